"""The curriculum: the conversations that a training step draws at each point of the run.

A large image has 576 tokens and a document up to 1,000, so most of what a conversation of the second generation costs
is what it is asked about. Its training therefore begins with *small* conversations: of an image only a coarser grid of
its tokens is shown (every third row and column at first), and documents are as short in proportion. Conversations of
full size come in after seven tenths and make up the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from mpic_lab.generator import Conversation, Generator
from mpic_lab.generator.mix import Mix
from mpic_lab.generator.worlds import SECOND
from mpic_lab.train.batch import Encoder, Example, shared_tokens

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
_FULL = Mix(
    ("image", "image", "image", "card", "biography", "needle"),
    named=0.5, search=0.08, compare=0.25, both=0.06, order=0.4, alike=0.4, apart=0.75,
)  # fmt: skip
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
        Mix(_FULL.kinds, named=0.3, search=0.1, compare=0.12, hop=0.15, both=0.04, apart=0.75),
        2048,
        (8,),
    ),
    CurriculumStep(0.70, _FULL_COUNTS, _FULL, 2560, (8, 8, 8, 8, 8, 8, 8, 12)),
    CurriculumStep(0.85, _FULL_COUNTS, _FULL, 4096, (8, 12, 16, 24, 24)),
    # ten whole images are 5,760 tokens; behind eight, 1,500 rows hold the 72 questions
    CurriculumStep(1.01, _FULL_COUNTS, _FULL, 6144, (12, 16, 24, 24, 24, 24)),
)


def grid(rng: random.Random, side: int, full: int) -> list[int]:
    """Returns a regular grid of `side` x `side` tokens out of `full` x `full`, begun anywhere."""
    rows, columns = (
        [int((i + shift) * full / side) for i in range(side)] for shift in (rng.random(), rng.random())
    )
    return [r * full + c for r in rows for c in columns]


class Group(NamedTuple):
    """A conversation, or several that start alike and whose common part is computed once.

    Attributes:
        rows: rows that the model runs over for it.
    """

    examples: list[Example]
    rows: int


def draw_group(
    generator: Generator,
    encoder: Encoder,
    progress: float,
    steps: tuple[CurriculumStep, ...],
    limit: int | None = None,
) -> Group:
    """Draws one training conversation, or questions that are asked one by one over the same chunks, for this progress
    of the base stage (1.0: the full mix). It has at most `limit` rows where its step allows more."""
    step = next(step for step in steps if progress < step.until)
    most = step.limit if limit is None else min(limit, step.limit)
    full, rng = int(encoder.image_tokens**0.5), generator.rng
    while True:
        count, mix, turns, side = rng.choice(step.counts), step.mix, (8, 12, 20), full
        if step.grids:
            side = rng.choice(step.grids)
            mix = replace(mix, words=mix.words or WORDS[side])
            if count * sum(mix.words) / 2 > most:
                continue
            turns = _MANY_TURNS
        apart = mix.apart > 0 and count > 0 and rng.random() < mix.apart
        drawn = (
            generator.training_branches(count, rng.choice(turns), mix)
            if apart
            else [generator.training(count, rng.choice(turns), mix)]
        )
        group = _cut(encoded(encoder, drawn, side, rng.getrandbits(30)), most)
        if group is not None:
            return group


def encoded(encoder: Encoder, conversations: list[Conversation], side: int, seed: int) -> list[Example]:
    """Returns conversations as examples that show a grid of this side of their images, the same of the same image."""
    full = int(encoder.image_tokens**0.5)
    examples = []
    for conversation in conversations:
        rng = random.Random(seed)
        encoder.pick = None if side == full else lambda rng=rng: grid(rng, side, full)
        examples.append(encoder(conversation))
    encoder.pick = None
    return examples


def _cut(examples: list[Example], most: int) -> Group | None:
    """Returns as many of the examples as have `most` rows together; none if not even one does."""
    shared = shared_tokens(examples)
    rows = kept = 0
    for example in examples:
        own = len(example.ids) - (shared if kept else 0)
        if rows + own > most:
            break
        rows, kept = rows + own, kept + 1
    return Group(examples[:kept], rows) if kept else None


def fill(groups: list[Group], tokens: int) -> list[list[Group]]:
    """Returns batches of at most `tokens` rows together: the longest first, each in the first that has room."""
    batches: list[list[Group]] = []
    left: list[int] = []
    for group in sorted(groups, key=lambda g: -g.rows):
        place = next((i for i, room in enumerate(left) if room >= group.rows), None)
        if place is None:
            place = len(batches)
            batches.append([])
            left.append(tokens)
        batches[place].append(group)
        left[place] -= group.rows
    return batches


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
        draw: Callable[[float], Group],
        tokens: int,
        common_seed: int,
        pic_share: float = 0.0,
        pic_heads: tuple[int, ...] = (),
    ) -> None:
        self.generator, self.draw, self.tokens = generator, draw, tokens
        self.common = random.Random(common_seed)
        self.pic_share, self.pic_heads = pic_share, pic_heads
        self.progress = 0.0

    def __iter__(self) -> Iterator[tuple[list[list[Example]], list[int | None]]]:
        """Yields the groups of a batch, and the head length of each (none: ordinary causal attention)."""
        rng: random.Random = self.generator.rng
        pool: list[Group] = []
        ready: list[list[Group]] = []
        while True:
            while len(ready) < _READY:
                pool += [self.draw(self.progress) for _ in range(_READY)]
                batches = fill(pool, self.tokens)
                full = [b for b in batches if _size(b) >= 0.9 * self.tokens]
                if not full and len(pool) < 4 * _READY:
                    continue  # nothing fits together yet
                ready += full or batches
                pool = [g for b in batches if _size(b) < 0.9 * self.tokens for g in b] if full else []
            ready.sort(key=_size)
            batch = ready.pop(int(self.common.random() * len(ready)))
            masked = self.common.random() < self.pic_share
            heads = [rng.choice(self.pic_heads) if masked else None for _ in batch]
            yield [group.examples for group in batch], heads


def _size(batch: list[Group]) -> int:
    return sum(group.rows for group in batch)
