"""What a training step of the second generation draws.

A large image has 576 tokens and a document up to 1,000, so most of what a conversation costs is what it is asked about.
Training therefore begins with *small* conversations: of an image only a coarser grid of its tokens is shown (every
third row and column at first), and documents are as short in proportion. Conversations of full size come in from the
second half on and make up the end.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from mpic.data.generator import Generator
from mpic.data.generator.tasks import Mix
from mpic.data.generator.worlds import SECOND
from mpic.train.batch import Encoder, Example

WORDS = {8: (40, 110), 12: (70, 250), 16: (130, 450), 24: SECOND.words}
"""Words of a document by the side of the grid that is shown of an image."""
PIC_HEADS = (8, 16, 32, 32, 64)
_FULL = Mix(search=0.1, compare=0.2, both=0.06, order=0.4, alike=0.4)
_COUNTS = (0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 10)


class Step(NamedTuple):
    """A part of the base stage: up to which share of it, chunk counts, grids, most tokens of a conversation, mix."""

    until: float
    counts: tuple[int, ...]
    grids: tuple[int, ...]
    limit: int
    mix: Mix


_KINDS = ("image", "image", "card", "biography", "needle")
STEPS = (
    Step(0.03, (1, 1, 2), (8,), 1024, Mix(_KINDS, 0.1, 0.0, 0.0, 0.0, 0.0, (20, 60))),
    Step(0.08, (1, 2, 2, 3), (8,), 2048, Mix(named=0.2, search=0.05, compare=0.05, hop=0.0)),
    Step(0.16, (1, 2, 2, 3, 3, 4), (8, 8, 12), 2048, Mix(named=0.3, search=0.1, compare=0.12, hop=0.15, both=0.04)),
    Step(0.50, _COUNTS, (8, 8, 8, 8, 8, 12, 12, 16, 24), 2560, _FULL),
    Step(0.80, _COUNTS, (8, 12, 16, 24, 24), 4096, _FULL),
    Step(1.01, _COUNTS, (12, 16, 24, 24, 24, 24), 8192, _FULL),
)  # fmt: skip


def grid(rng: random.Random, side: int, full: int) -> list[int]:
    """A regular grid of `side` x `side` tokens out of `full` x `full`, begun anywhere."""
    rows, columns = (
        [int((i + shift) * full / side) for i in range(side)] for shift in (rng.random(), rng.random())
    )
    return [r * full + c for r in rows for c in columns]


def draw_example(generator: Generator, encoder: Encoder, progress: float) -> Example:
    """One training conversation at this progress of the base stage."""
    step = next(step for step in STEPS if progress < step.until)
    full, rng = int(encoder.image_tokens**0.5), generator.rng
    while True:
        count, side = rng.choice(step.counts), rng.choice(step.grids)
        words = step.mix.words or WORDS[side]
        if count * sum(words) / 2 > step.limit:
            continue
        encoder.pick = lambda side=side: grid(rng, side, full)
        turns = rng.choice((12, 20, 28) if side < 16 else (20, 28, 36))
        example = encoder(generator.training(count, turns, replace(step.mix, words=words)))
        if len(example.ids) <= step.limit:
            return example
