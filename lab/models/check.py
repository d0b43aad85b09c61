"""Checks one family: the load-time self-test, then links of a prompt with two chunks against the oracle."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from PIL import Image

from mpic.engine.base import Engine
from mpic.engine.native.engine import NativeEngine
from mpic.errors import ModelRefused, MPICError
from mpic.kv.chunk import Chunk, ChunkInputs
from mpic.link import ChunkPlace, parse_policy
from mpic.model.bidirectional import Scope, types_name
from mpic.model.image_selftest import image_self_test
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import self_test
from mpic.model.structure import as_plain
from mpic.prompt.segments import ChunkSegment, Prompt
from mpic_lab.bench.workload import image_chunk, prompt_of, request_of, text_chunk
from mpic_lab.models.images import processor_of, stock_answer
from mpic_lab.models.instances import build, one_line
from mpic_lab.oracle import IMAGE_TYPES, PREFIX_TYPES, StockOracle, TokenTypes

POLICIES = ("full", "mpic-5", "reuse")
TOKENS = 3
LIMIT = 1e-3
"""Maximum difference of log-probabilities in fp32, over answers of ``TOKENS`` tokens."""
_BOS = 1
"""The begin token for chunks compiled behind sink tokens; none of the policies here needs it."""


class Row(NamedTuple):
    """The result for a family: ``verified``, ``refused`` or ``not built`` with the reason, or ``failed``."""

    family: str
    kind: str
    result: str
    reason: str


def check(family: str, kind: str) -> Row:
    """Check one family. Every failure is reported in the row."""
    torch.set_num_threads(1)
    try:
        model = build(family, kind)
    except ModelRefused as error:
        return Row(family, kind, "not built", error.message)
    stock = copy.deepcopy(model)
    where = " at load"
    try:
        loaded = LoadedModel(model, None, family)
        tested = self_test(loaded)
        where = ""
        worst = compare(loaded, stock, family, kind)
    except ModelRefused as refusal:
        return Row(family, kind, "refused", " ".join(refusal.message.split()))
    except Exception as error:
        if isinstance(error, MPICError) and not where:
            return Row(family, kind, "failed", f"passes the self-test, then {one_line(error)}")
        return Row(family, kind, "failed", f"raw error{where}: {one_line(error)} {_place(error)}")
    if not worst <= LIMIT:
        return Row(family, kind, "failed", f"passes the self-test, differs from the oracle by {worst:.1e}")
    return Row(family, kind, "verified", f"self-test {tested:.0e}, oracle {worst:.0e}")


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"


def compare(loaded: LoadedModel, stock: torch.nn.Module, family: str, kind: str) -> float:
    """Return the largest difference between the engine's log-probabilities and the oracle's over ``POLICIES``; with
    images, also between ``full`` and the untouched model, called with pixel values.

    Raises:
        ModelRefused: the model takes no images.
    """
    prompt, chunks = text_prompt(loaded.config)
    images: list[Image.Image] = []
    if kind == "image-text-to-text":
        processor, images = processor_of(family, loaded)
        image_self_test(loaded)
        chunks = [image_chunk(image, "local") for image in images]
        prompt = around(loaded.config, chunks)
    inputs = [
        loaded.image_inputs(chunk.load_image()) if chunk.load_image else loaded.text_inputs(chunk.token_ids)
        for chunk in chunks
    ]
    worst = 0.0
    types = types_of(loaded)
    oracle = StockOracle(stock, loaded.mrope, types, loaded.stand_ins)
    with closing(NativeEngine(loaded, pages=256, page_size=8)) as engine:
        engine.pool.arena.fill_(float("nan"))
        for name in POLICIES:
            difference, got = linked(engine, oracle, prompt, inputs, name)
            worst = max(worst, difference)
            if images and name == "full":
                ids, kinds = _ids_of(prompt, inputs)
                answer = _stock_answer(
                    stock, processor, ids, images, {} if types is None else types.of(kinds)
                )
                worst = max(worst, _difference(got[0], answer))
        engine.check()
    return worst


def linked(
    engine: Engine, oracle: StockOracle, prompt: Prompt, inputs: Sequence[ChunkInputs], name: str
) -> tuple[float, torch.Tensor]:
    """Return the largest difference between an engine's log-probabilities and the oracle's under a policy, over the
    tokens on which they agree and the next, and the engine's, ``[TOKENS, vocabulary]``."""
    policy = parse_policy(name)
    selection = policy.select(_slots(prompt, inputs))
    tokens, expected = oracle.generate(prompt, inputs, policy, selection, TOKENS, _BOS)
    expected = torch.log_softmax(expected.float(), -1)
    got, worst = _answer(engine, prompt, name, expected.shape[1]), 0.0
    for step in range(TOKENS):
        worst = max(worst, _difference(got[step], expected[step]))
        if int(got[step].argmax()) != tokens[step]:
            break
    return worst, got


