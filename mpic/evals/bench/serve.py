"""Requests that arrive by themselves: what rate each policy can serve (EPIC, section 6.3; MPIC, section 5).

Every request links ``linked`` chunks drawn from a pool and has text of its own. First each policy is given a backlog
that keeps it busy: requests finished a second are its *peak*, the most that can be served without the queue growing.
Then requests arrive at random (Poisson, the same pattern for every policy) at shares of that peak, and every request's
time to the first token is counted with and without its time in the queue.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpic.engine.base import Usage
from mpic.engine.native.engine import NativeEngine
from mpic.evals.bench.drive import (
    Decoder,
    Ids,
    compile_all,
    describe,
    engine_for,
    first_token,
    make_pair,
    prompt_of,
    request_of,
    text_chunk,
)
from mpic.evals.bench.frame import Report, Row, Ticker, Where, bench
from mpic.kv.chunk import Chunk

_DECODER = Decoder(layers=12, hidden=768, heads=12, intermediate=3072)


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``serve`` bench.

    Args:
        backlog: seconds of work in a policy's backlog, as estimated from one request.
        shares: of the peak, for arrivals at random.
        seconds: of arrivals.
        ratios: of requests whose chunks are cached already; the others bring chunks nobody has seen.
    """

    decoder: Decoder = _DECODER
    pool: int = 12
    linked: int = 4
    chunk_tokens: int = 576
    text: int = 64
    answer: int = 8
    policies: tuple[str, ...] = ("full", "prefix", "cacheblend-15", "mpic-32", "legolink-16")
    backlog: float = 15.0
    shares: tuple[float, ...] = (0.5, 0.8)
    seconds: float = 25.0
    ratios: tuple[float, ...] = (0.0, 0.5)
    seed: int = 0


@dataclass
class Served:
    """One finished request: seconds from its arrival to the first token and to the end; usage has the queue's share."""

    arrived: float
    first: float
    ended: float
    usage: Usage


@bench(
    "serve",
    "requests that arrive at random: peak throughput and time to the first token",
    Settings,
    quick={
        "decoder": Decoder(layers=4, hidden=256, heads=4, intermediate=512, vocabulary=2_000),
        "chunk_tokens": 256,
        "backlog": 1.5,
        "seconds": 2.0,
    },
    wants={"legolink16_over_cacheblend15": "> 1 (papers: up to 7)", "mpic32_over_prefix": "> 1"},
)
def run(settings: Settings, where: Where, ticker: Ticker) -> Report:
    """Three tables: backlog, arrivals at random, and arrivals with chunks nobody has compiled."""
    pair = make_pair(settings.decoder, where, seed=settings.seed)
    workload = _Workload(settings)
    tokens = 6 * settings.pool * settings.chunk_tokens + 64 * (settings.linked * settings.chunk_tokens + 512)
    rows: list[Row] = []
    peaks: dict[str, float] = {}
    ticker.expect(len(settings.policies) * (1 + len(settings.shares)) + len(settings.ratios))
    with engine_for(pair.loaded, min(tokens, 120_000)) as engine:
        compile_all(engine, workload.pool)
        for policy in settings.policies:
            with ticker.step(f"{policy}: backlog"):
                row = workload.backlog(engine, policy)
            peaks[policy] = row["requests_per_s"]
            rows.append(row)
        for policy in settings.policies:
            for share in settings.shares:
                with ticker.step(f"{policy}: {share:.0%} of its peak"):
                    rows.append(workload.arrivals(engine, policy, share, peaks[policy], 1.0))
        for ratio in settings.ratios:
            with ticker.step(f"{settings.policies[-1]}: {ratio:.0%} cached"):
                policy = settings.policies[-1]
                rows.append(workload.arrivals(engine, policy, settings.shares[0], peaks["full"], ratio))
    notes = {
        "model": describe(pair, settings.decoder),
        "peak": "requests finished a second while the queue is never empty",
        "arrivals": "Poisson, the same unit pattern for every policy, stretched to its rate",
        "prefix": "a user's requests share no prefix, as chunks come in random order behind fresh text",
    }
    headline = {
        "legolink16_over_cacheblend15": peaks["legolink-16"] / peaks["cacheblend-15"],
        "mpic32_over_prefix": peaks["mpic-32"] / peaks["prefix"],
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, rows))


