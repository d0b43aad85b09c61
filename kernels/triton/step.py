"""A step on the device: its tables are copied there once, then its layers are launched (``launch.py``).

Nothing here waits for the device: tables are built from host integers and go over in one copy from pinned memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpic.kernels.attention import Rotation, SpanCall, Write
from mpic.kernels.triton.launch import (
    Features,
    Geometry,
    Grid,
    Launches,
    multiprocessors,
    shape_of,
)
from mpic.kernels.triton.tables import SegmentColumn, TargetColumn
from mpic.kernels.triton.tiles import Strides
from mpic.kernels.triton.tuning import Tiles, tiles_for
from mpic.kernels.triton.worklist import WorkList, build
from mpic.kernels.upload import upload

_ALIGNED = 16
"""Elements that every offset and stride is a multiple of, which the kernels promise to the compiler."""


def strides_of(data: torch.Tensor, anchor: torch.Tensor) -> Strides:
    """Return the place of ``data [layers, 2, kv_heads, slots, head_dim]`` relative to the anchor.

    Raises:
        ValueError: the kernels cannot read such strides or offsets.
    """
    layers, _, heads, _, dim = data.shape
    to_layer, to_value, to_head, to_slot, one = data.stride()
    origin, rest = divmod(data.data_ptr() - anchor.data_ptr(), anchor.element_size())
    moves = (origin, to_value, to_layer if layers > 1 else 0, to_head if heads > 1 else 0)
    if rest or (to_slot, one) != (dim, 1) or any(number % _ALIGNED for number in moves):
        raise ValueError(
            f"segment attention reads rows of {dim} dense elements whose offsets are multiples of {_ALIGNED}; "
            f"got strides {data.stride()} at offset {origin}"
        )
    return Strides(origin, to_layer, to_value, to_head)


def host_tables(
    work: WorkList, calls: Sequence[SpanCall], writes: Sequence[Write], rows: int, dim: int
) -> dict[str, np.ndarray]:
    """Return a step's tables: those of its work, ``targets``, and ``grows``, 1 for segments that get a slot more in
    the next step."""
    growing = {(call.span.source.origin, call.span.hi) for call in calls if call.first}
    ends = work.segments[:, [SegmentColumn.ORIGIN, SegmentColumn.HI]].tolist()
    arrays = {n: t for n, t in work._asdict().items() if isinstance(t, np.ndarray)}
    arrays["targets"] = _targets(writes, rows, dim)
    arrays["grows"] = np.array([tuple(end) in growing for end in ends], np.int64)
    return arrays


def advance(tables: Mapping[str, torch.Tensor], dim: int) -> None:
    """Advance the tables of single rows by one token, with two additions on the device."""
    tables["segments"][:, SegmentColumn.HI].add_(tables["grows"])
    tables["targets"][:, TargetColumn.ORIGIN].add_(dim)


class TritonStep(Launches):
    """A step with tables of its own size.

    Args:
        calls: the calls of the rows; a span's source is its ``Strides``.
        rows: number of the step's rows.
        anchor: see ``Launches``.
        rotation: function that returns the rotation by minus a base.
        writes: cover every row at most once.
        programs: number of programs that keep the device busy; by default two per multiprocessor.
        least: a tile is not cut into items of fewer keys.
        block_programs: number of programs for blocks of rows that run at once; 0: ``programs``.
    """

    def __init__(
        self,
        calls: Sequence[SpanCall],
        rows: int,
        geometry: Geometry,
        anchor: torch.Tensor,
        rotation: Rotation,
        writes: Sequence[Write] = (),
        tiles: Tiles | None = None,
        programs: int | None = None,
        least: int = 256,
        block_programs: int = 0,
    ) -> None:
        g, device = geometry, anchor.device
        tiles = tiles or tiles_for(device, anchor.dtype, g.dim)
        programs = 2 * multiprocessors(device) if programs is None else programs
        self.work: WorkList = build(calls, rows, shape_of(g, tiles, programs, least, block_programs))
        self._left = tiles.single_n if all(c.rows.stop - c.rows.start == 1 for c in calls) else 0
        parts = max(1, self.work.partials)
        super().__init__(
            g,
            tiles,
            Grid(*self.work.counts, len(self.work.merged)),
            Features(len(self.work.first_rows) > 0, len(self.work.floors) > 0),
            upload(host_tables(self.work, calls, writes, rows, g.dim), device),
            rotation_table(self.work.bases, rotation, g.half, device),
            (
                torch.empty(parts, g.heads, g.dim, dtype=torch.float32, device=device),
                torch.empty(parts, g.heads, dtype=torch.float32, device=device),
            ),
            rows,
            anchor,
            bool(writes),
        )

    def advance(self) -> TritonStep | None:
        """Return a step of single rows one token later, if each has one more own token (a span whose call is
        ``first``) and nothing else has changed; None if it has to be cut anew. It takes only two additions on the
        device."""
        if self._left <= 0:
            return None
        self._left -= 1
        advance(self.tables, self.geometry.dim)
        return self


def _targets(writes: Sequence[Write], rows: int, dim: int) -> np.ndarray:
    """Return the table ``[rows, TargetColumn]`` of the destinations of each row's key and value."""
    targets = np.zeros((rows, len(TargetColumn)), np.int64)
    for write in writes:
        span, source = write.span, write.span.source
        count = write.rows.stop - write.rows.start
        if count != span.tokens:
            raise ValueError(f"{count} rows into {span.tokens} slots")
        targets[write.rows, TargetColumn.ORIGIN] = source.origin + np.arange(span.lo, span.hi) * dim
        targets[write.rows, TargetColumn.VALUE :] = source.value, source.layer, source.head
    return targets


def rotation_table(
    bases: Sequence[int], rotation: Rotation, half: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines ``[bases, half]`` of rotations that are on the device already; the first base is 0."""
    turns: list[Any] = [rotation(base) for base in bases[1:]]  # only base 0 has none
    one = torch.ones(half, dtype=torch.float32, device=device)
    cos = torch.stack([one, *(turn.cos for turn in turns)])
    return cos, torch.stack([torch.zeros_like(one), *(turn.sin for turn in turns)])
