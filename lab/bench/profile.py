"""Where a step's time goes: matrix products, attention, other operations and Python, beside what the machine can do.

Four kinds of steps of the native engine on a CPU: linking resident chunks, computing a prompt of which nothing is
cached, and decoding one answer and several. A profiler slows down what it watches, Python most. The title of each table
has the time of a step that was not watched; shares are those of watched ones. The way from a socket to the engine and
back is not here: ``mpic bench serving --engine native-http`` has it.

Steps are fused where they can be (``mpic.model.program``), as in a server. All layers, or everything from tokens to
logits, are then one part of a decoding step, so decoding steps are watched a second time, as the model's modules run
them. Fused links and fresh prompts have no table of layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch

from mpic.config import ConfigError
from mpic.engine.native.engine import NativeEngine
from mpic.engine.native.executor import TorchExecutor
from mpic.kv.chunk import Chunk
from mpic.model.program import NOTE
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Report, Row, Ticker, bench, median_seconds
from mpic_lab.bench.step_profile import (
    ATTENTION,
    FUSED,
    MATRIX,
    PARTS,
    StepProfile,
    profile_steps,
    python_seconds,
)
from mpic_lab.bench.workload import (
    BENCH_DECODER,
    DecoderShape,
    Ids,
    compile_all,
    decoding,
    engine_for,
    first_token,
    make_pair,
    prompt_of,
    request_of,
)
from mpic_lab.eval.flops import Flops

MODULES = ", by modules"
"""Behind the name of a kind of steps that could be fused and are not."""
Work = Callable[[], int]
"""Runs some steps; returns the pairs of row and key that a layer has attended to, 0 where they are not counted."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``profile`` bench.

    Args:
        fresh: tokens of the prompt of which nothing is cached.
        steps: decoding steps that are watched.
        peak: side of the square matrices and megabytes of the copy that say what the machine can do.
    """

    decoder: DecoderShape = BENCH_DECODER
    chunks: int = 8
    chunk_tokens: int = 512
    text: int = 64
    fresh: int = 2048
    policy: str = "mpic-32"
    batches: tuple[int, ...] = (1, 16)
    steps: int = 20
    peak: int = 1024
    repeats: int = 5
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of an answer that is watched while it is decoded. It goes on while a profiler starts, which takes as
        long as a hundred steps of a small model."""
        return max(400, self.steps * (self.repeats + 3))


