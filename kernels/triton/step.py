"""A step on the device: its tables are copied there once, then every layer is one scatter and one attention.

Nothing here waits for the device: tables are built from host integers and go over in one copy from pinned memory, and
launches take Python integers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
import triton

from mpic.kernels.spans import Shift, SpanCall
from mpic.kernels.triton import attention, copies
from mpic.kernels.triton.tiles import KV, Call, Shape, power
from mpic.kernels.triton.tuning import Tiles, tiles_for
from mpic.kernels.triton.worklist import WorkList, build

_ALIGNED = 16
"""Elements that every offset and stride is a multiple of, which the kernels promise to the compiler."""


class Geometry(NamedTuple):
    """What the kernels need to know of a model. ``half`` is ``rotary_dim / 2``."""

    heads: int
    kv_heads: int
    dim: int
    half: int
    interleaved: bool = False


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, which has to be chosen before they are imported."""
    return not isinstance(attention.attend, triton.JITFunction)


def available(device: torch.device) -> bool:
    """Compiled kernels need CUDA, interpreted ones the CPU."""
    return device.type == ("cpu" if interpreted() else "cuda")


def kv_of(keys: torch.Tensor, values: torch.Tensor, anchor: torch.Tensor, layer: int = 0) -> KV:
    """Where ``keys, values [kv_heads, n, head_dim]`` lie, as seen from ``anchor``.

    Args:
        layer: elements from a layer to the next.

    Raises:
        ValueError: the kernels cannot read such strides or offsets.
    """
    heads, n, dim = keys.shape
    size = anchor.element_size()
    origin, rest = divmod(keys.data_ptr() - anchor.data_ptr(), size)
    value = (values.data_ptr() - keys.data_ptr()) // size
    dense = keys.stride()[1:] == (dim, 1) and values.stride() == keys.stride()
    numbers = (origin, value, layer, keys.stride(0) if heads > 1 else 0)
    if rest or not dense or n < 1 or any(number % _ALIGNED for number in numbers):
        raise ValueError(
            f"segment attention reads rows of {dim} dense elements whose offsets are multiples of {_ALIGNED}; "
            f"got strides {keys.stride()} and {values.stride()} at offset {origin}"
        )
    return KV(origin, layer, value, keys.stride(0), 0, n)


