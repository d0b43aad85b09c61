"""Full reuse: link every chunk as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpic.link import papers
from mpic.link.policy import ChunkPlace, Policy, Ranges


@dataclass(frozen=True)
class Reuse(Policy):
    """Full reuse ("naive" in EPIC, "full reuse" in MPIC, section 3.2): no chunk token is recomputed, only text."""

    syntax = "reuse"
    summary = "Recomputes nothing of images and documents. Fastest, and the least exact."
    paper = papers.MPIC

    @property
    def head(self) -> int:
        return 0

    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        return [() for _ in chunks]