class _Workload:
    """Requests over a pool of chunks, and ways to send them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._ids = Ids(settings.decoder.vocabulary, settings.seed)
        self.pool = [self._chunk() for _ in range(settings.pool)]

    def _chunk(self) -> Chunk:
        return text_chunk(self._ids.fresh(self.settings.chunk_tokens))

    def request(self, policy: str, rng: random.Random, cached: bool = True) -> Any:
        """Fresh text, chunks in random order, fresh text."""
        settings = self.settings
        linked = settings.linked
        chunks = rng.sample(self.pool, linked) if cached else [self._chunk() for _ in range(linked)]
        head = settings.text // 2
        prompt = prompt_of(self._ids.fresh(head), *chunks, self._ids.fresh(settings.text - head))
        return request_of(prompt, policy, settings.answer)

    def backlog(self, engine: NativeEngine, policy: str) -> Row:
        """Everything at once."""
        rng = random.Random(self.settings.seed)
        first_token(engine, self.request(policy, rng))
        alone, _ = first_token(engine, self.request(policy, rng))
        count = max(3, min(400, round(2 * self.settings.backlog * 1e3 / alone)))
        requests = [self.request(policy, rng) for _ in range(count)]
        served = send(engine, requests, [0.0] * count)
        elapsed = max(one.arrived + one.ended for one in served)
        return {
            "table": "backlog",
            "policy": policy,
            "requests": count,
            "alone_ttft_ms": round(alone, 1),
            "requests_per_s": round(count / elapsed, 3),
            "tokens_per_s": round(sum(one.usage.prompt_tokens for one in served) / elapsed),
        }

    def arrivals(self, engine: NativeEngine, policy: str, share: float, peak: float, ratio: float) -> Row:
        """At random, ``share`` of ``peak``; ``ratio`` of the requests link what is cached."""
        rng = random.Random(self.settings.seed + 1)
        rate = share * peak
        times = arrivals(rng, rate, self.settings.seconds)
        cached = [rng.random() < ratio for _ in times]
        requests = [self.request(policy, rng, hit) for hit in cached]
        served = send(engine, requests, times)
        elapsed = max(one.arrived + one.ended for one in served)
        with_queue = [1e3 * one.first for one in served]
        without = [ms - one.usage.queue_ms for ms, one in zip(with_queue, served, strict=True)]
        row: Row = {
            "table": "arrivals at random" if ratio == 1 else "chunks nobody has compiled",
            "policy": policy,
            "offered_per_s": round(rate, 3),
            "served_per_s": round(len(served) / elapsed, 3),
            "requests": len(served),
        }
        if ratio != 1:
            row["cached"] = f"{ratio:.0%}"
        for name, values in (("ttft", with_queue), ("no_queue", without)):
            row[f"{name}_p50_ms"] = round(statistics.median(values), 1)
            row[f"{name}_p99_ms"] = round(quantile(values, 0.99), 1)
        return row


def arrivals(rng: random.Random, rate: float, seconds: float) -> list[float]:
    """Seconds at which requests arrive: Poisson at ``rate`` a second for ``seconds``, three at least. The same seed
    gives the same pattern, stretched to the rate."""
    at, times = 0.0, list[float]()
    while at < seconds or len(times) < 3:
        at += rng.expovariate(1.0) / rate
        times.append(at)
    return times


def send(engine: NativeEngine, requests: Sequence[Any], times: Sequence[float]) -> list[Served]:
    """Submit each request at its time (seconds from now) and read all answers to their ends.

    Raises:
        MPICError: the first error that any request met.
    """
    served: list[Served] = []
    failed: list[BaseException] = []
    began = time.perf_counter()

    def read(stream: Any, arrived: float) -> None:
        try:
            first, usage = 0.0, None
            for delta in stream:
                first = first or time.perf_counter() - began - arrived
                usage = delta.usage or usage
            served.append(Served(arrived, first, time.perf_counter() - began - arrived, usage))
        except BaseException as error:
            failed.append(error)

    readers = []
    for request, at in zip(requests, times, strict=True):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        arrived = at if at else time.perf_counter() - began
        readers.append(threading.Thread(target=read, args=(engine.submit(request), arrived)))
        readers[-1].start()
    for reader in readers:
        reader.join()
    if failed:
        raise failed[0]
    return served


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1))]


def _plot(figure: Any, rows: list[Row]) -> None:
    peak, ttft = figure.subplots(1, 2)
    found = [row for row in rows if row["table"] == "backlog"]
    peak.barh([row["policy"] for row in found], [row["requests_per_s"] for row in found])
    peak.set_xlabel("peak (requests/s)")
    for policy in dict.fromkeys(row["policy"] for row in found):
        line = [
            (row["offered_per_s"], row["ttft_p50_ms"])
            for row in rows
            if row["table"] == "arrivals at random" and row["policy"] == policy
        ]
        ttft.plot(*zip(*line, strict=True), marker="o", label=policy)
    ttft.set(xlabel="offered (requests/s)", ylabel="time to first token, median, with queue (ms)")
    ttft.set_xscale("log")
    ttft.set_yscale("log")
    ttft.legend(fontsize=8)
    for axes in (peak, ttft):
        axes.grid(alpha=0.3)
