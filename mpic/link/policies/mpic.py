"""MPIC: recompute the head of every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpic.link import papers
from mpic.link.policy import ChunkPlace, Policy, Ranges
from mpic.method import tokens


@dataclass(frozen=True)
class MPIC(Policy):
    """MPIC-k (MPIC, section 5.2): recompute all text and the first ``k`` tokens of every image, since those attract
    most of the attention. Applied to text chunks too."""

    syntax = "mpic-K"
    summary = "Recomputes the first K tokens of every image and document."
    paper = papers.MPIC
    examples = ("mpic-16", "mpic-32")
    k: int = tokens()

    @property
    def head(self) -> int:
        return self.k

    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        return [((0, min(self.k, chunk.length)),) for chunk in chunks]
