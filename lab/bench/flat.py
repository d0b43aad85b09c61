"""Measures how time and memory to the first token grow with the context (EPIC, section 5.6 and figure 9), up to 50
thousand tokens and, on a wide model, up to 16.

KV Packet, which recomputes nothing of a document, is measured beside the paper's policies: ``legolink-16`` computes 16
more tokens for every further document of 512, whereas for KV Packet only attention grows. Its adapter is not trained,
which changes answers and not times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpic.engine.base import Engine
from mpic.kv.chunk import Chunk
from mpic.link import BARE, parse_policy
from mpic.memory import give_back
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
from mpic_lab.bench.peak import peak_of
from mpic_lab.bench.workload import (
    PAGE,
    DecoderShape,
    Ids,
    compile_all,
    engine_for,
    expect,
    first_token,
    request_of,
)

K, R = 16, 15
SOFT = 8
"""Tokens of the header of a packet, and of its trailer, as in KV Packet."""
LINKED, BLENDED, PACKED = f"legolink-{K}", f"cacheblend-{R}", "packet"
POLICIES = ("full", BLENDED, LINKED, PACKED)
"""Policies measured over documents of one size; growing documents are measured under linking only."""
FIXED, GROWING = "documents of one size", "growing documents"
WIDE = "a wide model: "
"""Prefix of the names of tables about ``Settings.wide``."""

_DECODER = DecoderShape(
    layers=6, hidden=768, heads=12, kv_heads=2, intermediate=2048, vocabulary=8_000, context=65_536
)


_WIDE = DecoderShape(
    layers=2, hidden=3072, heads=24, kv_heads=6, intermediate=8192, vocabulary=8_000, context=32_768
)


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``flat`` bench.

    Args:
        decoder: the model of the whole range.
        wide: a model in which matrix products outweigh attention, as in models that people serve: at 16 thousand
            tokens attention is a third of a link's operations, in ``decoder`` two thirds, and it is what grows.
        totals: tokens of all documents.
        wide_totals: tokens of all documents with the wide model, the largest 16 times the least.
        fixed: tokens of a document of one size.
        documents: number of growing documents.
    """

    decoder: DecoderShape = _DECODER
    wide: DecoderShape = _WIDE
    documents: int = 8
    totals: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 50176)
    wide_totals: tuple[int, ...] = (1024, 4096, 16384)
    fixed: int = 512
    text: int = 64
    repeats: int = 2
    seed: int = 0


