"""Traces where the tokens of a prompt came from, according to the plan of a finished request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mpic.engine.base import ChunkUse, TraceSpan
from mpic.kv.chunk import Chunk, KVKey
from mpic.link import LinkPlan
from mpic.prompt.segments import ChunkSegment, Segment


class TracedChunk(Protocol):
    """A chunk of a request, as ``ChunkUse`` describes it. ``reason`` says why it was compiled, if it was."""

    chunk: Chunk
    tier: str
    reason: str | None
    ms: float

    key: KVKey

    @property
    def tokens(self) -> int: ...


def chunk_uses(plan: LinkPlan, linked: Sequence[TracedChunk], token_bytes: int) -> tuple[ChunkUse, ...]:
    """Return the use of each chunk, in prompt order.

    Args:
        token_bytes: bytes of the KV of one token.
    """
    uses = []
    for i, one in enumerate(linked):
        reused = plan.reused(i)
        recomputed = plan.places[i].length - reused
        reason = one.reason if one.tier == "compiled" else ("policy" if recomputed else None)
        key, label = str(one.chunk.key), one.chunk.label
        recipe, ms = one.key.recipe, round(one.ms, 3)
        size = recipe.slots(one.tokens) * token_bytes if reused else 0
        counts = (one.tokens, reused, recomputed)
        uses.append(ChunkUse(key, label, *counts, one.tier, reason, ms, recipe.press or None, size))
    return tuple(uses)


class _PromptRange(NamedTuple):
    """Tokens ``[start, end)`` of the prompt, the number of the chunk that they belong to or None, and their state."""

    start: int
    end: int
    chunk: int | None
    state: str


def trace(
    segments: Sequence[Segment], plan: LinkPlan, linked: Sequence[TracedChunk], hit: int
) -> tuple[TraceSpan, ...]:
    """Return spans that tile ``[0, prompt tokens)`` in prompt order; see ``TraceSpan``.

    The request's own tokens are computed, except the first ``hit`` of them. Parts of chunks that the plan maps have
    the state of the tier they came from.
    """
    spans: list[TraceSpan] = []
    last: _PromptRange | None = None
    for part in _parts(segments, plan, linked, hit):
        if last is not None and (part.chunk, part.state) == (last.chunk, last.state):
            spans[-1] = spans[-1]._replace(end=part.end)
        else:
            spans.append(_show(linked, part))
        last = part
    return tuple(spans)


def _parts(
    segments: Sequence[Segment], plan: LinkPlan, linked: Sequence[TracedChunk], hit: int
) -> list[_PromptRange]:
    chunk_of: dict[int, int] = {}
    for i, segment in enumerate(segments):
        if isinstance(segment, ChunkSegment):
            chunk_of[i] = len(chunk_of)
    own = 0
    parts: list[_PromptRange] = []
    for mine in plan.own_ranges:
        chunk = chunk_of.get(mine.segment)
        computed = "new" if chunk is None else "recomputed"
        n = mine.hi - mine.lo
        found = min(max(hit - own, 0), n)
        if found:
            parts.append(_PromptRange(mine.start, mine.start + found, chunk, "prefix"))
        if n > found:
            parts.append(_PromptRange(mine.start + found, mine.start + n, chunk, computed))
        own += n
    for span in plan.spans:
        start, tier = plan.places[span.source].start, linked[span.source].tier
        parts.append(_PromptRange(start + span.lo, start + span.hi, span.source, tier))
    return sorted(parts, key=lambda part: part.start)


def _show(linked: Sequence[TracedChunk], part: _PromptRange) -> TraceSpan:
    if part.chunk is None:
        return TraceSpan(part.start, part.end, part.state, "text", None, None)
    chunk = linked[part.chunk].chunk
    kind = "document" if chunk.kind == "text" else chunk.kind
    return TraceSpan(part.start, part.end, part.state, kind, chunk.label, chunk.file_id)
