"""Measures loading chunks from disk against the speed of disk and memory, and finding them in a large catalogue."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpic.engine.native.engine import NativeEngine
from mpic.engine.native.loader import loaders_for
from mpic.engine.stream import DeltaStream
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKey, ChunkKV, KVKey, KVShape, Recipe, digest
from mpic.kv.file import IO_BYTES
from mpic.kv.pool import Pool
from mpic.library import Library
from mpic.link import BARE
from mpic.prompt.segments import Prompt
from mpic_lab.bench.disk import LoaderAlone, drop_from_cache, file_system, fresh_library
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
    PAGE,
    DecoderShape,
    Ids,
    engine_for,
    make_pair,
    prompt_of,
    request_of,
    text_chunk,
)

OWNER = "bench"


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``load`` bench. A chunk of 640 tokens has 40 MiB in this geometry."""

    chunks: int = 8
    tokens: int = 640
    layers: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    repeats: int = 7
    loaders: int = 0
    catalogue: int = 100_000
    linked: int = 32
    images: int = 64
    image_tokens: int = 576
    hidden: int = 768
    lookups: int = 500
    seed: int = 0


@bench(
    "load",
    "chunks from disk into pages against raw reading and memcpy; finding 32 of 100,000",
    Settings,
    quick={
        "tokens": 160,
        "repeats": 5,
        "catalogue": 20_000,
        "images": 40,
        "image_tokens": 64,
        "lookups": 200,
    },
    wants={
        "cold_over_raw": ">= 0.8",
        "warm_over_memcpy": ">= 0.5",
        "lookup_p50_ms": "< 1",
        "lookup_p99_ms": "< 5",
    },
    on_cpu=True,
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Reads the same files in five ways in the same rounds, then looks up chunks in a large catalogue."""
    with fresh_library() as library:
        rows, samples, notes = _reading(settings, library, ticker)
        lookups = _lookups(settings, library, ticker)
    rows += lookups
    headline = {
        "cold_over_raw": paired(samples["raw, cold"], samples["loader, cold"]),
        "warm_over_memcpy": paired(samples["memcpy"], samples["loader, warm"]),
        "lookup_p50_ms": lookups[0]["p50_ms"],
        "lookup_p99_ms": lookups[0]["p99_ms"],
    }
    notes |= {
        "lookup": f"from a request to its plan (mpic-32), {settings.linked} chunks of {settings.catalogue} in the "
        "catalogue, half documents and half images, none resident; the headline is of images whose inputs are in "
        "memory because they have been used before, the other row reads them from their files",
        "headline": "median over rounds of the ratio within a round; lookups of the first row",
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, samples, rows))


# ---- reading


def _reading(
    settings: Settings, library: Library, ticker: Ticker
) -> tuple[list[Row], dict[str, Series], dict[str, Any]]:
    shape = KVShape(settings.layers, settings.kv_heads, settings.head_dim)
    keys = [_key(ChunkKey.of_text(str(i))) for i in range(settings.chunks)]
    kv = torch.randn(settings.layers, 2, settings.kv_heads, settings.tokens, settings.head_dim)
    inputs = ChunkInputs(torch.arange(settings.tokens), torch.arange(settings.tokens)[None], settings.tokens)
    ticker.expect(5 * (settings.repeats + 1) + settings.chunks)
    for key in keys:
        with ticker.step("writing"):
            library.store.save(ChunkKV(key, inputs, kv))
    pool = Pool(shape, settings.chunks * -(-settings.tokens // PAGE), PAGE, torch.float32)
    pool.arena.zero_()  # touch the pages, as a server has done before
    views = [pool.view(pool.alloc(settings.tokens)) for _ in keys]
    paths = [library.store.path(key) for key in keys]
    threads = settings.loaders or loaders_for()
    with closing(LoaderAlone(library.store, threads)) as reader:
        columns, worked = _ways(reader, keys, paths, views, kv)
        samples = interleave(columns, settings.repeats, ticker)
    size = settings.chunks * kv.nbytes
    title = f"{settings.chunks} chunks of {kv.nbytes / 2**20:.0f} MiB"
    rows = []
    for name, sample in samples.items():
        cpu = {"cpu_ms": round(statistics.median(worked[name]), 1)} if name in worked else {}
        gib = size / 2**30 / (sample.median / 1e3)
        rows.append({"table": title, "column": name, "GiB_per_s": round(gib, 2)} | sample.row() | cpu)
    notes = {
        "cold": "files synced and dropped from the page cache (POSIX_FADV_DONTNEED) before every reading",
        "raw": f"one thread, file after file, {IO_BYTES >> 20} MiB a read, nothing verified",
        "loader": f"{threads} threads, layer by layer, XXH3 of every layer verified, catalogue and headers included",
        "memory": "all destinations have been touched before",
        "file_system": file_system(str(library.root)),
    }
    return rows, samples, notes


def _ways(
    reader: LoaderAlone, keys: list[KVKey], paths: list[Path], views: list[torch.Tensor], kv: torch.Tensor
) -> tuple[dict[str, Callable[[], float]], dict[str, list[float]]]:
    """Returns five ways to bring the same bytes into memory, and the processor time of the loader's by name."""
    scratch = torch.zeros(max(path.stat().st_size for path in paths), dtype=torch.uint8)
    worked: dict[str, list[float]] = {"loader, cold": [], "loader, warm": []}

    def load(name: str) -> float:
        elapsed, cpu = reader(keys, views)
        worked[name].append(cpu)
        if not all(torch.equal(view[:, :, :, -1], kv[:, :, :, -1]) for view in views):
            raise BenchFailed("what was loaded is not what was stored")
        return elapsed

    def after(prepare: Callable[[], object], measure: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            prepare()
            return measure()

        return measured

    def raw() -> float:
        return _read_raw(paths, scratch)

    def cold() -> None:
        drop_from_cache(paths)

    columns = {
        "raw, cold": after(cold, raw),
        "loader, cold": after(cold, lambda: load("loader, cold")),
        "raw, warm": after(raw, raw),
        "loader, warm": after(raw, lambda: load("loader, warm")),
        "memcpy": lambda: _copy(views, kv),
    }
    return columns, worked


def _read_raw(paths: list[Path], scratch: torch.Tensor) -> float:
    memory = memoryview(scratch.numpy())
    began = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            size, at = os.fstat(fd).st_size, 0
            while at < size:
                at += os.preadv(fd, [memory[at : min(at + IO_BYTES, size)]], at)
        finally:
            os.close(fd)
    return (time.perf_counter() - began) * 1e3


def _copy(views: list[torch.Tensor], kv: torch.Tensor) -> float:
    """Copies the same number of bytes with one thread's memcpy; returns milliseconds."""
    source = memoryview(kv.view(-1).view(torch.uint8).numpy())
    targets = [memoryview(view.view(-1).view(torch.uint8).numpy()) for view in views]
    began = time.perf_counter()
    for target in targets:
        target[:] = source
    return (time.perf_counter() - began) * 1e3


def _key(chunk: ChunkKey, model: str = "0" * 64, recipe: Recipe | None = None) -> KVKey:
    return KVKey(OWNER, chunk, model, recipe or Recipe("float32"))


# ---- looking up


def _lookups(settings: Settings, library: Library, ticker: Ticker) -> list[Row]:
    """Measures look-ups of images used before and of images used for the first time."""
    heads = max(1, settings.hidden // 64)  # as wide as the embeddings of the images
    decoder = DecoderShape(layers=2, hidden=settings.hidden, heads=heads, intermediate=64, context=1 << 16)
    pair = make_pair(decoder, BenchDevice(torch.device("cpu"), torch.float32), seed=settings.seed)
    pages = settings.linked * (-(-settings.image_tokens // PAGE) + 40) + 256
    ids = Ids(decoder.vocabulary, settings.seed)
    with engine_for(pair.loaded, PAGE * pages, library.store) as engine:
        recipe = engine.linker.recipe(BARE)
        with ticker.step(f"a catalogue of {settings.catalogue} chunks"):
            images = _store_images(settings, library, pair.loaded.shape, pair.loaded.digest, recipe)
            documents = [text_chunk(ids.fresh(400), OWNER) for _ in range(256)]
            _fill_catalogue(settings, library, documents, pair.loaded.digest, recipe)
        picks = random.Random(settings.seed)
        half = settings.linked // 2

        def look_up() -> float:
            chunks = picks.sample(documents, settings.linked - half) + picks.sample(images, half)
            picks.shuffle(chunks)
            parts = [part for chunk in chunks for part in (chunk, ids.fresh(8))]
            return _plan(engine, prompt_of(*parts))

        def first_use() -> float:
            for image in images:
                engine.linker.forget(image)
            return look_up()

        ticker.expect(2)
        title = f"lookup and plan: {settings.linked} chunks of {settings.catalogue:,}"
        with ticker.step("images read for the first time"):
            first = _percentiles([first_use() for _ in range(max(10, settings.lookups // 10))])
        for image in images:
            _plan(engine, prompt_of(image, ids.fresh(8)))  # from now on the image is known
        with ticker.step("images used before"):
            known = _percentiles([look_up() for _ in range(settings.lookups)])
        return [
            {"table": title, "column": "inputs in memory"} | known,
            {"table": title, "column": "images for the first time"} | first,
        ]


def _plan(engine: NativeEngine, prompt: Prompt) -> float:
    """Returns the milliseconds from a request to its plan, on the caller's thread."""
    request = request_of(prompt, "mpic-32", 4, OWNER)
    arrived = engine.tombstones.begin()
    try:
        began = time.perf_counter()
        engine.builder.build(request, DeltaStream(request.id), arrived)
        return (time.perf_counter() - began) * 1e3
    finally:
        engine.tombstones.end(arrived)


def _percentiles(values: list[float]) -> Row:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49], 3), "p99_ms": round(cuts[98], 3), "max_ms": round(max(values), 3)}


def _store_images(
    settings: Settings, library: Library, shape: KVShape, model: str, recipe: Recipe
) -> list[Chunk]:
    """Stores images with the embeddings that a link needs, and returns them."""
    n, chunks = settings.image_tokens, []
    kv = torch.randn(shape.extent(n))
    for i in range(settings.images):
        key = ChunkKey("image", digest("bench image", str(i)))
        inputs = ChunkInputs(torch.full((n,), 5), torch.arange(n)[None], n, torch.randn(n, settings.hidden))
        library.store.save(ChunkKV(_key(key, model, recipe), inputs, kv))
        chunks.append(Chunk(key, OWNER))
    return chunks


def _fill_catalogue(
    settings: Settings, library: Library, documents: list[Chunk], model: str, recipe: Recipe
) -> None:
    """Adds rows of documents in one transaction. Their files are never read here, and so never written."""
    contents = [chunk.key for chunk in documents]
    contents += [
        ChunkKey("text", digest("bench document", str(i))) for i in range(settings.catalogue - len(documents))
    ]
    columns = "key, owner, kind, digest, model, recipe, path, bytes, tokens, state, created_at, last_used"
    sql = f"INSERT INTO chunks ({columns}) VALUES (?, ?, ?, ?, ?, '{{}}', ?, 1, 400, 'ready', 0, 0)"
    with library.catalog.write() as db:
        library.catalog.add_user(db, OWNER, 0.0)
        for content in contents:
            key = _key(content, model, recipe)
            path = str(library.store.path(key).relative_to(library.root))
            db.execute(sql, (key.digest, OWNER, content.kind, content.digest, model, path))


def _plot(figure: Any, samples: dict[str, Series], rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    speeds = [row["GiB_per_s"] for row in rows if "GiB_per_s" in row]
    left.barh(list(samples), speeds)
    left.invert_yaxis()
    left.set_xlabel("GiB/s")
    found = [row for row in rows if "p50_ms" in row]
    names = [row["column"].replace(" for ", "\nfor ").replace(" in ", "\nin ") for row in found]
    right.bar(names, [row["p99_ms"] for row in found], alpha=0.4, label="p99")
    right.bar(names, [row["p50_ms"] for row in found], label="p50")
    right.set_ylabel("lookup + plan (ms)")
    right.set_yscale("log")
    right.legend()
