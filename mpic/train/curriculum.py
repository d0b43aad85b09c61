"""What a training step draws at each point of the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from mpic.data.generator import Generator
from mpic.data.generator.tasks import Mix
from mpic.train.batch import Encoder, Example

PIC_HEADS = (
    4,
    6,
    8,
    12,
    16,
    16,
    24,
    32,
)  # k of the PIC-aware phase; 0 is left out, so full reuse stays lossy
_POOL = 48

# (share of the base stage, chunk counts, mix)
_STEPS: tuple[tuple[float, tuple[int, ...], Mix], ...] = (
    (0.06, (1, 1, 2), Mix(("image", "card"), 0.0, 0.0, 0.0, 0.0, 0.0, (20, 40))),
    (0.14, (1, 2, 2, 3), Mix(named=0.2, search=0.05, compare=0.05, hop=0.0, words=(20, 60))),
    (0.30, (1, 2, 2, 3, 3, 4), Mix(named=0.3, search=0.1, compare=0.12, hop=0.15)),
    # chunks of one kind are what the model mixes up: codes of several needles, facts of several cards, who comes last
    (
        1.01,
        (0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 10),
        Mix(search=0.1, compare=0.22, order=0.4, alike=0.4),
    ),
)


LIMIT = 2048  # tokens of a conversation


def draw_example(generator: Generator, encoder: Encoder, progress: float, limit: int = LIMIT) -> Example:
    """One training conversation at this progress of the base stage (1.0: the full mix), at most `limit` tokens."""
    _, counts, mix = next(step for step in _STEPS if progress < step[0])
    while True:
        rng = generator.rng
        example = encoder(generator.training(rng.choice(counts), rng.choice((8, 12, 20)), mix))
        if len(example.ids) <= limit:
            return example


def fill(examples: list[Example], tokens: int) -> list[list[Example]]:
    """Groups of at most `tokens` tokens together, the longest first and each where it first fits."""
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

    Attributes:
        progress: of the stage, in [0, 1]; may be set while iterating.
    """

    def __init__(
        self,
        generator: Generator,
        draw: Callable[[float], Example],
        tokens: int,
        pic_share: float = 0.0,
        pic_heads: tuple[int, ...] = PIC_HEADS,
    ) -> None:
        self.generator, self.draw, self.tokens = generator, draw, tokens
        self.pic_share, self.pic_heads = pic_share, pic_heads
        self.progress = 0.0

    def __iter__(self) -> Iterator[tuple[list[Example], list[int | None] | None]]:
        rng: random.Random = self.generator.rng
        pool: list[Example] = []
        while True:
            fresh = [self.draw(self.progress) for _ in range(_POOL)]
            groups = fill(pool + fresh, self.tokens)
            groups, short = [g for g in groups if _filled(g, self.tokens)], groups
            pool = [e for g in short if not _filled(g, self.tokens) for e in g] if groups else []
            groups = groups or short  # nothing fits together
            rng.shuffle(groups)
            for group in groups:
                masked = rng.random() < self.pic_share
                yield group, [rng.choice(self.pic_heads) for _ in group] if masked else None


def _filled(group: list[Example], tokens: int) -> bool:
    return sum(len(e.ids) for e in group) >= 0.9 * tokens
