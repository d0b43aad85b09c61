"""Measures loading stored chunks while compiling missing ones (MPIC, section 4.3 and figure 6): the time to the first
token against doing one after the other, and against the limit."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from mpic.kv.chunk import Chunk, ChunkKV
from mpic.kv.store import ChunkStore
from mpic.library import Library
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.disk import drop_from_cache, file_system, fresh_library
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Report, Row, Series, Ticker, bench, interleave
from mpic_lab.bench.workload import (
    BENCH_TOWER,
    PAGE,
    BenchModel,
    DecoderShape,
    Ids,
    TowerShape,
    bring,
    compile_all,
    engine_for,
    first_token,
    image_chunk,
    random_image,
    request_of,
    text_chunk,
)

DOCUMENTS, IMAGES = "documents", "images"
_DECODER = DecoderShape(layers=16, hidden=512, heads=8, intermediate=512)


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``parallel`` bench. A chunk of 640 tokens has 40 MiB of KV in this model.

    Args:
        chunks, tokens: number and size of the documents.
        missing: how many of them are compiled, in turn.
        tower, missing_images: the vision encoder of a further prompt over as many images, and how many of them are
            encoded and compiled while the others are loaded, in turn.
        many, many_text, many_policy: a further prompt with so many chunks and so few new tokens that loading takes
            about as long as computing; none of its chunks is missing.
    """

    decoder: DecoderShape = _DECODER
    chunks: int = 8
    tokens: int = 640
    missing: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    tower: TowerShape = BENCH_TOWER
    missing_images: tuple[int, ...] = (1, 2, 4)
    text: int = 72
    policy: str = "mpic-16"
    many: int = 32
    many_text: int = 64
    many_policy: str = "legolink-2"
    repeats: int = 5
    seed: int = 0


