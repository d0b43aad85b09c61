"""Measures retrieval: linking references while decoding against rebuilding the prompt with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpic.engine.base import Engine, GenerationRequest, Hit, Retrieval, SearchResult
from mpic.kv.chunk import Chunk
from mpic.prompt.segments import ChunkSegment, Segment, TextSegment
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import (
    BenchDevice,
    BenchFailed,
    Report,
    Row,
    Series,
    Ticker,
    bench,
    interleave,
    paired,
)
from mpic_lab.bench.workload import (
    BENCH_DECODER,
    BENCH_TOWER,
    DecoderShape,
    Ids,
    TowerShape,
    compile_all,
    engine_for,
    image_chunk,
    prompt_of,
    random_image,
    request_of,
)

CALL_TOKENS = 2
"""Tokens of a call."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``retrieval`` bench."""

    decoder: DecoderShape = BENCH_DECODER
    tower: TowerShape = BENCH_TOWER
    references: int = 4
    context: int = 512
    policy: str = "mpic-32"
    repeats: int = 5
    seed: int = 0


class _Search(Retrieval):
    """Finds fixed references. ``began`` is the time at which the search began."""

    opens = closes = "x"
    rounds = 1

    def __init__(self, inserted: tuple[Segment, ...]) -> None:
        self.inserted = inserted
        self.began = 0.0

    def search(self, call: str = "") -> SearchResult:
        self.began = time.perf_counter()
        chunks = [s.chunk for s in self.inserted if isinstance(s, ChunkSegment)]
        return SearchResult("x", tuple(Hit(chunk, {}) for chunk in chunks))

    def insert(self, hits: Sequence[Hit], number: int) -> tuple[Segment, ...]:
        if len(hits) != sum(isinstance(s, ChunkSegment) for s in self.inserted):
            raise BenchFailed("the references do not fit")
        return self.inserted


@bench(
    "retrieval",
    "references linked while decoding against a rebuilt prompt",
    Settings,
    quick={
        "decoder": DecoderShape(layers=4, hidden=384, heads=6, intermediate=1024, context=8192),
        "tower": TowerShape(layers=2, hidden=128, heads=2, size=336, patch=14),
        "repeats": 3,
    },
    wants={"reprefill_over_midlink": ">= 3"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure the time from a search to the next token in three ways."""
    # every token says the same: the first token of an answer opens a call, the second closes it
    model = make_model(settings.decoder, placement, settings.tower, seed=settings.seed, says=_Search.opens)
    ids = Ids(settings.decoder.vocabulary, settings.seed)
    side = settings.tower.size
    chunks = [image_chunk(random_image(settings.seed + i, side)) for i in range(settings.references)]
    new = settings.references * settings.tower.tokens
    shown: dict[str, Row] = {}

    def search() -> _Search:
        inserted: list[Segment] = []
        for chunk in chunks:
            inserted += [TextSegment(ids.fresh(4)), ChunkSegment(chunk)]
        return _Search((*inserted, TextSegment(ids.fresh(4))))

    def midlink() -> float:
        job = search()
        request = request_of(prompt_of(ids.fresh(settings.context)), settings.policy, CALL_TOKENS + 1)
        return _until_next(engine, replace(request, retrieval=job), job, shown)

    def reprefill(policy: str) -> Callable[[], float]:
        return lambda: _rebuilt(engine, policy, ids.fresh(settings.context), search(), shown)

    columns = {
        "linked while decoding": midlink,
        "re-prefill, prefix cache": reprefill("prefix"),
        "re-prefill, no cache": reprefill("full"),
    }
    room = 4 * (new + settings.context) + 2 * new + 4096
    with engine_for(model, room) as engine:
        compile_all(engine, chunks)
        ticker.expect((settings.repeats + 1) * len(columns))
        samples = interleave(columns, settings.repeats, ticker)
    rows = [
        {"table": "from the search to the next token", "column": name} | shown[name] | sample.row()
        for name, sample in samples.items()
    ]
    notes = {
        "model": model.description,
        "references": f"{settings.references} of {settings.tower.tokens} image tokens, KV resident, {settings.policy}",
        "context": f"{settings.context} tokens of prompt and {CALL_TOKENS} of answer before the call",
        "re-prefill": "the same prompt, answer so far and references as a new request; images are not encoded again. "
        "With a prefix cache it finds prompt and answer there and computes the references; headline",
    }
    headline = {
        "reprefill_over_midlink": paired(
            samples["re-prefill, prefix cache"], samples["linked while decoding"]
        )
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, samples))


def _until_next(engine: Engine, request: GenerationRequest, job: _Search, shown: dict[str, Row]) -> float:
    """Return the milliseconds from the search of a request to its next token."""
    stream = iter(engine.submit(request))
    elapsed, usage = None, None
    linked = False
    for delta in stream:
        linked = linked or delta.retrieval is not None
        if linked and elapsed is None and delta.token_ids:
            elapsed = (time.perf_counter() - job.began) * 1e3
        usage = delta.usage or usage
    if elapsed is None or usage is None or [r.error for r in usage.retrieval] != [None]:
        raise BenchFailed("no reference was linked while decoding")
    (round,) = usage.retrieval
    stale = [c.tier for c in usage.chunks if c.reused and c.tier != "device"]
    if stale:
        raise BenchFailed(f"references came from {stale}")
    shown["linked while decoding"] = {"computed": round.tokens - round.reused, "reused": round.reused}
    return elapsed


def _rebuilt(
    engine: Engine, policy: str, prompt: tuple[int, ...], job: _Search, shown: dict[str, Row]
) -> float:
    """Return the milliseconds from a search to the first token of a new request that is built from its result."""
    generated = (
        engine.submit(request_of(prompt_of(prompt), policy, CALL_TOKENS + 1)).result().token_ids[:CALL_TOKENS]
    )
    job.search()
    parts: list[Chunk | Sequence[int]] = [prompt, generated]
    parts += [s.chunk if isinstance(s, ChunkSegment) else s.token_ids for s in job.inserted]
    stream = iter(engine.submit(request_of(prompt_of(*parts), policy, 2)))
    next(stream)
    elapsed = (time.perf_counter() - job.began) * 1e3
    *_, last = stream
    hit = last.usage.prefix_hit
    if policy == "prefix" and hit < len(prompt):
        raise BenchFailed(f"the prefix cache had {hit} of {len(prompt)} tokens")
    name = "re-prefill, prefix cache" if policy == "prefix" else "re-prefill, no cache"
    shown[name] = {"computed": last.usage.computed, "reused": hit}
    return elapsed


def _plot(figure: Any, samples: Mapping[str, Series]) -> None:
    axes = figure.subplots()
    axes.barh(list(samples), [sample.median for sample in samples.values()])
    axes.invert_yaxis()
    axes.set_xlabel("from the search to the next token (ms)")