class Prepared:
    """The tables of a step.

    Args:
        calls: which rows see what; ``Call.shift`` is a row of ``shifts`` plus one, 0 for none.
        writes: ``(start, stop, where)`` covers every row at most once.
        rows: of the step.
        anchor: a tensor of the KV's dtype and device that all offsets count from.
        shifts: rotations by minus a base, each ``[half]``.
        programs: how many programs the device wants at once; by default two a multiprocessor.
        least: a tile is not cut into items of fewer keys.
        page: tokens a page, where calls have page tables.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        rows: int,
        geometry: Geometry,
        anchor: torch.Tensor,
        shifts: Sequence[Shift] = (),
        writes: Sequence[tuple[int, int, KV]] = (),
        tiles: Tiles | None = None,
        programs: int | None = None,
        least: int = 256,
        page: int = 16,
    ) -> None:
        self.geometry, self.anchor, self.rows, self.page = geometry, anchor, rows, page
        self.tiles = tiles or tiles_for(anchor.device, anchor.dtype, geometry.dim)
        if programs is None:
            programs = 2 * multiprocessors(anchor.device)
        group = geometry.heads // geometry.kv_heads
        self._block_m = max(self.tiles.block_m, power(group))
        shape = Shape(
            group,
            geometry.kv_heads,
            geometry.dim,
            self._block_m,
            self.tiles.block_n,
            self.tiles.single_n,
            programs,
            least,
            page,
        )
        self.work: WorkList = build(calls, rows, shape)
        self._tables = _upload(self.work, places_of(writes, rows, geometry.dim, page), anchor.device)
        self._cos, self._sin = turns_of(shifts, geometry.half, anchor.device)
        self._scattered = bool(writes)
        parts, device = self.work.partials, anchor.device
        self._part = torch.empty(
            max(1, parts), geometry.heads, geometry.dim, dtype=torch.float32, device=device
        )
        self._part_lse = torch.empty(max(1, parts), geometry.heads, dtype=torch.float32, device=device)

    def scatter(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the rows' keys and values ``[kv_heads, rows, head_dim]`` to their slots of a layer."""
        if not self._scattered:
            return
        g, block = self.geometry, 16
        k, v = dense(k), dense(v)
        with on(self.anchor.device):
            copies.scatter[(-(-self.rows // block), g.kv_heads)](
                k,
                v,
                self.anchor,
                self._tables["places"],
                layer,
                self.rows,
                k.stride(1),
                k.stride(0),
                v.stride(1),
                v.stride(0),
                DIM=g.dim,
                DIM_PAD=power(g.dim),
                BLOCK=block,
                num_warps=4,
            )

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a layer.

        Args:
            q: ``[heads, rows, head_dim]``, rotated at the rows' own positions.
            out, lse: where to write, contiguous; new tensors by default.

        Returns:
            ``[rows, heads, head_dim]`` in q's dtype and its log-sum-exp ``[heads, rows]`` fp32. A row that sees
            nothing gets zeros and minus infinity.
        """
        g, work, sizes = self.geometry, self.work, self.tiles
        if q.dtype != self.anchor.dtype:
            raise ValueError(f"queries of {q.dtype} over keys of {self.anchor.dtype}")
        q = dense(q)
        if out is None:
            out = torch.empty(self.rows, g.heads, g.dim, dtype=q.dtype, device=q.device)
        if lse is None:
            lse = torch.empty(g.heads, self.rows, dtype=torch.float32, device=q.device)
        blocks = self._block_m, sizes.block_n, sizes.block_warps, sizes.block_stages
        warps = min(
            8, sizes.single_warps * (2 if work.single_m >= 64 else 1)
        )  # or their queries leave the registers
        singles = work.single_m, sizes.single_n, warps, sizes.single_stages
        with on(q.device):
            self._tiles(0, work.blocks, blocks, layer, q, scale, out, lse)
            self._tiles(work.blocks, len(work.items), singles, layer, q, scale, out, lse)
            self._merge(out, lse)
        return out, lse

    def _tiles(
        self,
        lo: int,
        hi: int,
        sizes: tuple[int, int, int, int],
        layer: int,
        q: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Items ``[lo, hi)``, whose tiles have these sizes: queries, keys, warps, stages."""
        if lo == hi:
            return
        g, t, (block_m, block_n, warps, stages) = self.geometry, self._tables, sizes
        attention.attend[(hi - lo, g.kv_heads)](
            q,
            self.anchor,
            out,
            lse,
            self._part,
            self._part_lse,
            self._cos,
            self._sin,
            t["segments"],
            t["items"][lo:],
            t["rows"],
            t["shift_of"],
            t["seen"],
            t["pages"],
            layer,
            scale,
            self.rows,
            q.stride(1),
            q.stride(0),
            g.heads,
            GROUP=g.heads // g.kv_heads,
            DIM=g.dim,
            DIM_PAD=power(g.dim),
            HALF=g.half,
            INTERLEAVED=g.interleaved,
            PAGED=self.work.paged,
            PAGE=self.page,
            HOLES=len(self.work.seen) > 0,
            PRECISION="ieee",
            WIDEN=q.dtype == torch.bfloat16 and interpreted(),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps,
            num_stages=stages,
        )

    def _merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        if not len(self.work.merge):
            return
        g, t = self.geometry, self._tables
        attention.merge[(len(self.work.merge), g.heads)](
            out,
            lse,
            self._part,
            self._part_lse,
            t["merge"],
            t["ptr"],
            t["slots"],
            self.rows,
            g.heads,
            DIM=g.dim,
            DIM_PAD=power(g.dim),
            BLOCK_S=16,
            num_warps=4,
        )


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to this device, which need not be torch's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def dense(x: torch.Tensor) -> torch.Tensor:
    """With rows of dense elements."""
    return x if x.stride(-1) == 1 else x.contiguous()


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for the interpreter, which runs one program after the other."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1


def places_of(writes: Sequence[tuple[int, int, KV]], rows: int, dim: int, page: int) -> np.ndarray:
    """``[rows, 4]``: where each row's key goes, and the strides to its value, to the next layer and the next head."""
    places = np.zeros((rows if writes else 0, 4), np.int64)
    for start, stop, kv in writes:
        if stop - start != kv.hi - kv.lo:
            raise ValueError(f"{stop - start} rows into {kv.hi - kv.lo} slots")
        slots = np.arange(kv.lo, kv.hi)
        if kv.pages is None:
            places[start:stop, 0] = kv.origin + slots * dim
        else:
            places[start:stop, 0] = np.array(kv.pages)[slots // page] + slots % page * dim
        places[start:stop, 1:] = kv.value, kv.layer, kv.head
    return places


def _upload(work: WorkList, places: np.ndarray, device: torch.device) -> dict[str, torch.Tensor]:
    """All tables in one copy; every table begins at a multiple of 16 bytes."""
    arrays = {
        name: getattr(work, name)
        for name in ("segments", "items", "rows", "shift_of", "seen", "pages", "merge", "ptr", "slots")
    }
    arrays["places"] = places
    ends = np.cumsum([0, *(-(-a.nbytes // 16) * 16 + 16 for a in arrays.values())])
    buffer = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    whole = buffer.numpy()
    for array, at in zip(arrays.values(), ends):
        whole[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    there = buffer.to(device, non_blocking=True)
    found = {}
    for (name, array), at in zip(arrays.items(), ends):
        dtype = torch.int64 if array.dtype == np.int64 else torch.int32
        piece = there[at : at + max(array.nbytes, 16)].view(dtype)
        found[name] = piece[: array.size].view(array.shape) if array.size else piece
    return found


def turns_of(shifts: Sequence[Shift], half: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables ``[1 + shifts, half]``; row 0 turns nothing."""
    one = torch.ones(half, dtype=torch.float32, device=device)
    cos = torch.stack([one, *(s.cos for s in shifts)])
    return cos, torch.stack([torch.zeros_like(one), *(s.sin for s in shifts)])


def segment_attention(
    q: torch.Tensor,
    calls: Sequence[SpanCall],
    scale: float,
    geometry: Geometry,
    anchor: torch.Tensor,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer by itself, from the calls every implementation takes; see ``Prepared.attend``.

    Args:
        q: ``[heads, rows, head_dim]``.
        anchor: any tensor on the same device and of the same dtype.
    """
    shifts: list[Shift] = []
    found = []
    for call in calls:
        start, stop, _ = call.rows.indices(q.shape[1])
        if call.shift is not None:
            shifts.append(call.shift)
        where = kv_of(call.keys, call.values, anchor)
        found.append(Call(start, stop, where, call.causal, len(shifts) if call.shift is not None else 0))
    prepared = Prepared(found, q.shape[1], geometry, anchor, shifts, **options)
    return prepared.attend(0, q, scale)


def name(tiles: Tiles) -> str:
    """For ``/health`` and the bench's header."""
    how = "interpreted" if interpreted() else tiles.source
    return f"triton ({how})"
