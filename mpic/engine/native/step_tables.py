"""The tables of a step: the slots that each row writes, and the spans that it attends to.

Most steps continue the one before: the same rows that stand alone (decoding), each one own token further. Then the
tables of the last step are advanced: nothing has to be looked up on the host and nothing copied to the device. After
other steps, and always for a model with windows (in which the visible keys of a row begin elsewhere each time), new
tables are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from mpic.engine.native.batch import BatchSlice, Rows
from mpic.kernels.attention import KVView, SingleRows, SpanCall, Write
from mpic.kernels.gathered import calls_over
from mpic.kernels.patterns import Blocks, Pattern, fresh_calls, pieces
from mpic.kernels.span import Span
from mpic.kernels.windows import Stretch, span_calls
from mpic.kernels.writes import RowWrites
from mpic.kv.pool import Pool
from mpic.model.hooks import KindCalls, Step, StepKernel
from mpic.model.loaded import LoadedModel


class _SingleRow:
    """A row that stood alone in the last step, at ``at``. As long as only this changes, and by one, tables can be
    advanced."""

    def __init__(self, part: BatchSlice, start: int) -> None:
        rows = part.rows
        self._rows, self._extent, self._spans, self._mapped = rows, rows.extent, rows.spans, rows.mapped
        self._count, self._start, self.at = len(rows.spans), start, part.lo
        # tokens from which on another span is seen
        self._changes = {row for span in rows.spans for row in (span.row, span.ahead)}

    def is_continued(self, part: BatchSlice, start: int) -> bool:
        """Return whether a row is this one, one token further, and sees the same spans."""
        rows, lo, _ = part
        return (
            rows is self._rows
            and lo == self.at + 1
            and rows.extent is self._extent
            and rows.spans is self._spans
            and len(rows.spans) == self._count
            and rows.mapped == self._mapped
            and start == self._start
            and lo not in self._changes
        )


class PlacedSlice(NamedTuple):
    """A batch slice and the place of its keys: the step's rows from ``start`` on are tokens ``[lo, hi)`` of ``rows``.

    Args:
        fresh: the slots that the tokens write.
        spans: the spans that the tokens see besides their own extent.
        gathers: True if a chunk's many spans are attended to together (``mpic.kernels.gathered``) by blocks of rows in
            layers without windows.
    """

    rows: Rows
    lo: int
    hi: int
    start: int
    fresh: Span[KVView]
    spans: list[Span[KVView]]
    gathers: bool

    @property
    def write(self) -> Write:
        return Write(slice(self.start, self.start + self.hi - self.lo), self.fresh)

    def calls(self, pattern: Pattern) -> list[SpanCall]:
        """Return the attention calls of the rows in layers of a pattern, those over their own tokens first."""
        places = None if pattern.window is None else self.rows.places()[: self.hi]
        # every token is still inside the window
        window: Any = pattern.window  # None where `places` is
        if places is not None and window.floor(places[-1:])[0] <= 0:
            places = None
        own, blocks = self.fresh, self._blocks(pattern)
        if places is None:
            return [*self._own(pattern.blocks, blocks), *self._spans(pattern.blocks)]
        before = (
            [Stretch(own._replace(lo=0, hi=own.lo), places[self.rows.mapped : self.lo])] if own.lo else []
        )
        if self.hi - self.lo > 1 or blocks:
            made = fresh_calls(pattern, self.start, places[self.lo :], own, before, blocks)
        else:
            floors = window.floor(places[self.lo :])
            skipped = int(Stretch(own._replace(lo=0), places[self.rows.mapped :]).skipped(floors)[0])
            made = [SpanCall(slice(self.start, self.start + 1), own._replace(lo=skipped), first=True)]
        return made + self._windowed_spans(pattern, places, blocks)

    def _blocks(self, pattern: Pattern) -> list[tuple[int, int]]:
        """Return the blocks of a pattern's layers that reach into the slice, counted from its first row."""
        if pattern.blocks is None:
            return []
        blocks = self.rows.blocks
        return [(lo - self.lo, hi - self.lo) for lo, hi in blocks if hi > self.lo and lo < self.hi]

    def _own(self, kind: Blocks | None, blocks: Sequence[tuple[int, int]]) -> list[SpanCall]:
        """Return the calls over the rows themselves and the tokens before them; one call where there is one row."""
        own, rows = self.fresh, self.hi - self.lo
        if rows == 1:
            return [SpanCall(slice(self.start, self.start + 1), own._replace(lo=0), first=True)]
        before = [Stretch(own._replace(lo=0, hi=own.lo), 0)] if own.lo else []
        return fresh_calls(Pattern(None, kind), self.start, np.empty(rows), own, before, blocks)

    def _spans(self, kind: Blocks | None) -> list[SpanCall]:
        """Return the calls over mapped spans, each of which the rows see whole."""
        gathers = self.gathers and self.hi - self.lo > 1
        return list(calls_over(self.spans, self.lo, self.hi, self.start, kind is not None, gathers))

    def _windowed_spans(
        self, pattern: Pattern, places: np.ndarray, blocks: Sequence[tuple[int, int]]
    ) -> list[SpanCall]:
        """Return the calls over mapped spans that the rows, at ``places[lo:]``, see through a window."""
        window: Any = pattern.window
        made, mapped = [], 0
        for span in self.spans:
            stretch = Stretch(span, span.place)
            # the prefix cache's come first, and cover the tokens before its own
            if mapped < self.rows.mapped:
                stretch = Stretch(span, places[mapped : mapped + span.tokens])
                mapped += span.tokens
            first = max(self.lo, span.first(pattern.blocks is not None))
            for piece in pieces(self.hi - self.lo, blocks):
                lo, hi = max(piece.lo, first - self.lo), piece.hi
                if lo >= hi:
                    continue
                if piece.is_block and pattern.blocks is Blocks.WHOLE:
                    made.append(SpanCall(slice(self.start + lo, self.start + hi), span))
                else:
                    made += span_calls(window, self.start + lo, places[self.lo + lo : self.lo + hi], stretch)
        return made


