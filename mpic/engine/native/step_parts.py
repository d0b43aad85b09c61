"""The parts of a step: what rows of each batch slice see, where they write, and whether a step continues another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from mpic.engine.native.batch import BatchSlice, Rows
from mpic.kernels.attention import KVView, SpanCall, Write
from mpic.kernels.span import Span
from mpic.kernels.windows import Stretch, Window, own_calls, span_calls
from mpic.kv.pool import Extent, Pool
from mpic.model.trace import LayerKind


class _Alone(NamedTuple):
    """A row that stands alone in a step. As long as only ``at`` changes, and by one, tables can be advanced."""

    rows: Rows
    extent: Extent
    spans: list[Span[Extent]]
    mapped: int
    count: int  # spans
    start: int  # the row of the step
    at: int  # its own token

    def continues(self, before: _Alone) -> bool:
        same = (self.rows is before.rows, self.extent is before.extent, self.spans is before.spans)
        return all(same) and self[3:6] == before[3:6] and self.at == before.at + 1


class Part(NamedTuple):
    """A batch slice and where its keys lie: rows ``start`` and on of the step are tokens ``[lo, hi)`` of ``rows``.

    Args:
        fresh: their own slots.
        spans: what they see besides their own extent.
        masks: as ``mpic.kernels.windows.own_calls``.
    """

    rows: Rows
    lo: int
    hi: int
    start: int
    fresh: Span[KVView]
    spans: list[Span[KVView]]
    masks: torch.device | None = None

    @property
    def write(self) -> Write:
        return Write(slice(self.start, self.start + self.hi - self.lo), self.fresh)

    def calls(self, window: Window | None) -> list[SpanCall]:
        """Returns what the rows see through a window, their own tokens first."""
        return self._all() if window is None else self._windowed(window)

    def _all(self) -> list[SpanCall]:
        """Returns what the rows see, all of it: block by block, or in one call a span where there is one row."""
        lo, hi, start, own = self.lo, self.hi, self.start, self.fresh
        end, before = start + hi - lo, own.lo
        if hi - lo == 1:
            made = [SpanCall(slice(start, end), own._replace(lo=0), first=True)]
        else:
            made = [SpanCall(slice(start, end), own, causal=True, first=True)]
            if before:
                made.append(SpanCall(slice(start, end), own._replace(lo=0, hi=before)))
        for span in self.spans:
            first = max(lo, span.row)
            if first < hi:
                made.append(SpanCall(slice(start + first - lo, end), span))
        return made

    def _windowed(self, window: Window) -> list[SpanCall]:
        """Returns what the rows see through a window."""
        lo, hi, own = self.lo, self.hi, self.fresh
        places = self.rows.places()[:hi]
        floors = window.floor(places[lo:hi])
        if floors[-1] <= 0:
            return self._all()
        earlier, made, mapped = Stretch(own._replace(lo=0, hi=own.lo), places[self.rows.mapped : lo]), [], 0
        if hi - lo == 1:
            skipped = int(Stretch(own._replace(lo=0), places[self.rows.mapped :]).skipped(floors)[0])
            made.append(SpanCall(slice(self.start, self.start + 1), own._replace(lo=skipped), first=True))
        else:
            made += own_calls(window, self.start, places[lo:hi], own, [earlier] if own.lo else [], self.masks)
        for span in self.spans:
            stretch = Stretch(span, span.place)
            if (
                mapped < self.rows.mapped
            ):  # the prefix cache's come first, and cover the tokens before its own
                stretch = Stretch(span, places[mapped : mapped + span.tokens])
                mapped += span.tokens
            first = max(lo, span.row)
            if first < hi:
                made += span_calls(window, self.start + first - lo, places[first:hi], stretch, self.masks)
        return made


def part_of(pool: Pool, part: BatchSlice, start: int, masks: torch.device | None = None) -> Part:
    """Returns a batch slice whose rows begin at ``start`` of the step; see ``Part``."""
    rows, lo, hi = part
    own, before = pool.kv(rows.extent), lo - rows.mapped
    spans = [span._replace(source=pool.kv(span.source)) for span in rows.spans]
    return Part(rows, lo, hi, start, Span(own, before, before + hi - lo), spans, masks)


def calls_of(parts: Sequence[Part], kinds: Iterable[LayerKind]) -> dict[Window | None, list[SpanCall]]:
    """Returns what the rows see through each window (None: without one). Kinds with one window share it."""
    windows = {kind.window for kind in kinds}
    return {window: [call for part in parts for call in part.calls(window)] for window in windows}


class Continuation:
    """Remembers the rows that tables were made for, to tell whether the next ones are the same one token further."""

    def __init__(self) -> None:
        self._last: list[_Alone] = []
        self._state: tuple[object, ...] = ()

    def forget(self) -> None:
        self._last = []

    def follows(self, alone: Sequence[tuple[BatchSlice, int]], state: tuple[object, ...]) -> bool:
        """Returns whether these rows are the last ones, one token further, and notes them down.

        Args:
            alone: rows that stand alone, and where each stands in the step.
            state: everything else that the tables are made of.
        """
        rows = [
            _Alone(r, r.extent, r.spans, r.mapped, len(r.spans), start, lo) for (r, lo, _), start in alone
        ]
        before, self._last = self._last, rows
        same, self._state = state == self._state, state
        if not same or len(before) != len(rows):
            return False
        if not all(row.continues(old) for row, old in zip(rows, before, strict=True)):
            return False
        # a span behind the last step's row, which this one would be the first to see
        return not any(span.row == row.at for row in rows for span in row.spans)
