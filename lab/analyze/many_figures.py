"""Drawings of averages over many linked prompts."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.ticker import MaxNLocator

from mpic_lab.analyze.figures import colours, titled
from mpic_lab.analyze.many import LEAST, SMALL, STEPS, TOP, Gathered, group_names, spread


def distribution(figure: Any, found: Gathered) -> None:
    """Draw how the first output token's attention is spread over the tokens of chunks: by amount, and by place (MPIC,
    figure 4)."""
    left, right = figure.subplots(1, 2, sharey=True)
    amounts = 10 ** torch.linspace(LEAST, 0, STEPS + 1)[1:]
    places = found.cumulative()
    for layer, colour in enumerate(colours(len(places))):
        left.plot(amounts, found.distribution()[layer], color=colour)
        right.plot(torch.arange(1, places.shape[1] + 1), places[layer], color=colour, label=f"layer {layer}")
    left.axvline(SMALL, color="grey", linestyle=":")
    left.set(xscale="log", xlabel="attention", ylabel="share", ylim=(0, 1.02))
    right.plot([0, places.shape[1]], [0, 1], color="grey", linestyle=":", label="evenly")
    right.set(xlabel="first tokens of a chunk")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    titled(
        figure,
        f"What the first output token attends to, {found.prompts} prompts of {found.chunks} chunks",
        "Left: share of chunk tokens with at most so much attention. Right: share of a chunk's attention on its "
        "first tokens.",
    )


def important(figure: Any, found: Gathered) -> None:
    """Draw in how many layers each token of a chunk is among the most distant ones (MPIC, figure 8)."""
    axes = figure.subplots()
    counts = found.counts()
    axes.bar(torch.arange(len(counts)), counts, width=1.0)
    by_chance = found.comparable * min(TOP, len(counts)) / len(counts)
    axes.axhline(by_chance, color="grey", linestyle=":", label="by chance")
    axes.set(xlabel="token of the chunk", ylabel=f"layers of {found.comparable}", ylim=(0, found.comparable))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    titled(
        figure,
        f"Tokens whose keys depend most on what stands before, {found.prompts} prompts",
        f"Mean number of layers in which a token is among the {TOP} whose keys differ most between the chunk "
        "before its question and behind it.",
    )


def maps(figure: Any, found: Gathered, layer: int) -> None:
    """Draw the mean attention of one layer under each policy in groups of tokens (MPIC, figure 11; EPIC, figures 4 and
    7). The last row is that of the first output token."""
    names = group_names(found.chunks)
    starts = [number for number, name in enumerate(names) if name.endswith(": 0")]
    ends = [number for number, name in enumerate(names) if name in ("text between", "question")]
    panels = figure.subplots(1, len(found.sums), squeeze=False)[0]
    for axes, policy in zip(panels, found.sums, strict=True):
        logs = found.attention_map(policy, layer).clamp_min(1e-6).log10()
        image = axes.imshow(logs, vmin=-5, vmax=0, interpolation="nearest", aspect="auto")
        for edge in (*starts, *ends):
            axes.axvline(edge - 0.5, color="red", linewidth=0.5)
            axes.axhline(edge - 0.5, color="red", linewidth=0.5)
        axes.set_xticks(starts, [f"chunk {number}" for number in range(1, found.chunks + 1)], fontsize=7)
        axes.set_yticks([*starts, len(names)], [*(names[at] for at in starts), "first output"], fontsize=7)
        axes.set_title(policy, fontsize=9)
    for axes in panels[1:]:
        axes.set_yticklabels([])
    titled(
        figure,
        f"Attention to a token, layer {layer}, mean of {found.prompts} prompts",
        "Tokens of a chunk are grouped by place: 0, 1, 2-3, 4-7, ... White rows are not computed. A bright first "
        "column of a chunk is its attention sink.",
    )
    figure.colorbar(image, ax=figure.axes, label="attention, log10", shrink=0.8)


def sinks(figure: Any, found: Gathered) -> None:
    """Draw the share of attention on the prompt's first token and on the chunks' first tokens, by layer and policy."""
    panels = figure.subplots(1, 2, sharey=True)
    titles = {
        "first": "computed rows, on the prompt's first token",
        "heads": "question, on the chunks' first tokens",
    }
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        for number, policy in enumerate(found.sums):
            mean, deviation = found.spread(policy, what)
            aside = 0.04 * (number - (len(found.sums) - 1) / 2)  # bars stand beside each other
            at = torch.arange(len(mean)) + aside
            axes.errorbar(at, mean, deviation, marker="o", color=f"C{number % 10}", capsize=2, label=policy)
        if what == "first":
            mean, deviation = spread(found.alone)
            axes.errorbar(
                range(len(mean)), mean, deviation, fmt="k--", capsize=2, label="a chunk alone, on its own"
            )
            axes.legend(fontsize=8)
        axes.axhline(0.3, color="grey", linestyle=":")
        axes.set(xlabel="layer", ylim=(0, 1))
        axes.set_title(title, fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of attention")
    panels[1].legend(fontsize=8)
    titled(
        figure,
        f"Attention sinks, mean of {found.prompts} prompts of {found.chunks} chunks",
        "A chunk that was compiled alone brings a sink of its own at its first token; policies repair it or not. "
        "Bars: a standard deviation over prompts.",
    )
