"""Training curves as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpic.figure import save_png


def plot_curves(log: list[dict[str, Any]], path: Path) -> None:
    """Loss (left) and quick held-out exact match (right) over minutes, stages one after another."""
    save_png(path, lambda figure: _draw(figure, log), (13, 4.5))


def _draw(figure: Any, log: list[dict[str, Any]]) -> None:
    starts, elapsed, stage_end = {}, 0.0, 0.0
    for entry in log:
        if entry["stage"] not in starts:
            elapsed += stage_end
            starts[entry["stage"]] = elapsed
        stage_end = entry["seconds"] / 60
    left, right = figure.subplots(1, 2)
    scores: dict[str, list[tuple[float, float]]] = {}
    for stage, start in starts.items():
        rows = [e for e in log if e["stage"] == stage]
        losses = [(start + e["seconds"] / 60, e["loss"]) for e in rows if "loss" in e]
        if losses:
            left.plot(*zip(*losses, strict=True), label=stage)
        for e in rows:
            for name, value in e.get("scores", {}).items():
                scores.setdefault(name, []).append((start + e["seconds"] / 60, 100 * value))
    for name, points in scores.items():
        right.plot(*zip(*points, strict=True), marker=".", label=name)
    left.set(xlabel="minutes", ylabel="loss", yscale="log")
    right.set(xlabel="minutes", ylabel="held-out exact match, %", ylim=(0, 102))
    if starts:
        left.legend()
    if scores:
        right.legend(fontsize=6, ncol=2)
