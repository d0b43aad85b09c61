"""The sliding window of frames that an agent keeps: every step drops the oldest frame and appends a new one.

All frames but one were in the previous step, in the same order, but none of them follows the same tokens any more. A
prefix cache finds the system prompt and computes the whole window again; linked, each frame is compiled once, in the
step in which it arrives.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mpic.engine.base import Engine
from mpic.kv.chunk import Chunk
from mpic.prompt.segments import Prompt
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Report, Row, Ticker, bench, rotated
from mpic_lab.bench.workload import (
    DecoderShape,
    Ids,
    TowerShape,
    engine_for,
    first_token,
    image_chunk,
    prompt_of,
    random_image,
    request_of,
)

_DECODER = DecoderShape(layers=4, hidden=512, heads=8, intermediate=1408, vocabulary=8_000)
_TOWER = TowerShape(layers=2, hidden=128, heads=2, size=336, patch=16)
K = 16
LINK, PREFIX = f"mpic-{K}", "prefix"
Measure = Callable[[Prompt], float]
"""Sends a prompt and returns the milliseconds to its first token."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``frames`` bench.

    Args:
        frames, window: number of frames that arrive, and the maximum number that a prompt holds.
        system, text, question: tokens of the system prompt, of the text before each frame, and of the question after
            the last one, which is new in every step.
    """

    decoder: DecoderShape = _DECODER
    tower: TowerShape = _TOWER
    frames: int = 200
    window: int = 8
    system: int = 48
    text: int = 12
    question: int = 24
    seed: int = 0

    @property
    def length(self) -> int:
        """Number of tokens of a prompt whose window is full."""
        return self.system + self.window * (self.text + self.tower.tokens) + self.question


QUICK = {
    "decoder": DecoderShape(layers=4, hidden=384, heads=6, intermediate=1024, vocabulary=2_000),
    "tower": TowerShape(layers=1, hidden=64, heads=2, size=252, patch=14),
    "frames": 60,
}


class AgentPrompts:
    """The prompts of an agent, step by step, for several columns that share nothing.

    Args:
        columns: names of the columns; the frames of each column have their own owner.
    """

    def __init__(self, settings: Settings, columns: Sequence[str]) -> None:
        self._settings, self._columns = settings, columns
        self._ids = Ids(settings.decoder.vocabulary, settings.seed)
        self._system = self._ids.fresh(settings.system)

    def steps(self) -> Iterator[dict[str, Prompt]]:
        """Yield the prompt of every column for each step."""
        s = self._settings
        window: list[tuple[tuple[int, ...], dict[str, Chunk]]] = []
        for number in range(s.frames):
            image = random_image(s.seed + number, s.tower.size)
            frame = {name: image_chunk(image, f"frames {name}") for name in self._columns}
            window = [*window, (self._ids.fresh(s.text), frame)][-s.window :]
            question = self._ids.fresh(s.question)
            yield {
                name: prompt_of(
                    self._system,
                    *(part for text, chunks in window for part in (text, chunks[name])),
                    question,
                )
                for name in self._columns
            }


@bench(
    "frames",
    "time to first token over 200 steps of an agent that keeps a sliding window of 8 frames",
    Settings,
    quick=QUICK,
    wants={"prefix_over_mpic16": ">= 3", "mpic16_growth": "<= 1.2"},
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure every step with both policies."""
    model = make_model(settings.decoder, placement, settings.tower, seed=settings.seed)
    with engine_for(model, 4 * settings.length) as engine:
        ways = {LINK: linked(engine), PREFIX: _prefix(engine, settings)}
        samples = measure(settings, ways, ticker)
        frames = {
            "frames_compiled": engine.stats()["counters"]["tokens_compiled"] // settings.tower.tokens,
            "frames_resident_at_the_end": engine.stats()["chunks_resident"],
        }
    notes = {"model": model.description, **words(settings), **frames}
    return report(settings, samples, PREFIX, notes)


