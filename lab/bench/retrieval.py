"""Measures retrieval: the vector index against brute force, and linking a reference while decoding against rebuilding
the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mpic.engine.base import GenerationRequest, Hit, Retrieval, SearchResult
from mpic.engine.native.engine import NativeEngine
from mpic.kv.chunk import Chunk
from mpic.library.catalog.database import Catalog
from mpic.prompt.segments import ChunkSegment, Segment, TextSegment
from mpic.retriever.embedder import EmbedderName
from mpic.retriever.index import VectorIndex
from mpic.retriever.index_file import IndexFile
from mpic.retriever.vector_rows import VectorRows
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Report, Row, Ticker, bench, interleave, paired
from mpic_lab.bench.workload import (
    BENCH_DECODER,
    BENCH_TOWER,
    DecoderShape,
    Ids,
    TowerShape,
    compile_all,
    engine_for,
    image_chunk,
    make_pair,
    prompt_of,
    random_image,
    request_of,
)

NEIGHBOURS = 10
CALL_TOKENS = 2
"""Tokens of a call."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``retrieval`` bench."""

    decoder: DecoderShape = BENCH_DECODER
    tower: TowerShape = BENCH_TOWER
    vectors: int = 100_000
    dimension: int = 512
    queries: int = 500
    changes: int = 50
    batch: int = 64
    references: int = 4
    context: int = 512
    policy: str = "mpic-32"
    repeats: int = 5
    seed: int = 0


