"""Steps of single rows (decoding) whose tables, grid and memory stay where they are, so that a CUDA graph captured once
serves every such step with the same number of rows: only the numbers in the tables change.

A step of fewer rows is filled up: the additional rows see nothing and are not written, the additional items have no
rows, and the additional merges are skipped. Tables have room for many more segments than a usual batch needs, which
costs memory and no time; items cost a program each, so there are two grids for each number of rows. With the larger one
segments may have holes, for which the kernel takes more registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mpic.kernels.attention import Rotation, SpanCall, Write
from mpic.kernels.triton.launch import Features, Geometry, Grid, Launches, shape_of
from mpic.kernels.triton.step import advance, host_tables, rotation_table
from mpic.kernels.triton.tables import ITEM_WIDTH, SegmentColumn, TargetColumn
from mpic.kernels.triton.tiles import Shape, power
from mpic.kernels.triton.tuning import Tiles
from mpic.kernels.triton.worklist import build
from mpic.kernels.upload import upload

_SEGMENTS = 256
"""Segments for each row that the tables have room for."""
_BASES = 64
"""Rotary offsets for each row, likewise."""
_SLOTS = 1 << 20
"""Slots of segments with holes, of all rows together."""
_WIDER = 4
"""How many times the items of the smaller grid the larger one has."""


def grids(rows: int, shape: Shape) -> tuple[Grid, Grid]:
    """Return a small and a large grid for steps with this number of rows: each row has its own tile, and tiles are cut
    along their keys until the device is busy."""
    pieces = -(-shape.programs // shape.kv_heads)
    lone = power(rows + pieces)
    shared = 0 if rows * shape.group <= shape.lone_m else power(rows // 2 + pieces)
    return Grid(0, shared, lone, rows), Grid(0, _WIDER * shared, _WIDER * lone, rows)


class TableCapacity(NamedTuple):
    """The capacity of the tables for steps with a limited number of rows."""

    rows: int
    items: int
    segments: int
    bases: int
    partials: int

    @classmethod
    def of(cls, rows: int, shape: Shape) -> TableCapacity:
        _, grid = grids(rows, shape)
        pieces = -(-shape.programs // shape.kv_heads)
        return cls(rows, grid.shared + grid.lone, _SEGMENTS * rows, _BASES * rows + 1, rows * (pieces + 8))


class Partials:
    """The partial results of cut tiles, one layer after the other: ``[partials, heads, head_dim]`` fp32, and their
    log-sum-exps ``[partials, heads]``. Layers of all kinds share them."""

    def __init__(self, capacity: TableCapacity, geometry: Geometry, device: torch.device) -> None:
        size = (capacity.partials, geometry.heads, geometry.dim)
        self.tensors = (
            torch.zeros(size, dtype=torch.float32, device=device),
            torch.zeros(size[:2], dtype=torch.float32, device=device),
        )


class StaticTables:
    """The tables of all static steps of one kind of layer, on the device, where they stay.

    Args:
        geometry, tiles, shape: those of the layers' attention.
        anchor: see ``Launches``.
    """

    def __init__(
        self,
        geometry: Geometry,
        tiles: Tiles,
        shape: Shape,
        capacity: TableCapacity,
        partials: Partials,
        anchor: torch.Tensor,
    ) -> None:
        self.geometry, self.tiles, self.shape, self.capacity = geometry, tiles, shape, capacity
        self.partials, self.anchor = partials.tensors, anchor
        wide = (capacity.partials + capacity.rows,)
        sizes: dict[str, tuple[int, ...]] = {
            "segments": (capacity.segments, len(SegmentColumn)),
            "grows": (capacity.segments,),
            "targets": (capacity.rows, len(TargetColumn)),
            "items": (capacity.items, ITEM_WIDTH),
            "rows": wide,
            "rotation_of": (capacity.segments,),
            "first_rows": (_SLOTS,),
            "floors": (1,),
            "merged": (capacity.rows,),
            "ends": (capacity.rows + 1,),
            "partial_of": wide,
        }
        long = ("segments", "grows", "targets")
        self.tables = {
            name: torch.zeros(size, dtype=torch.int64 if name in long else torch.int32, device=anchor.device)
            for name, size in sizes.items()
        }
        self.rotations = tuple(
            torch.zeros(capacity.bases, geometry.half, dtype=torch.float32, device=anchor.device)
            for _ in range(2)
        )

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.tables.values(), *self.rotations))

    def fill(self, arrays: dict[str, np.ndarray], bases: Sequence[int], rotation: Rotation) -> None:
        """Write the numbers of a step that fits (``StaticStep.fill``), behind everything the device has been given."""
        for name, new in upload(arrays, self.anchor.device).items():
            self.tables[name][: len(new)].copy_(new)
        turns = rotation_table(bases, rotation, self.geometry.half, self.anchor.device)
        for mine, new in zip(self.rotations, turns, strict=True):
            mine[: len(new)].copy_(new)

    def advance(self) -> None:
        """Make the tables those of the same rows one token later."""
        advance(self.tables, self.geometry.dim)


class StaticStep(Launches):
    """The launches of static steps with one grid, for any content of the tables; ``holes`` allows segments with
    holes."""

    def __init__(self, tables: StaticTables, rows: int, grid: Grid, holes: bool) -> None:
        super().__init__(
            tables.geometry,
            tables.tiles,
            grid,
            Features(holes),
            tables.tables,
            tables.rotations,  # ty: ignore[invalid-argument-type] (cosines and sines)
            tables.partials,
            rows,
            tables.anchor,
        )
        self._static = tables

    def fill(self, calls: Sequence[SpanCall], writes: Sequence[Write], rotation: Rotation) -> bool:
        """Fill the tables for a step of at most ``rows`` single rows; see ``TritonStep``. Return False, and leave
        them as they are, when the step does not fit."""
        grid, capacity, work = self.grid, self._static.capacity, build(calls, self.rows, self._static.shape)
        _, shared, lone = work.counts
        fits = (
            work.blocks == 0
            and shared <= grid.shared
            and lone <= grid.lone
            and len(work.merged) <= grid.merged
            and len(work.segments) <= capacity.segments
            and len(work.rotation_of) <= capacity.segments
            and len(work.bases) <= capacity.bases
            and len(work.first_rows) <= (_SLOTS if self.features.holes else 0)
            and work.partials <= capacity.partials
        )
        if not fits:
            return False
        arrays = host_tables(work, calls, writes, self.rows, self.geometry.dim)
        items = np.zeros((grid.shared + grid.lone, ITEM_WIDTH), np.int32)
        items[:shared], items[grid.shared : grid.shared + lone] = work.items[:shared], work.items[shared:]
        beyond = grid.merged - len(work.merged)
        arrays |= {
            "items": items,
            "merged": np.pad(work.merged, (0, beyond), constant_values=-1),
            "ends": np.pad(work.ends, (0, beyond), mode="edge"),
        }
        del arrays["floors"]  # single rows see whole segments
        self._static.fill(arrays, work.bases, rotation)
        return True


def tables_for(
    geometry: Geometry,
    tiles: Tiles,
    rows: int,
    programs: int,
    least: int,
    anchor: torch.Tensor,
    partials: Partials,
) -> StaticTables:
    """Return tables for static steps with at most this number of rows."""
    shape = shape_of(geometry, tiles, programs, least)
    return StaticTables(geometry, tiles, shape, TableCapacity.of(rows, shape), partials, anchor)
