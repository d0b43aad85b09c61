"""Where every token of a prompt came from, read off the plan of a finished request."""

from __future__ import annotations

from typing import NamedTuple

from mpic.engine.base import TraceSpan
from mpic.engine.native.lanes import Sequence
from mpic.prompt.segments import ChunkSegment


class _Part(NamedTuple):
    """A stretch of the prompt: sequence indices, which of its chunks it belongs to or None, and its state."""

    start: int
    end: int
    chunk: int | None
    state: str


def trace(sequence: Sequence) -> tuple[TraceSpan, ...]:
    """Spans that tile ``[0, prompt tokens)`` in prompt order; see ``TraceSpan``.

    The request's own tokens are computed, except the first ``usage.prefix_hit`` of them; pieces of chunks that the
    plan maps have the state of the tier they came from.
    """
    spans: list[TraceSpan] = []
    last: _Part | None = None
    for part in _parts(sequence):
        if last is not None and (part.chunk, part.state) == (last.chunk, last.state):
            spans[-1] = spans[-1]._replace(end=part.end)
        else:
            spans.append(_show(sequence, part))
        last = part
    return tuple(spans)


def _parts(sequence: Sequence) -> list[_Part]:
    plan, segments = sequence.plan, sequence.segments
    chunk_of: dict[int, int] = {}
    for i, segment in enumerate(segments):
        if isinstance(segment, ChunkSegment):
            chunk_of[i] = len(chunk_of)
    hit = sequence.usage.prefix_hit
    own = 0
    parts: list[_Part] = []
    for run in plan.runs:
        chunk = chunk_of.get(run.segment)
        computed = "new" if chunk is None else "recomputed"
        n = run.hi - run.lo
        found = min(max(hit - own, 0), n)
        if found:
            parts.append(_Part(run.start, run.start + found, chunk, "prefix"))
        if n > found:
            parts.append(_Part(run.start + found, run.start + n, chunk, computed))
        own += n
    for span in plan.spans:
        start, tier = plan.slots[span.chunk].start, sequence.linked[span.chunk].tier
        parts.append(_Part(start + span.lo, start + span.hi, span.chunk, tier))
    return sorted(parts, key=lambda part: part.start)


def _show(sequence: Sequence, part: _Part) -> TraceSpan:
    if part.chunk is None:
        return TraceSpan(part.start, part.end, part.state, "text", None, None)
    chunk = sequence.linked[part.chunk].chunk
    kind = "image" if chunk.kind == "image" else "document"
    return TraceSpan(part.start, part.end, part.state, kind, chunk.label, chunk.file_id)
