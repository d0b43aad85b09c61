"""Policies that recompute the head of every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpic.link.plan import ChunkSlot, Policy, Ranges


@dataclass(frozen=True)
class MPIC(Policy):
    """MPIC-k (MPIC, section 4): recompute all text and the first ``k`` tokens of every image, since those attract most
    of the attention. Applied to text chunks too."""

    k: int
    syntax: ClassVar[str] = "mpic-K"

    @property
    def name(self) -> str:
        return f"mpic-{self.k}"

    def select(self, chunks: Sequence[ChunkSlot]) -> list[Ranges]:
        return [((0, min(self.k, chunk.length)),) for chunk in chunks]


@dataclass(frozen=True)
class LegoLink(Policy):
    """LegoLink-k (EPIC, section 4): recompute the first ``k`` tokens of every chunk except one that starts the
    prompt, whose sink tokens are already those of the full context."""

    k: int
    syntax: ClassVar[str] = "legolink-K"

    @property
    def name(self) -> str:
        return f"legolink-{self.k}"

    def select(self, chunks: Sequence[ChunkSlot]) -> list[Ranges]:
        return [() if chunk.start == 0 else ((0, min(self.k, chunk.length)),) for chunk in chunks]


@dataclass(frozen=True)
class LegoLink0(Policy):
    """LegoLink-0 (EPIC, section 4): chunks are compiled behind 4 BOS tokens that are dropped afterwards, so that the
    sink forms on them and not on the chunk's first tokens; nothing is recomputed at link."""

    syntax: ClassVar[str] = "legolink-0"
    sink: ClassVar[int] = 4
    name: ClassVar[str] = "legolink-0"

    def select(self, chunks: Sequence[ChunkSlot]) -> list[Ranges]:
        return [() for _ in chunks]
