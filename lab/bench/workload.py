"""The workloads of the benches: random models, prompts, and an engine in this process."""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import transformers as tf
from PIL import Image
from torch import nn

from mpic.engine.base import Delta, Engine, GenerationRequest, GenerationUsage, Sampling
from mpic.engine.native.engine import NativeEngine
from mpic.errors import ModelRefused
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.kv.store import ChunkStore
from mpic.link import BARE, Wrapping, parse_policy
from mpic.model.loaded import LoadedModel
from mpic.model.program_proof import use_program
from mpic.model.selftest import self_test
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
        """Returns the bytes of one token's keys and values in all layers."""
        width = self.hidden // self.heads * (self.kv_heads or self.heads)
        return self.layers * 2 * width * dtype.itemsize

    def sizes(self) -> dict[str, int]:
        """Returns what the configuration of a decoder says about them, whichever its kind."""
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


@dataclass
class ModelPair:
    """A model hooked by MPIC and the stock model, which share their weights, and a description for the settings."""

    loaded: LoadedModel
    stock: nn.Module
    description: str


@contextmanager
def made_on(placement: BenchDevice) -> Iterator[None]:
    """Has modules made on the device from the start, in its dtype: a large model would take minutes on the host."""
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
    """Returns a random Llama, or a random LLaVA when there is a tower; see ``make_pair``."""
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


def make_pair(
    decoder: DecoderShape,
    placement: BenchDevice,
    tower: TowerShape | None = None,
    gain: float = 1.0,
    seed: int = 0,
) -> ModelPair:
    """Returns a random model, self-tested as every model is at load.

    Args:
        gain: multiplies the weights; more than 1 makes attention sharp, so that answers depend on what is linked.
    """
    return pair_of(random_model(decoder, placement, tower, gain, seed), decoder, tower)


def pair_of(model: nn.Module, decoder: DecoderShape, tower: TowerShape | None = None) -> ModelPair:
    """Returns a model of ``random_model``, self-tested, and a stock one beside it with the same weights."""
    stock = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    stock.set_attn_implementation("sdpa")
    loaded = LoadedModel(model, tower.processor() if tower else None, "random")
    self_test(loaded)
    use_program(loaded)
    return ModelPair(loaded, stock, describe(stock, decoder))


def with_half_kv(pair: ModelPair) -> LoadedModel | None:
    """Returns a pair's model once more, over the same weights, with keys and values in 16 bits; None where the engine
    has no such thing."""
    if pair.loaded.dtype is not torch.float32:
        return None
    model = copy.deepcopy(pair.stock, {id(p): p for p in pair.stock.parameters()})
    try:
        loaded = LoadedModel(model, pair.loaded.processor, "random", torch.float16)
    except ModelRefused:
        return None
    self_test(loaded)
    use_program(loaded)
    return loaded


def describe(model: nn.Module, decoder: DecoderShape) -> str:
    """Returns a description of a model of ``random_model``, for the settings."""
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
        """Returns texts of fresh tokens as chunks."""
        return [text_chunk(self.fresh(tokens)) for _ in range(count)]

    def framed(self, chunks: Sequence[Chunk], text: int) -> Prompt:
        """Returns a prompt of chunks with ``text`` fresh tokens around them, half before and half behind."""
        return prompt_of(self._beginning(text // 2), *chunks, self.fresh(text - text // 2))

    def spaced(self, chunks: Sequence[Chunk], before: int, behind: int, between: int = 2) -> Prompt:
        """Returns a prompt with so many fresh tokens before the chunks, after each of them, and after all."""
        parts = [part for chunk in chunks for part in (chunk, self.fresh(between))]
        return prompt_of(self._beginning(before), *parts, self.fresh(behind))

    def _beginning(self, n: int) -> tuple[int, ...]:
        """Returns fresh tokens for the beginning of a prompt. No two begin with the same one until every token has been
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
    """Returns a prompt with a link for each chunk and a text for each sequence of neighbouring lists of ids."""
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
    loaded: LoadedModel, tokens: int, store: ChunkStore | None = None, **options: object
) -> Iterator[NativeEngine]:
    """Opens an engine with an empty pool that has room for ``tokens``, and closes it at the end."""
    engine = NativeEngine(loaded, store, pages=-(-tokens // PAGE), page_size=PAGE, **options)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()  # frees the pool, which is the largest allocation


def compile_all(engine: Engine, chunks: Sequence[Chunk], wrapping: Wrapping = BARE) -> None:
    """Makes chunks resident."""
    for future in [engine.compile(chunk, wrapping) for chunk in chunks]:
        future.result()


def bring(engine: NativeEngine, chunks: Sequence[Chunk]) -> float:
    """Loads stored chunks and waits until they are resident; returns the seconds it took.

    Raises:
        BenchFailed: they are not resident after a minute.
    """
    began = time.perf_counter()
    for chunk in chunks:
        engine.prefetch(chunk)
    while (ready := sum(r.ready for r in list(engine.device.chunks.values()))) < len(chunks):
        if time.perf_counter() - began > 60:
            raise BenchFailed(f"{ready} of {len(chunks)} chunks are resident after 60 s")
        time.sleep(2e-4)
    return time.perf_counter() - began


def first_token(engine: Engine, request: GenerationRequest) -> tuple[float, GenerationUsage]:
    """Returns the milliseconds from submission to the first token as the caller sees it; the request is then read to
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
    """Has a batch of answers decoded: yields the deltas of the last one once all have their first tokens. The answers
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
    """Checks that the engine did what the column claims, without which a measurement does not count."""
    stale = [c.tier for c in usage.chunks if c.reused and c.tier != "device"]
    if usage.reused != reused or usage.prefix_hit != prefix_hit or stale:
        raise BenchFailed(
            f"{usage.policy}: reused {usage.reused} of {reused} expected, prefix hit {usage.prefix_hit} of {prefix_hit}"
            + (f", chunks came from {stale}" if stale else "")
        )
