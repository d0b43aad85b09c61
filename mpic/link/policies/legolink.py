"""LegoLink: recompute the head of every chunk but a leading one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpic.link import papers
from mpic.link.policy import ChunkPlace, Policy, Ranges
from mpic.method import tokens


@dataclass(frozen=True)
class LegoLink(Policy):
    """LegoLink-k (EPIC, section 4.2): recompute the first ``k`` tokens of every chunk except one that starts the
    prompt, whose sink tokens are already those of the full context."""

    syntax = "legolink-K"
    summary = "Like mpic-K, except for an image or document that starts the prompt."
    paper = papers.EPIC
    examples = ("legolink-16",)
    k: int = tokens(least=1)

    @property
    def head(self) -> int:
        return self.k

    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        return [() if chunk.start == 0 else ((0, min(self.k, chunk.length)),) for chunk in chunks]
