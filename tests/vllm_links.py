"""Building blocks for tests of links inside vLLM: an engine with our parts, chunks compiled into files, orders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm_kit as kit
from engine_kit import ids, image_chunk, prompt_of, select, text_chunk
from families import random_image
from oracle import Oracle

from mpic.engine.accounting import segment_shapes
from mpic.engine.vllm.wire import ChunkRef, CompileOrder, LinkOrder, make_link_order, packet_ids
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKV, KVKey, Recipe
from mpic.kv.file import ChunkFile, write
from mpic.link import BARE, Wrapping, make_plan, parse_policy
from mpic.packet.adapter import Adapter
from mpic.prompt.segments import ChunkSegment, Prompt

MODEL = "0" * 64
"""Digest of the model in the keys of test chunks; nothing checks it."""
BOS = 1

TOKENS = 4
"""Generated tokens that tests of exactness compare."""

_numbers = itertools.count()


def random_adapter(name: str) -> Adapter:
    """Return an adapter of 5 and 3 tokens, as large as a family's embeddings."""
    table = kit.stock(name)[0].get_input_embeddings().weight.detach()
    soft = torch.randn(8, table.shape[1], generator=torch.Generator().manual_seed(5)) * table.std()
    return Adapter(soft[:5], soft[5:], "0" * 64)


class ReportedAnswer(NamedTuple):
    """An answer's ids, how it ended, and the connector's report."""

    ids: list[int]
    reason: str
    report: dict[str, Any] | None


