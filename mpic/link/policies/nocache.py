"""A control: answer without the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpic.link.plan import ChunkSlot, Policy, Ranges


@dataclass(frozen=True)
class NoCache(Policy):
    """The prompt without its chunks (KV Packet's and EPIC's "no context" control): what the model answers from the
    question alone. The request's own text stays, chunk markers included; a chunk takes neither tokens nor positions."""

    syntax: ClassVar[str] = "nocache"
    uses_chunks: ClassVar[bool] = False
    prefix: ClassVar[bool] = False
    context: ClassVar[bool] = False
    name: ClassVar[str] = "nocache"

    def select(self, chunks: Sequence[ChunkSlot]) -> list[Ranges]:
        return [() for _ in chunks]
