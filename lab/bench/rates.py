"""Measures users who return at random, under every policy at the same rates (EPIC, sections 5.2 and 5.5, figure 8).

Every user has documents that were compiled once, and asks about them again and again for a while. The number of users
follows from the share of the pool that their documents may fill; running requests have the rest. All policies get the
same users, requests and times. A prompt is as long as those of the paper's workload, 2WikiMQA: ten documents, 5
thousand tokens, and a question.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpic.engine.base import Engine
from mpic.kv.chunk import Chunk
from mpic_lab.bench.arrivals import Served, poisson, send
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import BenchDevice, Report, Row, Ticker, bench
from mpic_lab.bench.workload import (
    DecoderShape,
    Ids,
    compile_all,
    engine_for,
    first_token,
    request_of,
)

_DECODER = DecoderShape(layers=12, hidden=768, heads=12, intermediate=3072, kv_heads=4)
BLENDED, LINKED = "cacheblend-15", "legolink-16"
FILLED = "share of the pool that documents fill: "
SHARES = {"10": 0.1, "30": 0.3, "60": 0.6}
"""Shares of the pool that the users' documents may fill (EPIC's context cache ratio), by the name of their case, which
is the share in percent. Because only whole users fit, they fill a little less."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``rates`` bench.

    Args:
        only: the cases that are measured.
        tokens: size of the pool.
        documents: documents of a user, who asks about all of them each time.
        text: tokens around the documents: half of them before, half, the question, behind.
        rates: requests a second of all users together.
        seconds: time for which requests arrive; those unanswered by then are aborted and not counted.
        repeats: runs of each cell, each with its own arrival times.
    """

    decoder: DecoderShape = _DECODER
    only: tuple[str, ...] = tuple(SHARES)
    tokens: int = 131_072
    documents: int = 10
    document_tokens: int = 512
    text: int = 24
    answer: int = 8
    policies: tuple[str, ...] = ("full", BLENDED, "mpic-32", LINKED)
    rates: tuple[float, ...] = (0.25, 1.0, 4.0)
    seconds: float = 40.0
    repeats: int = 5
    seed: int = 0

    def users(self, share: str) -> int:
        return max(1, int(SHARES[share] * self.tokens / (self.documents * self.document_tokens)))


def _headline(rows: Sequence[Row]) -> dict[str, float]:
    """Return the largest ratios of two policies in a cell; none if both answered something in no cell."""
    cells: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["table"], row["offered_per_s"]), {})[row["policy"]] = row
    pairs = [
        (cell[LINKED], cell[BLENDED])
        for cell in cells.values()
        if cell[BLENDED]["requests_per_s"] and cell[LINKED]["requests_per_s"]
    ]
    if not pairs:
        return {}
    return {
        "throughput_legolink16_over_cacheblend15": max(
            a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs
        ),
        "ttft_cacheblend15_over_legolink16": max(b["ttft_ms"] / a["ttft_ms"] for a, b in pairs),
    }


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    panels = {"ttft_ms": "time to first token (ms)", "tokens_per_s": "throughput (tokens/s)"}
    tables = list(dict.fromkeys(row["table"] for row in rows))
    styles = dict(zip(tables, ("-", "--", ":"), strict=False))
    offered = sorted({row["offered_per_s"] for row in rows})
    for axes, (name, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for number, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
            for table in tables:
                line = [
                    (row["offered_per_s"], row[name], row[f"{name}_deviation"])
                    for row in rows
                    if (row["policy"], row["table"]) == (policy, table) and row[name] != ""
                ]
                if line:
                    x, y, deviation = zip(*line, strict=True)
                    axes.errorbar(
                        x, y, yerr=deviation, color=f"C{number}", linestyle=styles[table],
                        label=f"{policy}, {table.removeprefix(FILLED)}",
                        marker="o", markersize=3, capsize=2,
                    )  # fmt: skip
        axes.set(xlabel="offered (requests/s)", ylabel=label, xscale="log", yscale="log")
        axes.set_xticks(offered, [f"{rate:g}" for rate in offered])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=6, handlelength=3)


@bench(
    "rates",
    "users who return at random: throughput and time to the first token of every policy at the same rates",
    Settings,
    quick={
        "decoder": DecoderShape(layers=4, hidden=256, heads=4, intermediate=512, vocabulary=2_000),
        "tokens": 16_384,
        "only": ("10", "60"),
        "documents": 4,
        "document_tokens": 256,
        "policies": (BLENDED, LINKED),
        "rates": (2.0, 8.0),
        "seconds": 2.0,
        "repeats": 2,
    },
    wants={
        "throughput_legolink16_over_cacheblend15": "> 1 (EPIC: up to 7)",
        "ttft_cacheblend15_over_legolink16": "> 1 (EPIC: up to 8)",
    },
    cases=tuple(SHARES),
    draw=_draw,
    headline=_headline,
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Make a row for each share, rate and policy: means over the repeats, and their deviations."""
    model = make_model(settings.decoder, placement, seed=settings.seed)
    cells = [
        (share, rate, policy)
        for share in settings.only
        for rate in settings.rates
        for policy in settings.policies
    ]
    ticker.expect(len(cells) * settings.repeats)
    measured: dict[tuple[str, float, str], list[Row]] = {cell: [] for cell in cells}
    with engine_for(model, settings.tokens) as engine:
        users = _Users(settings, engine)
        for share in sorted(settings.only, key=settings.users):
            users.enter(settings.users(share))
            for repeat in range(settings.repeats):
                for rate in settings.rates:
                    for policy in settings.policies:  # in turn: other load on the machine hits all alike
                        with ticker.step(f"{policy}: {share} % of the pool, {rate:g}/s"):
                            measured[share, rate, policy].append(users.ask(policy, rate, repeat))
    rows = [
        {
            "table": f"{FILLED}{share} %",
            "users": settings.users(share),
            "repeats": settings.repeats,
            "offered_per_s": rate,
            "policy": policy,
        }
        | _means(measured[share, rate, policy])
        for share, rate, policy in cells
    ]
    notes = {
        "model": model.description,
        "arrivals": "Poisson, each request of a user drawn at random, the same for every policy; fresh text before and "
        "behind the documents, so that nothing is found in the prefix cache",
        "unanswered": "requests that were not answered when the time was over; they count in nothing else, so that the "
        "times of an overloaded policy are those of its first requests",
        "driven_out": "documents that running requests had driven out of the pool; a request compiled them again",
        "deviation": "standard deviation over the repeats, which have times of their own",
    }
    return Report(rows, _headline(rows), notes, lambda figure: _draw(figure, rows))


