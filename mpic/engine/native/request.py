"""A request: how its prompt is linked, which status it has, what it computes and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch

from mpic.engine.base import GenerationRequest, GenerationUsage
from mpic.engine.detokenize import Detokenizer
from mpic.engine.native.batch import EmbeddedTokens, Rows
from mpic.engine.native.sampling import Sampler
from mpic.engine.stream import DeltaStream
from mpic.errors import IntegrityError
from mpic.kernels.span import Span
from mpic.kv.chunk import Chunk, ChunkInputs, KVKey
from mpic.kv.device import Resident
from mpic.kv.prefix import Item, Node
from mpic.kv.store import StoredChunk
from mpic.link import LinkPlan, SegmentShape
from mpic.prompt.segments import Segment, TextSegment


class Status(Enum):
    """Where a request is; ``_NEXT`` says what may follow."""

    WAITING = auto()
    """It is in the queue for admission and holds no memory."""
    DECIDING = auto()
    """It is admitted. Its dynamic policy looks at the prompt as soon as all chunks are ready."""
    RUNNING = auto()
    """It is admitted. Its rows are computed as soon as the chunks that they see are ready."""
    SEARCHING = auto()
    """It is paused for a search: it keeps its memory, and no row of it is computed."""
    PREEMPTED = auto()
    """It was preempted while it searches: it holds no memory, and queues again when the search ends."""
    FINISHED = auto()
    """It was answered, aborted or failed, and holds no memory."""

    @property
    def admitted(self) -> bool:
        """True while the request holds memory."""
        return self in (Status.DECIDING, Status.RUNNING, Status.SEARCHING)


_NEXT: dict[Status, tuple[Status, ...]] = {
    Status.WAITING: (Status.DECIDING, Status.RUNNING, Status.FINISHED),
    Status.DECIDING: (Status.RUNNING, Status.WAITING, Status.FINISHED),
    Status.RUNNING: (Status.SEARCHING, Status.WAITING, Status.FINISHED),
    Status.SEARCHING: (Status.RUNNING, Status.PREEMPTED, Status.FINISHED),
    Status.PREEMPTED: (Status.WAITING, Status.FINISHED),
    Status.FINISHED: (),
}


@dataclass(eq=False)
class LinkedChunk:
    """One chunk of a request: what it is and where its KV is; see ``ChunkUse`` for ``tier`` and ``reason``. ``packet``
    of its tokens are an adapter's."""

    chunk: Chunk
    key: KVKey
    inputs: ChunkInputs
    stored: StoredChunk | None
    reason: str | None
    resident: Resident | None = None
    tier: str = "none"
    ms: float = 0.0
    packet: int = 0

    @property
    def tokens(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, eq=False)
class LinkedPrompt:
    """A prompt and how it is linked. It is replaced as a whole when a policy decides or retrieval extends it.

    Attributes:
        segments: the prompt; after an extension also what the model has generated up to there.
        needed: the chunks of which the plan maps at least one token. One that is linked twice is in here twice.
        undecided: the segments' shapes while a dynamic policy has yet to choose tokens: the plan has the right size but
            not the right tokens, and every chunk is needed. Empty otherwise.
    """

    segments: tuple[Segment, ...]
    plan: LinkPlan
    chunks: list[LinkedChunk]
    needed: list[LinkedChunk]
    undecided: tuple[SegmentShape, ...] = ()


def mapped_chunks(plan: LinkPlan, chunks: list[LinkedChunk]) -> list[LinkedChunk]:
    """Returns the chunks of which a plan maps at least one token, in prompt order."""
    mapped = {span.source for span in plan.spans}
    return [chunk for i, chunk in enumerate(chunks) if i in mapped]


class OwnTokens(NamedTuple):
    """Own tokens in sequence order, ``positions [p, tokens]``. ``items`` identify them, and the spans between them, in
    the prefix cache."""

    ids: list[int]
    positions: torch.Tensor
    embedded: list[EmbeddedTokens]
    items: list[Item]

    def rows(self) -> Rows:
        return Rows(self.ids, self.positions, self.embedded)


def own_tokens(
    segments: tuple[Segment, ...], plan: LinkPlan, chunks: list[LinkedChunk], mrope: int, since: int = 0
) -> OwnTokens:
    """Returns the own tokens from sequence index ``since`` on, where a segment must begin.

    Args:
        chunks: the prompt's, in order.
        mrope: rotary axes (p).
    """
    ids: list[int] = []
    embedded: list[EmbeddedTokens] = []
    items: list[Item] = []
    columns = [np.empty((mrope, 0), np.int64)]  # many short pieces, for which numpy is quicker than torch
    following = iter(chunks)
    chunk_of = {
        i: next(following) for i, segment in enumerate(segments) if not isinstance(segment, TextSegment)
    }
    parts = [
        *((run.start, run) for run in plan.runs),
        *((plan.places[span.source].start + span.lo, span) for span in plan.spans),
    ]
    for start, part in sorted(parts, key=lambda pair: pair[0]):
        if start < since:
            continue
        if isinstance(part, Span):
            items.append(("span", chunks[part.source].key.digest, part.lo, part.hi))
            continue
        segment, chunk = segments[part.segment], chunk_of.get(part.segment)
        if chunk is None or chunk.inputs.embeds is None:  # text: positions count up
            new = list((segment if chunk is None else chunk.chunk).token_ids[part.lo : part.hi])
            positions = np.arange(part.lo + part.base, part.hi + part.base, dtype=np.int64)[None]
            columns.append(positions.repeat(mrope, 0))
            items += new
        else:
            inputs = chunk.inputs
            new = inputs.token_ids[part.lo : part.hi].tolist()
            columns.append(inputs.positions.numpy()[:, part.lo : part.hi] + part.base)
            deepstack = None if inputs.deepstack is None else inputs.deepstack[:, part.lo : part.hi]
            embedded.append(EmbeddedTokens(len(ids), inputs.embeds[part.lo : part.hi], deepstack))
            items += ((chunk.key.chunk.digest, j) for j in range(part.lo, part.hi))
        ids += new
    return OwnTokens(ids, torch.from_numpy(np.concatenate(columns, 1)), embedded, items)


