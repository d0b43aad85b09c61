"""Measures the peak rates of CacheBlend and LegoLink over the length of documents (EPIC, sections 4.2 and 5.5).

CacheBlend recomputes 15 % of a document's tokens and passes all of them through its first layer; LegoLink computes 16
tokens of every document, whatever its length. So their ratio depends on document length, and ``serving``, whose
documents have 576 tokens, shows one point of it. Beside every measured ratio stands that of the counted operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mpic_lab.bench import serving
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import BenchDevice, Report, Row, Ticker, bench
from mpic_lab.bench.workload import DecoderShape, compile_all, engine_for
from mpic_lab.eval.flops import Flops

LENGTHS = {"short": 576, "medium": 1024, "long": 2048}


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``peaks`` bench.

    Args:
        lengths: tokens of a document, by the name that the headline has for it.
        pool, linked: number of documents in the pool, and of those in a request.
        text, answer: tokens of a request's own text and of its answer.
        backlog: seconds of work in a policy's backlog, as estimated from one request.
        repeats: backlogs of each policy and length.
    """

    decoder: DecoderShape = serving.Settings.decoder
    lengths: Mapping[str, int] = field(default_factory=LENGTHS.copy)
    pool: int = 12
    linked: int = 4
    text: int = 64
    answer: int = 8
    policies: tuple[str, ...] = ("cacheblend-15", "mpic-32", "legolink-16")
    backlog: float = 6.0
    repeats: int = 5
    seed: int = 0

    def load(self, tokens: int) -> serving.Settings:
        """Return the load with documents of this many tokens."""
        same = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "lengths"}
        return serving.Settings(chunk_tokens=tokens, **same)


@bench(
    "peaks",
    "peak throughput of LegoLink over that of CacheBlend, by the length of documents",
    Settings,
    quick={
        "decoder": DecoderShape(layers=4, hidden=256, heads=4, intermediate=512, vocabulary=2_000),
        "lengths": {"short": 128, "medium": 256, "long": 512},
        "backlog": 0.75,
        "repeats": 2,
    },
    wants={
        f"{name}_{ratio}": goal
        for name in LENGTHS
        for ratio, goal in (
            (
                "legolink16_over_cacheblend15",
                "> 7 (EPIC: up to 7)" if name == "long" else "near the operations'",
            ),
            ("operations_cacheblend15_over_legolink16", "to compare it with"),
        )
    },
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Make a row for each length and policy."""
    model = make_model(settings.decoder, placement, seed=settings.seed)
    ticker.expect(settings.repeats * len(settings.lengths) * len(settings.policies))
    rows: list[Row] = []
    headline: dict[str, float] = {}
    for name, tokens in settings.lengths.items():
        load = settings.load(tokens)
        room = load.pool * tokens + 8 * (load.linked * tokens + load.text + load.answer)
        with engine_for(model, room) as engine:
            sender = serving.PoolSender(load, engine, Flops(model.stock))
            ticker.say(f"compiling {load.pool} x {tokens}")
            compile_all(engine, sender.pool)
            backlogs = serving.backlogs_of(sender, load, ticker)
        rows += [{"document_tokens": tokens} | serving.of_rounds(found) for found in backlogs.values()]
        headline |= {f"{name}_{ratio}": value for ratio, value in serving.over_cacheblend(backlogs).items()}
    notes = {
        "model": model.description,
        "peak": "requests finished a second while the queue is never empty: median, least and most of the backlogs, "
        "which the policies get in turn; ratios are medians over rounds",
        "gflop": "counted operations to the first token of a request",
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, rows))


def _plot(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    for number, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        found = [row for row in rows if row["policy"] == policy]
        peaks, beside = serving.with_spread(found)
        axes.errorbar(
            [row["document_tokens"] for row in found], peaks, yerr=beside,
            color=f"C{number}", marker="o", markersize=3, capsize=2, label=policy,
        )  # fmt: skip
    axes.set(xlabel="tokens of a document", ylabel="peak (requests/s)", xscale="log", yscale="log")
    lengths = sorted({row["document_tokens"] for row in rows})
    axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    for ticks in ("major", "minor"):
        getattr(axes.yaxis, f"set_{ticks}_formatter")("{x:g}")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
