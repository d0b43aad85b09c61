"""The work of a layer, cut into equal programs on the host once a step.

From the calls of a step (``mpic.kernels.spans.SpanCall`` without a layer) come *tiles*: rows whose queries are kept
in registers together, and the segments they see. Rows of a block that follow one another make tiles; rows that stand
alone (decoding) make a tile with all rows that see the same segments, so that a chunk shared by several requests is
read once. Tiles that would leave the device idle are cut along their keys into *items*; rows of several items get
partial results that are merged by log-sum-exp.

All offsets are in elements from one anchor tensor, so segments may lie anywhere; nothing here touches the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NEVER = 2**31 - 1
"""In ``seen``: a key that no row sees (a hole)."""
SEGMENT = 12
"""Columns of ``segments``: origin, value, layer, head, lo, hi, shift, step, row_min, row_max, diagonal, seen."""
ITEM = 8
"""Columns of ``items``: first of its rows, their number, segments lo and hi, first partial or -1; the rest is empty, so
that any item begins at a multiple of 16 bytes."""


class KV(NamedTuple):
    """Where keys and values of a piece lie: slot s of head h of layer l at ``origin + l * layer + h * head + s * dim``,
    its value ``value`` elements further. Slots ``[lo, hi)`` are meant.

    With ``pages`` slot s lies on page ``s // page_size``, whose own origin ``pages[s // page_size]`` replaces
    ``origin``, at ``s % page_size``; pages may lie anywhere and be shared.
    """

    origin: int
    layer: int
    value: int
    head: int
    lo: int
    hi: int
    pages: tuple[int, ...] | None = None


class Call(NamedTuple):
    """Rows ``[start, stop)`` see a piece; ``causal``: row ``start + i`` sees its first ``i + 1`` slots. ``shift`` is a
    row of the step's cosine and sine tables; row 0 turns nothing."""

    start: int
    stop: int
    kv: KV
    causal: bool = False
    shift: int = 0


class Shape(NamedTuple):
    """How work is cut.

    Args:
        group: query heads of a KV head.
        kv_heads, dim: of the model.
        block_m, block_n: queries (rows x group) and keys of a block tile.
        single_n: keys of a tile of single rows.
        programs: so many should run at once; tiles are cut along their keys until they do.
        least: a cut item has at least so many keys.
        page: tokens a page, where pages are given.
    """

    group: int
    kv_heads: int
    dim: int
    block_m: int = 64
    block_n: int = 64
    single_n: int = 64
    programs: int = 1
    least: int = 256
    page: int = 16


class Segment(NamedTuple):
    """A piece as one tile sees it."""

    kv: KV
    lo: int
    hi: int
    shifts: tuple[int, ...]
    row_min: int
    row_max: int
    diagonal: int
    seen: int


class Tile(NamedTuple):
    rows: tuple[int, ...]
    segments: list[Segment]

    @property
    def keys(self) -> int:
        return sum(s.hi - s.lo for s in self.segments)


class WorkList(NamedTuple):
    """Host tables of a step; ``int64 segments``, the rest int32.

    ``items`` are in two runs: ``blocks`` of them are tiles of blocks, the rest of single rows, whose tiles hold
    ``single_m`` queries. ``merge`` rows have partials ``slots[ptr[i] : ptr[i + 1]]``.
    """

    segments: np.ndarray
    items: np.ndarray
    rows: np.ndarray
    shift_of: np.ndarray
    seen: np.ndarray
    pages: np.ndarray
    merge: np.ndarray
    ptr: np.ndarray
    slots: np.ndarray
    blocks: int
    single_m: int
    partials: int
    paged: bool


