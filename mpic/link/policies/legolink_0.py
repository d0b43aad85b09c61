"""LegoLink-0: recompute nothing over chunks that were compiled behind start tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpic.link import papers
from mpic.link.policy import ChunkPlace, Policy, Ranges, Wrapping


@dataclass(frozen=True)
class LegoLink0(Policy):
    """LegoLink-0 (EPIC, section 5.4): chunks are compiled behind 4 BOS tokens that are dropped afterwards, so that the
    sink forms on them and not on the chunk's first tokens; nothing is recomputed at link."""

    syntax = "legolink-0"
    summary = "Recomputes nothing; images and documents were compiled behind four start tokens."
    paper = papers.EPIC
    wrapping = Wrapping(sink=4)

    @property
    def head(self) -> int:
        return 0

    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        return [() for _ in chunks]
