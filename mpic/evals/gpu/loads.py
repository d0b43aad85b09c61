"""Chunks that are not on the device: links over stored chunks while they are read, and copies over the bus."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mpic.engine.native.engine import NativeEngine
from mpic.evals.bench.disk import IN_MEMORY, drop_from_cache, file_system
from mpic.evals.bench.drive import PAGE, Ids, compile_all, first_token, prompt_of, request_of, text_chunk
from mpic.evals.bench.gpu_kernels import load_rows, seconds
from mpic.evals.bench.roofline import Cost
from mpic.evals.gpu.context import Context
from mpic.evals.gpu.supervise import Run
from mpic.kv.chunk import Chunk
from mpic.library import Library
from mpic.library.limits import Limits
from mpic.model.loaded import LoadedModel

WAIT = 60.0
"""Seconds after which a prefetch that has not ended is an error."""


def loads(run: Run) -> None:
    """The first token of a link whose chunks are resident, in host memory, in the page cache, on the disk; the load
    alone; and what share of the shorter of load and link is hidden behind the other."""
    context = Context(run)
    sizes = context.sizes
    model = sizes.models[-1]
    loaded, costs = context.model(model)
    ids = Ids(model.vocabulary)
    count, tokens = sizes.stored
    chunks = [text_chunk(ids.fresh(tokens)) for _ in range(count)]
    kv = count * tokens * costs.token
    limits = Limits(disk_bytes=4 * kv + (1 << 30), host_bytes=4 * kv + (1 << 20))
    pages = -(-(count * (tokens + PAGE) + 4096) // PAGE)
    shape = f"{count} chunks of {tokens} tokens, {kv / 2**20:,.0f} MiB"

    def request():
        parts = [part for chunk in chunks for part in (chunk, ids.fresh(2))]
        return request_of(prompt_of(ids.fresh(sizes.text), *parts, ids.fresh(8)), "mpic-32", 2)

    with tempfile.TemporaryDirectory(prefix="mpic-report-") as folder:
        root = Path(folder, "library")
        with Library.open(root, limits) as library:
            with _engine(loaded, library, pages) as engine:
                compile_all(engine, chunks)
                keys = [engine.preparer.key(chunk, 0) for chunk in chunks]
                _, usage = first_token(engine, request())
                resident = _best(lambda: first_token(engine, request())[0] / 1e3, sizes.repeats)
                link = costs.prefill(usage)
                context.timed("first token", shape, "resident", resident, link)
            paths = [library.store.path(key) for key in keys]
            both = link + Cost(bytes=kv, bus=kv)
            where = file_system(folder)
            for name, cold in (("page cache", False), ("disk", True)):
                if cold and where in IN_MEMORY:
                    context.left_out(
                        "first token", shape, f"{folder} is in memory ({where}), so nothing is cold"
                    )
                    continue
                alone = _best(
                    lambda cold=cold: _alone(loaded, library, pages, chunks, paths, cold), sizes.repeats
                )
                context.rate(
                    "load alone", shape, name, kv / 1e9, alone, Cost(bus=kv), "GB/s", file_system=where
                )
                linked = _best(
                    lambda cold=cold: _linked(loaded, library, pages, paths, cold, request), sizes.repeats
                )
                hidden = round((alone + resident - linked) / min(alone, resident), 3)
                context.timed("first token", shape, name, linked, both, hidden_share=hidden)
        host = "pinned" if context.where.device.type == "cuda" else "plain"
        with Library.open(root, limits, host=host) as library:
            _alone(loaded, library, pages, chunks, paths, False)  # read once: now in host memory
            stored = library.store.find(keys)
            if {one.tier for one in stored.values()} != {"host"}:
                raise RuntimeError(
                    f"chunks are in {sorted({one.tier for one in stored.values()})}, not in host memory"
                )
            alone = _best(lambda: _alone(loaded, library, pages, chunks, paths, False), sizes.repeats)
            context.rate("load alone", shape, f"host memory, {host}", kv / 1e9, alone, Cost(bus=kv), "GB/s")
            linked = _best(lambda: _linked(loaded, library, pages, paths, False, request), sizes.repeats)
            hidden = round((alone + resident - linked) / min(alone, resident), 3)
            context.timed("first token", shape, f"host memory, {host}", linked, both, hidden_share=hidden)


def _best(measure, repeats: int) -> float:
    """The median after one measurement that does not count."""
    taken = sorted([measure() for _ in range(repeats + 1)][1:])
    return taken[(len(taken) - 1) // 2]


@contextmanager
def _engine(loaded: LoadedModel, library: Library, pages: int) -> Iterator[NativeEngine]:
    """An engine with an empty pool over what the library has."""
    engine = NativeEngine(loaded, library.store, pages=pages, page_size=PAGE)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()  # its pool is the largest thing there is


def _alone(
    loaded: LoadedModel, library: Library, pages: int, chunks: list[Chunk], paths: list[Path], cold: bool
) -> float:
    """Seconds until an engine that is asked for nothing else has all chunks resident."""
    with _engine(loaded, library, pages) as engine:
        if cold:
            drop_from_cache(paths)
        began = time.perf_counter()
        for chunk in chunks:
            engine.prefetch(chunk)
        while True:
            residents = list(engine.device.chunks.values())
            if len(residents) == len(chunks) and all(resident.ready for resident in residents):
                break
            if time.perf_counter() - began > WAIT:
                raise RuntimeError(f"{len(residents)} of {len(chunks)} chunks are resident after {WAIT} s")
            time.sleep(2e-4)
        if loaded.device.type == "cuda":
            torch.cuda.synchronize(loaded.device)
        return time.perf_counter() - began


def _linked(
    loaded: LoadedModel, library: Library, pages: int, paths: list[Path], cold: bool, request
) -> float:
    """Seconds to the first token of a link that is the first thing an engine is asked."""
    with _engine(loaded, library, pages) as engine:
        asked = request()
        if cold:
            drop_from_cache(paths)
        elapsed, usage = first_token(engine, asked)
        made = [use.tier for use in usage.chunks if use.tier in ("compiled", "none")]
        if made:
            raise RuntimeError(f"{len(made)} chunks were compiled instead of read")
        return elapsed / 1e3


def dma(run: Run) -> None:
    """One chunk over the bus, in every way the engine has, and back."""
    context = Context(run)
    where, sizes = context.where, context.sizes
    model, tokens = sizes.models[-1], sizes.stored[1]
    dim = model.hidden // model.heads
    shape = (model.layers, 2, model.kv_heads, tokens, dim)
    words = f"{tokens} tokens of {model.layers} layers"
    for row in load_rows(where, model.layers, model.kv_heads, dim, tokens, sizes.kernel_repeats):
        size = torch.Size(shape).numel() * where.dtype.itemsize
        if row["value"]:
            taken = size / 1e9 / row["value"]
            context.rate(
                row["measured"], row["shape"], row["with"], size / 1e9, taken, Cost(bus=size), "GB/s"
            )
        else:  # below what the row shows: tiny sizes in the interpreter
            run.emit(row)
    there = torch.zeros(shape, dtype=where.dtype, device=where.device)
    host = torch.empty(shape, dtype=where.dtype, pin_memory=where.device.type == "cuda")
    pageable = torch.empty(shape, dtype=where.dtype)

    def layers() -> None:
        for layer in range(shape[0]):
            there[layer].copy_(host[layer], non_blocking=True)

    def save() -> None:
        there.to("cpu", copy=True)

    for measured, how, work in (
        ("host to device", "layer by layer, pinned", layers),
        ("device to host", "one copy, pinned", lambda: host.copy_(there, non_blocking=True)),
        ("device to host", "one copy, pageable", lambda: pageable.copy_(there)),
        ("device to host", "as a compiled chunk is saved", save),
    ):
        taken = seconds(work, where, sizes.kernel_repeats)
        context.rate(measured, words, how, there.nbytes / 1e9, taken, Cost(bus=there.nbytes), "GB/s")
    if where.device.type == "cuda":
        _pinning(context, there.nbytes, words)


def _pinning(context: Context, size: int, words: str) -> None:
    """What registering host memory costs, and how much of it torch really takes."""
    began = time.perf_counter()
    kept = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    taken = time.perf_counter() - began
    context.run.row(
        "pinning host memory", words, "the first time", round(taken * 1e3, 3), "ms", bytes=kept.nbytes
    )
