"""Plots of a run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpic_lab.eval.answers import PolicyAnswer
from mpic_lab.eval.compare import (
    MEAN_LIMIT,
    Grades,
    PolicyResult,
    at_count,
    at_every_count,
    cells_of,
    mean_of,
    policies_of,
    score,
    ttft,
)
from mpic_lab.eval.judge import OVERALL

_MARKERS = "osD^vPX*<>hdp"


def style_of(number: int) -> dict[str, Any]:
    """Return the marker and the colour of a plot's policies in turn: no two of the first 130 have both."""
    return {"marker": _MARKERS[number % len(_MARKERS)], "color": f"C{number % 10}"}


def tradeoff(figure: Any, found: list[PolicyResult]) -> None:
    """Draw scores over the cost of the first token, as measured and as counted (EPIC, figure 6); bars are the
    intervals of the points lost, and a line joins the policies that no other one beats in both. Both axes are shares of
    ``full``, and times are compared within a question, so that other load on the machine has little effect. Policies
    that lack a cell are left out, because they answered other questions."""
    found = [result for result in found if result.complete]
    panels: list[tuple[Callable[[PolicyResult], float | None], str]] = [
        (lambda result: result.ttft_ratio, "time to first token, share of full's"),
        (lambda result: result.flops_ratio, "operations of the prefill, share of full's"),
    ]
    panels = [panel for panel in panels if all(panel[0](result) is not None for result in found)]
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (ratio, label) in zip(columns, panels, strict=True):
        for number, result in enumerate(found):
            full = result.score + result.lost.points
            axes.errorbar(
                1 / (ratio(result) or 1.0),
                result.score,
                yerr=_bars(result),
                linestyle="none",
                elinewidth=0.7,
                alpha=0.85,
                label=result.policy,
                **style_of(number),
            )
            if result.policy == "full":
                axes.axhspan(
                    full - MEAN_LIMIT, full, alpha=0.12, label=f"within {MEAN_LIMIT:.0f} points of full"
                )
        front = pareto([(1 / (ratio(result) or 1.0), result.score) for result in found])
        axes.plot(*zip(*front, strict=True), color="grey", linewidth=0.8, alpha=0.6, zorder=0)
        axes.set(xlabel=label, xlim=(0, None), ylim=(0, 102))
        axes.grid(alpha=0.3)
    columns[0].set_ylabel("score")
    columns[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


COLUMNS = 3
"""Panels in a row of ``by_task`` and ``needles``."""


def by_task(figure: Any, found: Mapping[str, list[PolicyResult]], judged: bool = False) -> None:
    """Draw one panel per task: the score of each policy over its cost, as a share of ``full``'s (EPIC, figure 6; MPIC,
    figure 9). The cost is the time to the first token where it was measured, else the operations of the prefill. Bars
    are the intervals of the points lost; a line joins the policies that no other one beats in both. A policy that lacks
    a number of chunks of a task is left out of its panel.

    Args:
        judged: draw the judge's overall grades instead of scores.
    """
    found = {task: [one for one in results if one.complete] for task, results in found.items()}
    timed = all(result.ttft_ratio is not None for results in found.values() for result in results)
    rows = -(-len(found) // COLUMNS)
    panels = figure.subplots(rows, COLUMNS, squeeze=False)
    # a policy looks alike in every panel, in whatever order each has them
    policies = list(dict.fromkeys(result.policy for results in found.values() for result in results))
    drawn: dict[str, Any] = {}
    for axes, (task, results) in zip(panels.flat, found.items()):
        points = []
        for result in results:
            style = style_of(policies.index(result.policy))
            ratio = result.ttft_ratio if timed else result.flops_ratio
            value = result.judged if judged else result.score
            if value is not None:
                points.append((1 / (ratio or 1.0), value))
                [drawn[result.policy]] = axes.plot(*points[-1], linestyle="none", **style)
                if not judged:
                    bars = {"fmt": "none", "ecolor": style["color"], "alpha": 0.5, "elinewidth": 0.8}
                    axes.errorbar(*points[-1], _bars(result), **bars)
        if front := pareto(points):
            axes.plot(*zip(*front, strict=True), color="grey", linewidth=0.8, alpha=0.6, zorder=0)
        axes.set(title=task, xlim=(0, None))
        if not judged:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -3), min(high, 103))
        axes.grid(alpha=0.3)
    for axes in panels.flat[len(found) :]:
        axes.set_axis_off()
    figure.supxlabel("time to first token, share of full's" if timed else "operations, share of full's")
    figure.supylabel("judge's overall grade, of 10" if judged else "score")
    last = panels[0, min(len(found), COLUMNS) - 1]
    last.legend(drawn.values(), drawn, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


def _bars(result: PolicyResult) -> list[list[float]]:
    """Return how far the interval of the points lost reaches below and above the score."""
    return [[result.lost.high - result.lost.points], [result.lost.points - result.lost.low]]


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, score) that no other one beats in both, from the cheapest on."""
    front: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or value > front[-1][1]:
            front.append((cost, value))
    return front


def tasks_apart(cells: Mapping[tuple[str, int], Any]) -> list[tuple[list[str], list[int]]]:
    """Return each task by itself, with its numbers of chunks in order."""
    counts: dict[str, list[int]] = {}
    for task, count in cells:
        counts.setdefault(task, []).append(count)
    return [([task], sorted(mine)) for task, mine in counts.items()]


def by_chunks(figure: Any, answers: list[PolicyAnswer], grades: Grades | None = None) -> None:
    """Draw score, time and operations over the number of chunks: means over the tasks that have every number, so that
    lines compare like with like (MPIC, figure 10). Where no task has all of them, every task has its own line or point.
    A policy that lacks one of the numbers has no line. With ``grades``, the judge's stand in place of the scores."""
    cells = cells_of(answers)
    counts, tasks = at_every_count(cells)
    lines = [(tasks, counts)] if tasks else tasks_apart(cells)
    panels = figure.subplots(1, 3)
    values: tuple[Callable[[Sequence[PolicyAnswer]], float | None], ...] = (
        (lambda one: mean_of((grades or {}).get(a.key, {}).get(OVERALL) for a in one)) if grades else score,
        ttft,
        lambda one: statistics.mean(a.flops for a in one) / 1e9,
    )
    for number, policy in enumerate(policies_of(cells)):
        style = style_of(number) | {"markersize": 4}
        for axes, value in zip(panels, values, strict=True):
            drawn = False
            for of_line, over in lines:
                means = [at_count(cells, of_line, count, policy, value) for count in over]
                if None not in means:
                    axes.plot(over, means, label=None if drawn else policy, alpha=0.85, **style)
                    drawn = True
    for axes, label in zip(
        panels,
        ("judge's overall grade" if grades else "score", "time to first token (ms)", "GFLOP of the prefill"),
        strict=True,
    ):
        axes.set(xlabel="chunks", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylim(0, 10.2 if grades else 102)
    names = "mean over tasks" if tasks else "each task at its own number of chunks"
    figure.suptitle(f"By number of chunks: {names}", fontsize=10)
    if panels[2].get_legend_handles_labels()[1]:
        panels[2].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


def needles(figure: Any, found: Mapping[str, Mapping[tuple[int, int], float]]) -> None:
    """Draw one map per grid: the score of each needle by the length of the prompt and its depth in it.

    Args:
        found: by the name of a grid (``tables.grid_names``), scores by depth (percent) and length (tokens).
    """
    panels = figure.subplots(-(-len(found) // COLUMNS), COLUMNS, squeeze=False)
    for axes, (name, grid) in zip(panels.flat, found.items()):
        depths, lengths = (sorted({place[of] for place in grid}) for of in (0, 1))
        scores = [[grid.get((depth, length), float("nan")) for length in lengths] for depth in depths]
        image = axes.imshow(scores, vmin=0, vmax=100, aspect="auto")
        for (row, depth), (column, length) in itertools.product(enumerate(depths), enumerate(lengths)):
            if (depth, length) in grid:
                value = grid[depth, length]
                style = {"ha": "center", "va": "center", "color": "black" if value > 50 else "white"}
                axes.text(column, row, f"{value:.0f}", fontsize=8, **style)
        axes.set_xticks(range(len(lengths)), lengths, fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths], fontsize=8)
        axes.set_title(name, fontsize=9)
    for axes in panels.flat[len(found) :]:
        axes.set_axis_off()
    figure.supxlabel("tokens of the prompt", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.colorbar(image, ax=panels, label="score", shrink=0.8)
