"""Decides from answers which policies lose little enough.

The interval of the points lost is Tango's score interval of a difference of paired proportions (Tango, Equivalence
test and confidence interval for the difference in proportions for the paired-sample design, 1998), not the bootstrap of
``mpic eval``: where no answer differs the bootstrap's interval is a point, and 20 such questions would seem to prove
what takes 189.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mpic.server.auto import MeasuredPolicy
from mpic_lab.eval.answers import PolicyAnswer
from mpic_lab.eval.compare import mean_of, points
from mpic_lab.eval.tasks import find

Z = 1.959964
"""Quantile of the normal distribution for a 95 % interval."""
MOST_QUESTIONS = 1_000_000
LEAST_RIGHT = 33.3
"""Minimum points of 100 for ``full``. A model that cannot answer has nothing to lose under any policy; with at least a
third of answers right, the share of right answers lost is at most three times the points shown."""


@dataclass(frozen=True)
class Paired:
    """The answers of a policy to ``n`` questions compared with those of ``full``: the sum of its losses and the sum of
    its gains, each question counting at most 1."""

    n: int
    worse: float
    better: float

    @property
    def lost(self) -> float:
        """Points of 100 lost."""
        return 100 * (self.worse - self.better) / self.n

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the points lost."""
        return -_upper(self.better, self.worse, self.n), _upper(self.worse, self.better, self.n)

    def cannot_meet(self, bound: float, questions: int) -> bool:
        """Return whether the bound is already exceeded, or would be missed even if no remaining question of the total
        differed, provided that the total can show the bound at all."""
        n = max(self.n, questions)
        hopeless = _upper(0, 0, n) <= bound < _upper(self.worse, self.better, n)
        return hopeless or self.interval()[0] > bound

    def questions_for(self, bound: float) -> int | None:
        """Return how many questions like these would show that the bound is met; None if the bound is not met, or no
        number would show it."""
        if self.lost >= bound:
            return None
        times = 1.0
        while _upper(self.worse * times, self.better * times, self.n * times) > bound:
            times *= 1.05
            if self.n * times > MOST_QUESTIONS:
                return None
        return math.ceil(self.n * times)


def _upper(worse: float, better: float, n: float) -> float:
    """Return the upper end of the interval, in points: the largest difference that the answers do not contradict."""

    def contradicted(d: float) -> bool:
        b = -worse - better + (2 * n - worse + better) * d
        q = (math.sqrt(max(0.0, b * b + 8 * n * better * d * (1 - d))) - b) / (4 * n)
        variance = n * (2 * q + d * (1 - d))
        return n * d - (worse - better) > Z * math.sqrt(max(0.0, variance))

    low, high = (worse - better) / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if contradicted(middle) else (middle, high)
    return 100 * high


def paired(answers: Iterable[PolicyAnswer], policy: str) -> Paired:
    """Compare the answers of a policy with those of ``full`` to the same questions."""
    lost = [points(full) - points(mine) for mine, full in _both(answers, policy)]
    return Paired(
        len(lost), sum(max(0.0, one) for one in lost) / 100, sum(max(0.0, -one) for one in lost) / 100
    )


def measured(answers: Iterable[PolicyAnswer], policy: str) -> MeasuredPolicy | None:
    """Return the figures of a policy; None if it answered no question that ``full`` answered."""
    both = _both(answers, policy)
    if not both:
        return None
    found = paired((one for pair in both for one in pair), policy)
    low, high = found.interval()
    kl = mean_of(mine.kl for mine, _ in both)
    saved = sum(full.flops for _, full in both) / max(1.0, sum(mine.flops for mine, _ in both))
    figures = {"lost": found.lost, "low": low, "high": high, "saved": saved}
    rounded = {name: round(value, 3) for name, value in figures.items()}
    return MeasuredPolicy(
        policy=policy, questions=found.n, kl=None if kl is None else round(kl, 4), **rounded
    )


def right(answers: Iterable[PolicyAnswer]) -> float | None:
    """Return the points of 100 that ``full`` has; None if it answered nothing."""
    return mean_of(points(one) for one in answers if one.policy == "full" and one.skipped is None)


def _both(answers: Iterable[PolicyAnswer], policy: str) -> list[tuple[PolicyAnswer, PolicyAnswer]]:
    given = {one.key: one for one in answers if one.skipped is None}
    mine = (one for one in given.values() if one.policy == policy)
    pairs = ((one, given.get((*one.key[:3], "full"))) for one in mine)
    return [(one, full) for one, full in pairs if full is not None]


IMAGE_TASKS = frozenset({
    "mmdu", "sparkles", "world-image", "world-image-named", "world-caption", "world-compare", "world-word-level",
    "world-few-shot",
})  # fmt: skip


def kind_of(task: str) -> str | None:
    """Return the kind of chunk that a task's questions are about; None: both in one prompt."""
    find(task)
    if task == "world-mixed":
        return None
    return "image" if task in IMAGE_TASKS else "text"
