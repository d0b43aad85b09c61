"""Cuts the work of a layer into equal programs, on the host and once per step.

``tiles.py`` makes tiles of a step's calls. Tiles that would leave the device idle are cut along their keys into
*items*; rows of several items get partial results that are merged by log-sum-exp. The kernel reads tables of items,
segments and rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpic.kernels.attention import SpanCall
from mpic.kernels.triton.tables import ITEM_WIDTH, SegmentColumn
from mpic.kernels.triton.tiles import RowTables, Segment, Shape, Tile, block_tiles, row_ranges, single_tiles


class WorkList(NamedTuple):
    """Host tables of a step; ``segments`` is int64, the rest int32.

    Args:
        segments: ``[segments, len(SegmentColumn)]``.
        items: ``[items, ITEM_WIDTH]`` in three runs: ``blocks`` of them are tiles of blocks, then ``shared`` of single
            rows that share what they see (``Shape.shared_m`` queries), and the rest of few rows (``Shape.lone_m``).
        rows: the rows of all items, one item after the other.
        rotation_of: rows of the rotation table, by segment.
        first_rows: the first row that sees each slot, for segments with holes.
        floors: the first slot that each row sees, for segments of which rows see a suffix (windows).
        merged, ends, partial_of: row ``merged[i]`` has partial results ``partial_of[ends[i] : ends[i + 1]]``.
        bases: the bases of the rows of the rotation table; the first is 0.
        partials: number of partial results.
    """

    segments: np.ndarray
    items: np.ndarray
    rows: np.ndarray
    rotation_of: np.ndarray
    first_rows: np.ndarray
    floors: np.ndarray
    merged: np.ndarray
    ends: np.ndarray
    partial_of: np.ndarray
    bases: tuple[int, ...]
    blocks: int
    shared: int
    partials: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """Items of each run."""
        return self.blocks, self.shared, len(self.items) - self.blocks - self.shared


def build(calls: Sequence[SpanCall], total: int, shape: Shape) -> WorkList:
    """Cut a step of ``total`` rows. Every row is in at least one item, so every output is written: a row that sees
    nothing gets zeros and a log-sum-exp of minus infinity."""
    per_row = RowTables.empty()
    blocks: list[Tile] = []
    alone: dict[int, list[SpanCall]] = {}
    for (start, stop), members in row_ranges(calls, total):
        if stop - start == 1:
            alone[start] = members
        else:
            blocks += block_tiles(start, stop, members, shape, per_row)
    blocks = _cut(blocks, _keys_of_blocks(blocks, shape), shape.block_n)
    singles = single_tiles(alone, shape, per_row)
    singles = _cut(singles, _keys_of_singles(singles, shape), shape.single_n)
    few = shape.lone_m // shape.group
    shared, lone = ([tile for tile in singles if (len(tile.rows) > few) == wide] for wide in (True, False))
    tiles = [*_longest_first(blocks), *_longest_first(shared), *_longest_first(lone)]
    uses = Counter(row for tile in tiles for row in tile.rows)
    tables = _Tables()
    for tile in tiles:
        tables.add(tile, uses)
    return tables.finish(per_row, len(blocks), len(shared))


_PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of items that are tried for the longest tile of blocks."""
_MERGED = 0.75
"""Keys, as a share of ``Shape.least``, in whose time an item of a cut tile writes its partial result and has it merged:
with tiles of 64 queries both move three times the memory of 64 keys and values."""
_WORTH = 0.95
"""Share of the time that more items have to save."""


