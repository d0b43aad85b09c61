"""Measures how the time to the first token grows with the documents (EPIC, section 6, figures 8 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpic.engine.native.engine import NativeEngine
from mpic.evals.bench.harness import BenchDevice, Report, Ticker, bench, interleave, paired
from mpic.evals.bench.workload import (
    DecoderShape,
    Ids,
    compile_all,
    engine_for,
    expect,
    first_token,
    make_pair,
    request_of,
    text_chunk,
)
from mpic.kv.chunk import Chunk

K = 16


_DECODER = DecoderShape(layers=3, hidden=768, heads=12, intermediate=2048, vocabulary=8_000)


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``flat`` bench."""

    decoder: DecoderShape = _DECODER
    documents: int = 8
    totals: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    fixed: int = 512
    text: int = 64
    repeats: int = 3
    seed: int = 0


@bench(
    "flat",
    "time to first token while the documents grow 16 times",
    Settings,
    quick={
        "decoder": DecoderShape(layers=2, hidden=512, heads=8, intermediate=1024, vocabulary=2_000),
        "totals": (512, 1024, 2048, 4096, 8192),
        "fixed": 256,
        "repeats": 3,
    },
    wants={"full_growth": "> 16", "legolink16_growth": "< 3.5"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measures two curves: a fixed number of growing documents, and a growing number of fixed ones."""
    pair = make_pair(settings.decoder, placement, seed=settings.seed)
    ids = Ids(settings.decoder.vocabulary, settings.seed)
    grown = {n: [n // settings.documents] * settings.documents for n in settings.totals}
    added = {n: [settings.fixed] * (n // settings.fixed) for n in settings.totals if n >= settings.fixed}
    policy = f"legolink-{K}"
    largest = max(settings.totals)
    columns: dict[str, Callable[[], float]] = {}
    with engine_for(pair.loaded, 4 * sum(settings.totals) + 2 * largest) as engine:
        for kind, sizes in (("growing", grown), ("fixed", added)):
            for total, lengths in sizes.items():
                chunks = [text_chunk(ids.fresh(n)) for n in lengths]
                ticker.say(f"compiling {len(lengths)} x {lengths[0]}")
                compile_all(engine, chunks)
                columns[f"{kind} {total} {policy}"] = _column(engine, ids, settings.text, chunks, policy)
                if kind == "growing":
                    columns[f"{kind} {total} full"] = _column(engine, ids, settings.text, chunks, "full")
        ticker.expect((settings.repeats + 1) * len(columns))
        samples = interleave(columns, settings.repeats, ticker)
    rows = []
    for kind, sizes in (("growing", grown), ("fixed", added)):
        for total, lengths in sizes.items():
            for name in ("full", policy):
                found = samples.get(f"{kind} {total} {name}", samples[f"growing {total} {name}"])
                size = {"documents": len(lengths), "document_tokens": lengths[0], "tokens": total}
                table = (
                    f"{settings.documents} growing documents"
                    if kind == "growing"
                    else "documents of one size"
                )
                rows.append({"table": table, **size, "policy": name} | found.row())
    low, high = min(settings.totals), largest

    def growth(name: str) -> float:
        return paired(samples[f"growing {high} {name}"], samples[f"growing {low} {name}"])

    notes = {
        "model": pair.description,
        "sizes": _words(settings.totals),
        "sharing": "every request has fresh text before and after the documents, so only chunks are shared",
        "full": "depends on the number of tokens alone; both tables show the same measurements",
    }
    headline = {"full_growth": growth("full"), "legolink16_growth": growth(policy)}
    return Report(rows, headline, notes, lambda figure: _plot(figure, rows, policy))


def _column(
    engine: NativeEngine, ids: Ids, text: int, chunks: list[Chunk], policy: str
) -> Callable[[], float]:
    linked = sum(len(c.token_ids or ()) for c in chunks)

    def measure() -> float:
        elapsed, usage = first_token(engine, request_of(ids.framed(chunks, text), policy, 2))
        reused = 0 if policy == "full" else linked - sum(min(K, len(c.token_ids or ())) for c in chunks)
        expect(usage, reused=reused, prefix_hit=0)
        return elapsed

    return measure


def _plot(figure: Any, rows: list[dict[str, Any]], policy: str) -> None:
    tables = list(dict.fromkeys(row["table"] for row in rows))
    for axes, table in zip(figure.subplots(1, len(tables), sharey=True), tables, strict=True):
        for name in ("full", policy):
            line = [
                (r["tokens"], r["median_ms"]) for r in rows if r["table"] == table and r["policy"] == name
            ]
            axes.plot(*zip(*line, strict=True), marker="o", label=name)
        axes.set_title(table)
        axes.set_xlabel("tokens in the documents")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time to first token (ms)")


def _words(values: Sequence[int]) -> str:
    """Formats sizes: ``1k, 2k, 512``."""
    return ", ".join(f"{v // 1024}k" if v % 1024 == 0 else str(v) for v in values)
