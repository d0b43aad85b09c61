"""Pool bytes against the number of chunks and against the request rate (MEPIC, section 5): one copy a request, or
shared chunks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from mpic.engine.native.engine import NativeEngine
from mpic.evals.bench.drive import (
    PAGE,
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
from mpic.evals.bench.serve import arrivals, send
from mpic.kv.chunk import Chunk

_DECODER = Decoder(layers=4, hidden=512, heads=8, intermediate=1024, vocabulary=2_000)


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``memory`` bench.

    Args:
        counts: of chunks that every request links.
        requests: at once, while the number of chunks grows.
        loads: arrival rates, as multiples of what one request at a time would serve.
        seconds: of arrivals at each rate.
    """

    decoder: Decoder = _DECODER
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    requests: int = 8
    linked: int = 8
    loads: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    seconds: float = 10.0
    chunk_tokens: int = 192
    text: int = 48
    answer: int = 24
    policy: str = "mpic-16"
    seed: int = 0


class _Meter:
    """In any step: the most pages in use, and the most that the running requests would need if each had a copy of its
    whole prompt."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine, self._run = engine, engine.runner.run
        self.pages = self.copies = self.running = 0
        engine.runner.run = self._metered

    def _metered(self, *step: Any) -> Any:
        pool, running = self._engine.pool, self._engine.scheduler.running
        held = [-(-(s.plan.length + s.max_tokens) // PAGE) for s in running]
        self.pages = max(self.pages, pool.pages - pool.free_pages)
        self.copies = max(self.copies, sum(held))
        self.running = max(self.running, len(running))
        return self._run(*step)


@bench(
    "memory",
    "pool bytes as chunks and request rate grow: one copy a request over shared chunks",
    Settings,
    quick={"counts": (1, 4, 8), "loads": (1.0, 4.0), "seconds": 3.0},
    wants={
        "copies_over_shared_at_most_chunks": "> 1, grows",
        "copies_over_shared_at_highest_rate": "> 1, grows",
    },
)
def run(settings: Settings, where: Where, ticker: Ticker) -> Report:
    """Two tables; every line is a fresh engine, so that nothing cached earlier counts."""
    pair = make_pair(settings.decoder, where, seed=settings.seed)
    ids = Ids(settings.decoder.vocabulary, settings.seed)
    pool = [
        text_chunk(ids.fresh(settings.chunk_tokens)) for _ in range(max(*settings.counts, settings.linked))
    ]
    room = 40 * (len(pool) * settings.chunk_tokens + settings.text + settings.answer)
    ticker.expect(len(settings.counts) + len(settings.loads))
    rows: list[Row] = []
    for count in settings.counts:
        with ticker.step(f"{count} chunks"), engine_for(pair.loaded, room) as engine:
            compile_all(engine, pool[:count])
            meter = _Meter(engine)
            requests = [_request(settings, ids, pool[:count], n) for n in range(settings.requests)]
            send(engine, requests, [0.0] * len(requests))
            rows.append(_row("chunks", {"chunks": count}, meter, engine))
    for load in settings.loads:
        with ticker.step(f"{load:g} x one at a time"), engine_for(pair.loaded, room) as engine:
            chunks = pool[: settings.linked]
            compile_all(engine, chunks)
            first_token(engine, _request(settings, ids, chunks, 0))
            alone = engine.submit(_request(settings, ids, chunks, 1)).result().usage.total_ms / 1e3
            meter = _Meter(engine)
            times = arrivals(random.Random(settings.seed), load / alone, settings.seconds)
            send(engine, [_request(settings, ids, chunks, n) for n in range(len(times))], times)
            rows.append(_row("request rate", {"per_s": round(load / alone, 2)}, meter, engine))
    notes = {
        "model": describe(pair, settings.decoder),
        "copies": "whole prompt and answer of every running request in pages of its own",
        "shared": "most pages of the pool in use at once, prefixes kept for later turns included",
    }
    headline = {
        "copies_over_shared_at_most_chunks": _last(rows, "chunks"),
        "copies_over_shared_at_highest_rate": _last(rows, "request rate"),
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, rows))


def _request(settings: Settings, ids: Ids, chunks: list[Chunk], number: int) -> Any:
    order = chunks[number % len(chunks) :] + chunks[: number % len(chunks)]
    head = settings.text // 2
    prompt = prompt_of(ids.fresh(head), *order, ids.fresh(settings.text - head))
    return request_of(prompt, settings.policy, settings.answer)


def _row(table: str, what: dict[str, Any], meter: _Meter, engine: NativeEngine) -> Row:
    mib = engine.pool.page_bytes / 2**20
    return {
        "table": table,
        **what,
        "running": meter.running,
        "copies_MiB": round(meter.copies * mib, 2),
        "shared_MiB": round(meter.pages * mib, 2),
        "ratio": round(meter.copies / meter.pages, 3),
    }


def _last(rows: list[Row], table: str) -> float:
    return [row["ratio"] for row in rows if row["table"] == table][-1]


def _plot(figure: Any, rows: list[Row]) -> None:
    for axes, (table, x) in zip(
        figure.subplots(1, 2), (("chunks", "chunks"), ("request rate", "per_s")), strict=True
    ):
        found = [row for row in rows if row["table"] == table]
        for name in ("copies_MiB", "shared_MiB"):
            axes.plot([r[x] for r in found], [r[name] for r in found], marker="o", label=name.split("_")[0])
        axes.set(xlabel="chunks a request" if x == "chunks" else "requests/s", ylabel="pool (MiB)")
        axes.grid(alpha=0.3)
        axes.legend()
