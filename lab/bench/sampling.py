"""Measures choosing the tokens of a step: all rows at once against one request after the other, with the same seeds.

Both draw in every round from the same logits, and the bench fails if a token differs. Logits are random: *flat* ones
(normally distributed) are the hard case, because top-p keeps half of the vocabulary; with *peaked* ones it keeps tens
of tokens, as with those of a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mpic.engine.base import Sampling
from mpic.engine.native.sampling import Sampler, choose
from mpic.engine.native.sampling_reference import SequentialSampler
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Report, Row, Ticker, bench, interleave, paired

OPTIONS = {
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "temperature": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
}


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``sampling`` bench. ``spread`` is the standard deviation of the logits."""

    vocabulary: int = 152_064
    batch: int = 16
    spread: tuple[tuple[str, float], ...] = (("peaked", 4.0), ("flat", 1.0))
    repeats: int = 5
    seed: int = 0


@bench(
    "sampling",
    "tokens of a step drawn at once, against one request after the other",
    Settings,
    quick={"repeats": 2},
    wants={"top_p_peaked_sequential_over_batch": "> 10", "top_p_flat_sequential_over_batch": "> 10"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measures every kind of sampling over every kind of logits."""
    generator = torch.Generator().manual_seed(settings.seed)
    rows: list[Row] = []
    ratios: dict[tuple[str, str], float] = {}
    ticker.expect(len(settings.spread) * len(OPTIONS) * 2 * (settings.repeats + 1))
    for kind, spread in settings.spread:
        made = torch.randn(settings.batch, settings.vocabulary, generator=generator) * spread
        logits = made.to(placement.device)
        for name, options in OPTIONS.items():
            found = interleave(_columns(logits, options, placement), settings.repeats, ticker)
            ratios[name, kind] = paired(found["sequential"], found["batch"])
            for column, series in found.items():
                rows.append({"table": f"{kind} logits", "sampling": name, "drawn": column} | series.row())
    headline = {f"top_p_{kind}_sequential_over_batch": ratios["top-p", kind] for kind, _ in settings.spread}
    notes = {
        "sequential": "from logits on the device to tokens on the host, one row after the other, in fp64",
        "flat": "what top-p keeps is half of the vocabulary; models do that at high temperatures only",
    }
    return Report(rows, headline, notes, lambda figure: _plot(figure, rows))


def _columns(
    logits: torch.Tensor, options: dict[str, float], placement: BenchDevice
) -> dict[str, Callable[[], float]]:
    """Returns measurements of one step in milliseconds. The result of the sampler that draws second in a round is
    compared with the first."""
    choices = [Sampling(seed=row, **options) for row in range(len(logits))]
    alone, together = [SequentialSampler(s) for s in choices], [Sampler(s) for s in choices]
    drawn: dict[str, list[list[int]]] = {"sequential": [], "batch": []}

    def sequential() -> list[int]:
        return [sampler(row)[0] for sampler, row in zip(alone, logits.cpu(), strict=True)]

    def batch() -> list[int]:
        return [choice[0] for choice in choose(logits, together)]

    def measured(name: str, work: Callable[[], list[int]]) -> float:
        placement.synchronize()
        began = time.perf_counter()
        drawn[name].append(work())
        taken = (time.perf_counter() - began) * 1e3
        done = min(map(len, drawn.values()))
        if drawn["sequential"][:done] != drawn["batch"][:done]:
            raise BenchFailed(f"with {options} the batch was given other tokens than its requests alone")
        return taken

    return {
        "sequential": lambda: measured("sequential", sequential),
        "batch": lambda: measured("batch", batch),
    }


def _plot(figure: Any, rows: list[Row]) -> None:
    tables = list(dict.fromkeys(row["table"] for row in rows))
    for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        for drawn in ("sequential", "batch"):
            mine = [row for row in rows if row["table"] == table and row["drawn"] == drawn]
            axes.plot(
                [row["sampling"] for row in mine], [row["median_ms"] for row in mine], marker="o", label=drawn
            )
        axes.set(title=table, ylabel="ms a step", yscale="log")
        axes.legend(fontsize=8)