def _keys_of_singles(tiles: Sequence[Tile], shape: Shape) -> int:
    """Return the most keys of an item of single rows: so many that all together keep the device busy."""
    total = sum(tile.keys for tile in tiles)
    return max(shape.least, -(-total * shape.kv_heads // shape.programs), 1)


def _keys_of_blocks(tiles: Sequence[Tile], shape: Shape) -> int:
    """Return the most keys of an item of blocks: so many that the device has finished soonest.

    It runs ``block_programs`` items at once. Where there are a few more of equal length than that, these few take as
    long again as all others together, unless the items are cut and fill the device more evenly.
    """
    keys = np.array([tile.keys for tile in tiles], np.int64)
    longest = int(keys.max(initial=1))
    at_once = (shape.block_programs or shape.programs) / shape.kv_heads
    merged = _MERGED * shape.least
    found, soonest = longest, float("inf")
    for pieces in _PIECES:
        most = -(-longest // (pieces * shape.block_n)) * shape.block_n
        if pieces > 1 and most < shape.least:
            break
        items = int((-(-keys // most)).sum())
        taken = min(np.ceil(items / at_once) * most, keys.sum() / at_once + most)
        if pieces > 1:
            taken += merged * (1 + items / at_once)
        if taken < _WORTH * soonest:
            found, soonest = most, taken
    return found


def _cut(tiles: Sequence[Tile], most: int, block_n: int) -> list[Tile]:
    """Cut tiles along their keys into items of at most this many, in whole blocks of keys."""
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
                if segment.hi - hi < block_n:  # no tiny items
                    hi = segment.hi
                part.append(_from(segment, lo, hi))
                room -= hi - lo
                lo = hi
        cut.append(Tile(tile.rows, part))
    return cut


def _longest_first(tiles: list[Tile]) -> list[Tile]:
    """Return the tiles in an order in which the last to finish is a short one."""
    return sorted(tiles, key=lambda tile: -tile.keys)


def _from(segment: Segment, lo: int, hi: int) -> Segment:
    first_row = segment.first_row + lo - segment.lo if segment.first_row >= 0 else -1
    return segment._replace(lo=lo, hi=hi, first_row=first_row)


class _Tables:
    """Rows of the tables, grown item by item."""

    def __init__(self) -> None:
        self._segments: list[tuple[int, ...]] = []
        self._items: list[tuple[int, ...]] = []
        self._rows: list[int] = []
        self._bases = {0: 0}
        self._rotation_of: list[int] = []
        self._rotation_at: dict[tuple[int, ...], int] = {}
        self._partials_of: dict[int, list[int]] = {}
        self._partials = 0

    def add(self, tile: Tile, uses: Mapping[int, int]) -> None:
        """Add an item; its rows get partial results if other items hold one of them too."""
        begin = len(self._segments)
        for segment in tile.segments:
            self._segments.append(self._columns(segment))
        partial = -1
        if any(uses[row] > 1 for row in tile.rows):
            partial = self._partials
            self._partials += len(tile.rows)
            for i, row in enumerate(tile.rows):
                self._partials_of.setdefault(row, []).append(partial + i)
        item = (len(self._rows), len(tile.rows), begin, len(self._segments), partial)
        self._items.append(item + (0,) * (ITEM_WIDTH - len(item)))
        self._rows += tile.rows

    def _columns(self, segment: Segment) -> tuple[int, ...]:
        """Return the segment's row of the table, in the order of ``SegmentColumn``."""
        source, bases = segment.source, segment.bases
        shared = len(set(bases)) == 1
        rotation = -1 if shared and bases[0] == 0 else self._rotation(bases[:1] if shared else bases)
        lies = (source.origin, source.value, source.layer, source.head, segment.lo, segment.hi)
        visible = (segment.row_min, segment.row_max, segment.diagonal, segment.first_row, segment.floors)
        return (*lies, rotation, int(not shared), *visible)

    def _rotation(self, bases: tuple[int, ...]) -> int:
        """Return the index of these bases' rotations in ``rotation_of``."""
        begin = self._rotation_at.get(bases)
        if begin is None:
            begin = self._rotation_at[bases] = len(self._rotation_of)
            self._rotation_of += [self._bases.setdefault(base, len(self._bases)) for base in bases]
        return begin

    def finish(self, per_row: RowTables, blocks: int, shared: int) -> WorkList:
        ends = np.cumsum([0, *map(len, self._partials_of.values())])
        flat = [partial for partials in self._partials_of.values() for partial in partials]
        return WorkList(
            np.array(self._segments, np.int64).reshape(-1, len(SegmentColumn)),
            np.array(self._items, np.int32).reshape(-1, ITEM_WIDTH),
            np.array(self._rows, np.int32),
            np.array(self._rotation_of, np.int32),
            *(np.concatenate(pieces or [np.zeros(0, np.int32)]) for pieces in per_row),
            np.array(list(self._partials_of), np.int32),
            ends.astype(np.int32),
            np.array(flat, np.int32),
            tuple(self._bases),
            blocks,
            shared,
            self._partials,
        )
