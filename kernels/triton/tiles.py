"""Tiles of a step: rows whose queries are kept in registers together, and the segments they see.

Rows of a block that follow one another make tiles; rows that stand alone (decoding) make a tile with all rows that see
the same segments, so that a chunk shared by several requests is read once.

All offsets are in elements from one anchor tensor, so segments may be anywhere in memory; nothing here touches the
device. A span's source is its ``Strides`` here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpic.kernels.attention import SpanCall
from mpic.kernels.triton.tables import NO_FLOORS

NEVER = 2**31 - 1
"""In ``first_rows``: no row sees the slot (a hole)."""


class Strides(NamedTuple):
    """The place of the keys and values of a span's source, in elements from the step's anchor: the key of slot s, head
    h and layer l is at ``origin + l * layer + h * head + s * head_dim``, its value ``value`` elements further."""

    origin: int
    layer: int
    value: int
    head: int


class Shape(NamedTuple):
    """The parameters by which work is cut.

    Args:
        group: number of query heads per KV head.
        kv_heads, dim: number of the model's KV heads, and their dimension.
        block_m, block_n: queries (rows x group) and keys of a block tile.
        single_n: keys of a tile of single rows.
        programs: number of programs that should run at once; tiles of single rows are cut along their keys until they
            do.
        least: minimum number of keys of a cut item.
        block_programs: number of programs for tiles of blocks that run at once; 0: ``programs``.
    """

    group: int
    kv_heads: int
    dim: int
    block_m: int = 64
    block_n: int = 64
    single_n: int = 64
    programs: int = 1
    least: int = 256
    block_programs: int = 0

    @property
    def lone_m(self) -> int:
        """Number of queries of a tile of rows that share little: a row's own, but at least the minimum of a product."""
        return max(16, power(self.group))

    @property
    def shared_m(self) -> int:
        """Queries of a tile of rows that see the same slots."""
        return max(64, power(self.group))


class Segment(NamedTuple):
    """A span as one tile sees it: slots ``[lo, hi)`` of ``source``.

    Args:
        bases: bases of the span: one for all rows of the tile, or one per row.
        row_min, row_max: rows ``[row_min, row_max)`` see it.
        diagonal: row r sees slots below ``r + diagonal``; ``NEVER``: all.
        first_row: index into the step's ``first_rows`` of its first slot, where the first row that sees each slot is
            written; -1: all rows see all slots.
        floors: index into the step's ``floors``, less r, of the first slot that row r sees; ``NO_FLOORS``: all rows see
            the first slots.
    """

    source: Strides
    lo: int
    hi: int
    bases: tuple[int, ...]
    row_min: int
    row_max: int
    diagonal: int
    first_row: int
    floors: int = NO_FLOORS


class Tile(NamedTuple):
    """Rows whose queries are kept in registers together."""

    rows: tuple[int, ...]
    segments: list[Segment]

    @property
    def keys(self) -> int:
        """Slots of all segments."""
        return sum(s.hi - s.lo for s in self.segments)


def row_ranges(calls: Sequence[SpanCall], total: int) -> list[tuple[tuple[int, int], list[SpanCall]]]:
    """Return the maximal ranges of rows that calls connect, in order, with the calls of each; rows that no call
    covers stand alone.

    Raises:
        ValueError: a call's rows are not among the step's.
    """
    ranges: list[tuple[tuple[int, int], list[SpanCall]]] = []
    end = 0
    for call in sorted(calls, key=lambda c: c.rows.start):
        start, stop = call.rows.start, call.rows.stop
        if not 0 <= start < stop <= total:
            raise ValueError(f"rows {start}..{stop} of a step of {total}")
        if ranges and start < end:
            (begin, _), members = ranges[-1]
            members.append(call)
            end = max(end, stop)
            ranges[-1] = ((begin, end), members)
            continue
        ranges += [((row, row + 1), []) for row in range(end, start)]
        ranges.append(((start, stop), [call]))
        end = stop
    return ranges + [((row, row + 1), []) for row in range(end, total)]


