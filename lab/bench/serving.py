"""Measures serving under load: the rate that each policy sustains, and the wait for first tokens (EPIC, section 5.5).

Every request links some chunks of a pool and has text of its own. First each policy gets a backlog that keeps it busy:
the requests finished per second are its *peak*, the highest rate that can be served without a growing queue. Then
requests arrive at random (Poisson), and the time to each first token is taken.

``native`` drives the engine in this process. ``native-http`` and ``vllm`` drive a whole server with vLLM's own load
generator (``serving_http``).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpic.engine.base import Engine
from mpic.link import parse_policy
from mpic_lab.bench.arrivals import Served, poisson, send
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import BenchDevice, Report, Row, Series, Ticker, bench, paired, rotated
from mpic_lab.bench.workload import (
    DecoderShape,
    Ids,
    compile_all,
    engine_for,
    first_token,
    request_of,
)
from mpic_lab.eval.flops import Flops

_DECODER = DecoderShape(layers=12, hidden=768, heads=12, intermediate=3072)
BACKLOG, ARRIVALS, UNCACHED = "backlog", "arrivals at random", "chunks nobody has compiled"
LEAST = 10
"""Requests at least where only a share of them links cached chunks: of fewer, a share says little."""
SPREAD = ("min_requests_per_s", "max_requests_per_s")
SUMS = ("requests", "compiled_again")
MEDIANS = ("alone_ttft_ms", "alone_ms", "requests_per_s", "tokens_per_s")


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``serving`` bench.

    Args:
        pool, linked: number of chunks in the pool, and of those in a request.
        text, answer: tokens of a request's own text and of its answer.
        backlog: seconds of work in a policy's backlog, as estimated from one request.
        repeats: backlogs of each policy.
        shares: shares of the peak at which requests arrive at random.
        seconds: time for which they arrive.
        ratios: shares of requests whose chunks are cached already; the others bring new chunks. So many requests are
            drawn, to the nearest whole number, and ``cached`` in a row is the share that came of it.
    """

    decoder: DecoderShape = _DECODER
    pool: int = 12
    linked: int = 4
    chunk_tokens: int = 576
    text: int = 64
    answer: int = 8
    policies: tuple[str, ...] = ("full", "prefix", "cacheblend-15", "mpic-32", "legolink-16")
    backlog: float = 15.0
    repeats: int = 3
    shares: tuple[float, ...] = (0.5, 0.8)
    seconds: float = 25.0
    ratios: tuple[float, ...] = (0.0, 0.5)
    seed: int = 0