@bench(
    "retrieval",
    "index of 100,000 vectors against brute force; references linked while decoding against a rebuilt prompt",
    Settings,
    quick={
        "decoder": DecoderShape(layers=4, hidden=384, heads=6, intermediate=1024, context=8192),
        "tower": TowerShape(layers=2, hidden=128, heads=2, size=336, patch=14),
        "vectors": 10_000,
        "queries": 100,
        "changes": 10,
        "repeats": 3,
    },
    wants={"ann_recall": "1.000", "reprefill_over_midlink": ">= 3"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measures the index first, then the engine, with a search of that index in every measured column."""
    index, rows, share = _index(settings, ticker)
    linked, samples, notes = _linking(settings, placement, ticker, index)
    headline = {
        "ann_recall": share,
        "reprefill_over_midlink": paired(
            samples["re-prefill, prefix cache"], samples["linked while decoding"]
        ),
    }
    return Report([*rows, *linked], headline, notes, lambda figure: _plot(figure, rows, samples))


# ---- the index


def _index(settings: Settings, ticker: Ticker) -> tuple[VectorIndex, list[Row], float]:
    random = np.random.default_rng(settings.seed)

    def unit(n: int) -> np.ndarray:
        made = random.standard_normal((n, settings.dimension), np.float32)
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    vectors, queries = unit(settings.vectors), unit(settings.queries)
    with ticker.step("filling the index"):
        index = VectorIndex(settings.dimension)
        index.put(range(settings.vectors), vectors)
    spent: dict[str, list[float]] = {"index": [], "numpy": []}
    agreed = 0
    for at, query in enumerate(queries):
        found: dict[str, set[int]] = {}
        columns: dict[str, Callable[[], set[int]]] = {
            "index": lambda query=query: {n.id for n in index.search(query, NEIGHBOURS)[0]},
            "numpy": lambda query=query: _brute(vectors, query),
        }
        for name in list(columns) if at % 2 else list(columns)[::-1]:
            began = time.perf_counter()
            found[name] = columns[name]()
            spent[name].append((time.perf_counter() - began) * 1e3)
        agreed += len(found["index"] & found["numpy"])
    rows: list[Row] = [
        {"table": "search", "column": name, "vectors": settings.vectors}
        | {f"p{p}_ms": round(float(np.percentile(ms, p)), 3) for p in (50, 99)}
        for name, ms in spent.items()
    ]
    rows += _changes(settings, index, unit, ticker)
    rows += _restart(settings, index, vectors, ticker)
    return index, rows, agreed / (len(queries) * NEIGHBOURS)


def _brute(vectors: np.ndarray, query: np.ndarray) -> set[int]:
    scores = vectors @ query
    return set(np.argpartition(-scores, NEIGHBOURS)[:NEIGHBOURS].tolist())


def _changes(
    settings: Settings, index: VectorIndex, unit: Callable[[int], np.ndarray], ticker: Ticker
) -> list[Row]:
    """Measures rates of adding and removing, one by one and in batches as the server does."""
    rows: list[Row] = []
    first = settings.vectors
    for size in (1, settings.batch):
        groups = [range(first + i * size, first + (i + 1) * size) for i in range(settings.changes)]
        new = [unit(size) for _ in groups]
        row: Row = {"table": "changes", "column": f"{size} at a time"}
        for name in ("added", "removed"):
            with ticker.step(f"{name}, {size} at a time"):
                began = time.perf_counter()
                for group, rows_of in zip(groups, new, strict=True):
                    if name == "added":
                        index.put(group, rows_of)
                    elif index.remove(group) != size:
                        raise BenchFailed("vectors that were added could not be removed")
                row[f"{name}_per_s"] = round(size * len(groups) / (time.perf_counter() - began), 1)
        rows.append(row)
    if len(index) != settings.vectors:
        raise BenchFailed(f"{len(index)} vectors are left of {settings.vectors}")
    index.check()
    return rows


def _restart(settings: Settings, index: VectorIndex, vectors: np.ndarray, ticker: Ticker) -> list[Row]:
    """Measures the time until searches can be answered after a restart: from the index file, and from the catalogue
    alone."""
    rows: list[Row] = []
    name = EmbedderName("bench", "0" * 64, settings.dimension)

    def timed(column: str, work: Callable[[], Any]) -> Any:
        with ticker.step(column):
            began = time.perf_counter()
            result = work()
        rows.append(
            {"table": "restart", "column": column, "ms": round((time.perf_counter() - began) * 1e3, 1)}
        )
        return result

    with TemporaryDirectory(prefix="mpic-bench-") as folder:
        file = IndexFile(Path(folder) / "bench.vectors", name)
        timed("index file written", lambda: file.write(index, 1))
        again = timed("index file read and verified", lambda: file.read(1))
        catalog = Catalog(Path(folder) / "catalog.sqlite")
        stored = VectorRows(catalog, name)
        with catalog.write() as db:
            db.executemany(
                "INSERT INTO vectors (id, embedder, reference, version, vector) VALUES (?, ?, ?, 1, ?)",
                (
                    (i, stored.embedder, f"ref_{i}", vector.astype("<f4").tobytes())
                    for i, vector in enumerate(vectors)
                ),
            )

        def rebuild() -> VectorIndex:
            rebuilt = VectorIndex(settings.dimension)
            rebuilt.put(*stored.load())
            return rebuilt

        rebuilt = timed("rebuilt from the catalogue", rebuild)
        catalog.close()
    if not index.ids() == again.ids() == rebuilt.ids():
        raise BenchFailed("what was written is not what was read")
    return rows


# ---- linking while decoding


class _CallTokenizer:
    """A tokenizer that gives all tokens the same text: the first token of an answer opens a call, the second closes
    it."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "x" * len(ids)


class _Search(Retrieval):
    """Searches the index, then returns fixed references. ``began`` is the time at which the search began."""

    opens = closes = "x"
    rounds = 1

    def __init__(self, index: VectorIndex, query: np.ndarray, inserted: tuple[Segment, ...]) -> None:
        self._index, self._query, self.inserted = index, query, inserted
        self.began = 0.0

    def search(self, call: str = "") -> SearchResult:
        self.began = time.perf_counter()
        self._index.search(self._query, 2 * NEIGHBOURS)
        chunks = [s.chunk for s in self.inserted if isinstance(s, ChunkSegment)]
        return SearchResult("x", tuple(Hit(chunk, {}) for chunk in chunks))

    def insert(self, hits: Sequence[Hit], number: int) -> tuple[Segment, ...]:
        if len(hits) != sum(isinstance(s, ChunkSegment) for s in self.inserted):
            raise BenchFailed("the references do not fit")
        return self.inserted


def _linking(
    settings: Settings, placement: BenchDevice, ticker: Ticker, index: VectorIndex
) -> tuple[list[Row], dict[str, Any], dict[str, Any]]:
    pair = make_pair(settings.decoder, placement, settings.tower, seed=settings.seed)
    pair.loaded.tokenizer = _CallTokenizer()
    ids = Ids(settings.decoder.vocabulary, settings.seed)
    random = np.random.default_rng(settings.seed + 1)
    side = settings.tower.size
    chunks = [image_chunk(random_image(settings.seed + i, side)) for i in range(settings.references)]
    new = settings.references * settings.tower.tokens
    shown: dict[str, Row] = {}

    def search() -> _Search:
        inserted: list[Segment] = []
        for chunk in chunks:
            inserted += [TextSegment(ids.fresh(4)), ChunkSegment(chunk)]
        query = random.standard_normal(settings.dimension, np.float32)
        return _Search(index, query, (*inserted, TextSegment(ids.fresh(4))))

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
    with engine_for(pair.loaded, room) as engine:
        compile_all(engine, chunks)
        ticker.expect((settings.repeats + 1) * len(columns))
        samples = interleave(columns, settings.repeats, ticker)
    rows = [
        {"table": "from the search to the next token", "column": name} | shown[name] | sample.row()
        for name, sample in samples.items()
    ]
    notes = {
        "model": pair.description,
        "references": f"{settings.references} of {settings.tower.tokens} image tokens, KV resident, {settings.policy}",
        "context": f"{settings.context} tokens of prompt and {CALL_TOKENS} of answer before the call",
        "re-prefill": "the same prompt, answer so far and references as a new request; images are not encoded again. "
        "With a prefix cache it finds prompt and answer there and computes the references; headline",
        "search": f"every column searches the index of {settings.vectors} vectors once",
        "index": f"exact, {settings.dimension} dimensions, one thread; add and remove change both copies",
    }
    return rows, samples, notes


def _until_next(
    engine: NativeEngine, request: GenerationRequest, job: _Search, shown: dict[str, Row]
) -> float:
    """Returns the milliseconds from the search of a request to its next token."""
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
    engine: NativeEngine, policy: str, prompt: tuple[int, ...], job: _Search, shown: dict[str, Row]
) -> float:
    """Returns the milliseconds from a search to the first token of a new request that is built from its result."""
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


def _plot(figure: Any, rows: list[Row], samples: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    found = [row for row in rows if row["table"] == "search"]
    left.bar([row["column"] for row in found], [row["p50_ms"] for row in found], label="p50")
    left.scatter(
        [row["column"] for row in found], [row["p99_ms"] for row in found], label="p99", color="black"
    )
    left.set_ylabel("search (ms)")
    left.legend()
    right.barh(list(samples), [sample.median for sample in samples.values()])
    right.invert_yaxis()
    right.set_xlabel("from the search to the next token (ms)")
