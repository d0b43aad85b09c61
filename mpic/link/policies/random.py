"""A control: recompute randomly chosen tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mpic.link.policy import ChunkPlace, Policy, Ranges, ranges_of
from mpic.method import percent


@dataclass(frozen=True)
class Random(Policy):
    """Random-r: recompute ``r`` percent of each chunk's tokens, drawn uniformly. A control of KV Packet, which shows
    the effect of the budget alone. The draw depends only on ``r``, the chunk's length and its place among the chunks,
    so a request selects the same tokens every time."""

    syntax = "random-R"
    summary = "Recomputes a random R percent of every image and document. A control."
    examples = ("random-15",)
    r: int = percent()

    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        return [self._draw(i, chunk.length) for i, chunk in enumerate(chunks)]

    def _draw(self, index: int, length: int) -> Ranges:
        count = min(length, round(length * self.r / 100))
        chosen = sorted(random.Random(f"{self.r}:{index}:{length}").sample(range(length), count))
        return ranges_of(chosen)