@dataclass
class Times:
    """When a request got how far (``time.monotonic``); 0 before that."""

    admitted: float = 0.0  # for the first time
    ready: float = 0.0  # the last of its chunks was loaded
    first_token: float = 0.0
    resumed: float = 0.0  # its search ended; back to 0 with the next token


@dataclass(eq=False)
class Request(Rows):
    """A request. Its rows are the own tokens of its prompt, what it has generated, and what retrieval has inserted
    between generated tokens (``extend.py``). ``items`` identify them in the prefix cache, of which it maps ``path``."""

    spec: GenerationRequest = None
    prompt: LinkedPrompt = None
    items: list[Item] = field(default_factory=list)
    stream: DeltaStream = None
    sampler: Sampler = None
    detokenizer: Detokenizer = None
    arrived: float = 0.0
    max_tokens: int = 0
    path: list[Node] = field(default_factory=list)
    status: Status = Status.WAITING
    times: Times = field(default_factory=Times)
    usage: GenerationUsage = field(default_factory=GenerationUsage)

    def become(self, status: Status) -> None:
        """Changes the status.

        Raises:
            IntegrityError: the new status may not follow the present one.
        """
        if status not in _NEXT[self.status]:
            raise IntegrityError(f"a request cannot go from {self.status.name} to {status.name}")
        self.status = status

    @property
    def generated(self) -> int:
        """Generated tokens."""
        return self.usage.completion_tokens

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.max_tokens - self.generated

    @property
    def own_prompt(self) -> int:
        """Own tokens of the prompt, inserted ones included."""
        return len(self.ids) - self.generated

    @property
    def since_plan(self) -> int:
        """Tokens generated since the plan was made."""
        return len(self.ids) - self.prompt.plan.own

    def append(self, token: int) -> None:
        """Adds a generated token behind everything before it."""
        n, plan = len(self.ids), self.prompt.plan
        if (
            n == self.positions.shape[1]
        ):  # doubled, so that a long answer does not copy all positions for each token
            self.positions = torch.cat([self.positions, torch.empty_like(self.positions)], 1)
        self.positions[:, n] = plan.rotary_length + self.since_plan
        self.ids.append(token)
        self.items.append(token)
        self.usage.completion_tokens += 1

    def decide(self, prompt: LinkedPrompt, own: OwnTokens) -> None:
        """Takes the tokens that a dynamic policy has chosen in place of the provisional ones."""
        self.prompt = prompt
        self.ids, self.positions, self.embedded, self.items = own

    def extend(self, prompt: LinkedPrompt, own: OwnTokens, max_tokens: int) -> None:
        """Adds what retrieval inserts behind everything before it."""
        n = len(self.ids)
        self.prompt, self.max_tokens = prompt, max_tokens
        self.positions = torch.cat([self.positions[:, :n], own.positions], 1)
        self.embedded = [*self.embedded, *(EmbeddedTokens(e.start + n, *e[1:]) for e in own.embedded)]
        self.ids += own.ids
        self.items += own.items

    def places(self) -> np.ndarray:
        """See ``Rows.places``: own tokens lie between chunks, and generated ones behind the prompt."""
        plan = self.prompt.plan
        generated = np.arange(plan.length, plan.length + self.since_plan)
        return np.concatenate([*(np.arange(r.start, r.start + r.hi - r.lo) for r in plan.runs), generated])

    @property
    def blocks(self) -> Sequence[tuple[int, int]]:
        return self.prompt.plan.blocks

    @property
    def namespace(self) -> tuple[str, ...]:
        """Its prefix namespace: exact KV of a user, or KV that a user linked under one policy (and so one recipe).
        Neither is ever found through the other."""
        plan, user = self.prompt.plan, self.spec.user
        return ("exact", user) if plan.exact else ("linked", user, plan.policy)

    def map(self) -> None:
        """Maps all that its rows see: its prefix nodes at base 0, then its chunks. Called when the nodes have just been
        matched: a node that is split later is only the rest of the one that was mapped."""
        nodes = [node for node in self.path if node.own_tokens]
        self.spans = [Span(node.shared.extent, node.lo, node.lo + node.own_tokens) for node in nodes]
        self.map_chunks(self.prompt.needed)

    def map_chunks(self, chunks: Sequence[LinkedChunk]) -> None:
        """Maps what the plan maps of some of its chunks."""
        wanted = {id(linked) for linked in chunks}
        for span in self.prompt.plan.spans:
            linked = self.prompt.chunks[span.source]
            if id(linked) in wanted:
                resident, first = linked.resident, linked.resident.first
                base = span.base - linked.key.recipe.sink
                slots = (first + span.lo, first + span.hi)
                self.spans.append(Span(resident.extent, *slots, base, *span[4:]))
