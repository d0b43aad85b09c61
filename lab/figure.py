"""Plots as PNG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def save_png(path: Path, draw: Callable[[Any], None], size: tuple[float, float], dpi: int = 90) -> Path:
    """Draw into a matplotlib figure and write it as PNG, without a display.

    Args:
        size: width and height in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path