def over_policies(
    engine: Engine, oracle: StockOracle, prompt: Prompt, inputs: Sequence[ChunkInputs]
) -> tuple[float, float]:
    """Return the largest difference between an engine's log-probabilities and the oracle's under ``full``, which
    links nothing, and that over ``POLICIES``."""
    differences = {policy: linked(engine, oracle, prompt, inputs, policy)[0] for policy in POLICIES}
    return differences["full"], max(differences.values())


def text_prompt(config: Any) -> tuple[Prompt, list[Chunk]]:
    """Return a prompt with two texts as chunks, and the chunks."""
    chunks = [_chunk(config, 1, 17), _chunk(config, 2, 21)]
    return around(config, chunks), chunks


def around(config: Any, chunks: Sequence[Chunk]) -> Prompt:
    """Return a prompt of text around two chunks."""
    return prompt_of(_text(config, 3, 6), chunks[0], _text(config, 4, 3), chunks[1], _text(config, 5, 4))


def types_of(loaded: LoadedModel) -> TokenTypes | None:
    """Return the types of tokens according to the processor of a family."""
    name = types_name(loaded.model)
    if name is None:
        return None
    return PREFIX_TYPES if loaded.scope is Scope.PROMPT else IMAGE_TYPES[name]


def _stock_answer(stock: torch.nn.Module, *given: Any) -> torch.Tensor:
    """Return the untouched model's answer. Raise ModelRefused if that model itself does not accept the tiny
    processor's images."""
    try:
        return torch.log_softmax(stock_answer(stock, *given).float(), -1)
    except Exception as error:
        raise ModelRefused(f"the stock model does not take these images: {one_line(error)}") from error


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = float((got - expected).abs().max())
    return difference if difference == difference else float("inf")


def _ids_of(prompt: Prompt, inputs: Sequence[ChunkInputs]) -> tuple[list[int], list[int]]:
    """Return the prompt's token ids, and for each whether it belongs to an image."""
    ids: list[int] = []
    kinds: list[int] = []
    following = iter(inputs)
    for segment in prompt.segments:
        chunk = next(following) if isinstance(segment, ChunkSegment) else None
        new = list(segment.token_ids) if chunk is None else chunk.token_ids.tolist()
        ids += new
        kinds += [int(chunk is not None)] * len(new)
    return ids, kinds


def _chunk(config: Any, seed: int, n: int) -> Chunk:
    return text_chunk(_text(config, seed, n), "local")


def _text(config: Any, seed: int, n: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return as_plain(config, torch.randint(10, 290, (n,), generator=generator)).tolist()


def _slots(prompt: Prompt, inputs: Sequence[ChunkInputs]) -> list[ChunkPlace]:
    slots, start = [], 0
    following = iter(inputs)
    for segment in prompt.segments:
        is_chunk = isinstance(segment, ChunkSegment)
        n = len(next(following)) if is_chunk else len(segment)
        if is_chunk:
            slots.append(ChunkPlace(n, start, start))
        start += n
    return slots


def _answer(engine: Engine, prompt: Prompt, policy: str, vocabulary: int) -> torch.Tensor:
    rows = torch.full((TOKENS, vocabulary), float("nan"))
    request = request_of(prompt, policy, TOKENS, "local", logprobs=vocabulary)
    for i, logprob in enumerate(engine.submit(request).result().logprobs):
        for token, value in logprob.top:
            rows[i, token] = value
    return rows