@bench(
    "profile",
    "where the time of a step goes, beside what the machine can do",
    Settings,
    quick={
        "decoder": DecoderShape(
            layers=6, hidden=512, heads=8, intermediate=1024, vocabulary=8_000, context=8192
        ),
        "chunk_tokens": 128,
        "fresh": 768,
        "repeats": 3,
    },
    wants={
        "decode1_python_ms": "< 0.3",
        "decode16_python_ms": "< 1",
        "decode1_products_of_memory_speed": "near 1",
        "fresh_products_of_peak": "near 1",
        "fresh_attention_of_peak": "near that of the products",
        "link_products_of_peak": "near 1",
    },
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Profiles each kind of step.

    Raises:
        ConfigError: the device is no CPU.
    """
    if placement.device.type != "cpu":
        raise ConfigError("bench profile measures the CPU; `make bench-gpu` profiles a GPU", param="device")
    pair = make_pair(settings.decoder, placement, seed=settings.seed)
    ways = (True, False) if pair.loaded.program else (False,)
    ticker.expect(3 + len(ways) * len(settings.batches))
    with ticker.step("what the machine can do"):
        peak = _peaks(settings, placement)
    counts, ids = Flops(pair.loaded), Ids(settings.decoder.vocabulary, settings.seed)
    linked, most = settings.chunks * settings.chunk_tokens, max(settings.batches)
    own = settings.text + 64 * settings.chunks + settings.tokens
    rows: list[Row] = [
        {"table": "machine", "measured": name, "giga_a_second": round(rate / 1e9, 1)}
        for name, rate in peak.items()
    ]
    headline: dict[str, float] = {}
    profiles: dict[str, StepProfile] = {}
    with engine_for(pair.loaded, linked + 2 * settings.fresh + (most + 2) * own) as engine:
        chunks = ids.chunks(settings.chunks, settings.chunk_tokens)
        compile_all(engine, chunks)
        for name, (fused, case) in _cases(engine, settings, ids, chunks, ways).items():
            with ticker.step(name), _way(engine, fused), case as work:
                work()  # warm
                unwatched = _step_seconds(engine, work, settings.repeats)
                if fused and name.startswith("decode"):
                    python = statistics.median(python_seconds(engine, work))
                    headline[f"{name.replace(' ', '')}_python_ms"] = 1e3 * python
                attended = [0]
                found = profiles[name] = profile_steps(
                    engine, lambda work=work, seen=attended: seen.append(work())
                )
            flops = counts.layers * counts.pair * attended[-1]
            rows += _rows(name, found, unwatched, flops, peak)
            headline |= _headline(name, found, flops, peak)
    notes = {
        "model": pair.description,
        "linked_tokens": linked,
        "shares": "of steps that a profiler watches, which are slower; step_ms says how long a step takes without one",
        "fused_step": pair.loaded.info.details[NOTE]
        or f"all steps; decoding by the model's modules, too: '{MODULES}'",
        "python_ms": "processor time of the engine's thread in a step that is not watched, less that of its kernels",
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, profiles))


def _peaks(settings: Settings, placement: BenchDevice) -> dict[str, float]:
    """Returns rates a second: operations of a matrix product and of attention, bytes of a product with one row and of a
    copy."""
    side, dtype = settings.peak, placement.dtype
    heads, size = settings.decoder.heads, settings.decoder.hidden // settings.decoder.heads
    square = torch.randn(side, side, dtype=dtype)
    wide = torch.randn(16 * side, 4 * side, dtype=dtype)  # 256 MB in fp32: no cache holds it
    row = torch.randn(1, 4 * side, dtype=dtype)
    halves = torch.ones(2, 256 << 20, dtype=torch.uint8)
    q, k, v = (torch.randn(1, heads, n, size, dtype=dtype) for n in (256, 2048, 2048))

    def seconds(work: Callable[[], Any]) -> float:
        work()
        return median_seconds(work, placement, settings.repeats)

    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        "matrix product, FLOP": 2 * side**3 / seconds(lambda: square @ square),
        "torch's attention, FLOP": 4 * heads * size * 256 * 2048 / seconds(lambda: attention(q, k, v)),
        "product of one row, bytes": wide.nbytes / seconds(lambda: torch.nn.functional.linear(row, wide)),
        "copy, bytes read and written": 2 * halves[0].nbytes / seconds(lambda: halves[0].copy_(halves[1])),
    }


def _cases(
    engine: NativeEngine, settings: Settings, ids: Ids, chunks: list[Chunk], ways: Sequence[bool]
) -> dict[str, tuple[bool, AbstractContextManager[Work]]]:
    """Returns each kind of step: whether its steps are fused where they can be, and its work.

    Args:
        ways: whether decoding steps are fused, one for each time that they are watched.
    """

    def link() -> int:
        prompt = ids.framed(chunks, settings.text)
        return first_token(engine, request_of(prompt, settings.policy, 1))[1].attended

    def fresh() -> int:
        return first_token(engine, request_of(prompt_of(ids.fresh(settings.fresh)), "full", 1))[1].attended

    cases: dict[str, tuple[bool, AbstractContextManager[Work]]] = {
        "link": (True, nullcontext(link)),
        "fresh": (True, nullcontext(fresh)),
    }
    for number, fused in enumerate(ways):
        for batch in settings.batches:
            name = f"decode {batch}{MODULES if number else ''}"
            cases[name] = (fused, _decoding(engine, settings, ids, chunks, batch))
    return cases


@contextmanager
def _way(engine: NativeEngine, fused: bool) -> Iterator[None]:
    """Keeps steps from being fused unless they are to be."""
    modules = TorchExecutor(engine.model, engine.pool)
    with nullcontext() if fused else patch.object(engine, "executor", modules):
        yield


@contextmanager
def _decoding(
    engine: NativeEngine, settings: Settings, ids: Ids, chunks: list[Chunk], batch: int
) -> Iterator[Work]:
    """Has a batch of answers over the same chunks decoded; the work is ``settings.steps`` more tokens of each."""
    requests = [
        request_of(ids.framed(chunks, settings.text), settings.policy, settings.tokens) for _ in range(batch)
    ]
    with decoding(engine, requests) as deltas:

        def decode() -> int:
            before = engine.stats()["counters"]["steps"]
            # the first tokens may have been waiting here, from steps that nobody watched
            while engine.stats()["counters"]["steps"] - before < settings.steps // 2:
                if len(list(islice(deltas, settings.steps))) < settings.steps:
                    raise BenchFailed("an answer ended while it was watched")
            return 0

        yield decode


def _step_seconds(engine: NativeEngine, work: Work, repeats: int) -> float:
    """Returns the median seconds of a step without a profiler."""
    taken = []
    for _ in range(repeats):
        before, began = engine.stats()["counters"]["steps"], time.perf_counter()
        work()
        passed = time.perf_counter() - began
        taken.append(passed / max(1, engine.stats()["counters"]["steps"] - before))
    return statistics.median(taken)


def _rows(name: str, found: StepProfile, unwatched: float, flops: float, peak: dict[str, float]) -> list[Row]:
    """Returns a table of a kind of step: its parts, then its layers."""
    rows: list[Row] = []
    for part in PARTS:
        seconds = found.parts[part]
        row: Row = {
            "table": f"{name}: {1e3 * unwatched:.3f} ms a step, {1e3 * found.total / found.steps:.3f} watched",
            "part": part,
            "ms": round(1e3 * seconds / found.steps, 4),
            "percent": round(100 * seconds / found.total, 1),
        }
        if part == MATRIX and seconds:  # none where a step is one call from tokens to logits
            row["gflop_a_second"] = round(found.operations / seconds / 1e9, 1)
            row["gb_a_second"] = round(found.bytes / seconds / 1e9, 1)
        elif part == ATTENTION and flops:
            row["gflop_a_second"] = round(flops / seconds / 1e9, 1)
        rows.append(row)
    return rows + [
        {"table": f"{name}: layers", "layer": layer, "ms": round(1e3 * seconds / found.steps, 4)}
        for layer, seconds in sorted(found.layers.items())
    ]


def _headline(name: str, found: StepProfile, flops: float, peak: dict[str, float]) -> dict[str, float]:
    if not found.steps:
        raise BenchFailed(f"no step of {name} was watched: its answers had ended")
    products = found.parts[MATRIX]
    if name.startswith("decode"):
        if found.parts[FUSED]:  # which has most products, and does not say how long they took
            return {}
        speed = found.bytes / products / peak["copy, bytes read and written"]
        return {f"{name.removesuffix(MODULES).replace(' ', '')}_products_of_memory_speed": speed}
    best = peak["matrix product, FLOP"]
    return {
        f"{name}_products_of_peak": found.operations / products / best,
        f"{name}_attention_of_peak": flops / found.parts[ATTENTION] / best,
    }


def _plot(figure: Any, profiles: dict[str, StepProfile]) -> None:
    axes = figure.subplots()
    left = dict.fromkeys(profiles, 0.0)
    for part in PARTS:
        shares = [100 * found.parts[part] / found.total for found in profiles.values()]
        axes.barh(list(profiles), shares, left=list(left.values()), label=part)
        left = {name: at + share for (name, at), share in zip(left.items(), shares, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("percent of a step")
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
