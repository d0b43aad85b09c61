"""Compares policies: every figure of a policy is compared with ``full`` on the same questions.

Points lost come with a 95 % interval: questions are resampled 2,000 times within each cell (a task with a number of
chunks), always a question's two answers together (stratified paired bootstrap; Efron and Tibshirani 1993, chapter 13).
A difference whose interval contains 0 may be chance.

A policy that lacks a cell has figures over other questions than the rest, so it is marked and left out of the ranking.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpic_lab.eval.answers import PolicyAnswer
from mpic_lab.eval.judge import OVERALL
from mpic_lab.eval.tasks import find

MEAN_LIMIT, WORST_LIMIT = 2.0, 5.0
"""Points a policy may lose against ``full``: on average, and on its worst task."""
DRAWS = 2000

Cell = tuple[str, int]
"""A task and a number of chunks."""
Cells = Mapping[Cell, Mapping[str, Sequence[PolicyAnswer]]]
"""Cell -> policy -> answers to the same samples in the same order."""
Grades = Mapping[tuple[str, int, str, str], Mapping[str, float]]


class Lost(NamedTuple):
    """Points of 100 lost against ``full``, and the 95 % interval."""

    points: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.points:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


@dataclass(frozen=True)
class PolicyResult:
    """The figures of a policy over some answers: scores in points of 100, times in milliseconds (None where none were
    measured), ratios against ``full``. ``cells`` is the number of cells that it answered, of ``of_cells``."""

    policy: str
    questions: int
    score: float
    lost: Lost
    worst: Lost
    worst_task: str
    ttft_ms: float | None
    ttft_ratio: float | None
    flops_ratio: float
    recomputed: float
    kl: float | None
    top1: float | None
    judged: float | None = None
    answer_tokens: float | None = None
    cells: int = 1
    of_cells: int = 1

    @property
    def complete(self) -> bool:
        """True if the figures are over all cells, so that they can be compared with those of others."""
        return self.cells == self.of_cells

    @property
    def within_two_points(self) -> bool:
        return self.lost.points <= MEAN_LIMIT and self.worst.points <= WORST_LIMIT


def compare_policies(answers: Iterable[PolicyAnswer], grades: Grades | None = None) -> list[PolicyResult]:
    """Return the result of each policy over all cells it answered, each cell counting the same."""
    cells = cells_of(answers)
    found = []
    for policy in policies_of(cells):
        parts = [(cell[policy], cell["full"]) for cell in cells.values() if policy in cell]
        by_task = losses(cells, policy)
        worst = max(by_task, key=lambda task: by_task[task].points)
        mine = [answer for one, _ in parts for answer in one]
        full = [answer for _, one in parts for answer in one]
        found.append(
            PolicyResult(
                policy,
                len(mine),
                statistics.mean(score(one) for one, _ in parts),
                lost(parts),
                by_task[worst],
                worst,
                ttft(mine),
                median_of(
                    b.ttft_ms / a.ttft_ms if a.ttft_ms and b.ttft_ms else None
                    for a, b in zip(mine, full, strict=True)
                ),
                sum(b.flops for b in full) / max(1.0, sum(a.flops for a in mine)),
                100
                * sum(a.chunk_tokens - a.reused for a in mine)
                / max(1, sum(a.chunk_tokens for a in full)),
                mean_of(a.kl for a in mine),
                mean_of(None if a.top1 is None else 100.0 * a.top1 for a in mine),
                mean_of((grades or {}).get(a.key, {}).get(OVERALL) for a in mine),
                mean_of(a.answer_tokens for a in mine),
                len(parts),
                len(cells),
            )
        )
    return found


def losses(cells: Cells, policy: str) -> dict[str, Lost]:
    """Return the points lost on each task, over its numbers of chunks."""
    by_task: dict[str, list[tuple[Sequence[PolicyAnswer], Sequence[PolicyAnswer]]]] = defaultdict(list)
    for (task, _), cell in cells.items():
        if policy in cell:
            by_task[task].append((cell[policy], cell["full"]))
    return {task: lost(parts) for task, parts in by_task.items()}


def lost(parts: Sequence[tuple[Sequence[PolicyAnswer], Sequence[PolicyAnswer]]]) -> Lost:
    """Return the points lost over cells, given as (the policy's answers, those of ``full``)."""
    differences = [
        np.array([points(b) - points(a) for a, b in zip(mine, full, strict=True)]) for mine, full in parts
    ]
    low, high = interval(differences)
    return Lost(float(np.mean([one.mean() for one in differences])), float(low), float(high))


def interval(parts: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 95 % interval of the mean over parts of their means, by the bootstrap over the questions of each.

    Of n questions n - 1 are drawn: with n the variance of a part would come out by (n - 1) / n too small, which counts
    where parts have a few questions each (Rao and Wu, Resampling inference with complex survey data, 1988).
    """
    rng = np.random.default_rng(0)
    sizes = [max(1, len(one) - 1) for one in parts]
    drawn = sum(
        one[rng.integers(len(one), size=(DRAWS, n))].mean(1) for one, n in zip(parts, sizes, strict=True)
    )
    low, high = np.quantile(drawn / len(parts), (0.025, 0.975))
    return float(low), float(high)


def cells_of(answers: Iterable[PolicyAnswer]) -> dict[Cell, dict[str, list[PolicyAnswer]]]:
    """Return the cells that ``full`` answered, with the samples that every policy of the cell answered."""
    grouped: dict[Cell, dict[str, dict[str, PolicyAnswer]]] = defaultdict(lambda: defaultdict(dict))
    for answer in answers:
        if answer.skipped is None:
            grouped[answer.task, answer.chunks][answer.policy][answer.sample] = answer
    cells = {}
    for key, cell in sorted(grouped.items()):
        if "full" not in cell:
            continue
        common = set.intersection(*(set(found) for found in cell.values()))
        order = [sample for sample in cell["full"] if sample in common]
        if order:
            cells[key] = {policy: [found[s] for s in order] for policy, found in cell.items()}
    return cells


def policies_of(cells: Cells) -> list[str]:
    return list(dict.fromkeys(policy for cell in cells.values() for policy in cell))


def complete_policies(cells: Cells) -> list[str]:
    """Return the policies that answered every cell."""
    return [policy for policy in policies_of(cells) if all(policy in cell for cell in cells.values())]


def at_every_count(cells: Cells) -> tuple[list[int], list[str]]:
    """Return the numbers of chunks, and the tasks that have all of them, so that means over these tasks can be
    compared."""
    counts = sorted({chunks for _, chunks in cells})
    tasks = dict.fromkeys(task for task, _ in cells)
    return counts, [task for task in tasks if all((task, count) in cells for count in counts)]


def at_count(
    cells: Cells,
    tasks: Iterable[str],
    count: int,
    policy: str,
    value: Callable[[Sequence[PolicyAnswer]], float | None],
) -> float | None:
    """Return a policy's mean over the tasks for which ``full`` has a value; None if it lacks one of them, because its
    mean would be over other questions."""
    compared = [cell for task in tasks if value((cell := cells[task, count])["full"]) is not None]
    found = [value(cell[policy]) if policy in cell else None for cell in compared]
    return None if None in found else mean_of(found)


def score(answers: Sequence[PolicyAnswer]) -> float:
    """Return the mean of the task's metric, in points of 100."""
    return statistics.mean(points(answer) for answer in answers)


def ttft(answers: Sequence[PolicyAnswer]) -> float | None:
    """Return the median milliseconds to the first token, over the answers whose time was measured."""
    return median_of(answer.ttft_ms for answer in answers)


def points(answer: PolicyAnswer) -> float:
    """Return an answer's score by its task's metric, in points of 100."""
    return 100 * answer.scores[metric_of(answer)]


def metric_of(answer: PolicyAnswer) -> str:
    """Return the name of the metric that an answer is scored by."""
    return answer.metric or find(answer.task).metric


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    present = [value for value in values if value is not None]
    return statistics.mean(present) if present else None