class StepTables:
    """Makes the tables of one step after the other.

    Attributes:
        made, advanced: number of steps whose single rows' tables were newly made, and of those that advanced the last
            tables.
    """

    def __init__(self, model: LoadedModel, pool: Pool) -> None:
        self._model, self._pool = model, pool
        self._last: list[_SingleRow] = []
        self._state: tuple[object, ...] = ()  # everything else that the last tables depend on
        self._writes: RowWrites | None = None
        self._singles: list[SingleRows] = []  # by kind of layer
        self._kernel: StepKernel | None = None
        self._has_windows = any(kind.window is not None for kind in model.kinds)
        self.made = self.advanced = 0

    def step(self, slices: Sequence[BatchSlice], starts: Sequence[int]) -> Step:
        """Return the step of some slices, whose rows begin at ``starts``.

        Blocks of rows and rows that stand alone have tables of their own, unless the implementation takes whole steps
        and gathers them itself."""
        whole = self._model.triton is not None
        placed = list(zip(slices, starts, strict=True))
        alone = [(part, start) for part, start in placed if part.hi - part.lo == 1]
        blocks = [self._part(*at) for at in placed if whole or at[0].hi - at[0].lo > 1]
        calls = self._calls(blocks)
        kinds = [self._model.kind_calls(i, calls[kind.pattern]) for i, kind in enumerate(self._model.kinds)]
        step = Step([part.write for part in blocks], kinds, self._model.kind_of, self._model.partial)
        if whole:
            if len(alone) == len(slices):
                step.kernel = self._whole(step, alone)
            else:
                self._last = []
        elif alone:
            singles, step.single_writes = self.single_rows(alone)
            step.kinds = [kind._replace(singles=rows) for kind, rows in zip(kinds, singles, strict=True)]
            if step.single_writes is None:
                step.writes += [self._part(*at).write for at in alone]
        else:
            self._last = []
        return step

    def forget(self) -> None:
        """Discard the tables, so that the next step makes new ones whatever its rows are."""
        self._last = []

    def continues(self, slices: Sequence[BatchSlice]) -> bool:
        """Return whether a step of single rows is the last one asked about, one token further, for tables that others
        keep; never for a model with windows, which move."""
        continues = self._continues([(part, row) for row, part in enumerate(slices)])
        return continues and not self._has_windows

    def alone(self, slices: Sequence[BatchSlice]) -> tuple[list[Write], list[KindCalls]]:
        """Return the writes of a step of single rows, and their attention calls by kind of layer."""
        parts = [self._part(part, row) for row, part in enumerate(slices)]
        calls = self._calls(parts)
        kinds = [self._model.kind_calls(i, calls[kind.pattern]) for i, kind in enumerate(self._model.kinds)]
        return [part.write for part in parts], kinds

    def _continues(self, alone: Sequence[tuple[BatchSlice, int]]) -> bool:
        """Return whether these rows are the last step's, one token further, and remember them."""
        state = (self._pool.moves, self._model.partial, self._model.streams, self._model.triton)
        last = self._last
        same, self._state = state == self._state and len(last) == len(alone), state
        if same and all(row.is_continued(*at) for row, at in zip(last, alone, strict=True)):
            for row in last:
                row.at += 1
            return True
        self._last = [_SingleRow(*at) for at in alone]
        return False

    def single_rows(self, alone: list[tuple[BatchSlice, int]]) -> tuple[list[SingleRows], RowWrites | None]:
        """Return the tables of the rows that stand alone, each given with its place in the step: their spans by kind
        of layer, and their writes (None: written like blocks, because layers differ in their heads). They are the same
        objects as those of the last step where this one continues it."""
        if self._continues(alone) and not self._has_windows:
            advanced: list[Any] = [rows.advance() for rows in self._singles]
            if None not in advanced:
                self._singles = advanced
                if self._writes is not None:
                    self._writes.advance()
                self.advanced += 1
                return self._singles, self._writes
        self.made += 1
        calls = self._calls([self._part(*at) for at in alone])
        kinds = enumerate(self._model.kinds)
        self._singles = [self._model.single_rows(i, calls[kind.pattern]) for i, kind in kinds]
        self._writes = None if self._model.is_uneven else self._row_writes(alone)
        return self._singles, self._writes

    def _row_writes(self, alone: list[tuple[BatchSlice, int]]) -> RowWrites:
        return RowWrites(
            self._pool.arena,
            [start for _, start in alone],
            [self._pool.kv(part.rows.extent).data for part, _ in alone],
            [part.lo - part.rows.mapped for part, _ in alone],
        )

    def _whole(self, step: Step, alone: list[tuple[BatchSlice, int]]) -> StepKernel:
        """Return the tables of a step of single rows for an implementation that takes it whole."""
        continues = self._continues(alone) and not self._has_windows
        last: Any = self._kernel
        if continues and (advanced := last.advance()) is not None:
            self.advanced += 1
        else:
            self.made += 1
            assert self._model.triton is not None
            advanced = self._model.triton.prepare(step, len(alone))
        self._kernel = advanced
        return advanced

    def _part(self, part: BatchSlice, start: int) -> PlacedSlice:
        rows, lo, hi = part
        own, before = self._pool.kv(rows.extent), lo - rows.mapped
        spans: list[Any] = [
            cast(Any, span)._replace(source=self._pool.kv(span.source)) for span in rows.spans
        ]
        fresh = Span(own, before, before + hi - lo)
        return PlacedSlice(rows, lo, hi, start, fresh, spans, self._model.gathers_spans)

    def _calls(self, parts: Sequence[PlacedSlice]) -> dict[Pattern, list[SpanCall]]:
        """Return the calls of the rows for each kind of layer. Kinds with the same pattern share them."""
        patterns = {kind.pattern for kind in self._model.kinds}
        return {pattern: [call for part in parts for call in part.calls(pattern)] for pattern in patterns}
