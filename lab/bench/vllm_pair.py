"""Two engines on the same checkpoint that take turns: unchanged vLLM, and the same vLLM with our connector, scheduler
and worker, both in separate processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mpic.config import EngineConfig
from mpic.engine import load_engine
from mpic.engine.base import GenerationUsage
from mpic.engine.vllm.frontend.options import prepare_environment
from mpic.kv.chunk import Chunk
from mpic.kv.page_locked import page_locked_bytes
from mpic.library import Library
from mpic_lab.bench import checkpoint, ttft
from mpic_lab.bench.baseline_vllm import PlainVLLM, TimedAnswer
from mpic_lab.bench.disk import drop_from_cache, fresh_library
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Ticker
from mpic_lab.bench.workload import (
    DecoderShape,
    compile_all,
    first_token,
    image_chunk,
    prompt_of,
    random_image,
    request_of,
)

K = 32
LINK = f"mpic-{K}"
HOST, PAGES, DISK = (f"{LINK}: {tier}" for tier in ("host memory", "page cache", "disk"))
ALONE, FLOOR = "vllm: prefix caching", "vllm: all in its prefix cache"
LEAST_FREE = 0.05
"""Share of a GPU's memory that must be free when an engine starts."""


@dataclass(frozen=True)
class Settings(ttft.Settings):
    """Sizes of the ``ttft`` bench on vLLM.

    Args:
        answers, tokens: number of long answers that are generated while prompts arrive, and the tokens of each.
        arrivals, gap: number of prompts with images that arrive meanwhile, and the seconds between them.
        questions: number of prompts about the same images that are sent at once, or one after the other.
        block: tokens of a block of vLLM's cache.
    """

    repeats: int = 4
    decode_repeats: int = 3
    answers: int = 4
    tokens: int = 96
    arrivals: int = 3
    gap: float = 1.0
    questions: int = 4
    block: int = 128

    @property
    def computed(self) -> int:
        """Number of tokens that a link computes."""
        return self.system + self.text + K * self.images

    @property
    def cached(self) -> int:
        """Number of tokens that the floor finds in vLLM's prefix cache: at least as many as a link reuses, in whole
        blocks."""
        return -(-(self.length - self.computed) // self.block) * self.block


@dataclass(frozen=True)
class BothEngines:
    """vLLM alone and our engine inside vLLM, the library of the latter, and a description for the settings."""

    plain: PlainVLLM
    ours: Any
    library: Library
    notes: dict[str, str]


@contextmanager
def both_engines(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Iterator[BothEngines]:
    """Start both engines side by side on a random model."""
    ticker.say("starting vLLM, twice")
    with TemporaryDirectory(prefix="mpic-bench-") as folder, fresh_library() as library:
        path = Path(folder, "bench")
        words = checkpoint.save_random(settings.decoder, placement, settings.tower, settings.seed, path)
        with engines_of(settings, placement, str(path), library) as (plain, ours):
            notes = {"engine": "vllm", "vllm": ours.info.details["vllm"], "model": words}
            yield BothEngines(plain, ours, library, notes)


@contextmanager
def engines_of(
    settings: Settings, placement: BenchDevice, model: str, library: Library
) -> Iterator[tuple[PlainVLLM, Any]]:
    """Start vLLM alone and our engine inside vLLM side by side on a saved model."""
    cpu = prepare_environment()
    # imports vLLM, which reads its environment then
    from mpic.engine.vllm.frontend.model import describe_model

    config = _config(settings, placement, model)
    described = describe_model(config, cpu)
    chunk = settings.tower.tokens * settings.decoder.token_bytes(placement.dtype)
    host = int((settings.images + 0.5) * (chunk if cpu else page_locked_bytes(chunk)))
    with ExitStack() as engines, ThreadPoolExecutor(1) as starter:
        starting = starter.submit(PlainVLLM, config, described, cpu)
        starting.add_done_callback(lambda one: one.exception() or engines.callback(one.result().close))
        ours = engines.enter_context(closing(load_engine(config, library.store, host)[0]))
        yield starting.result(), ours


def _config(settings: Settings, placement: BenchDevice, model: str) -> EngineConfig:
    """Return the configuration of both engines. The pool has room for what runs at once, for the floor's prefix and,
    as vLLM wants it, for one prompt as long as the model's context."""
    prompts = max(settings.arrivals + 1, settings.questions)
    tokens = prompts * (settings.length + settings.block)
    tokens += settings.answers * (settings.system + settings.tokens + settings.block)
    return engine_config(settings.decoder, placement, model, tokens, settings.block)


def engine_config(
    decoder: DecoderShape, placement: BenchDevice, model: str, tokens: int, block: int, **more: Any
) -> EngineConfig:
    """Return the configuration of an engine that has no more than it needs of a device.

    Args:
        tokens: minimum number of tokens that the KV cache holds.
        more: further fields of ``EngineConfig``.
    """
    arguments: dict[str, float] = {"block_size": block}
    if placement.device.type == "cuda":
        # by default vLLM refuses to start if another process uses part of the GPU
        arguments["gpu_memory_utilization"] = LEAST_FREE
    return EngineConfig(
        engine="vllm",
        model=model,
        device=placement.device.type,
        dtype=str(placement.dtype).removeprefix("torch."),
        pool_bytes=max(tokens, decoder.context + block) * decoder.token_bytes(placement.dtype),
        vllm_args=json.dumps(arguments),
        **more,
    )


class VllmAlone:
    """Asks vLLM alone. Where no vision encoder is to run, a prompt is text of the same length."""

    def __init__(self, settings: Settings, engine: PlainVLLM, prompts: ttft.Prompts) -> None:
        self._settings, self._engine, self._prompts = settings, engine, prompts
        self._prefix = prompts.ids.fresh(settings.cached)

    def first(self) -> float:
        return self._checked(self.arrive().result(), 0).first_ms

    def first_cached(self) -> float:
        self.prime()
        return self._checked(self.arrive_cached().result(), self._settings.cached).first_ms

    def first_encoded(self) -> float:
        """Ask with the same images from another user, so that they have to be encoded."""
        prompt = self._prompts.make(self._prompts.again())
        parts = [getattr(segment, "chunk", None) or segment.token_ids for segment in prompt.segments]
        return self._checked(self._engine.ask(parts, 2).result(), 0).first_ms

    def prime(self) -> None:
        """Compute the shared prefix, so that it is in the prefix cache."""
        self.arrive_cached().result()

    def arrive(self) -> Future[TimedAnswer]:
        return self._engine.ask([self._prompts.ids.fresh(self._settings.length)], 2)

    def arrive_cached(self) -> Future[TimedAnswer]:
        fresh = self._prompts.ids.fresh(self._settings.length - self._settings.cached)
        return self._engine.ask([(*self._prefix, *fresh)], 2)

    def answer(self, times: list[float]) -> Future[Any]:
        return self._engine.ask(
            [self._prompts.ids.fresh(self._settings.system)], self._settings.tokens, times
        )

    def _checked(self, answer: TimedAnswer, cached: int) -> TimedAnswer:
        if (answer.prompt, answer.cached) != (self._settings.length, cached):
            raise BenchFailed(
                f"vLLM found {answer.cached} of {answer.prompt} tokens in its prefix cache, not {cached}"
            )
        return answer


class Ours:
    """Links images in our engine. The connector's memory holds one set of images and not two, so a link of the other
    set sends the first one back to its files."""

    def __init__(self, settings: Settings, engine: Any, prompts: ttft.Prompts, library: Library) -> None:
        self._settings, self._engine, self._prompts = settings, engine, prompts
        side, n = settings.tower.size, settings.images
        others = [random_image(settings.seed + n + i, side) for i in range(n)]
        self._others = [image_chunk(image) for image in others]
        compile_all(engine, [*prompts.chunks, *self._others])
        self._files = [library.store.path(engine.compiler.key(chunk)) for chunk in prompts.chunks]
        readers = max(settings.answers + settings.arrivals, settings.questions)
        self._readers = ThreadPoolExecutor(readers, "bench-read")
        self.usage: dict[str, GenerationUsage] = {}

    def first(self) -> float:
        self._link(self._prompts.chunks)
        return self._measured(HOST)

    def first_from_pages(self) -> float:
        self._link(self._others)
        return self._measured(PAGES)

    def first_from_disk(self) -> float:
        self._link(self._others)
        drop_from_cache(self._files)
        return self._measured(DISK)

    def _measured(self, column: str) -> float:
        elapsed, self.usage[column] = self._link(self._prompts.chunks)
        return elapsed

    def _link(self, chunks: list[Chunk]) -> tuple[float, GenerationUsage]:
        elapsed, usage = first_token(self._engine, request_of(self._prompts.make(chunks), LINK, 2))
        late = [use.reason for use in usage.chunks if use.tier != "disk"]
        if usage.computed != self._settings.computed or late:
            raise BenchFailed(f"{LINK} computed {usage.computed} of {self._settings.computed} tokens {late}")
        return elapsed, usage

    def one_by_one(self) -> float:
        """Ask several questions about the same images, each when the one before it has been answered; return the sum
        of the milliseconds to their first tokens."""
        return sum(self._link(self._prompts.chunks)[0] for _ in range(self._settings.questions))

    def at_once(self) -> float:
        """Ask the same number of questions at once; return the milliseconds until all have their first token."""
        asked = [self.arrive() for _ in range(self._settings.questions)]
        return max(one.result()[0] for one in asked)

    def arrive(self) -> Future[Any]:
        return self._readers.submit(self._link, self._prompts.chunks)

    def answer(self, times: list[float]) -> Future[Any]:
        prompt = prompt_of(self._prompts.ids.fresh(self._settings.system))
        stream = self._engine.submit(request_of(prompt, "prefix", self._settings.tokens))
        return self._readers.submit(
            lambda: times.extend(time.perf_counter() for delta in stream for _ in delta.token_ids)
        )
