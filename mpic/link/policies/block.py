"""Block-level recomputation: recompute the first pages of every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpic.link import papers
from mpic.link.policy import ChunkPlace, Policy, Ranges
from mpic.method import parameter

PAGE = 16
"""Tokens of a page, as in the paper's engine, whatever the page size of the pool."""


@dataclass(frozen=True)
class Block(Policy):
    """Block-level recomputation (MEPIC, section 3.3.1): recompute the first ``n`` pages of every chunk, so that only
    they are the request's own and all other pages stay shared."""

    syntax = "block-N"
    summary = "Recomputes the first N pages (of 16 tokens) of every image and document."
    paper = papers.MEPIC
    examples = ("block-1",)
    n: int = parameter("pages", 1_000_000)

    @property
    def head(self) -> int:
        return self.n * PAGE

    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        return [((0, min(self.n * PAGE, chunk.length)),) for chunk in chunks]
