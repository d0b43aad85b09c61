"""The workloads of the benches: random models, prompts, and an engine in this process.

A random model is saved in a temporary folder like a published one (``checkpoint``), and engines are started by
``load_engine``, as a server starts them.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
import transformers as tf
from PIL import Image
from torch import nn

from mpic.engine import load_engine
from mpic.engine.base import Delta, Engine, GenerationRequest, GenerationUsage, Sampling
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.kv.store import ChunkStore
from mpic.link import BARE, Wrapping, parse_policy
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment
from mpic_lab.bench.harness import BenchDevice, BenchFailed

PAGE = 16
IMAGE_TOKEN = 5
_numbers = itertools.count()


@dataclass(frozen=True)
class DecoderShape:
    """Shape of a random Llama decoder."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    kv_heads: int = 0
    vocabulary: int = 32_000
    context: int = 32_768

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        width = self.hidden // self.heads * (self.kv_heads or self.heads)
        return self.layers * 2 * width * dtype.itemsize

    def sizes(self) -> dict[str, int]:
        """Return the decoder's sizes, under the names that configurations of every family share."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "max_position_embeddings": self.context,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }

    def config(self) -> tf.LlamaConfig:
        return tf.LlamaConfig(**self.sizes(), tie_word_embeddings=True)


@dataclass(frozen=True)
class TowerShape:
    """Shape of a random CLIP vision tower; an image becomes ``(size / patch) ** 2`` tokens."""

    layers: int
    hidden: int
    heads: int
    size: int
    patch: int

    @property
    def tokens(self) -> int:
        return (self.size // self.patch) ** 2

    def config(self) -> tf.CLIPVisionConfig:
        return tf.CLIPVisionConfig(
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            image_size=self.size,
            patch_size=self.patch,
        )

    def processor(self) -> SimpleNamespace:
        side = {"height": self.size, "width": self.size}
        return SimpleNamespace(
            image_processor=tf.CLIPImageProcessor(size={"shortest_edge": self.size}, crop_size=side),
            tokenizer=None,
        )


BENCH_DECODER = DecoderShape(layers=12, hidden=768, heads=12, intermediate=2048, context=8192)
BENCH_TOWER = TowerShape(layers=8, hidden=256, heads=4, size=336, patch=14)
"""The bench model: about 110 M parameters, 576 tokens an image."""


@dataclass(frozen=True)
class BenchModel:
    """A random model, saved in a folder that every engine can load.

    Args:
        folder: of the checkpoint.
        placement: device and dtype with which engines load it.
        description: for the settings of a result.
        keeper: keeps the folder; it is removed with the last reference to this model.
    """

    folder: Path
    decoder: DecoderShape
    placement: BenchDevice
    description: str
    keeper: TemporaryDirectory | None = field(default=None, repr=False)

    @cached_property
    def stock(self) -> nn.Module:
        """The same model in transformers' own code, with weights of its own in memory."""
        config = tf.AutoConfig.from_pretrained(self.folder)
        kind = (
            tf.LlavaForConditionalGeneration if "vision_config" in config.to_dict() else tf.LlamaForCausalLM
        )
        model = kind.from_pretrained(self.folder, dtype=self.placement.dtype, attn_implementation="sdpa")
        model.generation_config.eos_token_id = None
        return model.to(self.placement.device).eval().requires_grad_(False)


