"""Full prefill: recompute everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpic.link.policy import ChunkPlace, Policy, Ranges


@dataclass(frozen=True)
class Full(Policy):
    """Full prefill of the whole prompt, nothing reused: the quality reference of every paper."""

    syntax = "full"
    summary = "Computes everything and reuses nothing. The reference for quality."
    exact = True
    uses_chunks = False
    prefix = False

    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        return [((0, chunk.length),) for chunk in chunks]
