"""What sharing pages saves when many requests link the same chunks at once (MEPIC, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpic.engine.base import Delta, GenerationRequest
from mpic.engine.native.engine import NativeEngine
from mpic.evals.bench.drive import (
    PAGE,
    Decoder,
    Ids,
    compile_all,
    describe,
    engine_for,
    make_pair,
    prompt_of,
    request_of,
    text_chunk,
)
from mpic.evals.bench.frame import BenchFailed, Report, Ticker, Where, bench
from mpic.kv.chunk import Chunk

_DECODER = Decoder(layers=4, hidden=256, heads=8, intermediate=512, vocabulary=2_000)


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``pages`` bench."""

    decoder: Decoder = _DECODER
    requests: int = 16
    chunks: int = 8
    chunk_tokens: int = 256
    text: int = 48
    answer: int = 32
    policy: str = "mpic-16"
    seed: int = 0


class _Meter:
    """The most pages in use and requests running at any allocation of an engine's pool."""

    def __init__(self, engine: NativeEngine) -> None:
        self.pages = self.running = 0
        pool, alloc = engine.pool, engine.pool.alloc

        def metered(tokens: int) -> object:
            extent = alloc(tokens)
            self.pages = max(self.pages, pool.pages - pool.free_pages)
            self.running = max(self.running, len(engine.scheduler.running) + 1)
            return extent

        pool.alloc = metered


@bench(
    "pages",
    "pool bytes of concurrent requests that link the same chunks at different offsets",
    Settings,
    quick={"answer": 16, "chunk_tokens": 192},
    wants={"copies_over_shared": ">= 4"},
)
def run(settings: Settings, where: Where, ticker: Ticker) -> Report:
    """All requests alone first, then all at once; the answers must be the same."""
    pair = make_pair(settings.decoder, where, gain=4.0, seed=settings.seed)
    ids = Ids(settings.decoder.vocabulary, settings.seed)
    chunks = [text_chunk(ids.fresh(settings.chunk_tokens)) for _ in range(settings.chunks)]
    requests = [_request(settings, ids, chunks, i) for i in range(settings.requests)]
    linked = settings.chunks * settings.chunk_tokens
    room = 2 * settings.requests * (linked + settings.text + settings.answer)
    ticker.expect(settings.requests + 1)
    alone: list[Delta] = []
    with engine_for(pair.loaded, room) as engine:
        for i, request in enumerate(requests):
            with ticker.step(f"request {i + 1} alone"):
                alone.append(engine.submit(request).result())
    with engine_for(pair.loaded, room) as engine, ticker.step("all at once"):
        meter = _Meter(engine)
        compile_all(engine, chunks)
        together = [stream.result() for stream in [engine.submit(request) for request in requests]]
        engine.check()
        page_bytes = engine.pool.page_bytes
    different = [
        i for i, (a, b) in enumerate(zip(alone, together, strict=True)) if a.token_ids != b.token_ids
    ]
    if different:
        raise BenchFailed(
            f"requests {different} of {len(requests)} answered differently beside others than alone; "
            "half precision rounds differently in a batch, in float32 this is an error"
        )
    copies = sum(-(-(len(r.prompt.segments and _tokens(r)) + settings.answer) // PAGE) for r in requests)
    ratio = copies / meter.pages
    rows: list[dict[str, Any]] = [
        _row("one copy a request", copies, page_bytes, settings),
        _row("shared chunks", meter.pages, page_bytes, settings) | {"requests": meter.running},
    ]
    notes = {
        "model": describe(pair, settings.decoder),
        "page_tokens": PAGE,
        "copies": "whole prompt and answer of every request in pages of its own, as EPIC and CacheBlend hold them",
        "shared": "most pages of the pool in use at once: the chunks, every request's own tokens and its reserve",
        "identical": f"all {len(requests)} answers equal to those of the same requests run alone",
    }
    return Report(rows, {"copies_over_shared": ratio}, notes, lambda figure: _plot(figure, rows))


def _request(settings: Settings, ids: Ids, chunks: list[Chunk], i: int) -> GenerationRequest:
    """The chunks in an order of its own behind a text of a length of its own."""
    order = chunks[i % len(chunks) :] + chunks[: i % len(chunks)]
    if i % 2:
        order = order[::-1]
    head = settings.text // 2 + i
    prompt = prompt_of(ids.fresh(head), *order, ids.fresh(settings.text // 2))
    return request_of(prompt, settings.policy, settings.answer)


def _tokens(request: GenerationRequest) -> range:
    return range(
        sum(len(s.chunk.token_ids) if hasattr(s, "chunk") else len(s) for s in request.prompt.segments)
    )


def _row(name: str, pages: int, page_bytes: int, settings: Settings) -> dict[str, Any]:
    size = pages * page_bytes
    return {
        "held": name,
        "requests": settings.requests,
        "pages": pages,
        "bytes": size,
        "MiB": round(size / 2**20, 2),
    }


def _plot(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
    axes.bar([row["held"] for row in rows], [row["MiB"] for row in rows], color=["tab:grey", "tab:blue"])
    axes.set_ylabel("pool (MiB)")
    axes.set_title(f"{rows[0]['requests']} requests at once, same chunks at different offsets")
