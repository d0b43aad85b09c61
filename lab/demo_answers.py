"""The answers of ``mpic demo``, and the headline that follows from them.

The headline is the case that MPIC is made for: questions over eight images that earlier prompts had in another order,
so that prefix caching, which is on, finds none of them. Everything else is equal for the compared policies: the server
is warm, features of the images are kept, and no other request runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PASSES = ("first", "again")
WARM = "warm"
"""The rounds: common questions are asked twice, those of the headline once everything is warm."""
EIGHT_IMAGES = "eight-images"
"""The kind of the headline's questions in the manifest."""
BASELINE, MUST_BE_RIGHT = "prefix", "mpic-16"
"""The policies of the headline; the demo fails if the second one misses an answer."""


@dataclass(frozen=True)
class DemoAnswer:
    """An answer under one policy. Times are in milliseconds; ``tiers`` are the places the chunks' KV came from."""

    question: str
    policy: str
    turn: str
    answer: str
    right: bool
    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    reused: int
    recomputed: int
    prefix_hit: int
    compiled: int
    tiers: tuple[str, ...]


@dataclass(frozen=True)
class Headline:
    """The comparison of ``prefix`` with ``mpic-16``.

    Attributes:
        prefix_over_mpic: time to the first token over eight images, the median of the questions' ratios.
        right_prefix, right_mpic: number of questions of all kinds that were answered correctly each time.
        asked: number of questions.
    """

    prefix_over_mpic: float
    right_prefix: int
    right_mpic: int
    asked: int


def headline_of(asked: Sequence[DemoAnswer]) -> Headline | None:
    """Return the headline; None where one of its two policies or its questions were not asked."""
    ratios = ratios_to(asked, MUST_BE_RIGHT)
    if not ratios:
        return None
    return Headline(
        round(statistics.median(ratios), 3),
        len(right_of(asked, BASELINE)),
        len(right_of(asked, MUST_BE_RIGHT)),
        len({answer.question for answer in asked}),
    )


def ratios_to(asked: Iterable[DemoAnswer], policy: str) -> list[float]:
    """Return the speed-up of the first token against ``prefix``, one ratio for each question over eight images."""
    times = {(a.policy, a.question): a.ttft_ms for a in asked if a.turn == WARM}
    return [times[BASELINE, q] / ms for (p, q), ms in times.items() if p == policy and (BASELINE, q) in times]


def right_of(asked: Iterable[DemoAnswer], policy: str) -> set[str]:
    """Return the questions that a policy answered correctly each time."""
    mine = [answer for answer in asked if answer.policy == policy]
    return {answer.question for answer in mine} - {answer.question for answer in mine if not answer.right}