@contextmanager
def made_on(placement: BenchDevice) -> Iterator[None]:
    """Create modules directly on the device and in its dtype, because a large model would take minutes on the host."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(placement.dtype)
    try:
        with placement.device:
            yield
    finally:
        torch.set_default_dtype(before)


def random_model(
    decoder: DecoderShape,
    placement: BenchDevice,
    tower: TowerShape | None = None,
    gain: float = 1.0,
    seed: int = 0,
) -> nn.Module:
    """Return a random Llama, or a random LLaVA when there is a tower.

    Args:
        gain: multiplies the weights; more than 1 makes attention sharp, so that answers depend on what is linked.
    """
    torch.manual_seed(seed)
    with made_on(placement) if placement.device.type == "cuda" else nullcontext():
        if tower is None:
            model: nn.Module = tf.LlamaForCausalLM(decoder.config())
        else:
            config = tf.LlavaConfig(
                vision_config=tower.config(),
                text_config=decoder.config(),
                image_token_id=IMAGE_TOKEN,
                vision_feature_layer=-1,
                tie_word_embeddings=True,
            )
            model = tf.LlavaForConditionalGeneration(config)
    if gain != 1.0:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(gain)
    model = model.to(placement.device, placement.dtype).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def describe(model: nn.Module, decoder: DecoderShape) -> str:
    """Return a description of a model of ``random_model``, for the settings."""
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    kind = "LLaVA" if isinstance(model, tf.LlavaForConditionalGeneration) else "Llama"
    shape = f"{decoder.layers} layers x {decoder.hidden}, {decoder.heads} heads"
    return f"random {kind}, {millions:.0f} M parameters, {shape}"


# ---- prompts


class Ids:
    """A stream of random token ids that never repeats a passage."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._generator = torch.Generator().manual_seed(seed)
        self._begun: set[int] = set()

    def fresh(self, n: int) -> tuple[int, ...]:
        return tuple(torch.randint(10, self._vocabulary, (n,), generator=self._generator).tolist())

    def chunks(self, count: int, tokens: int) -> list[Chunk]:
        """Return texts of fresh tokens as chunks."""
        return [text_chunk(self.fresh(tokens)) for _ in range(count)]

    def framed(self, chunks: Sequence[Chunk], text: int) -> Prompt:
        """Return a prompt of chunks with ``text`` fresh tokens around them, half before and half behind."""
        return prompt_of(self._beginning(text // 2), *chunks, self.fresh(text - text // 2))

    def spaced(self, chunks: Sequence[Chunk], before: int, behind: int, between: int = 2) -> Prompt:
        """Return a prompt with so many fresh tokens before the chunks, after each of them, and after all."""
        parts = [part for chunk in chunks for part in (chunk, self.fresh(between))]
        return prompt_of(self._beginning(before), *parts, self.fresh(behind))

    def _beginning(self, n: int) -> tuple[int, ...]:
        """Return fresh tokens for the beginning of a prompt. No two begin with the same one until every token has been
        the first, because a prefix cache finds even a single token."""
        if len(self._begun) == self._vocabulary - 10:
            self._begun.clear()
        tokens = self.fresh(n)
        while tokens and tokens[0] in self._begun:
            tokens = self.fresh(n)
        self._begun.update(tokens[:1])
        return tokens


def text_chunk(token_ids: Sequence[int], owner: str = "bench") -> Chunk:
    return Chunk(ChunkKey.of_text(" ".join(map(str, token_ids))), owner, tuple(token_ids))


def image_chunk(image: Image.Image, owner: str = "bench") -> Chunk:
    return Chunk(ChunkKey.of_image(image), owner, load_image=lambda: image)


def random_image(seed: int, side: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(
        torch.randint(0, 256, (side, side, 3), generator=generator, dtype=torch.uint8).numpy()
    )


def prompt_of(*parts: Chunk | Sequence[int]) -> Prompt:
    """Return a prompt with a link for each chunk and a text for each sequence of neighbouring lists of ids."""
    segments: list[TextSegment | ChunkSegment] = []
    for part in parts:
        if isinstance(part, Chunk):
            segments.append(ChunkSegment(part))
        elif segments and isinstance(segments[-1], TextSegment):
            segments[-1] = TextSegment((*segments[-1].token_ids, *part))
        else:
            segments.append(TextSegment(tuple(part)))
    return Prompt(tuple(segments))


def request_of(
    prompt: Prompt, policy: str, tokens: int, user: str = "bench", **sampling: object
) -> GenerationRequest:
    settings = Sampling(max_tokens=tokens, ignore_eos=True, **sampling)
    return GenerationRequest(f"bench-{next(_numbers)}", prompt, parse_policy(policy), settings, user)


# ---- driving


@contextmanager
def engine_for(
    model: BenchModel, tokens: int, store: ChunkStore | None = None, **options: object
) -> Iterator[Engine]:
    """Start the native engine on a model, with an empty pool that has room for ``tokens``, and close it at the end.

    Args:
        options: of ``EngineConfig``.

    Raises:
        ModelRefused: the model cannot be served with these options.
    """
    from mpic.config import EngineConfig  # needs packages that a GPU report's machine may lack

    placement = model.placement
    token_bytes = model.decoder.token_bytes(torch.float16 if "kv_dtype" in options else placement.dtype)
    config = EngineConfig(
        model=str(model.folder),
        device=str(placement.device),
        dtype=str(placement.dtype).removeprefix("torch."),
        pool_bytes=-(-tokens // PAGE) * PAGE * token_bytes,
        **options,
    )
    engine, _ = load_engine(config, store)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()  # frees the pool, which is the largest allocation


def compile_all(engine: Engine, chunks: Sequence[Chunk], wrapping: Wrapping = BARE) -> None:
    """Make chunks resident."""
    for future in [engine.compile(chunk, wrapping) for chunk in chunks]:
        future.result()


def bring(engine: Engine, chunks: Sequence[Chunk]) -> float:
    """Load stored chunks and wait until they are resident; return the seconds it took.

    Raises:
        BenchFailed: they are not resident after a minute.
    """
    began = time.perf_counter()
    wanted = engine.stats()["chunks_ready"] + len(chunks)
    for chunk in chunks:
        engine.prefetch(chunk)
    while (ready := engine.stats()["chunks_ready"]) < wanted:
        if time.perf_counter() - began > 60:
            raise BenchFailed(f"{ready} of {wanted} chunks are resident after 60 s")
        time.sleep(2e-4)
    return time.perf_counter() - began


def first_token(engine: Engine, request: GenerationRequest) -> tuple[float, GenerationUsage]:
    """Return the milliseconds from submission to the first token as the caller sees it; the request is then read to
    its end.

    Ask for two tokens, so that the end of the request is not counted as part of the time to the first.
    """
    began = time.perf_counter()
    stream = iter(engine.submit(request))
    first = next(stream)
    elapsed = (time.perf_counter() - began) * 1e3
    last = [first, *stream][-1]  # the first delta, since a slow reader may receive all tokens at once
    return elapsed, last.usage


@contextmanager
def decoding(engine: Engine, requests: Sequence[GenerationRequest]) -> Iterator[Iterator[Delta]]:
    """Decode a batch of answers: yield the deltas of the last one once all have their first tokens. The answers
    are aborted at the end."""
    streams = [engine.submit(request) for request in requests]
    try:
        reading = [iter(stream) for stream in streams]
        for deltas in reading:
            next(deltas)
        yield reading[-1]
    finally:
        for stream in streams:
            stream.abort()
        for stream in streams:
            stream.result()


def expect(usage: GenerationUsage, *, reused: int, prefix_hit: int) -> None:
    """Check that the engine did what the column claims; otherwise the measurement does not count."""
    stale = [c.tier for c in usage.chunks if c.reused and c.tier != "device"]
    if usage.reused != reused or usage.prefix_hit != prefix_hit or stale:
        raise BenchFailed(
            f"{usage.policy}: reused {usage.reused} of {reused} expected, prefix hit {usage.prefix_hit} of {prefix_hit}"
            + (f", chunks came from {stale}" if stale else "")
        )