def build(calls: Sequence[Call], total: int, shape: Shape) -> WorkList:
    """Cut a step of ``total`` rows. Every row is in at least one item, so every output is written: a row that sees
    nothing gets zeros and a log-sum-exp of minus infinity."""
    seen: list[np.ndarray] = []
    blocks: list[Tile] = []
    alone: dict[int, list[Call]] = {}
    for (start, stop), members in _lanes(calls, total):
        if stop - start == 1:
            alone[start] = members
        else:
            blocks += _block_tiles(start, stop, members, shape, seen)
    singles, single_m = _single_tiles(alone, shape, seen)
    tables = _Tables(shape, any(call.kv.pages is not None for call in calls))
    uses: dict[int, int] = {}
    enough = -(-shape.programs // shape.kv_heads)
    if len(blocks) < enough:
        blocks = _cut(blocks, shape, shape.block_n)
    runs = [_longest_first(blocks), _longest_first(_cut(singles, shape, shape.single_n))]
    for tile in (*runs[0], *runs[1]):
        for row in tile.rows:
            uses[row] = uses.get(row, 0) + 1
    for tile in (*runs[0], *runs[1]):
        tables.add(tile, uses)
    return tables.finish(seen, len(runs[0]), single_m)


def _lanes(calls: Sequence[Call], total: int) -> list[tuple[tuple[int, int], list[Call]]]:
    """Maximal ranges of rows that calls connect, in order, with the calls of each; rows no call covers stand alone."""
    found: list[tuple[tuple[int, int], list[Call]]] = []
    end = 0
    for call in sorted(calls, key=lambda c: c.start):
        if not 0 <= call.start < call.stop <= total:
            raise ValueError(f"rows {call.start}..{call.stop} of a step of {total}")
        if found and call.start < end:
            (start, _), members = found[-1]
            members.append(call)
            end = max(end, call.stop)
            found[-1] = ((start, end), members)
            continue
        found += [((row, row + 1), []) for row in range(end, call.start)]
        found.append(((call.start, call.stop), [call]))
        end = call.stop
    return found + [((row, row + 1), []) for row in range(end, total)]


def _block_tiles(
    start: int, stop: int, calls: list[Call], shape: Shape, seen: list[np.ndarray]
) -> list[Tile]:
    size = max(1, shape.block_m // shape.group)
    groups = []
    causal = [c for c in calls if c.causal]
    for merged in _coalesce([c for c in calls if not c.causal], shape):
        groups.append((merged, [c.start for c in merged.calls], _mask(merged.first, seen)))
    tiles = []
    for t0 in range(start, stop, size):
        t1 = min(t0 + size, stop)
        segments = [s for call in causal for s in _causal(call, t0, t1)]
        for merged, starts, at in groups:
            visible = bisect_left(
                starts, t1
            )  # later pieces are seen by later rows, all of them to the same end
            first = merged.calls[0]
            if not visible or first.stop <= t0:
                continue
            last = merged.calls[visible - 1]
            lo, hi = merged.slot(first, shape.dim), merged.slot(last, shape.dim) + last.kv.hi - last.kv.lo
            mask = at + lo - merged.kv.lo if at >= 0 else -1
            row_min = first.start if at < 0 else t0
            segments.append(Segment(merged.kv, lo, hi, (first.shift,), row_min, first.stop, NEVER, mask))
        tiles.append(Tile(tuple(range(t0, t1)), segments))
    return tiles


def _causal(call: Call, t0: int, t1: int) -> list[Segment]:
    """Keys before the tile's first row without looking at each, then the square on the diagonal."""
    t0, t1 = max(t0, call.start), min(t1, call.stop)
    if t0 >= t1:
        return []
    lo = call.kv.lo
    middle, end = min(lo + t0 - call.start, call.kv.hi), min(lo + t1 - call.start, call.kv.hi)
    shifts = (call.shift,)
    segments = [Segment(call.kv, lo, middle, shifts, t0, call.stop, NEVER, -1)] if middle > lo else []
    diagonal = lo - call.start + 1
    if end > middle:
        segments.append(Segment(call.kv, middle, end, shifts, t0, call.stop, diagonal, -1))
    return segments


class _Merged(NamedTuple):
    """Calls on pieces of one extent as one segment; ``first`` holds for each of its slots the first row that sees it
    (``NEVER`` in holes), or is None when there is but one call."""

    calls: list[Call]
    first: np.ndarray | None

    @property
    def kv(self) -> KV:
        kv = self.calls[0].kv
        return kv if self.first is None else kv._replace(hi=kv.lo + len(self.first))

    def slot(self, call: Call, dim: int) -> int:
        """First slot of one of the calls, counted as those of the first call are."""
        return (call.kv.origin - self.calls[0].kv.origin) // dim + call.kv.lo


def _coalesce(calls: list[Call], shape: Shape) -> list[_Merged]:
    """Pieces of one chunk with small holes between them become one segment: 350 pieces of six keys (cacheblend) would
    each fill a block of keys."""
    groups: list[list[Call]] = []
    blocks = lambda keys: -(-keys // shape.block_n)
    end = lambda group: _Merged(group, None).slot(group[-1], shape.dim) + group[-1].kv.hi - group[-1].kv.lo
    for call in calls:
        if groups and _continues(groups[-1][-1], call, shape.dim):
            group, lo = groups[-1], groups[-1][0].kv.lo
            merged = end([*group, call]) - lo
            if blocks(merged) <= blocks(end(group) - lo) + blocks(call.kv.hi - call.kv.lo):
                group.append(call)
                continue
        groups.append([call])
    found = []
    for group in groups:
        first = None
        if len(group) > 1:
            lo = group[0].kv.lo
            first = np.full(end(group) - lo, NEVER, np.int32)
            for call in group:
                at = _Merged(group, None).slot(call, shape.dim) - lo
                first[at : at + call.kv.hi - call.kv.lo] = call.start
        found.append(_Merged(group, first))
    return found


def _continues(a: Call, b: Call, dim: int) -> bool:
    """``b`` lies behind ``a`` in the same run of memory and is seen the same way, perhaps by fewer rows."""
    if a.stop != b.stop or a.shift != b.shift or b.start < a.start:
        return False
    if a.kv.pages is not None or b.kv.pages is not None:
        return False
    same = (a.kv.layer, a.kv.value, a.kv.head) == (b.kv.layer, b.kv.value, b.kv.head)
    gap = b.kv.origin + b.kv.lo * dim - (a.kv.origin + a.kv.hi * dim)
    inside = b.kv.origin + b.kv.hi * dim - (a.kv.origin + a.kv.lo * dim) <= a.kv.head
    return same and gap >= 0 and gap % dim == 0 and inside


def _mask(first: np.ndarray | None, seen: list[np.ndarray]) -> int:
    if first is None:
        return -1
    seen.append(first)
    return sum(map(len, seen[:-1]))


def _single_tiles(
    alone: dict[int, list[Call]], shape: Shape, seen: list[np.ndarray]
) -> tuple[list[Tile], int]:
    """Rows that see the same pieces are a tile, each with its own shifts."""
    readers: dict[tuple[KV, bytes | None, int], list[tuple[int, int]]] = {}
    tiles = []
    for row, calls in alone.items():
        times: dict[tuple[KV, bytes | None], int] = {}
        trimmed = [c._replace(kv=c.kv._replace(hi=c.kv.lo + 1)) if c.causal else c for c in calls]
        for merged in _coalesce(trimmed, shape):
            holes = None if merged.first is None else (merged.first == NEVER).tobytes()
            key = (merged.kv, holes)
            times[key] = times.get(key, 0) + 1  # a chunk that a row maps twice is two segments
            readers.setdefault((*key, times[key]), []).append((row, merged.calls[0].shift))
        if not calls:
            tiles.append(Tile((row,), []))
    cohorts: dict[tuple[int, ...], list[Segment]] = {}
    for (kv, holes, _), members in readers.items():
        rows, shifts = zip(*members)
        first = None if holes is None else np.where(np.frombuffer(holes, bool), NEVER, 0).astype(np.int32)
        segment = Segment(kv, kv.lo, kv.hi, shifts, 0, NEVER, NEVER, _mask(first, seen))
        cohorts.setdefault(rows, []).append(segment)
    widest = max(map(len, cohorts), default=1) * shape.group
    single_m = min(max(16, power(widest)), max(64, power(shape.group)))
    size = single_m // shape.group
    for rows, segments in cohorts.items():
        for at in range(0, len(rows), size):
            part = slice(at, at + size)
            tiles.append(Tile(rows[part], [s._replace(shifts=s.shifts[part]) for s in segments]))
    return tiles, single_m


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def _cut(tiles: list[Tile], shape: Shape, block_n: int) -> list[Tile]:
    """Cut tiles along their keys into as many as keep the device busy, if they are long enough for that."""
    total = sum(tile.keys for tile in tiles)
    most = max(shape.least, -(-total * shape.kv_heads // shape.programs), 1)
    most = -(-most // block_n) * block_n
    cut: list[Tile] = []
    for tile in tiles:
        part: list[Segment] = []
        room = most
        for segment in tile.segments:
            lo = segment.lo
            while lo < segment.hi:
                if room <= 0:
                    cut.append(Tile(tile.rows, part))
                    part, room = [], most
                hi = min(segment.hi, lo + room)
                if segment.hi - hi < block_n:  # no crumbs
                    hi = segment.hi
                part.append(_from(segment, lo, hi))
                room -= hi - lo
                lo = hi
        cut.append(Tile(tile.rows, part))
    return cut


def _longest_first(tiles: list[Tile]) -> list[Tile]:
    """So that the last to finish is a short one."""
    return sorted(tiles, key=lambda tile: -tile.keys)


def _from(segment: Segment, lo: int, hi: int) -> Segment:
    seen = segment.seen + lo - segment.lo if segment.seen >= 0 else -1
    return segment._replace(lo=lo, hi=hi, seen=seen)


class _Tables:
    """Rows of the tables, grown item by item."""

    def __init__(self, shape: Shape, paged: bool) -> None:
        self._shape, self._paged = shape, paged
        self._segments: list[tuple[int, ...]] = []
        self._items: list[tuple[int, ...]] = []
        self._rows: list[int] = []
        self._shifts: list[int] = []
        self._shift_at: dict[tuple[int, ...], int] = {}
        self._pages: list[int] = []
        self._page_at: dict[KV, int] = {}
        self._partials: dict[int, list[int]] = {}
        self._slot = 0

    def add(self, tile: Tile, uses: dict[int, int]) -> None:
        begin = len(self._segments)
        for s in tile.segments:
            uniform = len(set(s.shifts)) == 1
            shift = -1 if uniform and s.shifts[0] == 0 else self._shift(s.shifts[:1] if uniform else s.shifts)
            origin = self._page(s.kv) if self._paged else s.kv.origin
            place = (origin, s.kv.value, s.kv.layer, s.kv.head, s.lo, s.hi)
            self._segments.append((*place, shift, int(not uniform), s.row_min, s.row_max, s.diagonal, s.seen))
        slot = -1
        if any(uses[row] > 1 for row in tile.rows):
            slot = self._slot
            self._slot += len(tile.rows)
            for i, row in enumerate(tile.rows):
                self._partials.setdefault(row, []).append(slot + i)
        self._items.append((len(self._rows), len(tile.rows), begin, len(self._segments), slot, 0, 0, 0))
        self._rows += tile.rows

    def _shift(self, shifts: tuple[int, ...]) -> int:
        at = self._shift_at.get(shifts)
        if at is None:
            at = self._shift_at[shifts] = len(self._shifts)
            self._shifts += shifts
        return at

    def _page(self, kv: KV) -> int:
        """Where the piece's page table begins; a contiguous piece among paged ones gets one entry a page."""
        whole = kv._replace(lo=0)
        at = self._page_at.get(whole)
        if at is None:
            size = self._shape.page
            pages = kv.pages
            if pages is None:
                pages = tuple(kv.origin + i * size * self._shape.dim for i in range(-(-kv.hi // size)))
            at = self._page_at[whole] = len(self._pages)
            self._pages += pages
        return at

    def finish(self, seen: list[np.ndarray], blocks: int, single_m: int) -> WorkList:
        ends = np.cumsum([0, *map(len, self._partials.values())])
        flat = [p for partials in self._partials.values() for p in partials]
        return WorkList(
            np.array(self._segments, np.int64).reshape(-1, SEGMENT),
            np.array(self._items, np.int32).reshape(-1, ITEM),
            np.array(self._rows, np.int32),
            np.array(self._shifts, np.int32),
            np.concatenate(seen) if seen else np.zeros(0, np.int32),
            np.array(self._pages, np.int64),
            np.array(list(self._partials), np.int32),
            ends.astype(np.int32),
            np.array(flat, np.int32),
            blocks,
            single_m,
            self._slot,
            self._paged,
        )
