"""The record that goes from a plan to the kernels: a range of slots of an extent, seen as if it began at a base."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

Source = TypeVar("Source")


class Span(NamedTuple, Generic[Source]):
    """Slots ``[lo, hi)`` of ``source`` that a request maps and does not compute.

    Args:
        source: the KV, in the form of each stage: a chunk's number in a plan, an extent of the pool in the engine, a
            tensor or its strides in a kernel.
        lo, hi: slots (tokens) of the source, half-open.
        base: rotary offset between the positions at which the keys were compiled and those in the prompt. Keys stay as
            they are; queries are rotated by minus the base.
        row: the first of the request's own tokens that sees the span.
        place: place of slot ``lo`` in the prompt, in tokens; only layers with windows use it.
        ahead: the first own token that sees the span in layers where a block attends to itself in both directions
            (``patterns.py``); None: ``row`` there too.
    """

    source: Source
    lo: int
    hi: int
    base: int = 0
    row: int = 0
    place: int = 0
    ahead: int | None = None

    @property
    def tokens(self) -> int:
        return self.hi - self.lo

    def first(self, in_blocks: bool) -> int:
        """Return the first own token that sees the span, in layers with or without blocks."""
        return self.row if self.ahead is None or not in_blocks else self.ahead
