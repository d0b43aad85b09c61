"""Drawings of linked prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.ticker import MaxNLocator

from mpic_lab.analyze import measures
from mpic_lab.analyze.dense import DenseLink
from mpic_lab.figure import save_png


def save(path: Path, draw: Callable[..., None], *shown: Any, size: tuple[float, float] = (9, 4.2)) -> Path:
    """Write the drawing that ``draw(figure, *shown)`` makes to a file."""
    return save_png(path, lambda figure: draw(figure, *shown), size, dpi=120)


def shares(figure: Any, full: DenseLink) -> None:
    """Draw the attention CDF, and the cumulative share by place within a chunk, one line per layer."""
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, curves, xlabel in (
        (left, measures.concentration(full), "most attended tokens, share of all"),
        (right, measures.by_place(full), "first tokens of a chunk"),
    ):
        for layer, (curve, colour) in enumerate(zip(curves, colours(len(curves)), strict=True)):
            n = torch.arange(1, len(curve) + 1)
            x = n / len(curve) if axes is left else n
            axes.plot(x, curve.cpu(), color=colour, label=f"layer {layer}")
        axes.set_xlabel(xlabel)
        if axes is right:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    right.plot([0, len(curves[0])], [0, 1], color="grey", linestyle=":", label="evenly")
    left.set_ylabel("share of the question's attention")
    titled(
        figure,
        "What the question attends to",
        "The steeper a curve, the fewer tokens matter; the more the right "
        "curves lie above the dotted line, the more a chunk's first tokens draw attention.",
    )
    right.legend(fontsize=7)


def distances(figure: Any, found: dict[str, torch.Tensor]) -> None:
    """Draw heat maps, layers x tokens, of the change of keys and values with the text before the chunk."""
    top = max(float(part.max()) for part in found.values())
    for axes, (name, values) in zip(figure.subplots(2, 1, sharex=True), found.items(), strict=True):
        image = axes.imshow(values.cpu(), aspect="auto", vmin=0, vmax=top, interpolation="nearest")
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_ylabel("layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    titled(
        figure,
        "How much a chunk's keys and values depend on what stands before it",
        "Bright tokens change most and are the ones worth computing again when the chunk is linked.",
    )
    axes.set_xlabel("token of the chunk")
    figure.colorbar(image, ax=figure.axes, label="relative distance")


def maps(figure: Any, linked: Sequence[DenseLink], layer: int) -> None:
    """Draw attention of one layer under each policy, on a logarithmic scale; rows that are not computed stay empty,
    chunk boundaries are drawn."""
    for axes, one in zip(figure.subplots(1, len(linked), squeeze=False)[0], linked, strict=True):
        n = one.weights[layer].shape[1]
        square = torch.full((n, n), float("nan"))
        seen = torch.arange(n)[None] <= one.rows[:, None]
        weights = one.weights[layer].float().clamp_min(1e-6).log10()
        square[one.rows] = weights.masked_fill(~seen, float("nan"))
        image = axes.imshow(square.cpu(), vmin=-4, vmax=0, interpolation="nearest")
        for place in one.places:
            for edge in (place.start, place.start + place.length):
                axes.axvline(edge - 0.5, color="red", linewidth=0.5)
                axes.axhline(edge - 0.5, color="red", linewidth=0.5)
        axes.set_title(one.policy, fontsize=9)
        axes.set_xlabel("token that is attended to")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure.axes[0].set_ylabel("token that attends")
    titled(
        figure,
        f"Attention of layer {layer} under each policy",
        "White rows were not computed; red lines are borders of chunks. Alike pictures mean alike answers.",
    )
    figure.colorbar(image, ax=figure.axes, label="attention, log10", shrink=0.8)


def errors(figure: Any, linked: Sequence[DenseLink], full: DenseLink) -> None:
    """Draw the distance of each policy's attention from that of ``full``, by layer."""
    axes = figure.subplots()
    for one in linked:
        axes.plot(measures.attention_error(one, full).cpu(), marker="o", label=one.policy)
    axes.set(xlabel="layer", ylabel="distance of the last token's attention", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    titled(
        figure,
        "How far each policy's attention is from that of full",
        "Total variation distance: 0 is the same attention, 1 is none in common; lower is closer to full.",
    )
    axes.legend()
    axes.grid(alpha=0.3)


def titled(figure: Any, title: str, says: str) -> None:
    """Add a title to a drawing, and a sentence that explains it."""
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(says, fontsize=8)


def colours(n: int) -> list[Any]:
    """Return a colour for each of ``n`` layers."""
    from matplotlib import colormaps

    return [colormaps["viridis"](i / max(1, n - 1)) for i in range(n)]
