"""What the two sides of the connector tell each other in a step: the scheduler's orders, the workers' report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from mpic.engine.vllm.files import HostChunk
from mpic.link.plan import Ranges


class Fault(NamedTuple):
    """Why a request ended, or a chunk was not linked: a stable code and a sentence."""

    code: str
    message: str


class Linked(NamedTuple):
    """A chunk in a prompt, as ``wire.ChunkRef`` says, with its file."""

    chunk: HostChunk
    start: int
    length: int
    base: int


@dataclass(frozen=True)
class LinkStart:
    """A link is admitted (or admitted again, after a preemption).

    Args:
        length: tokens of its prompt.
        hit: tokens found in the prefix cache: nothing in front of it is written.
        rows: half-open ranges that are computed, as ``wire.LinkOrder.rows``.
        chunks: whose tokens are mapped, or whose embeddings are needed.
    """

    length: int
    hit: int
    rows: Ranges
    chunks: tuple[Linked, ...]


@dataclass(frozen=True)
class CompileEnd:
    """A compile prompt is computed to its end in this step.

    Args:
        folder: absolute; exists.
        skip: sink tokens in front.
        blocks: of the paged cache, in order.
    """

    folder: str
    skip: int
    blocks: tuple[int, ...]


@dataclass
class StepOrders(KVConnectorMetadata):
    """What happens to links and compiles in one step, by request id."""

    links: dict[str, LinkStart] = field(default_factory=dict)
    compiles: dict[str, CompileEnd] = field(default_factory=dict)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What a worker did in one step, by request id.

    Args:
        placed: links whose whole KV is in the paged cache since this step, with the seconds that took.
        faults: requests that must not go on.
    """

    placed: dict[str, float] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        placed = {
            request: max(self.placed.get(request, 0.0), other.placed.get(request, 0.0))
            for request in {**self.placed, **other.placed}
        }
        return StepReport(placed, {**other.faults, **self.faults})