def measure(settings: Settings, ways: Mapping[str, Measure], ticker: Ticker) -> dict[str, list[float]]:
    """Return the milliseconds of every step by column. The columns take turns in going first."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    ticker.expect(settings.frames * len(names))
    for number, prompts in enumerate(AgentPrompts(settings, names).steps()):
        for name in rotated(names, number):
            with ticker.step(name):
                samples[name].append(ways[name](prompts[name]))
    return samples


def linked(engine: Engine) -> Measure:
    """Return the measurement of links. It raises BenchFailed unless the newest frame was compiled, and no other."""

    def once(prompt: Prompt) -> float:
        elapsed, usage = first_token(engine, request_of(prompt, LINK, 2))
        tiers = [use.tier for use in usage.chunks]
        if [tier == "compiled" for tier in tiers] != [False] * (len(tiers) - 1) + [True]:
            raise BenchFailed(
                f"{LINK}: only the newest frame should be compiled, but their KV came from {tiers}"
            )
        return elapsed

    return once


def _prefix(engine: Engine, settings: Settings) -> Measure:
    steps = 0

    def once(prompt: Prompt) -> float:
        nonlocal steps
        elapsed, usage = first_token(engine, request_of(prompt, PREFIX, 2))
        steps += 1
        found, most = usage.prefix_hit, settings.system + settings.text
        if steps > settings.window and not settings.system <= found < most:
            raise BenchFailed(f"{PREFIX} found {found} tokens; the system prompt has {settings.system}")
        return elapsed

    return once


# ---- the report


def words(settings: Settings) -> dict[str, Any]:
    """Return a description of the measurement."""
    return {
        "prompt_tokens": settings.length,
        "frame_tokens": settings.tower.tokens,
        "steps": "every column sees the same frames in the same steps, as chunks of an owner of its own; encoding and "
        "compiling the new frame are part of a step",
        "prefix_over_mpic16": "median over the steps with a full window of the ratio within a step",
        "mpic16_growth": "median of the last quarter of these steps over that of the first quarter",
    }


def report(
    settings: Settings, samples: Mapping[str, list[float]], prefix: str, notes: dict[str, Any]
) -> Report:
    """Return the report of the steps' times.

    Args:
        prefix: name of the column with a prefix cache.
    """
    slid = {name: values[settings.window :] for name, values in samples.items()}
    linked, quarter = slid[LINK], max(1, len(slid[LINK]) // 4)
    headline = {
        "prefix_over_mpic16": statistics.median(a / b for a, b in zip(slid[prefix], linked, strict=True)),
        "mpic16_growth": statistics.median(linked[-quarter:]) / statistics.median(linked[:quarter]),
    }
    return Report(
        _rows(settings, samples), headline, notes, lambda figure: _plot(figure, settings.window, samples)
    )


def _rows(settings: Settings, samples: Mapping[str, list[float]]) -> list[Row]:
    """Return one row for the filling of the window, then the steps with a full window in quarters."""
    bounds = [0, *(settings.window + (settings.frames - settings.window) * i // 4 for i in range(5))]
    rows = []
    for low, high in pairwise(bounds):
        for name, values in samples.items():
            part = values[low:high]
            if part:
                numbers = {"min": min(part), "median": statistics.median(part), "max": max(part)}
                times = {f"{key}_ms": round(value, 3) for key, value in numbers.items()}
                rows.append({"frames": f"{low + 1} to {high}", "column": name, **times})
    return rows


def _plot(figure: Any, window: int, samples: Mapping[str, list[float]]) -> None:
    axes = figure.subplots()
    for name, values in samples.items():
        axes.plot(range(1, len(values) + 1), values, label=name, linewidth=1)
    axes.axvline(window, color="grey", linestyle=":", label="the window is full")
    axes.set_xlabel("frames that have arrived")
    axes.set_ylabel("time to first token (ms)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
