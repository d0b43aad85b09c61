"""The launches of a step: for every layer one scatter, up to three of attention, and one that merges.

Nothing here waits for the device: launches use tables on the device and Python integers that the host knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton

from mpic.kernels.triton import attention, merge, scatter
from mpic.kernels.triton.tiles import Shape, power
from mpic.kernels.triton.tuning import Tiles

_SCATTERED = 16
"""Rows that a program of the scatter writes."""


class Geometry(NamedTuple):
    """The sizes of a model's attention. ``half`` is ``rotary_dim / 2``."""

    heads: int
    kv_heads: int
    dim: int
    half: int
    interleaved: bool = False

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.heads // self.kv_heads


class Grid(NamedTuple):
    """The number of programs of the launches for each KV head, and of those that merge for each head. Items of
    ``items`` are in this order; empty ones fill it up."""

    blocks: int
    shared: int
    lone: int
    merged: int


class Features(NamedTuple):
    """The parts of the kernels that a step's tables need; others are not compiled in."""

    holes: bool = False
    floors: bool = False


def interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter, which has to be chosen before they are imported."""
    return not isinstance(attention.attend, triton.JITFunction)


def available(device: torch.device) -> bool:
    """Return whether the kernels run on the device: compiled ones need CUDA, interpreted ones the CPU."""
    return device.type == ("cpu" if interpreted() else "cuda")


def shape_of(geometry: Geometry, tiles: Tiles, programs: int, least: int, block_programs: int = 0) -> Shape:
    """Return the ``Shape`` by which the work of a step is cut for tiles of these sizes."""
    block_m = max(tiles.block_m, power(geometry.group))
    sizes = (block_m, tiles.block_n, tiles.single_n)
    return Shape(geometry.group, geometry.kv_heads, geometry.dim, *sizes, programs, least, block_programs)


class TileSize(NamedTuple):
    """Queries and keys of a tile, and the warps and stages of the program that attends for it."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile_sizes(geometry: Geometry, tiles: Tiles) -> tuple[TileSize, TileSize, TileSize]:
    """Return the tile sizes of a step's launches: for blocks of rows, for rows that share what they see, and for other
    rows."""
    shape, t = shape_of(geometry, tiles, 1, 1), tiles

    def single(queries: int) -> TileSize:
        # with more the queries do not fit the registers
        warps = min(8, t.single_warps * (2 if queries >= 64 else 1))
        return TileSize(queries, t.single_n, warps, t.single_stages)

    block = TileSize(shape.block_m, t.block_n, t.block_warps, t.block_stages)
    return block, single(shape.shared_m), single(shape.lone_m)


