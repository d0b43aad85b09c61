"""Measures pool memory when requests link the same chunks: the pages that they share against one copy for each (MEPIC,
section 4)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpic.engine.base import Delta, Engine, GenerationRequest
from mpic.kv.chunk import Chunk
from mpic_lab.bench.arrivals import Served, poisson, send
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Report, Row, Ticker, bench
from mpic_lab.bench.workload import (
    PAGE,
    BenchModel,
    DecoderShape,
    Ids,
    compile_all,
    engine_for,
    first_token,
    prompt_of,
    request_of,
)

_DECODER = DecoderShape(layers=4, hidden=512, heads=8, intermediate=1024, vocabulary=2_000)
SAME, COUNTS, RATES = "the same chunks at different offsets", "chunks", "request rate"


@dataclass(frozen=True)
class Load:
    """The requests of a load: how many arrive at once, the number of chunks that each links, and the tokens of a chunk
    and of an answer."""

    requests: int
    chunks: int
    chunk_tokens: int
    answer: int


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``memory`` bench.

    Args:
        same: number of requests that are also run alone, to compare the answers.
        grown: number of requests at once while the number of chunks grows through ``counts``, and of those that arrive
            one by one.
        counts: numbers of chunks that every request links.
        rates: arrival rates, as multiples of the rate at which requests are served one at a time.
        seconds: time for which requests arrive at each rate.
        text: number of tokens of a request's own text.
    """

    decoder: DecoderShape = _DECODER
    same: Load = Load(requests=16, chunks=8, chunk_tokens=256, answer=32)
    grown: Load = Load(requests=8, chunks=8, chunk_tokens=192, answer=24)
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    seconds: float = 10.0
    text: int = 48
    policy: str = "mpic-16"
    seed: int = 0


class _Meter:
    """The maximum of pages in use, as the engine reports it after every token, and the maximum that the running
    requests would need with a copy each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.pages = self.copies = self.running = 0

    def look(self) -> None:
        pages = self._engine.stats()["pages"]
        self.pages = max(self.pages, pages["total"] - pages["free"])

    def count(self, served: Sequence[Served]) -> None:
        """Count the copies of finished requests, each from the end of its time in the queue to its end."""
        self.look()
        page = self._engine.stats()["pages"]["page_size"]
        changes = []
        for one in served:
            own = -(-(one.usage.prompt_tokens + one.usage.completion_tokens) // page)
            changes.append((one.arrived + one.usage.queue_ms / 1e3, 1, own))
            changes.append((one.arrived + one.ended, -1, -own))
        running = copies = 0
        for _, request, own in sorted(changes):
            running, copies = running + request, copies + own
            self.running, self.copies = max(self.running, running), max(self.copies, copies)

    def row(self, table: str, load: dict[str, Any]) -> Row:
        mib = self._engine.stats()["pages"]["page_bytes"] / 2**20
        return {
            "table": table,
            **load,
            "running": self.running,
            "copies_MiB": round(self.copies * mib, 2),
            "shared_MiB": round(self.pages * mib, 2),
            "ratio": round(self.copies / self.pages, 4),
        }


@bench(
    "memory",
    "pool memory of requests that link the same chunks: one copy a request over shared pages",
    Settings,
    quick={
        "same": Load(requests=16, chunks=8, chunk_tokens=192, answer=16),
        "counts": (1, 4, 8),
        "rates": (1.0, 4.0),
        "seconds": 3.0,
    },
    wants={
        "copies_over_shared": ">= 4",
        "copies_over_shared_at_most_chunks": "> 1, grows",
        "copies_over_shared_at_highest_rate": "> 1, grows",
    },
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure three tables; every row has a fresh engine, so that nothing cached earlier counts."""
    model = make_model(settings.decoder, placement, gain=4.0, seed=settings.seed)
    prompts = _ShuffledPrompts(settings)
    ticker.expect(settings.same.requests + 1 + len(settings.counts) + len(settings.rates))
    rows = [_same_answers(settings, model, prompts, ticker)]
    grown, longest = settings.grown, max(*settings.counts, settings.grown.chunks)
    chunks = prompts.chunks(longest, grown.chunk_tokens)
    room = 40 * (longest * grown.chunk_tokens + settings.text + grown.answer)
    for count in settings.counts:
        with ticker.step(f"{count} chunks"), engine_for(model, room) as engine:
            compile_all(engine, chunks[:count])
            meter = _Meter(engine)
            requests = [prompts.request(chunks[:count], n, grown.answer) for n in range(grown.requests)]
            meter.count(send(engine, requests, [0.0] * len(requests), at_token=meter.look))
            rows.append(meter.row(COUNTS, {"chunks": count}))
    linked = chunks[: grown.chunks]
    for multiple in settings.rates:
        with ticker.step(f"{multiple:g} x one at a time"), engine_for(model, room) as engine:
            compile_all(engine, linked)
            first_token(engine, prompts.request(linked, 0, grown.answer))
            alone = engine.submit(prompts.request(linked, 1, grown.answer)).result().usage.total_ms / 1e3
            meter = _Meter(engine)
            times = poisson(random.Random(settings.seed), multiple / alone, settings.seconds)
            requests = [prompts.request(linked, n, grown.answer) for n in range(len(times))]
            meter.count(send(engine, requests, times, at_token=meter.look))
            rows.append(meter.row(RATES, {"per_s": round(multiple / alone, 2)}))
    notes = {
        "model": model.description,
        "page_tokens": PAGE,
        "copies": "whole prompt and answer of every running request in pages of its own, as EPIC and CacheBlend do",
        "shared": "most pages of the pool in use at once: the chunks, every request's own tokens and its reserve, and "
        "prefixes kept for later turns",
        "identical": f"all {settings.same.requests} answers of the first table equal those of requests run alone",
    }
    last = {row["table"]: row["ratio"] for row in rows}
    headline = {
        "copies_over_shared": last[SAME],
        "copies_over_shared_at_most_chunks": last[COUNTS],
        "copies_over_shared_at_highest_rate": last[RATES],
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, rows))


