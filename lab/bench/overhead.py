"""Measures where CacheBlend's time to the first token goes (EPIC, appendix A and figure 10): looking at the whole
prompt, choosing tokens, and computing what was chosen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from mpic.engine.native.engine import NativeEngine
from mpic.kv.chunk import Chunk
from mpic_lab.bench.harness import BenchDevice, Report, Row, Ticker, bench, interleave, paired
from mpic_lab.bench.workload import (
    BENCH_DECODER,
    DecoderShape,
    Ids,
    compile_all,
    engine_for,
    expect,
    first_token,
    make_pair,
    request_of,
)

BLENDED, STATIC = "cacheblend-15", "legolink-16"
LOOK, CHOOSE, LINK = "looking at the prompt", "choosing tokens", "computing them"


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``overhead`` bench."""

    decoder: DecoderShape = BENCH_DECODER
    counts: tuple[int, ...] = (2, 4, 8, 15)
    chunk_tokens: int = 512
    text: int = 64
    repeats: int = 5
    seed: int = 0


@bench(
    "overhead",
    "where CacheBlend's time to the first token goes, beside a policy that need not look",
    Settings,
    quick={
        "decoder": DecoderShape(layers=6, hidden=384, heads=6, intermediate=1024, vocabulary=8_000),
        "counts": (2, 4, 8),
        "chunk_tokens": 256,
        "repeats": 3,
    },
    wants={
        "least_share_of_deciding": "EPIC: 0.16",
        "most_share_of_deciding": "EPIC: 0.64",
        "cacheblend15_over_legolink16": "> 1",
    },
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Makes a row for each policy and number of chunks."""
    pair = make_pair(settings.decoder, placement, seed=settings.seed)
    ids = Ids(settings.decoder.vocabulary, settings.seed)
    chunks = ids.chunks(max(settings.counts), settings.chunk_tokens)
    columns: dict[str, Callable[[], float]] = {}
    watches: dict[str, _DecidingTime] = {}
    with engine_for(pair.loaded, 4 * (len(chunks) * settings.chunk_tokens + settings.text + 64)) as engine:
        compile_all(engine, chunks)
        for count in settings.counts:
            for policy in (BLENDED, STATIC):
                name = f"{count} {policy}"
                watches[name] = _DecidingTime(engine, placement)
                columns[name] = _column(engine, ids, settings.text, chunks[:count], policy, watches[name])
        ticker.expect((settings.repeats + 1) * len(columns))
        samples = interleave(columns, settings.repeats, ticker)
    rows: list[Row] = []
    for count in settings.counts:
        for policy in (BLENDED, STATIC):
            name = f"{count} {policy}"
            tokens = count * settings.chunk_tokens + settings.text
            size = {"chunks": count, "tokens": tokens, "policy": policy}
            rows.append(size | _figures(samples[name].values, watches[name].rounds[1:]))
    notes = {
        "model": pair.description,
        LOOK: "all tokens of the prompt pass the first layer and the projections of the second",
        CHOOSE: "their keys and values are compared with the compiled ones, and the prompt is planned again",
        LINK: "everything else, to the first token",
        "deciding": "share of looking and choosing in the time to the first token, median over rounds",
    }
    shares = [row["deciding"] for row in rows if row["policy"] == BLENDED]
    most = max(settings.counts)
    headline = {
        "least_share_of_deciding": min(shares),
        "most_share_of_deciding": max(shares),
        "cacheblend15_over_legolink16": paired(samples[f"{most} {BLENDED}"], samples[f"{most} {STATIC}"]),
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, rows))


def _figures(taken: Sequence[float], deciding: Sequence[tuple[float, float]]) -> Row:
    """Returns medians over rounds, and the least and the most where the page names one.

    Args:
        taken: milliseconds to the first token, by round.
        deciding: those of looking and of choosing within them.
    """
    rounds = list(zip(taken, deciding, strict=True))
    parts = {
        LOOK: [look for _, (look, _) in rounds],
        CHOOSE: [choose for _, (_, choose) in rounds],
        LINK: [ms - look - choose for ms, (look, choose) in rounds],
    }
    row = {f"{part}, ms": round(statistics.median(values), 1) for part, values in parts.items()}
    shares = [(look + choose) / ms for ms, (look, choose) in rounds]
    for name, values, digits in (("ttft_ms", taken, 1), ("deciding", shares, 3)):
        for prefix, of in (("", statistics.median), ("min_", min), ("max_", max)):
            row[prefix + name] = round(of(values), digits)
    return row


class _DecidingTime:
    """The milliseconds that a request's deciding pass takes, by round: (looking, choosing)."""

    def __init__(self, engine: NativeEngine, placement: BenchDevice) -> None:
        self._decider, self._placement = engine.decider, placement
        self.rounds: list[tuple[float, float]] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        spent = [0.0, 0.0]

        def timed(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
            def measured(*args: Any) -> Any:
                began = time.perf_counter()
                result = function(*args)
                self._placement.synchronize()
                spent[number] += (time.perf_counter() - began) * 1e3
                return result

            return measured

        look, choose = self._decider._look, self._decider._choose
        with (
            patch.object(self._decider, "_look", timed(0, look)),
            patch.object(self._decider, "_choose", timed(1, choose)),
        ):
            yield
        self.rounds.append((spent[0], spent[1]))


def _column(
    engine: NativeEngine, ids: Ids, text: int, chunks: list[Chunk], policy: str, watch: _DecidingTime
) -> Callable[[], float]:
    def measure() -> float:
        request = request_of(ids.framed(chunks, text), policy, 2)
        with watch.watch():
            elapsed, usage = first_token(engine, request)
        expect(usage, reused=usage.reused, prefix_hit=0)
        return elapsed

    return measure


def _plot(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    names = [f"{row['policy']}, {row['chunks']} chunks" for row in rows]
    left = [0.0] * len(rows)
    for part in (LOOK, CHOOSE, LINK):
        widths = [row[f"{part}, ms"] for row in rows]
        axes.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("time to first token (ms)")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
