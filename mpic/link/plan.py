"""Layout, selection and plan of a link (DESIGN sections 2, 3, 5).

A *policy* looks at the chunks of a prompt and says which of their tokens the request computes itself; everything
else is mapped, not copied. A *plan* is the relocation table that follows: the request's own tokens in sequence order
and, for every visible piece of a chunk, its base and the first own token that comes after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

Ranges = tuple[tuple[int, int], ...]
"""Half-open token ranges within a chunk, ascending and disjoint."""


def ranges_of(tokens: Sequence[int]) -> Ranges:
    """Ascending token indices as maximal ranges."""
    runs = [list(group) for _, group in groupby(enumerate(tokens), lambda pair: pair[1] - pair[0])]
    return tuple((run[0][1], run[-1][1] + 1) for run in runs)


class ChunkSlot(NamedTuple):
    """A chunk's place in a prompt: its length in tokens, its sequence index and its rotary base."""

    length: int
    start: int
    base: int


class Policy(ABC):
    """Decides what a link recomputes. Static policies only look at the layout.

    Class attributes:
        syntax: how people write it, e.g. ``mpic-K``.
        exact: the result equals a full prefill; such KV may enter the exact prefix namespace.
        uses_chunks: False when no compiled chunk is ever read (full, prefix).
        prefix: reuse the request's own earlier prefixes.
        sink: BOS tokens its chunks are compiled behind.
        two_step: compute the own tokens without the chunks first and the last token over everything in a second step
            (what MPIC, section 2, calls the two-step form of full reuse).
        context: False when chunks are left out of the prompt (``nocache``).
    """

    syntax: ClassVar[str]
    exact: ClassVar[bool] = False
    uses_chunks: ClassVar[bool] = True
    prefix: ClassVar[bool] = True
    sink: ClassVar[int] = 0
    two_step: ClassVar[bool] = False
    context: ClassVar[bool] = True

    @property
    @abstractmethod
    def name(self) -> str:
        """Canonical short string; parses back to an equal policy."""

    @abstractmethod
    def select(self, chunks: Sequence[ChunkSlot]) -> list[Ranges]:
        """For each chunk the ranges of its tokens that the request recomputes."""

    def __str__(self) -> str:
        return self.name


class DynamicPolicy(Policy):
    """A policy that looks at the prompt's own keys and values before it decides.

    The whole prompt runs through the layers before ``layer``; there its fresh keys and values are compared with the
    chunks' compiled ones. How many tokens are recomputed is known beforehand, so pages can be reserved: ``select``
    gives a selection of the right size and ``choose`` the one that counts. What it links is not kept for later turns.

    Class attributes:
        layer: the deciding layer.
    """

    prefix: ClassVar[bool] = False
    layer: ClassVar[int] = 1

    @abstractmethod
    def choose(self, deviations: Sequence[torch.Tensor]) -> list[Ranges]:
        """For each chunk the ranges to recompute.

        Args:
            deviations: one ``[tokens]`` fp32 tensor a chunk, in prompt order: the squared distance between a token's
                fresh and compiled key and value at the deciding layer, summed over heads.
        """


class Span(NamedTuple):
    """A visible, not recomputed piece ``[lo, hi)`` of chunk number ``chunk``.

    ``base`` is the rotary offset of the chunk's first token; ``row`` the first own token (index into the plan's own
    tokens) that comes after the piece and therefore sees it.
    """

    chunk: int
    lo: int
    hi: int
    base: int
    row: int


class OwnRun(NamedTuple):
    """A maximal piece of the prompt that the request computes: tokens ``[lo, hi)`` of segment ``segment``, whose first
    token has sequence index ``start`` and whose segment has rotary base ``base``."""

    segment: int
    lo: int
    hi: int
    start: int
    base: int


@dataclass(frozen=True)
class LinkPlan:
    """The relocation table of one request.

    Args:
        length: tokens of the whole prompt.
        extent: rotary positions of the whole prompt; the first generated token sits at this position.
        runs: what is computed, in sequence order.
        spans: what is mapped, in sequence order.
        own: number of computed tokens (sum over runs).
        slots: one ChunkSlot a chunk, in prompt order.
    """

    length: int
    extent: int
    runs: tuple[OwnRun, ...]
    spans: tuple[Span, ...]
    own: int
    slots: tuple[ChunkSlot, ...]

    def pairs(self, mapped: int = 0, two_step: bool = False) -> int:
        """(query, key) pairs of a layer's attention over the prompt, by the own tokens from index ``mapped`` on; in two
        steps only the last of them sees chunks."""
        own = self.own * (self.own + 1) // 2 - mapped * (mapped + 1) // 2
        first = self.own - 1 if two_step else mapped
        return own + sum((s.hi - s.lo) * (self.own - max(first, s.row)) for s in self.spans)

    def extends(self, shorter: LinkPlan) -> bool:
        """Whether everything of a shorter plan is in this one as it was."""
        old, chunks = len(shorter.spans), len(shorter.slots)
        return self.spans[:old] == shorter.spans and all(span.chunk >= chunks for span in self.spans[old:])

    def reused(self, chunk: int) -> int:
        """Tokens of a chunk that are linked without recomputation."""
        return sum(s.hi - s.lo for s in self.spans if s.chunk == chunk)


class SegmentShape(NamedTuple):
    """What planning needs of a segment: tokens, rotary extent, whether it is a chunk."""

    length: int
    extent: int
    is_chunk: bool


def make_plan(
    segments: Sequence[SegmentShape], policy: Policy, decided: Sequence[Ranges] | None = None
) -> LinkPlan:
    """Lay out the segments, ask the policy, and cut the prompt into computed runs and mapped spans.

    Args:
        decided: what a dynamic policy chose; None asks ``policy.select``.
    """
    slots, starts, bases = [], [], []
    start = base = 0
    for segment in segments:
        starts.append(start)
        bases.append(base)
        if segment.is_chunk:
            slots.append(ChunkSlot(segment.length, start, base))
        start += segment.length
        base += segment.extent
    selection = iter(policy.select(slots) if decided is None else decided)
    runs: list[OwnRun] = []
    spans: list[Span] = []
    own = 0
    chunk = 0
    for i, segment in enumerate(segments):
        recompute: Ranges = ((0, segment.length),)
        if segment.is_chunk:
            recompute = next(selection)
        at = 0
        for lo, hi in (*recompute, (segment.length, segment.length)):
            if not at <= lo <= hi <= segment.length:
                raise ValueError(
                    f"{policy}: ranges {recompute} do not fit a segment of {segment.length} tokens"
                )
            if lo > at:
                spans.append(Span(chunk, at, lo, bases[i], own))
            if hi > lo:
                runs.append(OwnRun(i, lo, hi, starts[i] + lo, bases[i]))
                own += hi - lo
            at = hi
        chunk += segment.is_chunk
    return LinkPlan(start, base, tuple(runs), tuple(spans), own, tuple(slots))
