"""Measures a model in float32 and in bfloat16 in turns: the measurement behind the dtype that ``auto`` chooses on a CPU
(``mpic.model.dtype_choice``)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from mpic.engine.base import Engine
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import BenchDevice, Report, Row, Series, Ticker, bench, rotated
from mpic_lab.bench.peers.cases import (
    AGAIN,
    FIRST,
    FRESH,
    IMAGES,
    NEW_IMAGES,
    SHORT,
    SHUFFLED,
    answers_case,
    turn_of,
)
from mpic_lab.bench.peers.native import Native
from mpic_lab.bench.peers.peers import QUICK
from mpic_lab.bench.peers.prompts import SIZES, Questions, Settings
from mpic_lab.bench.workload import compile_all, engine_for

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
POLICIES = {"mpic-32": ("shuffled", "answers", "images"), "prefix": ("fresh", "again", "short", "new-images")}
"""Policy -> the short names of its cases."""
RATIOS = "ratios, more than 1: bfloat16 is faster"

Samples = Mapping[tuple[str, str], Series]
"""Measurements by case and dtype."""


def headlines(settings: Settings) -> dict[str, str]:
    """Return the name of the headline of every case."""
    names = {
        SHUFFLED: "shuffled",
        IMAGES: "images",
        FRESH: "fresh",
        NEW_IMAGES: "new_images",
        SHORT: "short",
        AGAIN: "again",
        **{answers_case(count): f"decode{count}" for count in settings.answers},
    }
    return {case: f"{name}_bfloat16_over_float32" for case, name in names.items()}


@bench(
    "dtype",
    "first tokens and decoding in bfloat16 against float32",
    Settings,
    quick=QUICK,
    wants={name: ">= 1.0" for name in headlines(Settings()).values()},
    on_cpu=True,
    dtypes=tuple(DTYPES),
    sizes={"110m": {}, "2b": {**SIZES["2b"], "documents": 4}},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Let the same random LLaVA run in both dtypes in turn. Speeds are compared, so that a ratio of more than 1 says
    that bfloat16 is faster in every case."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    notes: dict[str, Any] = {"prompt_tokens": settings.length, "image_prompt_tokens": settings.image_length}
    with ExitStack() as opened:
        columns: dict[str, _Column] = {}
        for name, dtype in DTYPES.items():
            ticker.say(f"making the model in {name}")
            on = BenchDevice(placement.device, dtype)
            model = make_model(settings.decoder, on, settings.tower, seed=settings.seed)
            engine = opened.enter_context(engine_for(model, settings.kept_tokens + _documents(settings)))
            columns[name] = _Column(engine, settings)
            notes |= {"model": model.description, name: columns[name].detail}
        ticker.expect((settings.repeats + 1) * len(columns))
        for turn in range(settings.repeats + 1):
            for name in rotated(list(columns), turn):
                with ticker.step(name):
                    for case, value in columns[name].turn(turn):
                        values[case, name].append(value)
    samples = {key: Series(some[0], some[1:]) for key, some in values.items()}
    rows = list(_rows(settings, samples))
    headline = {row["column"]: row["median"] for row in rows if row["table"] == RATIOS}
    notes["ratio"] = "of the speeds of a round; the first round is cold and not counted"
    return Report(rows, headline, notes, lambda figure: _plot(figure, samples))


def _documents(settings: Settings) -> int:
    """Return the tokens of all documents and images, which stay in the pool."""
    return settings.documents * (settings.document_tokens + settings.tower.tokens)


class _Column:
    """The engine of one dtype, with its own copy of the questions."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._peers = [
            (Native(engine, policy), replace(settings, only=cases)) for policy, cases in POLICIES.items()
        ]
        self._questions = [Questions(settings), Questions(settings, images=True)]
        for questions in self._questions:
            compile_all(engine, questions.documents)
        self.detail = self._peers[0][0].detail

    def turn(self, turn: int) -> Iterator[tuple[str, float]]:
        """Yield the cases with their measurements."""
        for peer, settings in self._peers:
            for questions in self._questions:
                yield from turn_of(settings, peer, questions, turn).items()


def _rows(settings: Settings, samples: Samples) -> Iterator[Row]:
    for (case, name), series in samples.items():
        yield {"table": case, "column": name} | series.row("ms" if case in FIRST else "tokens_per_s")
    for case, name in headlines(settings).items():
        pairs = zip(*(samples[case, dtype].values for dtype in DTYPES), strict=True)
        ratios = [full / half if case in FIRST else half / full for full, half in pairs]
        numbers = {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}
        yield {"table": RATIOS, "column": name} | numbers


def _plot(figure: Any, samples: Samples) -> None:
    cases = list(dict.fromkeys(case for case, _ in samples))
    for axes, case in zip(figure.subplots(2, -(-len(cases) // 2), squeeze=False).flat, cases, strict=False):
        axes.bar(list(DTYPES), [samples[case, name].median for name in DTYPES])
        axes.set_title(case, fontsize=8)
        axes.set_ylabel("ms" if case in FIRST else "tokens/s", fontsize=7)
