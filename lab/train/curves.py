"""Training curves as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpic_lab.figure import save_png

Lines = dict[str, list[tuple[float, float]]]
"""Points (x, y) by name."""


def plot(path: Path, losses: Lines, scores: Lines, over: str, loss: str, score: str, **axes: Any) -> None:
    """Draws losses (left) and scores in [0, 1] as percent (right) over the same axis; the texts are its labels."""

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for name, points in losses.items():
            left.plot(*zip(*points, strict=True), label=name, linewidth=0.8)
        for name, points in scores.items():
            right.plot([x for x, _ in points], [100 * y for _, y in points], marker=".", label=name)
        left.set(xlabel=over, ylabel=loss, **axes)
        right.set(xlabel=over, ylabel=score, ylim=(0, 102))
        if len(losses) > 1:
            left.legend()
        if scores:
            right.legend(fontsize=6, ncol=2)

    save_png(path, draw, (13, 4.5))


def plot_stages(log: list[dict[str, Any]], path: Path) -> None:
    """Draws loss and quick held-out exact match over minutes, the stages of a run one after another."""
    starts, elapsed, stage_end = dict[str, float](), 0.0, 0.0
    losses: Lines = {}
    scores: Lines = {}
    for entry in log:
        if entry["stage"] not in starts:
            elapsed += stage_end
            starts[entry["stage"]] = elapsed
        stage_end = entry["seconds"] / 60
        minute = starts[entry["stage"]] + stage_end
        if "loss" in entry:
            losses.setdefault(entry["stage"], []).append((minute, entry["loss"]))
        for name, value in entry.get("scores", {}).items():
            scores.setdefault(name, []).append((minute, value))
    plot(path, losses, scores, "minutes", "loss", "held-out exact match, %", yscale="log")