@contextmanager
def engine(
    folder: Path | str, files: Path, connector: dict[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """An in-process vLLM that links; its chunk files are below ``files``."""
    from vllm.config import KVTransferConfig

    settings = {"folders": [str(files)], "patience": 60.0, **(connector or {})}
    transfer = KVTransferConfig(
        kv_connector="MPICConnector",
        kv_connector_module_path="mpic.engine.vllm.plugin.connector",
        kv_role="kv_both",
        kv_connector_extra_config=settings,
    )
    parts = {
        "kv_transfer_config": transfer,
        "worker_cls": "mpic.engine.vllm.plugin.worker.LinkWorker",
        "scheduler_cls": "mpic.engine.vllm.plugin.scheduler.LinkScheduler",
        "async_scheduling": False,
    }
    with kit.engine(folder, **{**parts, **options}) as llm:
        yield llm


class Linker:
    """Compiles and links chunks in one engine, and has the oracle do the same.

    Args:
        name: name of the model family.
        files: the folder for chunk files.
        adapter: the adapter that the engine has been given; None if there is none.
    """

    def __init__(self, llm: Any, name: str, files: Path, adapter: Adapter | None = None) -> None:
        from mpic.engine.vllm.frontend.prompts import accept_soft_ids

        self.llm, self.name, self.files, self.adapter = llm, name, files, adapter
        if adapter is not None:
            accept_soft_ids(llm.renderer, len(adapter))
        self._made: dict[tuple[Any, Wrapping], tuple[ChunkInputs, tuple[str, str]]] = {}
        self._expected: dict[tuple[Prompt, str, int], tuple[list[int], torch.Tensor]] = {}

    def wrapped(self, ids: Sequence[int], wrapping: Wrapping) -> list[int]:
        """Return the ids of a chunk as prompts have them."""
        return list(packet_ids(ids, *self.adapter.lengths)) if wrapping.packet else list(ids)

    def compiled(self, chunk: Chunk, wrapping: Wrapping = BARE) -> tuple[ChunkInputs, torch.Tensor]:
        """Return a chunk's inputs and KV as vLLM computes them."""
        from mpic.engine.vllm.frontend.compiled import read_compiled

        order, start = CompileOrder(f"compile-{next(_numbers)}", wrapping.sink), [BOS] * wrapping.sink
        (self.files / order.folder).mkdir()
        prompt: dict[str, Any] = {"cache_salt": order.folder}
        if chunk.token_ids is not None:
            prompt["prompt_token_ids"] = start + self.wrapped(chunk.token_ids, wrapping)
        else:
            prompt["prompt_token_ids"] = start + self.wrapped(kit.image_ids(self.name)[-2:][:1], wrapping)
            prompt["multi_modal_data"] = {"image": chunk.load_image()}
        self.run([prompt], [order.params()], tokens=1)
        return read_compiled(self.files / order.folder)

    def file(self, chunk: Chunk, wrapping: Wrapping = BARE) -> tuple[ChunkInputs, tuple[str, str]]:
        """Return a chunk's inputs, and the path and key of its file, which is made once."""
        if (chunk.key, wrapping) not in self._made:
            self._made[chunk.key, wrapping] = self.save(chunk, *self.compiled(chunk, wrapping), wrapping)
        return self._made[chunk.key, wrapping]

    def stored(self, chunk: Chunk, wrapping: Wrapping = BARE) -> tuple[ChunkInputs, torch.Tensor]:
        """Return a chunk's inputs and KV as its file has them."""
        inputs, (name, _) = self.file(chunk, wrapping)
        file = ChunkFile(self.files / name)
        kv = torch.empty(file.shape.extent(len(inputs)))
        list(file.read_layers(kv))
        return inputs, kv

    def save(
        self, chunk: Chunk, inputs: ChunkInputs, kv: torch.Tensor, wrapping: Wrapping = BARE
    ) -> tuple[ChunkInputs, tuple[str, str]]:
        """Write a chunk's file."""
        packet = self.adapter.digest if wrapping.packet else ""
        key = KVKey(chunk.owner, chunk.key, MODEL, Recipe("float32", sink=wrapping.sink, packet=packet))
        path = f"{next(_numbers)}-{key.digest[:8]}.kv"
        write(self.files / path, ChunkKV(key, inputs, kv.contiguous()))
        return inputs, (path, key.digest)

    def order(
        self,
        prompt: Prompt,
        policy_text: str,
        files: dict[int, tuple[str, str]] | None = None,
        shared: bool = False,
    ):
        """Return token ids, order and chunk inputs of a prompt.

        Args:
            files: path and key to use instead for a chunk, by its number.
            shared: map resident chunks; the ids are then the own ones alone.
        """
        policy = parse_policy(policy_text)
        found = [self.file(chunk, policy.wrapping) for chunk in prompt.chunks]
        inputs = [one for one, _ in found]
        names = [(files or {}).get(i, name) for i, (_, name) in enumerate(found)]
        shapes = segment_shapes(prompt.segments, ((len(one), one.rotary_length) for one in inputs), policy)
        ids: list[int] = []
        following = iter(inputs)
        for segment in prompt.segments:
            if not isinstance(segment, ChunkSegment):
                ids += segment.token_ids
                continue
            own = next(following).token_ids
            if policy.wrapping.packet:
                header, trailer = self.adapter.lengths
                own = own[header : len(own) - trailer]
            ids += self.wrapped(own.tolist(), policy.wrapping)
        order = make_link_order(make_plan(shapes, policy), names, shared)
        return order.ids(ids), order, inputs

    def link(self, prompt: Prompt, policy: str, salt: str | None = None, **changes: Any) -> tuple[dict, dict]:
        """Return a prompt and its ``kv_transfer_params`` for ``run``."""
        ids, order, _ = self.order(prompt, policy, **changes)
        return {"prompt_token_ids": ids, "cache_salt": salt or f"salt-{next(_numbers)}"}, order.params()

    def run(
        self, prompts: Sequence[dict[str, Any]], params: Sequence[dict[str, Any] | None], tokens: int = TOKENS
    ) -> list[kit.GreedyAnswer]:
        return kit.generate(self.llm, prompts, tokens, params)

    def reported(
        self,
        prompts: Sequence[dict[str, Any]],
        params: Sequence[dict[str, Any] | None],
        tokens: int = TOKENS,
        **settings: Any,
    ) -> list[ReportedAnswer]:
        """Run prompts and return the answers with the connector's reports."""
        from vllm import SamplingParams

        settings |= {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        given = [{"kv_transfer_params": each} if each is not None else None for each in params]
        sampling = [SamplingParams(extra_args=extra, **settings) for extra in given]
        done = self.llm.generate(list(prompts), sampling, use_tqdm=False)
        reports = [(one.kv_transfer_params or {}).get("mpic") for one in done]
        firsts = [one.outputs[0] for one in done]
        return [
            ReportedAnswer(list(first.token_ids), first.finish_reason, report)
            for first, report in zip(firsts, reports)
        ]

    def expected(
        self, prompt: Prompt, policy_text: str, tokens: int = TOKENS
    ) -> tuple[list[int], torch.Tensor]:
        """Return the oracle's greedy ids and the log-distribution of the first."""
        if (prompt, policy_text, tokens) not in self._expected:
            self._expected[prompt, policy_text, tokens] = self._ask_oracle(prompt, policy_text, tokens)
        return self._expected[prompt, policy_text, tokens]

    def _ask_oracle(self, prompt: Prompt, policy_text: str, tokens: int) -> tuple[list[int], torch.Tensor]:
        policy = parse_policy(policy_text)
        inputs = [self.file(chunk, policy.wrapping)[0] for chunk in prompt.chunks]
        oracle = Oracle(kit.stock(self.name)[0], 3 if kit.is_qwen_vl(self.name) else 1)
        selection = select(prompt, inputs, policy)
        ids, logits = oracle.generate(prompt, inputs, policy, selection, tokens, BOS)
        return ids, torch.log_softmax(logits[0], -1)


def assert_close(answer: kit.GreedyAnswer, expected: tuple[list[int], torch.Tensor]) -> None:
    """The ids of an answer and the log-distribution of its first token are those that ``expected`` has."""
    assert answer.ids == expected[0]
    assert (answer.logprobs - expected[1]).abs().max() < 1e-4


def replaced(order: LinkOrder, chunk: int, **fields: Any) -> LinkOrder:
    """Return an order in which fields of one ``ChunkRef`` are replaced."""
    refs = list(order.chunks)
    refs[chunk] = ChunkRef(**{**refs[chunk]._asdict(), **fields})
    return LinkOrder(order.length, order.extent, order.rows, tuple(refs))


def chunks_of(name: str):
    """Return two chunks and a document between them; the chunks are images if the family has images."""
    document = text_chunk(ids(7, 41))
    if name in kit.VISION:
        return image_chunk(random_image(1)), document, image_chunk(random_image(2, 72, 40))
    return text_chunk(ids(8, 57)), document, text_chunk(ids(9, 33))


def prompt_for(name: str):
    """Return a prompt of several blocks with one chunk at two places and two chunks side by side."""
    a, b, c = chunks_of(name)
    return prompt_of([1, *ids(1, 26)], a, ids(2, 3), b, c, ids(3, 2), a, ids(4, 14))