@bench(
    "serving",
    "requests that arrive at random: peak throughput and time to the first token",
    Settings,
    quick={
        "decoder": DecoderShape(layers=4, hidden=256, heads=4, intermediate=512, vocabulary=2_000),
        "chunk_tokens": 256,
        "backlog": 1.5,
        "repeats": 1,
        "seconds": 2.0,
    },
    wants={
        "legolink16_over_cacheblend15": "near operations_cacheblend15_over_legolink16 (papers: up to 7)",
        "operations_cacheblend15_over_legolink16": "to compare it with",
        "mpic32_over_prefix": "> 1",
        "p99_prefix_over_mpic32": "> 1",
    },
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure three tables: backlog, random arrivals, and arrivals with chunks that are not compiled."""
    model = make_model(settings.decoder, placement, seed=settings.seed)
    tokens = 6 * settings.pool * settings.chunk_tokens + 64 * (settings.linked * settings.chunk_tokens + 512)
    ticker.expect(
        len(settings.policies) * (settings.repeats + len(settings.shares)) + 1 + len(settings.ratios)
    )
    with engine_for(model, min(tokens, 120_000)) as engine:
        sender = PoolSender(settings, engine, Flops(model.stock))
        backlogs = backlogs_of(sender, settings, ticker)
        rows = [of_rounds(found) for found in backlogs.values()]
        peaks = {row["policy"]: row["requests_per_s"] for row in rows}
        for policy in settings.policies:
            for share in settings.shares:
                with ticker.step(f"{policy}: {share:.0%} of its peak"):
                    rows.append(sender.arrivals(policy, share * peaks[policy]))
        common = settings.shares[-1] * peaks["prefix"]
        with ticker.step("mpic-32 at the rate of prefix"):
            rows.append(sender.arrivals("mpic-32", common))
        for ratio in settings.ratios:
            policy = settings.policies[-1]
            with ticker.step(f"{policy}: {ratio:.0%} cached"):
                rows.append(sender.arrivals(policy, settings.shares[0] * peaks["full"], ratio))
    notes = {
        "model": model.description,
        "peak": "requests finished a second while the queue is never empty: median, least and most of the backlogs, "
        "which the policies get in turn; ratios are medians over rounds",
        "gflop": "counted operations to the first token of a request; where they take most of the time, peaks are "
        "inversely proportional to them",
        "arrivals": "Poisson, the same unit pattern for every policy, stretched to its rate",
        "p99_prefix_over_mpic32": "at the same rate; of few requests the 99th percentile is nearly the slowest",
        "compiled_again": "chunks of the pool that a request found gone from the pages, although all of them are made "
        "resident before each row is measured",
        "prefix": "a user's requests share no prefix, as chunks come in random order behind fresh text",
    }
    p99 = {r["policy"]: r["ttft_p99_ms"] for r in rows if r.get("offered_per_s") == round(common, 3)}
    headline = {
        **over_cacheblend(backlogs),
        "mpic32_over_prefix": peak_ratio(backlogs, "mpic-32", "prefix"),
        "p99_prefix_over_mpic32": p99["prefix"] / p99["mpic-32"],
    }
    return Report(rows, headline, notes, lambda figure: plot(figure, rows, "requests/s", "p50"))


class PoolSender:
    """Sends requests over a pool of chunks, as a backlog or at random times."""

    def __init__(self, settings: Settings, engine: Engine, flops: Flops) -> None:
        self._settings, self._engine, self._flops = settings, engine, flops
        self._ids = Ids(settings.decoder.vocabulary, settings.seed)
        self.pool = self._ids.chunks(settings.pool, settings.chunk_tokens)
        self._pooled = {str(chunk.key) for chunk in self.pool}

    def request(self, policy: str, rng: random.Random, cached: bool = True) -> Any:
        """Return a request of fresh text, chunks in random order, and fresh text."""
        settings = self._settings
        fresh = lambda: self._ids.chunks(settings.linked, settings.chunk_tokens)
        chunks = rng.sample(self.pool, settings.linked) if cached else fresh()
        return request_of(self._ids.framed(chunks, settings.text), policy, settings.answer)

    def backlog(self, policy: str) -> Row:
        """Send enough requests at once to keep the engine busy for a while."""
        rng = random.Random(self._settings.seed)
        compile_all(self._engine, self.pool)  # what was measured before may have taken their pages
        first_token(self._engine, self.request(policy, rng))
        alone, usage = first_token(self._engine, self.request(policy, rng))
        count = backlog_size(2 * self._settings.backlog, alone / 1e3)
        served = send(self._engine, [self.request(policy, rng) for _ in range(count)], [0.0] * count)
        elapsed = max(one.arrived + one.ended for one in served)
        return {
            "table": BACKLOG,
            "policy": policy,
            "requests": count,
            "gflop": round(self._flops.of(usage, parse_policy(policy)) / 1e9, 2),
            "alone_ttft_ms": round(alone, 1),
            "requests_per_s": round(count / elapsed, 3),
            "tokens_per_s": round(sum(one.usage.prompt_tokens for one in served) / elapsed),
            "compiled_again": self._compiled_again(served),
        }

    def arrivals(self, policy: str, rate: float, ratio: float | None = None) -> Row:
        """Send requests at random times; with ``ratio``, only that share of them links cached chunks."""
        rng = random.Random(self._settings.seed + 1)
        times = poisson(rng, rate, self._settings.seconds, 3 if ratio is None else LEAST)
        cached = hits(rng, len(times), 1.0 if ratio is None else ratio)
        compile_all(self._engine, self.pool)
        served = send(self._engine, [self.request(policy, rng, hit) for hit in cached], times)
        elapsed = max(one.arrived + one.ended for one in served)
        row: Row = {
            "table": ARRIVALS if ratio is None else UNCACHED,
            "policy": policy,
            "offered_per_s": round(rate, 3),
            "served_per_s": round(len(served) / elapsed, 3),
            "requests": len(served),
        }
        if ratio is not None:
            row["cached"] = f"{sum(cached) / len(cached):.0%}"
        with_queue = [1e3 * one.first for one in served]
        without = [ms - one.usage.queue_ms for ms, one in zip(with_queue, served, strict=True)]
        for name, values in (("ttft", with_queue), ("no_queue", without)):
            row[f"{name}_p50_ms"] = round(statistics.median(values), 1)
            row[f"{name}_p99_ms"] = round(float(np.quantile(values, 0.99, method="inverted_cdf")), 1)
        return row | {"compiled_again": self._compiled_again(served)}

    def _compiled_again(self, served: Iterable[Served]) -> int:
        """Return how many chunks of the pool were not resident when a request linked them."""
        uses = (use for one in served for use in one.usage.chunks)
        return sum(use.key in self._pooled and use.tier == "compiled" for use in uses)


def hits(rng: random.Random, count: int, ratio: float) -> list[bool]:
    """Return which of ``count`` requests link cached chunks: a share of ``ratio`` as near as whole requests allow, in
    random order."""
    found = round(ratio * count)
    cached = [True] * found + [False] * (count - found)
    rng.shuffle(cached)
    return cached


def backlogs_of(sender: PoolSender, settings: Settings, ticker: Ticker) -> dict[str, list[Row]]:
    """Return the backlogs of each policy, which took turns."""
    what = f"backlog of {settings.linked} x {settings.chunk_tokens}"
    return in_turns(sender.backlog, settings.policies, settings.repeats, ticker, what)


def in_turns(
    measure: Callable[[str], Row], policies: Sequence[str], repeats: int, ticker: Ticker, what: str
) -> dict[str, list[Row]]:
    """Return the rows that ``measure`` makes of each policy, ``repeats`` of each, measured in turns."""
    found: dict[str, list[Row]] = {policy: [] for policy in policies}
    for turn in range(repeats):
        for policy in rotated(policies, turn):
            with ticker.step(f"{policy}: {what}"):
                found[policy].append(measure(policy))
    return found


def peak_ratio(backlogs: Mapping[str, Sequence[Row]], policy: str, base: str) -> float:
    """Return the peak of a policy over that of another: the median of the ratios within a round."""
    ours, theirs = (Series(0.0, [one["requests_per_s"] for one in backlogs[name]]) for name in (policy, base))
    return paired(ours, theirs)


def over_cacheblend(backlogs: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Return headline numbers of LegoLink beside CacheBlend: the ratio of their peaks, and the inverse one of their
    counted operations."""
    linked, blended = "legolink-16", "cacheblend-15"
    return {
        "legolink16_over_cacheblend15": peak_ratio(backlogs, linked, blended),
        "operations_cacheblend15_over_legolink16": backlogs[blended][0]["gflop"]
        / backlogs[linked][0]["gflop"],
    }


def of_rounds(found: list[Row]) -> Row:
    """Return one row for a policy's backlogs: medians, the least and most requests a second, and all requests."""
    row = found[0] | {name: sum(one[name] for one in found) for name in SUMS if name in found[0]}
    row |= {name: round(statistics.median(one[name] for one in found), 3) for name in MEDIANS if name in row}
    rates = [one["requests_per_s"] for one in found]
    return row | dict(zip(SPREAD, (min(rates), max(rates)), strict=True))


def backlog_size(seconds: float, alone: float) -> int:
    """Return the number of requests for a backlog of ``seconds`` when each takes ``alone`` seconds; at least 3, at
    most 400."""
    return max(3, min(400, round(seconds / alone)))


def with_spread(rows: Sequence[Row]) -> tuple[list[float], list[list[float]]]:
    """Return the peaks of rows, and how far the least is below and the most above each (0 in rows of one backlog)."""
    peaks = [row["requests_per_s"] for row in rows]
    least, most = ([row.get(name, row["requests_per_s"]) for row in rows] for name in SPREAD)
    below = [peak - low for peak, low in zip(peaks, least, strict=True)]
    return peaks, [below, [high - peak for peak, high in zip(peaks, most, strict=True)]]


def plot(figure: Any, rows: list[Row], unit: str, quantile: str) -> None:
    """Draw peaks as bars, and the time to the first token (``p50`` or ``p99``) over the offered rate."""
    peak, ttft = figure.subplots(1, 2)
    shown = [row for row in rows if row["table"] == BACKLOG]
    rates, beside = with_spread(shown)
    peak.barh([row["policy"] for row in shown], rates, xerr=beside, capsize=2)
    peak.set_xlabel(f"peak ({unit})")
    for policy in dict.fromkeys(row["policy"] for row in shown):
        line = sorted(
            (row["offered_per_s"], row[f"ttft_{quantile}_ms"])
            for row in rows
            if row["table"] == ARRIVALS and row["policy"] == policy
        )
        ttft.plot(*zip(*line, strict=True), marker="o", label=policy)
    name = {"p50": "median", "p99": "99th percentile"}[quantile]
    ttft.set(xlabel="offered (requests/s)", ylabel=f"time to first token with queue, {name} (ms)")
    ttft.set(xscale="log", yscale="log")
    ttft.legend(fontsize=8)
    for axes in (peak, ttft):
        axes.grid(alpha=0.3)
