"""What a step's rows see, as tiles: rows whose queries are kept in registers together, and the segments they see.

Rows of a block that follow one another make tiles; rows that stand alone (decoding) make a tile with all rows that see
the same segments, so that a chunk shared by several requests is read once.

All offsets are in elements from one anchor tensor, so segments may lie anywhere; nothing here touches the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NEVER = 2**31 - 1
"""In ``seen``: a key that no row sees (a hole)."""


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
    """A piece as one tile sees it: slots ``[lo, hi)``.

    Args:
        shifts: see ``Call``; one for all rows of the tile, or one a row.
        row_min, row_max: rows ``[row_min, row_max)`` see it.
        diagonal: row r sees slots below ``r + diagonal``; ``NEVER``: all.
        seen: where the step's ``seen`` says for each slot which row is the first to see it; -1: all see all.
    """

    kv: KV
    lo: int
    hi: int
    shifts: tuple[int, ...]
    row_min: int
    row_max: int
    diagonal: int
    seen: int


class Tile(NamedTuple):
    """Rows whose queries are kept in registers together."""

    rows: tuple[int, ...]
    segments: list[Segment]

    @property
    def keys(self) -> int:
        """Slots of all segments."""
        return sum(s.hi - s.lo for s in self.segments)


def lanes(calls: Sequence[Call], total: int) -> list[tuple[tuple[int, int], list[Call]]]:
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


def block_tiles(start: int, stop: int, calls: list[Call], shape: Shape, seen: list[np.ndarray]) -> list[Tile]:
    """Rows ``[start, stop)``, which calls connect, in tiles of ``block_m`` queries. Appends to the step's ``seen``."""
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


def single_tiles(
    alone: dict[int, list[Call]], shape: Shape, seen: list[np.ndarray]
) -> tuple[list[Tile], int]:
    """Rows that see the same pieces are a tile, each with its own shifts; and the queries such tiles hold at most.
    Appends to the step's ``seen``."""
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
