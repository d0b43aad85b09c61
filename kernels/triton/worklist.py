"""The work of a layer, cut into equal programs on the host once a step.

From the calls of a step (``mpic.kernels.spans.SpanCall`` without a layer) come ``tiles``. Tiles that would leave the
device idle are cut along their keys into *items*; rows of several items get partial results that are merged by
log-sum-exp. The kernel reads tables of items, segments and rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpic.kernels.triton.tiles import KV, Call, Segment, Shape, Tile, block_tiles, lanes, single_tiles

SEGMENT = 12
"""Columns of ``segments``: origin, value, layer, head, lo, hi, shift, step, row_min, row_max, diagonal, seen."""
ITEM = 8
"""Columns of ``items``: first of its rows, their number, segments lo and hi, first partial or -1; the rest is empty, so
that any item begins at a multiple of 16 bytes."""


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
    for (start, stop), members in lanes(calls, total):
        if stop - start == 1:
            alone[start] = members
        else:
            blocks += block_tiles(start, stop, members, shape, seen)
    singles, single_m = single_tiles(alone, shape, seen)
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