@bench(
    "flat",
    "time and memory to the first token while the context grows to 50k tokens",
    Settings,
    quick={
        "decoder": DecoderShape(layers=2, hidden=512, heads=8, intermediate=1024, vocabulary=2_000),
        "wide": DecoderShape(layers=1, hidden=1024, heads=8, kv_heads=2, intermediate=4096, vocabulary=2_000),
        "totals": (512, 1024, 2048, 4096, 8192),
        "wide_totals": (512, 8192),
        "fixed": 256,
    },
    wants={
        "full_growth": "> 16",
        "cacheblend15_growth": "> legolink16_fixed_growth",
        "legolink16_fixed_growth": "< 16 (EPIC: nearly linear)",
        "packet_fixed_growth": "< legolink16_fixed_growth",
        "legolink16_growth": "< 3.5",
        "wide_full_growth": "> 16",
        "wide_cacheblend15_growth": "> wide_legolink16_fixed_growth",
        "wide_legolink16_fixed_growth": "< wide_cacheblend15_growth (counted operations: 8.7)",
        "wide_packet_fixed_growth": "< 6",
        "wide_legolink16_growth": "< 2",
        "tokens_in_memory_over_cacheblend15": "> 1 (EPIC: 50 over 35 thousand)",
    },
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure a growing number of documents of one size, and a fixed number of growing ones."""
    rows, samples, model = _measured(settings, placement, ticker, settings.decoder, settings.totals)
    wide_rows, wide_samples, wide_model = _measured(
        settings, placement, ticker, settings.wide, settings.wide_totals
    )
    rows += [row | {"table": f"{WIDE}{row['table']}"} for row in wide_rows]
    notes = {
        "model": model,
        "wide model": wide_model,
        "sizes": _words(settings.totals),
        "wide sizes": _words(settings.wide_totals),
        "sharing": "every request has fresh text before and after the documents, so only chunks are shared",
        "full": "depends on the number of tokens alone, so growing documents are measured under linking only",
        "growth": "time to the first token at 16 times the fewest tokens over that at the fewest; _fixed: documents "
        "of one size, as for full and CacheBlend; legolink16_growth: growing ones; wide_: of the wide model",
        "kv_MiB": "pages of the prompt: its documents' and its own",
        "work_MiB": "most memory that the request took beyond that, in its second round",
        "tokens in memory": f"tokens that a policy reaches with what {LINKED} needs for the most (between measured "
        "sizes: in proportion)",
    }
    headline = {
        "full_growth": _growth(samples, FIXED, "full", settings.totals),
        f"cacheblend{R}_growth": _growth(samples, FIXED, BLENDED, settings.totals),
        f"legolink{K}_fixed_growth": _growth(samples, FIXED, LINKED, settings.totals),
        f"{PACKED}_fixed_growth": _growth(samples, FIXED, PACKED, settings.totals),
        f"legolink{K}_growth": _growth(samples, GROWING, LINKED, settings.totals),
        "wide_full_growth": _growth(wide_samples, FIXED, "full", settings.wide_totals),
        f"wide_cacheblend{R}_growth": _growth(wide_samples, FIXED, BLENDED, settings.wide_totals),
        f"wide_legolink{K}_fixed_growth": _growth(wide_samples, FIXED, LINKED, settings.wide_totals),
        f"wide_{PACKED}_fixed_growth": _growth(wide_samples, FIXED, PACKED, settings.wide_totals),
        f"wide_legolink{K}_growth": _growth(wide_samples, GROWING, LINKED, settings.wide_totals),
        **_reach(rows),
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, rows))


def _measured(
    settings: Settings,
    placement: BenchDevice,
    ticker: Ticker,
    decoder: DecoderShape,
    totals: Sequence[int],
) -> tuple[list[Row], dict[str, Series], str]:
    """Measure one model at each of these totals of tokens. Return the rows, the times of each column, and a description
    of the model.

    Raises:
        BenchFailed: there are too few tokens for a document of one size.
    """
    if min(totals) < settings.fixed:
        raise BenchFailed(f"{min(totals)} tokens make no document of {settings.fixed}")
    model = make_model(decoder, placement, seed=settings.seed, packet=SOFT)
    packets = parse_policy(PACKED).wrapping
    ids = Ids(decoder.vocabulary, settings.seed)
    grown = {n: [n // settings.documents] * settings.documents for n in totals}
    added = {n: [settings.fixed] * (n // settings.fixed) for n in totals}
    columns: dict[str, Callable[[], float]] = {}
    # documents of both kinds, packets, and the prefixes that requests leave behind
    room = 4 * sum(totals) + 4 * max(totals)
    with engine_for(model, room) as engine:
        subject = _FlatSubject(engine, ids, settings, placement)
        for kind, sizes in ((FIXED, added), (GROWING, grown)):
            for total, lengths in sizes.items():
                chunks = ids.chunks(len(lengths), lengths[0])
                ticker.say(f"compiling {len(lengths)} x {lengths[0]}")
                for wrapping in (BARE, packets) if kind == FIXED else (BARE,):
                    compile_all(engine, chunks, wrapping)
                for policy in POLICIES if kind == FIXED else (LINKED,):
                    columns[f"{kind} {total} {policy}"] = subject.column(total, chunks, policy, kind == FIXED)
        ticker.expect((settings.repeats + 1) * len(columns))
        samples = interleave(columns, settings.repeats, ticker)
    rows = []
    for kind, sizes in ((FIXED, added), (GROWING, grown)):
        for total, lengths in sizes.items():
            size = {"documents": len(lengths), "document_tokens": lengths[0], "tokens": total}
            for policy in POLICIES:
                if (series := samples.get(f"{kind} {total} {policy}")) is not None:
                    memory = subject.memory(total, len(lengths), policy) if kind == FIXED else {}
                    rows.append({"table": kind, **size, "policy": policy} | series.row() | memory)
    return rows, samples, model.description


class _FlatSubject:
    """An engine whose requests are timed, and whose memory is measured in the second round."""

    def __init__(self, engine: Engine, ids: Ids, settings: Settings, placement: BenchDevice) -> None:
        self._engine, self._ids, self._settings, self._placement = engine, ids, settings, placement
        self._work: dict[tuple[int, str], int | None] = {}

    def column(self, total: int, chunks: list[Chunk], policy: str, watched: bool) -> Callable[[], float]:
        asked = itertools.count()
        linked = sum(len(c.token_ids or ()) for c in chunks)
        heads = sum(min(K, len(c.token_ids or ())) for c in chunks)
        reuse = {"full": 0, LINKED: linked - heads, PACKED: linked + 2 * SOFT * len(chunks)}

        def measure() -> float:
            request = request_of(self._ids.framed(chunks, self._settings.text), policy, 2)
            if next(asked) != 1 or not watched:  # the first request touches the pool's pages
                elapsed, usage = first_token(self._engine, request)
            else:
                give_back()
                (elapsed, usage), work = peak_of(lambda: first_token(self._engine, request), self._placement)
                self._work[total, policy] = work
            expect(usage, reused=reuse.get(policy, usage.reused), prefix_hit=0)
            return elapsed

        return measure

    def memory(self, total: int, documents: int, policy: str) -> Row:
        """Return the pages of a prompt and the other memory that a request took; no figure if it cannot be measured."""
        soft = 2 * SOFT * documents if policy == PACKED else 0
        pages = (
            -(-(total + soft + self._settings.text + 2) // PAGE) * self._engine.stats()["pages"]["page_bytes"]
        )
        work = self._work[total, policy]
        if work is None:
            return {"kv_MiB": _mib(pages)}
        return {"kv_MiB": _mib(pages), "work_MiB": _mib(work), "memory_MiB": _mib(pages + work)}


def _mib(size: int) -> float:
    return round(size / 2**20, 1)


def _growth(samples: dict[str, Series], kind: str, policy: str, sizes: Iterable[int]) -> float:
    """Return the factor by which the time grows while the context grows 16 times, or over the measured range if that is
    smaller."""
    low = min(sizes)
    high = max(total for total in sizes if total <= 16 * low)
    return paired(samples[f"{kind} {high} {policy}"], samples[f"{kind} {low} {policy}"])


def _reach(rows: Sequence[Row]) -> dict[str, float]:
    """Return the ratio of the tokens that ``legolink`` and ``cacheblend`` reach in the same memory."""
    needs = {
        policy: [
            (row["tokens"], row["memory_MiB"])
            for row in rows
            if row["policy"] == policy and row["table"] == FIXED and "memory_MiB" in row
        ]
        for policy in (LINKED, BLENDED)
    }
    if not needs[LINKED]:
        return {}
    most, budget = needs[LINKED][-1]
    return {f"tokens_in_memory_over_cacheblend{R}": most / reach(needs[BLENDED], budget)}


def reach(needs: Sequence[tuple[int, float]], budget: float) -> float:
    """Return the number of tokens at which a need, measured at several sizes, reaches a budget. The need is
    interpolated linearly between the sizes and in proportion below the first."""
    before, had = 0, 0.0
    for tokens, need in needs:
        if need > budget:
            return before + (tokens - before) * (budget - had) / (need - had)
        before, had = tokens, need
    return float(before)


def _plot(figure: Any, rows: list[Row]) -> None:
    fixed, growing, memory = figure.subplots(1, 3)
    panels = (
        (fixed, FIXED, "median_ms", "time to first token (ms)"),
        (growing, GROWING, "median_ms", "time to first token (ms)"),
        (memory, FIXED, "memory_MiB", "memory: pages and work (MiB)"),
    )
    for axes, kind, name, label in panels:
        for table, style, words in ((kind, "-", ""), (f"{WIDE}{kind}", "--", ", wide model")):
            for number, policy in enumerate(POLICIES):
                line = [
                    (r["tokens"], r[name])
                    for r in rows
                    if r["table"] == table and r["policy"] == policy and name in r
                ]
                if line:
                    drawn = {"marker": "o", "linestyle": style, "color": f"C{number}"}
                    axes.plot(*zip(*line, strict=True), label=policy + words, **drawn)
        axes.set_title(kind, fontsize=9)
        axes.set(xlabel="tokens in the documents", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(fontsize=7, handlelength=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))
        axes.grid(alpha=0.3)


def _words(values: Sequence[int]) -> str:
    """Format sizes: ``1k, 2k, 512``."""
    return ", ".join(f"{v // 1024}k" if v % 1024 == 0 else str(v) for v in values)