class _ShuffledPrompts:
    """Makes requests that each link the chunks in a different order, after a text of a different length."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ids = Ids(settings.decoder.vocabulary, settings.seed)
        self.chunks = self._ids.chunks

    def request(self, chunks: list[Chunk], number: int, answer: int) -> GenerationRequest:
        order = chunks[number % len(chunks) :] + chunks[: number % len(chunks)]
        half = self._settings.text // 2
        prompt = prompt_of(
            self._ids.fresh(half + number % PAGE), *order[:: -1 if number % 2 else 1], self._ids.fresh(half)
        )
        return request_of(prompt, self._settings.policy, answer)


def _same_answers(settings: Settings, model: BenchModel, prompts: _ShuffledPrompts, ticker: Ticker) -> Row:
    """Run every request alone, then all at once. Raise BenchFailed if one is answered differently beside others."""
    same = settings.same
    chunks = prompts.chunks(same.chunks, same.chunk_tokens)
    requests = [prompts.request(chunks, n, same.answer) for n in range(same.requests)]
    room = 2 * same.requests * (same.chunks * same.chunk_tokens + settings.text + same.answer)
    alone: list[Delta] = []
    with engine_for(model, room) as engine:
        for number, request in enumerate(requests, 1):
            with ticker.step(f"request {number} alone"):
                alone.append(engine.submit(request).result())
    with engine_for(model, room) as engine, ticker.step("all at once"):
        meter = _Meter(engine)
        compile_all(engine, chunks)
        served = send(engine, requests, [0.0] * len(requests), at_token=meter.look)
        meter.count(served)
        engine.check()
    together = {one.id: one.token_ids for one in served}
    different = [n for n, request in enumerate(requests) if together[request.id] != alone[n].token_ids]
    if different:
        raise BenchFailed(
            f"requests {different} of {len(requests)} answered differently beside others than alone; "
            "half precision rounds differently in a batch, in float32 this is an error"
        )
    return meter.row(SAME, {"chunks": same.chunks})


def _plot(figure: Any, rows: list[Row]) -> None:
    panels = ((COUNTS, "chunks", "chunks a request"), (RATES, "per_s", "requests/s"))
    for axes, (table, x, label) in zip(figure.subplots(1, 2), panels, strict=True):
        shown = [row for row in rows if row["table"] == table]
        for name in ("copies_MiB", "shared_MiB"):
            axes.plot([r[x] for r in shown], [r[name] for r in shown], marker="o", label=name.split("_")[0])
        axes.set(xlabel=label, ylabel="pool (MiB)")
        axes.grid(alpha=0.3)
        axes.legend()