class RowTables(NamedTuple):
    """Single slots that a step's rows see, piece by piece as tiles are made; ``Segment`` points into them."""

    first_rows: list[np.ndarray]
    floors: list[np.ndarray]

    @classmethod
    def empty(cls) -> RowTables:
        return cls([], [])


def block_tiles(start: int, stop: int, calls: list[SpanCall], shape: Shape, tables: RowTables) -> list[Tile]:
    """Cut rows ``[start, stop)``, which calls connect, into tiles of ``block_m`` queries. Append to the step's
    tables."""
    size = max(1, shape.block_m // shape.group)
    causal = [(call, _floors(call, tables)) for call in calls if call.causal]
    groups = [
        (
            merged,
            [c.rows.start for c in merged.calls],
            _keep(merged.first_rows, tables.first_rows),
            _floors(merged.calls[0], tables),
        )
        for merged in _merged([c for c in calls if not c.causal], shape)
    ]
    tiles = []
    for t0 in range(start, stop, size):
        t1 = min(t0 + size, stop)
        segments = [s for call, floors in causal for s in _causal(call, floors, t0, t1)]
        for merged, starts, table, floors in groups:
            visible = bisect_left(
                starts, t1
            )  # later spans are seen by later rows, all of them to the same end
            first = merged.calls[0]
            if not visible or first.rows.stop <= t0:
                continue
            last = merged.calls[visible - 1]
            lo, hi = merged.lo + _hidden(first, t0), merged.slot(last, shape.dim) + last.span.tokens
            row_min = first.rows.start if table < 0 else t0
            bases, row_max = (first.span.base,), first.rows.stop
            segments.append(Segment(merged.source, lo, hi, bases, row_min, row_max, NEVER, table, floors))
        tiles.append(Tile(tuple(range(t0, t1)), segments))
    return tiles


def _floors(call: SpanCall, tables: RowTables) -> int:
    """Append the first slots that a call's rows see to the step's and return where row r finds its own, less r."""
    if call.visible is None:
        return NO_FLOORS
    tables.floors.append((call.visible.cpu().numpy() + call.span.lo).astype(np.int32))
    return sum(map(len, tables.floors[:-1])) - call.rows.start


def _hidden(call: SpanCall, row: int) -> int:
    """Return how many of the first slots neither this row nor a later one sees."""
    return 0 if call.visible is None else int(call.visible[max(0, row - call.rows.start)])


def _causal(call: SpanCall, floors: int, t0: int, t1: int) -> list[Segment]:
    """Return the keys before the tile's first row, which need no mask, then the square on the diagonal."""
    start, stop, span = call.rows.start, call.rows.stop, call.span
    t0, t1 = max(t0, start), min(t1, stop)
    if t0 >= t1:
        return []
    middle, end = min(span.lo + t0 - start, span.hi), min(span.lo + t1 - start, span.hi)
    first = span.lo + _hidden(call, t0)
    segments = []
    if middle > first:
        segments.append(Segment(span.source, first, middle, (span.base,), t0, stop, NEVER, -1, floors))
    if end > middle:
        diagonal = span.lo - start + 1
        segments.append(
            Segment(span.source, max(first, middle), end, (span.base,), t0, stop, diagonal, -1, floors)
        )
    return segments


class _Merged(NamedTuple):
    """Calls on spans of one run of memory as one segment; ``first_rows`` holds for each of its slots the first row that
    sees it (``NEVER`` in holes), or is None when there is but one call."""

    calls: list[SpanCall]
    first_rows: np.ndarray | None = None

    @property
    def source(self) -> Strides:
        return self.calls[0].span.source

    @property
    def lo(self) -> int:
        return self.calls[0].span.lo

    def slot(self, call: SpanCall, dim: int) -> int:
        """Return the first slot of one of the calls, counted as those of the first call are."""
        return (call.span.source.origin - self.source.origin) // dim + call.span.lo

    def hi(self, dim: int) -> int:
        return self.slot(self.calls[-1], dim) + self.calls[-1].span.tokens


def _merged(calls: list[SpanCall], shape: Shape) -> list[_Merged]:
    """Merge spans of one chunk with small holes between them: 350 spans of six keys (cacheblend) would each fill a
    block of keys."""
    groups: list[list[SpanCall]] = []
    blocks = lambda keys: -(-keys // shape.block_n)
    for call in calls:
        if groups and _continues(groups[-1][-1], call, shape.dim):
            group, lo = groups[-1], groups[-1][0].span.lo
            joined = _Merged([*group, call]).hi(shape.dim) - lo
            if blocks(joined) <= blocks(_Merged(group).hi(shape.dim) - lo) + blocks(call.span.tokens):
                group.append(call)
                continue
        groups.append([call])
    return [_Merged(group, _first_rows(group, shape.dim)) for group in groups]


def _first_rows(group: list[SpanCall], dim: int) -> np.ndarray | None:
    if len(group) == 1:
        return None
    merged = _Merged(group)
    first_rows = np.full(merged.hi(dim) - merged.lo, NEVER, np.int32)
    for call in group:
        begin = merged.slot(call, dim) - merged.lo
        first_rows[begin : begin + call.span.tokens] = call.rows.start
    return first_rows


def _continues(a: SpanCall, b: SpanCall, dim: int) -> bool:
    """Return whether ``b`` follows ``a`` in the same run of memory and is seen in the same way, perhaps by fewer
    rows."""
    if a.rows.stop != b.rows.stop or a.span.base != b.span.base or b.rows.start < a.rows.start:
        return False
    if a.visible is not None or b.visible is not None:
        return False
    one, two = a.span.source, b.span.source
    begin = one.origin + a.span.lo * dim
    gap = two.origin + b.span.lo * dim - (one.origin + a.span.hi * dim)
    inside = two.origin + b.span.hi * dim - begin <= one.head
    return one[1:] == two[1:] and gap >= 0 and gap % dim == 0 and inside


def _keep(table: np.ndarray | None, first_rows: list[np.ndarray]) -> int:
    """Append one segment's table to the step's and return where it begins; -1 without a table."""
    if table is None:
        return -1
    first_rows.append(table)
    return sum(map(len, first_rows[:-1]))


_Slots = tuple[Strides, int, int, bytes | None]
"""Source, lo, hi, and which slots between are holes."""


def single_tiles(alone: dict[int, list[SpanCall]], shape: Shape, tables: RowTables) -> list[Tile]:
    """Make a tile of all rows that see the same slots, each with its own base, of at most ``shape.shared_m`` queries.
    Append to the step's tables."""
    readers: dict[tuple[_Slots, int], list[tuple[int, int]]] = {}
    tiles = []
    for row, calls in alone.items():
        times: Counter[_Slots] = Counter()
        trimmed = [_one_slot(call) if call.causal else call for call in calls]
        for merged in _merged(trimmed, shape):
            holes = None if merged.first_rows is None else (merged.first_rows == NEVER).tobytes()
            key = (merged.source, merged.lo, merged.hi(shape.dim), holes)
            times[key] += 1  # a chunk that a row maps twice is two segments
            readers.setdefault((key, times[key]), []).append((row, merged.calls[0].span.base))
        if not calls:
            tiles.append(Tile((row,), []))
    cohorts: dict[tuple[int, ...], list[Segment]] = {}
    for ((source, lo, hi, holes), _), members in readers.items():
        rows, bases = zip(*members)
        seen = None if holes is None else np.where(np.frombuffer(holes, bool), NEVER, 0).astype(np.int32)
        segment = Segment(source, lo, hi, bases, 0, NEVER, NEVER, _keep(seen, tables.first_rows))
        cohorts.setdefault(rows, []).append(segment)
    size = shape.shared_m // shape.group
    for rows, segments in cohorts.items():
        for begin in range(0, len(rows), size):
            part = slice(begin, begin + size)
            tiles.append(Tile(rows[part], [s._replace(bases=s.bases[part]) for s in segments]))
    return tiles


def _one_slot(call: SpanCall) -> SpanCall:
    """Return a causal call of one row as one that sees its only visible slot."""
    return call._replace(span=call.span._replace(hi=call.span.lo + 1))


def power(n: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, n - 1).bit_length()
