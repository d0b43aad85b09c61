"""Full reuse: link every chunk as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpic.link.plan import ChunkSlot, Policy, Ranges


@dataclass(frozen=True)
class Reuse(Policy):
    """Full reuse ("naive" in EPIC, "full reuse" in MPIC section 2): no chunk token is recomputed, only text."""

    syntax: ClassVar[str] = "reuse"
    name: ClassVar[str] = "reuse"

    def select(self, chunks: Sequence[ChunkSlot]) -> list[Ranges]:
        return [() for _ in chunks]


@dataclass(frozen=True)
class ReuseTwoStep(Reuse):
    """Full reuse in the two steps of MPIC section 2: the text is prefilled without the chunks, then the last token
    once more over everything. Kept for comparison: it launches two forwards and its text never sees a chunk."""

    syntax: ClassVar[str] = "reuse-2step"
    prefix: ClassVar[bool] = False
    two_step: ClassVar[bool] = True
    name: ClassVar[str] = "reuse-2step"
