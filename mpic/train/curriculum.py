"""What a training step draws at each point of the run."""

from __future__ import annotations

import random
from collections.abc import Iterator

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
    (1.01, (0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 10), Mix()),
)


def draw_example(generator: Generator, encoder: Encoder, progress: float, limit: int) -> Example:
    """One training conversation at this progress of the base stage (1.0: the full mix), at most `limit` tokens."""
    _, counts, mix = next(step for step in _STEPS if progress < step[0])
    while True:
        rng = generator.rng
        example = encoder(generator.training(rng.choice(counts), rng.choice((8, 12, 20)), mix))
        if len(example.ids) <= limit:
            return example


class Batches:
    """Endless batches of similar length under a token budget. `progress` may be set while iterating."""

    def __init__(self, seed: int, encoder: Encoder, tokens: int, pic_share: float = 0.0) -> None:
        self.generator = Generator(seed)
        self.encoder, self.tokens, self.pic_share = encoder, tokens, pic_share
        self.progress = 0.0

    def __iter__(self) -> Iterator[tuple[list[Example], list[int | None] | None]]:
        rng: random.Random = self.generator.rng
        while True:
            limit = min(self.tokens, 2048)
            pool = [draw_example(self.generator, self.encoder, self.progress, limit) for _ in range(_POOL)]
            pool.sort(key=lambda e: len(e.ids))
            groups: list[list[Example]] = [[]]
            for example in pool:
                if groups[-1] and len(example.ids) * (len(groups[-1]) + 1) > self.tokens:
                    groups.append([])
                groups[-1].append(example)
            rng.shuffle(groups)
            for group in groups:
                masked = rng.random() < self.pic_share
                yield group, [rng.choice(PIC_HEADS) for _ in group] if masked else None
