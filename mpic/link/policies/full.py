"""Controls: recompute everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpic.link.plan import ChunkSlot, Policy, Ranges


@dataclass(frozen=True)
class Full(Policy):
    """Full prefill of the whole prompt, nothing reused: the quality reference of every paper."""

    syntax: ClassVar[str] = "full"
    exact: ClassVar[bool] = True
    uses_chunks: ClassVar[bool] = False
    prefix: ClassVar[bool] = False
    name: ClassVar[str] = "full"

    def select(self, chunks: Sequence[ChunkSlot]) -> list[Ranges]:
        return [((0, chunk.length),) for chunk in chunks]


@dataclass(frozen=True)
class Prefix(Full):
    """Prefix caching: as ``full``, but the longest prefix that the user's earlier exact requests have computed is
    mapped. The baseline of MPIC (section 5), EPIC and CacheBlend; what vLLM and SGLang do."""

    syntax: ClassVar[str] = "prefix"
    prefix: ClassVar[bool] = True
    name: ClassVar[str] = "prefix"