@bench(
    "parallel",
    "first token with 8 chunks, some on a cold disk and m missing: loaded beside compiling, or before",
    Settings,
    quick={
        "decoder": DecoderShape(layers=8, hidden=512, heads=8, intermediate=512),
        "missing": (0, 1, 4),
        "tower": TowerShape(layers=2, hidden=128, heads=2, size=224, patch=14),
        "missing_images": (2,),
        "many": 16,
        "repeats": 3,
    },
    wants={"worst_over_limit": "<= 1.2", "many_serial_over_parallel": ">= 1.4"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure every number of missing chunks, four ways in the same rounds, a prompt over many chunks, and images."""
    model = make_model(settings.decoder, placement, seed=settings.seed)
    seeing = make_model(settings.decoder, placement, settings.tower, seed=settings.seed)
    large = replace(
        settings, chunks=settings.many, text=settings.many_text, policy=settings.many_policy, missing=(0,)
    )
    pictures = replace(settings, tokens=settings.tower.tokens, missing=settings.missing_images)
    ticker.expect(4 * (len(settings.missing) + len(pictures.missing) + 1) * (settings.repeats + 1))
    shared = _cores() if placement.device.type == "cpu" else 0
    documents, fs, chunk_bytes = _measure(DOCUMENTS, settings, model, shared, ticker)
    many, *_ = _measure(DOCUMENTS, large, model, shared, ticker)
    images, *_ = _measure(IMAGES, pictures, seeing, shared, ticker)
    rows = documents + many + images
    notes = {
        "model": model.description,
        "model of images": f"{seeing.description}, {settings.tower.tokens} tokens an image",
        "chunk": f"{settings.tokens} tokens, {chunk_bytes / 2**20:.0f} MiB",
        "file_system": fs,
    }
    headline = {
        "worst_over_limit": max(row["over_limit"] for row in documents),
        "many_serial_over_parallel": many[0]["serial_over_parallel"],
    }
    return Report(rows, headline, notes | _words(settings, shared), lambda figure: _plot(figure, rows))


def _words(settings: Settings, shared: int) -> dict[str, str]:
    """Return what the columns and the headline mean."""
    limit = (
        "max(loads, compute + the loader's processor time / cores): loading costs processor time too, and compute uses "
        f"all {shared} cores"
        if shared
        else "max(loads, compute)"
    )
    return {
        "loads": "the stored chunks alone: files dropped from the page cache before, read and verified by the loader",
        "compute": "the same request with the stored chunks resident: compiles, link and first token",
        "limit": limit,
        "one after the other": "the stored chunks are loaded; once they are resident the request is submitted",
        "saving": "compiled chunks are not written back, so that no writing disturbs the next reading",
        "worst_over_limit": f"of {settings.chunks} documents: largest over m of the median over rounds of parallel / "
        "limit within a round",
        "many_serial_over_parallel": f"of {settings.many} stored chunks under {settings.many_policy}: one after the "
        "other / parallel, likewise",
    }


def _measure(
    kind: str, settings: Settings, model: BenchModel, shared: int, ticker: Ticker
) -> tuple[list[Row], str, int]:
    """Return rows, the file system and the bytes of a chunk."""
    with fresh_library() as library, _Subject(kind, settings, model, library) as subject:
        columns: dict[str, Callable[[], float]] = {}
        for m in settings.missing:
            columns |= {f"{settings.chunks} {m} {name}": way for name, way in subject.ways(m).items()}
        samples = interleave(columns, settings.repeats, ticker)
        rows = _rows(settings, samples, subject, shared)
        return [{"table": kind} | row for row in rows], file_system(str(library.root)), subject.chunk_bytes


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _ReadOnlyStore:
    """A store whose content stays fixed: compiled chunks are not written to it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def save(self, chunk: ChunkKV) -> None:
        pass


class _Subject:
    """An engine with stored chunks. Before every measurement nothing is resident and no file is in the page cache;
    chunks that must be missing are new."""

    def __init__(self, kind: str, settings: Settings, model: BenchModel, library: Library) -> None:
        self._kind, self._settings, self._library = kind, settings, library
        self._ids = Ids(settings.decoder.vocabulary, settings.seed)
        self._made = itertools.count(settings.seed)
        self.chunks = [self._new() for _ in range(settings.chunks)]
        self._tokens = 2 * settings.chunks * (settings.tokens + 2 * PAGE) + 1024
        self._opened = ExitStack()
        with engine_for(model, self._tokens, library.store) as first:
            compile_all(first, self.chunks)  # closing the engine writes the chunks
        self._engine = self._opened.enter_context(
            engine_for(model, self._tokens, _ReadOnlyStore(library.store))
        )
        self.chunk_bytes = settings.tokens * settings.decoder.token_bytes(model.placement.dtype)
        self.cpu: dict[
            int, list[float]
        ] = {}  # milliseconds of the loads, by number of missing chunks and round

    def _new(self) -> Chunk:
        if self._kind == IMAGES:
            return image_chunk(random_image(next(self._made), self._settings.tower.size))
        return text_chunk(self._ids.fresh(self._settings.tokens))

    def ways(self, m: int) -> dict[str, Callable[[], float]]:
        hits = self.chunks[m:]

        def loads() -> float:
            self._reset()
            worked = time.process_time()
            elapsed = self._bring(hits)
            self.cpu.setdefault(m, []).append((time.process_time() - worked) * 1e3)
            return elapsed

        def compute() -> float:
            self._reset()
            self._bring(hits)
            return self._ask(m, "device")

        def parallel() -> float:
            self._reset()
            return self._ask(m, "disk")

        def serial() -> float:
            self._reset()
            return self._bring(hits) + self._ask(m, "device")

        return {"loads": loads, "compute": compute, "parallel": parallel, "one after the other": serial}

    def _reset(self) -> None:
        self._engine.forget(*self.chunks)
        drop_from_cache(list(self._library.root.rglob("*.safetensors")))

    def _bring(self, chunks: list[Chunk]) -> float:
        """Return the milliseconds until chunks are loaded from the disk and resident."""
        return 1e3 * bring(self._engine, chunks)

    def _ask(self, m: int, tier: str) -> float:
        s = self._settings
        new = [self._new() for _ in range(m)]
        prompt = self._ids.spaced([*new, *self.chunks[m:]], s.text // 2, 0, max(1, s.text // 2 // s.chunks))
        elapsed, usage = first_token(self._engine, request_of(prompt, s.policy, 2))
        self._engine.forget(*new)
        tiers = [use.tier for use in usage.chunks]
        if tiers != ["compiled"] * m + [tier] * (len(tiers) - m) or usage.prefix_hit:
            raise BenchFailed(
                f"the chunks came from {tiers}, {usage.prefix_hit} tokens from the prefix cache"
            )
        return elapsed

    def __enter__(self) -> _Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def _rows(settings: Settings, samples: dict[str, Series], subject: _Subject, shared: int) -> list[Row]:
    """Return the rows. ``shared``: cores that loads and compute share, 0 when they share none."""
    rows = []
    for m in settings.missing:
        names = ("loads", "compute", "parallel", "one after the other")
        loads, compute, parallel, serial = (samples[f"{settings.chunks} {m} {name}"].values for name in names)
        cpu = subject.cpu[m][1:]  # the first round is cold and is left out
        limits = [
            max(load, work + (c / shared if shared else 0))
            for load, work, c in zip(loads, compute, cpu, strict=True)
        ]
        over = statistics.median(p / limit for p, limit in zip(parallel, limits, strict=True))
        gain = statistics.median(s / p for s, p in zip(serial, parallel, strict=True))
        medians = {
            "loads": loads,
            "loads_cpu": cpu,
            "compute": compute,
            "limit": limits,
            "parallel": parallel,
            "serial": serial,
        }
        rows.append(
            {"chunks": settings.chunks, "missing": m}
            | {f"{name}_ms": round(statistics.median(values), 1) for name, values in medians.items()}
            | {"over_limit": round(over, 3), "serial_over_parallel": round(gain, 3)}
        )
    return rows


_LINES = {"serial": "o-", "parallel": "o-", "limit": "k--", "compute": ":", "loads": ":"}


def _plot(figure: Any, rows: Sequence[Row]) -> None:
    """Draw a panel for each prompt: lines by how many of its chunks are missing, bars where none ever is."""
    prompts = list(dict.fromkeys((row["table"], row["chunks"]) for row in rows))
    panels = figure.subplots(1, len(prompts), squeeze=False, width_ratios=[3] + [2] * (len(prompts) - 1))[0]
    for axes, (kind, chunks) in zip(panels, prompts, strict=True):
        mine = [row for row in rows if (row["table"], row["chunks"]) == (kind, chunks)]
        if len(mine) > 1 or mine[0]["missing"]:
            _draw_lines(axes, mine)
            axes.set_xlabel(f"missing of {chunks} {kind}")
        else:
            labels = [_label(name) for name in _LINES]
            axes.bar(labels, [mine[0][f"{name}_ms"] for name in _LINES])
            axes.set_xticks(range(len(_LINES)), labels, rotation=45, ha="right", rotation_mode="anchor")
            axes.set_xlabel(f"{chunks} {kind}, none missing")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("time to first token (ms)")
    panels[0].legend(fontsize=8)


def _draw_lines(axes: Any, rows: Sequence[Row]) -> None:
    missing = [row["missing"] for row in rows]
    for name, style in _LINES.items():
        axes.plot(missing, [row[f"{name}_ms"] for row in rows], style, label=_label(name))
    axes.set_xticks(missing)


def _label(name: str) -> str:
    return "one after the other" if name == "serial" else name
