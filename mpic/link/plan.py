"""The plan of a link: which tokens of a prompt are computed, which are mapped, and where they stand.

A policy says which chunk tokens a request computes itself; all other chunk tokens are mapped, not copied. The plan is
the
relocation table that follows: the request's own tokens in sequence order and, for every visible part of a chunk, its
base and the first own token that comes after it (``docs/design.md``, "What a link is" and "Spans").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpic.kernels.span import Span
from mpic.link.policy import ChunkPlace, Policy, Ranges


class OwnRange(NamedTuple):
    """A maximal range of tokens that the request computes: tokens ``[lo, hi)`` of segment ``segment``, whose first
    token has sequence index ``start`` and whose segment has rotary base ``base``."""

    segment: int
    lo: int
    hi: int
    start: int
    base: int


@dataclass(frozen=True)
class LinkPlan:
    """The relocation table of one request, with the facts needed to run it.

    Args:
        policy: name of the policy that made it.
        exact: True if the computed KV equals a full prefill.
        prefix: True if earlier prefixes of the user may be read, and this request's may be kept.
        two_step: True if the last own token is computed in a separate step and is the only own token that sees the
            spans.
        length: tokens of the whole prompt.
        rotary_length: rotary positions of the whole prompt; the first generated token sits at this position.
        own_ranges: the computed tokens, in sequence order.
        spans: the mapped tokens, in sequence order; a span's source is the chunk's number in the prompt.
        own: number of computed tokens (sum over own ranges).
        places: one ChunkPlace per chunk, in prompt order.
        blocks: own tokens ``[lo, hi)`` that attend to each other in both directions where a model's layers do, as the
            tokens of an image; ascending.
    """

    policy: str
    exact: bool
    prefix: bool
    two_step: bool
    length: int
    rotary_length: int
    own_ranges: tuple[OwnRange, ...]
    spans: tuple[Span[int], ...]
    own: int
    places: tuple[ChunkPlace, ...]
    blocks: tuple[tuple[int, int], ...] = ()

    def pairs(self, mapped: int = 0, removed: Sequence[int] = ()) -> int:
        """Return the number of (query, key) pairs in a layer's attention over the prompt, for the own tokens from
        index ``mapped`` on; blocks count in both directions.

        Args:
            removed: number of tokens that a press has removed from each chunk; empty: none.
        """
        own = self.own * (self.own + 1) // 2 - mapped * (mapped + 1) // 2
        for lo, hi in self.blocks:
            rows = max(0, hi - max(lo, mapped))
            own += rows * (rows - 1) // 2
        less = removed or [0] * len(self.places)
        seen = (s.tokens - less[s.source] for s in self.spans)
        return own + sum(
            n * (self.own - max(mapped, s.first(True))) for n, s in zip(seen, self.spans, strict=True)
        )

    def extends(self, shorter: LinkPlan) -> bool:
        """Return whether this plan continues a shorter one, that is, contains all of it unchanged."""
        old, chunks = len(shorter.spans), len(shorter.places)
        return self.spans[:old] == shorter.spans and all(span.source >= chunks for span in self.spans[old:])

    def reused(self, chunk: int) -> int:
        """Return the number of a chunk's tokens that are linked without recomputation."""
        return sum(s.tokens for s in self.spans if s.source == chunk)


class SegmentShape(NamedTuple):
    """The facts about a segment that planning needs: its number of tokens, its rotary length, whether it is a chunk,
    and whether its tokens attend to each other in both directions."""

    length: int
    rotary_length: int
    is_chunk: bool
    bidirectional: bool = False


def make_plan(
    segments: Sequence[SegmentShape],
    policy: Policy,
    decided: Sequence[Ranges] | None = None,
    whole_prompt: bool = False,
) -> LinkPlan:
    """Lay out the segments, ask the policy, and cut the prompt into own ranges, to be computed, and mapped spans.

    Args:
        decided: the ranges that a dynamic policy chose; None asks ``policy.select``.
        whole_prompt: True if all tokens of the prompt attend to each other in both directions (a prefix language
            model). A token's KV then depends on what follows it, so no prefix of a prompt can be kept for another.

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
    own_ranges: list[OwnRange] = []
    spans: list[Span[int]] = []
    blocks: list[tuple[int, int]] = []
    own = chunk = 0
    for i, segment in enumerate(segments):
        recomputed = next(selection) if segment.is_chunk else ((0, segment.length),)
        end, first = 0, own  # totals of the segments laid out so far; the segment's first own token
        for lo, hi in (*recomputed, (segment.length, segment.length)):
            if not end <= lo <= hi <= segment.length:
                raise ValueError(
                    f"{policy}: ranges {recomputed} do not fit a segment of {segment.length} tokens"
                )
            if lo > end:
                ahead = first if segment.bidirectional else None
                spans.append(Span(chunk, end, lo, bases[i], own, starts[i] + end, ahead))
            if hi > lo:
                own_ranges.append(OwnRange(i, lo, hi, starts[i] + lo, bases[i]))
                own += hi - lo
            end = hi
        chunk += segment.is_chunk
        if segment.bidirectional and own > first:
            blocks.append((first, own))
    if whole_prompt:
        spans, blocks = [span._replace(ahead=0) for span in spans], [(0, own)]
    if policy.two_step:
        spans = [span._replace(row=max(own - 1, 0), ahead=None) for span in spans]
        blocks = [(lo, min(hi, own - 1)) for lo, hi in blocks if lo < own - 1]
    facts = (policy.name, policy.exact, policy.prefix and not whole_prompt, policy.two_step)
    return LinkPlan(*facts, start, base, tuple(own_ranges), tuple(spans), own, tuple(places), tuple(blocks))
