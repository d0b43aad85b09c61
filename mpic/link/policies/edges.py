"""Policies that recompute other fixed places of every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpic.link.plan import ChunkSlot, Policy, Ranges


@dataclass(frozen=True)
class AttnLink(Policy):
    """AttnLink-k (EPIC, section 4): recompute ``k`` tokens around every chunk boundary, half of them on each side: the
    last ``k // 2`` and the first ``k - k // 2`` tokens of every chunk."""

    k: int
    syntax: ClassVar[str] = "attnlink-K"

    @property
    def name(self) -> str:
        return f"attnlink-{self.k}"

    def select(self, chunks: Sequence[ChunkSlot]) -> list[Ranges]:
        tail = self.k // 2
        head = self.k - tail
        ranges: list[Ranges] = []
        for chunk in chunks:
            n = chunk.length
            whole = head + tail >= n
            ranges.append(((0, n),) if whole else tuple(r for r in ((0, head), (n - tail, n)) if r[0] < r[1]))
        return ranges


@dataclass(frozen=True)
class Block(Policy):
    """Block-level recomputation (MEPIC, section 4): recompute the first ``n`` pages of every chunk, so that only they
    are the request's own and all other pages stay shared. A page has ``PAGE`` tokens, as in the paper's engine,
    whatever the page size of the pool."""

    n: int
    syntax: ClassVar[str] = "block-N"
    PAGE: ClassVar[int] = 16

    @property
    def name(self) -> str:
        return f"block-{self.n}"

    def select(self, chunks: Sequence[ChunkSlot]) -> list[Ranges]:
        return [((0, min(self.n * self.PAGE, chunk.length)),) for chunk in chunks]
