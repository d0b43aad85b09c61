"""AttnLink: recompute both sides of every boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpic.link import papers
from mpic.link.policy import ChunkPlace, Policy, Ranges
from mpic.method import tokens


@dataclass(frozen=True)
class AttnLink(Policy):
    """AttnLink-k (EPIC v1, section 4.2): recompute ``k`` tokens around every chunk boundary, half of them on each side:
    the last ``k // 2`` and the first ``k - k // 2`` tokens of every chunk."""

    syntax = "attnlink-K"
    summary = "Recomputes K tokens around the boundaries of every image and document."
    paper = papers.EPIC
    examples = ("attnlink-16",)
    k: int = tokens()

    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        tail = self.k // 2
        head = self.k - tail
        ranges: list[Ranges] = []
        for chunk in chunks:
            n = chunk.length
            both = tuple(part for part in ((0, head), (n - tail, n)) if part[0] < part[1])
            ranges.append(((0, n),) if head + tail >= n else both)
        return ranges