class _Users:
    """Users with documents in the pool, and their requests."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings, self._engine = settings, engine
        self._ids = Ids(settings.decoder.vocabulary, settings.seed)
        self._documents: list[list[Chunk]] = []

    def enter(self, count: int) -> None:
        """Compile the documents of further users until there are ``count`` users."""
        settings = self._settings
        while len(self._documents) < count:
            made = self._ids.chunks(settings.documents, settings.document_tokens)
            compile_all(self._engine, made)
            self._documents.append(made)
        for policy in settings.policies:
            first_token(self._engine, self._request(policy, 0))  # so that one-time set-up is not measured

    def _request(self, policy: str, user: int) -> Any:
        prompt = self._ids.framed(self._documents[user], self._settings.text)
        return request_of(prompt, policy, self._settings.answer)

    def ask(self, policy: str, rate: float, repeat: int) -> Row:
        """Send a repeat's requests at their times, and return what was answered within the time."""
        settings = self._settings
        rng = random.Random(f"{settings.seed} {repeat}")
        times = [time for time in poisson(rng, rate, settings.seconds) if time < settings.seconds] or [0.0]
        asking = [rng.randrange(len(self._documents)) for _ in times]
        for documents in self._documents:
            compile_all(self._engine, documents)  # documents that requests of another policy have evicted
        requests = [self._request(policy, user) for user in asking]
        served = send(self._engine, requests, times, until=settings.seconds)
        return _figures(served, len(requests), settings.seconds)


def _figures(served: list[Served], sent: int, seconds: float) -> Row:
    first = [1e3 * one.first for one in served]
    return {
        "ttft_ms": statistics.mean(first) if first else float("nan"),
        "requests_per_s": len(served) / seconds,
        "tokens_per_s": sum(one.usage.prompt_tokens for one in served) / seconds,
        "unanswered": sent - len(served),
        "driven_out": sum(use.tier == "compiled" for one in served for use in one.usage.chunks),
    }


def _means(repeats: list[Row]) -> Row:
    row: Row = {}
    for name, digits in (("ttft_ms", 1), ("requests_per_s", 3), ("tokens_per_s", 0)):
        values = [one[name] for one in repeats if not math.isnan(one[name])]  # where anything was answered
        row[name] = round(statistics.mean(values), digits) if values else ""
        row[f"{name}_deviation"] = round(statistics.pstdev(values), digits) if values else ""
    return row | {name: sum(one[name] for one in repeats) for name in ("unanswered", "driven_out")}
