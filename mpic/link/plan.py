"""The plan of a link: which tokens of a prompt are computed, which are mapped, and where.

A policy says which chunk tokens a request computes itself; everything else is mapped, not copied. The plan is the
relocation table that follows: the request's own tokens in sequence order and, for every visible part of a chunk, its
base and the first own token that comes after it (``docs/design.md``, "What a link is" and "Spans").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpic.kernels.span import Span
from mpic.link.policy import ChunkPlace, Policy, Ranges


class OwnRun(NamedTuple):
    """A maximal part of the prompt that the request computes: tokens ``[lo, hi)`` of segment ``segment``, whose first
    token has sequence index ``start`` and whose segment has rotary base ``base``."""

    segment: int
    lo: int
    hi: int
    start: int
    base: int


@dataclass(frozen=True)
class LinkPlan:
    """The relocation table of one request, with the facts that running it takes.

    Args:
        policy: name of the policy that made it.
        exact: what is computed equals a full prefill.
        prefix: earlier prefixes of the user may be read, and this request's may be kept.
        two_step: the last own token is computed in a step of its own, and it alone sees the spans.
        length: tokens of the whole prompt.
        rotary_length: rotary positions of the whole prompt; the first generated token sits at this position.
        runs: what is computed, in sequence order.
        spans: what is mapped, in sequence order; a span's source is the chunk's number in the prompt.
        own: number of computed tokens (sum over runs).
        places: one ChunkPlace a chunk, in prompt order.
    """

    policy: str
    exact: bool
    prefix: bool
    two_step: bool
    length: int
    rotary_length: int
    runs: tuple[OwnRun, ...]
    spans: tuple[Span[int], ...]
    own: int
    places: tuple[ChunkPlace, ...]

    def pairs(self, mapped: int = 0, removed: Sequence[int] = ()) -> int:
        """Returns the (query, key) pairs of a layer's attention over the prompt, by the own tokens from index
        ``mapped`` on.

        Args:
            removed: of each chunk, the tokens that a press has removed; empty: none.
        """
        own = self.own * (self.own + 1) // 2 - mapped * (mapped + 1) // 2
        less = removed or [0] * len(self.places)
        return own + sum((s.tokens - less[s.source]) * (self.own - max(mapped, s.row)) for s in self.spans)

    def extends(self, shorter: LinkPlan) -> bool:
        """Returns whether everything of a shorter plan is in this one unchanged."""
        old, chunks = len(shorter.spans), len(shorter.places)
        return self.spans[:old] == shorter.spans and all(span.source >= chunks for span in self.spans[old:])

    def reused(self, chunk: int) -> int:
        """Returns how many tokens of a chunk are linked without recomputation."""
        return sum(s.tokens for s in self.spans if s.source == chunk)


class SegmentShape(NamedTuple):
    """A segment as planning sees it: its tokens, its rotary length, and whether it is a chunk."""

    length: int
    rotary_length: int
    is_chunk: bool


def make_plan(
    segments: Sequence[SegmentShape], policy: Policy, decided: Sequence[Ranges] | None = None
) -> LinkPlan:
    """Lays out the segments, asks the policy, and cuts the prompt into computed runs and mapped spans.

    Args:
        decided: what a dynamic policy chose; None asks ``policy.select``.

    Raises:
        ValueError: the policy chose ranges that are not within a chunk.
    """
    places, starts, bases = [], [], []
    start = base = 0
    for segment in segments:
        starts.append(start)
        bases.append(base)
        if segment.is_chunk:
            places.append(ChunkPlace(segment.length, start, base))
        start += segment.length
        base += segment.rotary_length
    selection = iter(policy.select(places) if decided is None else decided)
    runs: list[OwnRun] = []
    spans: list[Span[int]] = []
    own = chunk = 0
    for i, segment in enumerate(segments):
        recomputed = next(selection) if segment.is_chunk else ((0, segment.length),)
        end = 0  # of what is laid out so far
        for lo, hi in (*recomputed, (segment.length, segment.length)):
            if not end <= lo <= hi <= segment.length:
                raise ValueError(
                    f"{policy}: ranges {recomputed} do not fit a segment of {segment.length} tokens"
                )
            if lo > end:
                spans.append(Span(chunk, end, lo, bases[i], own, starts[i] + end))
            if hi > lo:
                runs.append(OwnRun(i, lo, hi, starts[i] + lo, bases[i]))
                own += hi - lo
            end = hi
        chunk += segment.is_chunk
    if policy.two_step:
        spans = [span._replace(row=max(own - 1, 0)) for span in spans]
    facts = (policy.name, policy.exact, policy.prefix, policy.two_step)
    return LinkPlan(*facts, start, base, tuple(runs), tuple(spans), own, tuple(places))
