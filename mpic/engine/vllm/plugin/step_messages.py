"""Messages of one step between the two sides of the connector: the scheduler's instructions, the workers' report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from mpic.engine.vllm.plugin.host_memory import CachedFile
from mpic.errors import OutOfMemory
from mpic.link import Ranges
from mpic.memory import is_exhaustion


class EndReason(NamedTuple):
    """The reason why a request ends: a stable code and a sentence."""

    code: str
    message: str

    @classmethod
    def of(cls, error: Exception, code: str, message: str) -> EndReason:
        """Return the fault for an error. Lack of memory has a code of its own, whatever operation failed, because the
        caller may try again."""
        short = isinstance(error, OutOfMemory) or is_exhaustion(error)
        return cls(OutOfMemory.code if short else code, message)


class PlacedChunk(NamedTuple):
    """A chunk at its place in a prompt (as in ``wire.ChunkRef``), with its file."""

    chunk: CachedFile
    start: int
    length: int
    base: int


@dataclass(frozen=True)
class LinkStart:
    """A link is admitted (or admitted again, after a preemption).

    Args:
        length: tokens of its prompt.
        hit: tokens found in the prefix cache; nothing before them is written.
        rows: half-open ranges that are computed, as in ``wire.LinkOrder``. chunks: chunks whose tokens are mapped or
        whose embeddings are needed.
    """

    length: int
    hit: int
    rows: Ranges
    chunks: tuple[PlacedChunk, ...]


class ResidentSpan(NamedTuple):
    """A part of a resident chunk that a prompt maps.

    Args:
        blocks: the chunk's blocks of the paged cache, in order.
        lo, hi: its tokens, half-open.
        base: positions between those at which its keys were compiled and those in the prompt.
        row: the first of the request's own tokens that sees it.
    """

    blocks: tuple[int, ...]
    lo: int
    hi: int
    base: int
    row: int


@dataclass(frozen=True)
class SharedStart:
    """A link that maps resident chunks is admitted (or admitted again, after a preemption).

    Args:
        length: tokens of its prompt, of which ``rows`` are vLLM's whole sequence.
        rows: half-open ranges that are computed, as in ``wire.LinkOrder``.
        spans: the mapped parts of chunks, in prompt order.
        chunks: all chunks of the order; their KV is not read from this message.
    """

    length: int
    rows: Ranges
    spans: tuple[ResidentSpan, ...]
    chunks: tuple[PlacedChunk, ...]


class ChunkFill(NamedTuple):
    """A chunk that becomes resident in this step: the digest of its key, its file, and its blocks in order."""

    key: str
    file: CachedFile
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class ChunkExport:
    """A prompt whose last tokens are computed in this step and whose KV is then exported.

    Args:
        folder: absolute; it exists.
        skip: sink tokens in front, which are not exported.
        token_ids: the whole prompt.
        blocks: the prompt's blocks in the paged cache, in order. They are kept until every worker has read them.
    """

    folder: str
    skip: int
    token_ids: Sequence[int]
    blocks: tuple[int, ...]


@dataclass
class StepInstructions(KVConnectorMetadata):
    """The links that start and the chunks that are exported in one step, by request id, and those that become
    resident."""

    links: dict[str, LinkStart] = field(default_factory=dict)
    shared: dict[str, SharedStart] = field(default_factory=dict)
    loads: list[ChunkFill] = field(default_factory=list)
    exports: dict[str, ChunkExport] = field(default_factory=dict)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """The results of one worker in one step, by request id.

    Args:
        placed: links whose chunks are all in the paged cache as of this step, with the seconds spent on placing them.
        faults: requests that must end.
        lost: blocks of chunks that could not be loaded, with the reason why.
    """

    placed: dict[str, float] = field(default_factory=dict)
    faults: dict[str, EndReason] = field(default_factory=dict)
    lost: dict[tuple[int, ...], EndReason] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        placed = {
            request: max(self.placed.get(request, 0.0), other.placed.get(request, 0.0))
            for request in {**self.placed, **other.placed}
        }
        return StepReport(placed, {**other.faults, **self.faults}, {**other.lost, **self.lost})