class Launches:
    """The launches of a step over its tables on the device.

    Args:
        tables: the tables of ``WorkList``, and ``targets``, on the device.
        rotations: cosines and sines ``[bases, half]``, by which ``rotation_of`` counts.
        partials: results ``[partials, heads, head_dim]`` fp32 and log-sum-exps ``[partials, heads]`` of cut tiles.
        rows: number of the step's rows.
        anchor: a tensor of the KV's dtype and device that all offsets count from.
        scattered: True if the step writes anything.
    """

    def __init__(
        self,
        geometry: Geometry,
        tiles: Tiles,
        grid: Grid,
        features: Features,
        tables: Mapping[str, torch.Tensor],
        rotations: tuple[torch.Tensor, torch.Tensor],
        partials: tuple[torch.Tensor, torch.Tensor],
        rows: int,
        anchor: torch.Tensor,
        scattered: bool = True,
    ) -> None:
        self.geometry, self.tiles, self.grid, self.features = geometry, tiles, grid, features
        self.tables, self.rotations, self.partials = tables, rotations, partials
        self.rows, self.anchor, self.scattered = rows, anchor, scattered

    def scatter(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the rows' keys and values ``[kv_heads, rows, head_dim]`` to their slots of a layer."""
        if not self.scattered:
            return
        g = self.geometry
        k, v = _dense(k), _dense(v)
        with _current(self.anchor.device):
            scatter.scatter[(-(-self.rows // _SCATTERED), g.kv_heads)](
                k,
                v,
                self.anchor,
                self.tables["targets"],
                layer,
                self.rows,
                k.stride(1),
                k.stride(0),
                v.stride(1),
                v.stride(0),
                DIM=g.dim,
                DIM_PAD=power(g.dim),
                BLOCK=_SCATTERED,
                num_warps=4,
            )

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of a layer.

        Args:
            q: ``[heads, rows, head_dim]``, rotated at the rows' own positions.
            softcap: see ``mpic.kernels.attention.Extras``.
            out, lse: contiguous tensors for the results; new ones by default.

        Returns:
            ``[rows, heads, head_dim]`` in q's dtype and its log-sum-exp ``[heads, rows]`` fp32. A row that sees
            nothing gets zeros and minus infinity.
        """
        g = self.geometry
        if q.dtype != self.anchor.dtype:
            raise ValueError(f"queries of {q.dtype} over keys of {self.anchor.dtype}")
        if out is None:
            out = torch.empty(self.rows, g.heads, g.dim, dtype=q.dtype, device=q.device)
        if lse is None:
            lse = torch.empty(g.heads, self.rows, dtype=torch.float32, device=q.device)
        self.launch(layer, q, scale, softcap, out, lse)
        return out, lse

    def launch(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float,
        softcap: float | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> list[Any]:
        """Launch the attention of a layer; see ``attend``. Return the compiled kernels of its tiles."""
        q, sizes = _dense(q), tile_sizes(self.geometry, self.tiles)
        first, kernels = 0, []
        with _current(q.device):
            for count, tile in zip(self.grid[:3], sizes, strict=True):
                if count:
                    kernels.append(self._tiles(first, count, tile, layer, q, scale, softcap, out, lse))
                first += count
            self._merge(out, lse)
        return kernels

    def _tiles(
        self,
        first: int,
        count: int,
        size: TileSize,
        layer: int,
        q: torch.Tensor,
        scale: float,
        softcap: float | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Any:
        """Launch ``count`` items with tiles of one size. Return the kernel."""
        g, t = self.geometry, self.tables
        return attention.attend[(count, g.kv_heads)](
            q,
            self.anchor,
            out,
            lse,
            *self.partials,
            *self.rotations,
            t["segments"],
            t["items"][first:],
            t["rows"],
            t["rotation_of"],
            t["first_rows"],
            t["floors"],
            layer,
            scale,
            softcap or 0.0,
            self.rows,
            q.stride(1),
            q.stride(0),
            g.heads,
            GROUP=g.group,
            DIM=g.dim,
            DIM_PAD=power(g.dim),
            HALF=g.half,
            INTERLEAVED=g.interleaved,
            HOLES=self.features.holes,
            FLOORED=self.features.floors,
            SOFTCAP=softcap is not None,
            PRECISION="ieee",
            WIDEN=q.dtype == torch.bfloat16 and interpreted(),
            BLOCK_M=size.queries,
            BLOCK_N=size.keys,
            num_warps=size.warps,
            num_stages=size.stages,
        )

    def _merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        if not self.grid.merged:
            return
        g, t = self.geometry, self.tables
        merge.merge[(self.grid.merged, g.heads)](
            out,
            lse,
            *self.partials,
            t["merged"],
            t["ends"],
            t["partial_of"],
            self.rows,
            g.heads,
            DIM=g.dim,
            DIM_PAD=power(g.dim),
            BLOCK_S=16,
            num_warps=4,
        )


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make launches go to this device, which need not be torch's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy, with contiguous rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for the interpreter, which runs one program after the other."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1


def name() -> str:
    """Return the name for ``/health`` and the bench's header."""
    return "triton (interpreted)" if interpreted() else "triton"
