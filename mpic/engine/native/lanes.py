"""What a step can contain: rows of requests and rows of chunks being compiled. Both are *lanes*: tokens in sequence
order whose keys and values go to an extent, plus the spans they see besides."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from mpic.engine.base import GenerationRequest, StoredChunk, Usage
from mpic.engine.detokenize import Detokenizer
from mpic.engine.native.sampling import Sampler
from mpic.engine.stream import Stream
from mpic.kv.chunk import Chunk, ChunkInputs, KVKey
from mpic.kv.device import Resident
from mpic.kv.pool import Extent
from mpic.kv.prefix import Item, Node
from mpic.link.plan import LinkPlan, SegmentShape
from mpic.prompt.segments import Segment, TextSegment


class MappedSpan(NamedTuple):
    """Slots ``[lo, hi)`` of an extent, seen by own tokens from index ``row`` on, rotated as if it began at ``base``."""

    extent: Extent
    lo: int
    hi: int
    base: int
    row: int


class Piece(NamedTuple):
    """Own tokens with embeddings of their own (image tokens): own indices ``[start, start + n)``."""

    start: int
    embeds: torch.Tensor
    deepstack: torch.Tensor | None


@dataclass(eq=False)
class Lane:
    """Tokens to compute. Token i (``mapped <= i``) lives at slot ``i - mapped`` of ``extent``.

    ``computed`` tokens have their KV; ``mapped`` of them come from the prefix cache. ``positions [p, tokens]``.
    """

    ids: list[int]
    positions: torch.Tensor
    pieces: list[Piece] = field(default_factory=list)
    extent: Extent | None = None
    spans: list[MappedSpan] = field(default_factory=list)
    mapped: int = 0
    computed: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(eq=False)
class CompileLane(Lane):
    """A chunk being compiled behind ``sink`` BOS tokens; its extent is the resident's."""

    resident: Resident | None = None


def compile_lane(inputs: ChunkInputs, sink: int, bos: int) -> CompileLane:
    """Rows of a chunk compiled alone at positions 0.. (``sink`` BOS tokens first)."""
    heads = torch.arange(sink).expand(inputs.positions.shape[0], sink)
    positions = torch.cat([heads, inputs.positions + sink], 1)
    pieces = [Piece(sink, inputs.embeds, inputs.deepstack)] if inputs.embeds is not None else []
    return CompileLane([bos] * sink + inputs.token_ids.tolist(), positions, pieces)


@dataclass(eq=False)
class LinkedChunk:
    """One chunk of a request: what it is and where its KV is."""

    chunk: Chunk
    key: KVKey
    inputs: ChunkInputs
    stored: StoredChunk | None
    reason: str | None
    resident: Resident | None = None
    tier: str = "none"
    ms: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.inputs)


@dataclass(eq=False)
class Sequence(Lane):
    """A request. ``ids`` are its own prompt tokens followed by what it has generated; what retrieval inserts comes
    between (``extend.py``), and ``segments`` and ``plan`` then cover everything up to there."""

    request: GenerationRequest = None
    plan: LinkPlan = None
    linked: list[LinkedChunk] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    stream: Stream = None
    sampler: Sampler = None
    detokenizer: Detokenizer = None
    max_tokens: int = 0
    prompt_own: int = 0
    path: list[Node] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    ready: float = 0.0
    first_token: float = 0.0
    needed: list[LinkedChunk] = field(default_factory=list)
    """Chunks of which the plan maps at least one token; one linked twice stands here twice."""
    shapes: list[SegmentShape] = field(default_factory=list)
    undecided: bool = False
    """A dynamic policy has yet to look at the prompt: the plan has the right size but not the right tokens."""
    segments: tuple[Segment, ...] = ()
    inserted: int = 0
    searching: bool = False
    """Paused: it keeps what it holds, and no row of it is computed."""
    resumed: float = 0.0
    """When a search ended whose first token is still to come."""

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt_own - self.inserted

    def append(self, token: int) -> None:
        """A generated token: the next own token, at the position after everything before it."""
        position = self.plan.extent + len(self.ids) - self.plan.own
        self.ids.append(token)
        self.items.append(token)
        column = torch.full((self.positions.shape[0], 1), position, dtype=torch.int64)
        self.positions = torch.cat([self.positions, column], 1)


class Own(NamedTuple):
    """Own tokens in sequence order; ``pieces`` start at indices into ``ids``."""

    ids: list[int]
    positions: list[torch.Tensor]
    pieces: list[Piece]
    items: list[Item]


def lay_out(
    segments: tuple[Segment, ...], plan: LinkPlan, linked: list[LinkedChunk], mrope: int, since: int = 0
) -> Own:
    """Own tokens from sequence index ``since`` on (where a segment begins), their positions, and the items that
    identify them in the prefix cache."""
    own = Own([], [], [], [])
    columns: list[np.ndarray] = []  # many short pieces, for which numpy is quicker
    chunk_of = {}
    digests = [one.key.digest for one in linked]
    for i, segment in enumerate(segments):
        if not isinstance(segment, TextSegment):
            chunk_of[i] = linked[len(chunk_of)]
    placed = sorted(
        [
            *((run.start, run) for run in plan.runs),
            *((s.lo + plan.slots[s.chunk].start, s) for s in plan.spans),
        ],
        key=lambda pair: pair[0],
    )
    for start, part in placed:
        if start < since:
            continue
        if hasattr(part, "chunk"):
            own.items.append(("span", digests[part.chunk], part.lo, part.hi))
            continue
        segment = segments[part.segment]
        source = segment if isinstance(segment, TextSegment) else chunk_of[part.segment].chunk
        if source.token_ids is not None:  # text, a request's own or a chunk's: positions count up
            new = source.token_ids[part.lo : part.hi]
            at = np.arange(part.lo + part.base, part.hi + part.base, dtype=np.int64)[None].repeat(mrope, 0)
            own.items.extend(new)
        else:
            inputs = chunk_of[part.segment].inputs
            new = inputs.token_ids[part.lo : part.hi].tolist()
            at = inputs.positions.numpy()[:, part.lo : part.hi] + part.base
            if inputs.embeds is not None:
                deep = None if inputs.deepstack is None else inputs.deepstack[:, part.lo : part.hi]
                own.pieces.append(Piece(len(own.ids), inputs.embeds[part.lo : part.hi], deep))
                content = chunk_of[part.segment].key.chunk.digest
                own.items.extend((content, j) for j in range(part.lo, part.hi))
            else:
                own.items.extend(new)
        columns.append(at)
        own.ids.extend(new)
    if columns:
        own.positions.append(torch.from_numpy(np.concatenate(columns, 1)))
    return own


def mapped_chunks(plan: LinkPlan, linked: list[LinkedChunk]) -> list[LinkedChunk]:
    """The chunks of which a plan maps at least one token, in prompt order."""
    used = {span.chunk for span in plan.spans}
    return [one for i, one in enumerate(linked) if i in used]


def build_sequence(
    request: GenerationRequest, plan: LinkPlan, linked: list[LinkedChunk], mrope: int
) -> Sequence:
    """A request as it arrives: its own prompt tokens, nothing computed."""
    own = lay_out(request.prompt.segments, plan, linked, mrope)
    sequence = Sequence(own.ids, torch.cat(own.positions, 1), own.pieces)
    sequence.request, sequence.plan, sequence.linked, sequence.items = request, plan, linked, own.items
    sequence.segments = request.prompt.segments
    sequence.prompt_own = len(own.ids)
    sequence.needed = mapped_chunks(plan, linked)
    return sequence
