"""The curriculum: the conversations that a training step draws at each point of the run.

A large image has 576 tokens and a document up to 1,000, so most of what a conversation of the second generation costs
is what it is asked about. Its training therefore begins with *small* conversations: of an image only a coarser grid of
its tokens is shown (every third row and column at first), and documents are as short in proportion. Conversations of
full size come in at three quarters and make up the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from mpic.data.generator import Generator
from mpic.data.generator.mix import Mix
from mpic.data.generator.worlds import SECOND
from mpic.train.batch import Encoder, Example

LIMIT = 2048
"""Tokens of a conversation of the first generation."""
WORDS = {8: (40, 110), 12: (70, 250), 16: (130, 450), 24: SECOND.words}
"""Words of a document by the side of the grid that is shown of an image."""
_READY = 24
_MANY_TURNS = (32, 48, 72)
"""Questions that are drawn for a conversation of the second generation; those drawn twice are asked once. Its chunks
are long, and only answers have a loss: with 12 to 28 questions they were 2 to 7 % of the tokens."""


class CurriculumStep(NamedTuple):
    """A part of the base stage.

    Attributes:
        until: the share of the stage at which it ends.
        counts: numbers of chunks.
        limit: the most tokens of a conversation.
        grids: sides of the grid that is shown of an image; none: all of it is shown.
    """

    until: float
    counts: tuple[int, ...]
    mix: Mix
    limit: int = LIMIT
    grids: tuple[int, ...] = ()


_FULL_COUNTS = (0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 10)
_FULL = Mix(search=0.1, compare=0.2, both=0.06, order=0.4, alike=0.4)
_KINDS = ("image", "image", "card", "biography", "needle")

SUMMARY_STEPS = (
    CurriculumStep(0.06, (1, 1, 2), Mix(("image", "card"), 0.0, 0.0, 0.0, 0.0, 0.0, (20, 40))),
    CurriculumStep(0.14, (1, 2, 2, 3), Mix(named=0.2, search=0.05, compare=0.05, hop=0.0, words=(20, 60))),
    CurriculumStep(0.30, (1, 2, 2, 3, 3, 4), Mix(named=0.3, search=0.1, compare=0.12, hop=0.15)),
    # chunks of one kind are what the model mixes up: codes of several needles, facts of several cards, who comes last
    CurriculumStep(1.01, _FULL_COUNTS, Mix(search=0.1, compare=0.22, order=0.4, alike=0.4)),
)
PATCH_STEPS = (
    CurriculumStep(0.04, (1, 1, 2), Mix(_KINDS, 0.1, 0.0, 0.0, 0.0, 0.0, (20, 60)), 1024, (8,)),
    CurriculumStep(0.12, (1, 2, 2, 3), Mix(named=0.2, search=0.05, compare=0.05, hop=0.0), 2048, (8,)),
    CurriculumStep(
        0.25,
        (1, 2, 2, 3, 3, 4),
        Mix(named=0.3, search=0.1, compare=0.12, hop=0.15, both=0.04),
        2048,
        (8,),
    ),
    CurriculumStep(0.75, _FULL_COUNTS, _FULL, 2560, (8, 8, 8, 8, 8, 8, 8, 12)),
    CurriculumStep(0.92, _FULL_COUNTS, _FULL, 4096, (8, 12, 16, 24, 24)),
    CurriculumStep(1.01, _FULL_COUNTS, _FULL, 8192, (12, 16, 24, 24, 24, 24)),
)


def grid(rng: random.Random, side: int, full: int) -> list[int]:
    """Returns a regular grid of `side` x `side` tokens out of `full` x `full`, begun anywhere."""
    rows, columns = (
        [int((i + shift) * full / side) for i in range(side)] for shift in (rng.random(), rng.random())
    )
    return [r * full + c for r in rows for c in columns]


def draw_example(
    generator: Generator,
    encoder: Encoder,
    progress: float,
    steps: tuple[CurriculumStep, ...],
    limit: int | None = None,
) -> Example:
    """Draws one training conversation for this progress of the base stage (1.0: the full mix), of at most
    `limit` tokens where its step allows more."""
    step = next(step for step in steps if progress < step.until)
    most = step.limit if limit is None else min(limit, step.limit)
    full, rng = int(encoder.image_tokens**0.5), generator.rng
    while True:
        count, mix, turns = rng.choice(step.counts), step.mix, (8, 12, 20)
        if step.grids:
            side = rng.choice(step.grids)
            mix = replace(mix, words=mix.words or WORDS[side])
            if count * sum(mix.words) / 2 > most:
                continue
            encoder.pick = lambda side=side: grid(rng, side, full)
            turns = _MANY_TURNS
        example = encoder(generator.training(count, rng.choice(turns), mix))
        if len(example.ids) <= most:
            return example


def fill(examples: list[Example], tokens: int) -> list[list[Example]]:
    """Returns groups of at most `tokens` tokens together: the longest first, each in the first that has room."""
    groups: list[list[Example]] = []
    left: list[int] = []
    for example in sorted(examples, key=lambda e: -len(e.ids)):
        size = len(example.ids)
        place = next((i for i, room in enumerate(left) if room >= size), None)
        if place is None:
            place = len(groups)
            groups.append([])
            left.append(tokens)
        groups[place].append(example)
        left[place] -= size
    return groups


class Batches:
    """Endless batches that fill a token budget; a longer conversation is a batch of its own.

    Workers wait for each other at every step, so all of them take a large batch at the same time: which one of those
    at hand a worker takes, counted from the smallest, is drawn from a generator that all workers seed alike.

    Attributes:
        progress: progress of the stage, in [0, 1]; it may be set while iterating.
    """

    def __init__(
        self,
        generator: Generator,
        draw: Callable[[float], Example],
        tokens: int,
        common_seed: int,
        pic_share: float = 0.0,
        pic_heads: tuple[int, ...] = (),
    ) -> None:
        self.generator, self.draw, self.tokens = generator, draw, tokens
        self.common = random.Random(common_seed)
        self.pic_share, self.pic_heads = pic_share, pic_heads
        self.progress = 0.0

    def __iter__(self) -> Iterator[tuple[list[Example], list[int | None] | None]]:
        rng: random.Random = self.generator.rng
        pool: list[Example] = []
        ready: list[list[Example]] = []
        while True:
            while len(ready) < _READY:
                pool += [self.draw(self.progress) for _ in range(_READY)]
                groups = fill(pool, self.tokens)
                full = [g for g in groups if _size(g) >= 0.9 * self.tokens]
                if not full and len(pool) < 4 * _READY:
                    continue  # nothing fits together yet
                ready += full or groups
                pool = [e for g in groups if _size(g) < 0.9 * self.tokens for e in g] if full else []
            ready.sort(key=_size)
            group = ready.pop(int(self.common.random() * len(ready)))
            masked = self.common.random() < self.pic_share
            yield group, [rng.choice(self.pic_heads) for _ in group] if masked else None


def _size(group: list[Example]) -> int:
    return sum(len(e.ids) for e in group)
