"""What stands beside attention, as functions on tensors: a chunk into its pages, deviation, selection.

Each does what the function of its name in ``mpic.kernels.reference`` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpic.kernels.spans import Shift
from mpic.kernels.triton import copies
from mpic.kernels.triton import deviation as kernels
from mpic.kernels.triton.step import Geometry, dense, on, places_of, power, turns_of
from mpic.kernels.triton.tiles import KV


def load_chunk(
    source: torch.Tensor,
    anchor: torch.Tensor,
    pages: torch.Tensor,
    where: KV,
    page_size: int,
    layers: slice = slice(None),
) -> None:
    """A group of a chunk's layers into its pages, in one launch.

    Args:
        source: ``[layers, 2, kv_heads, n, head_dim]`` contiguous, on the device or in pinned host memory, which the
            kernel then reads over the bus.
        anchor: what page origins count from.
        pages: int64 origins on the device, of page 0 of the table on.
        where: strides of the pages, and ``lo``, the slot of the first token.
        layers: which of them; all by default.
    """
    count, _, heads, n, dim = source.shape
    lo, hi, step = layers.indices(count)
    if step != 1 or where.hi - where.lo != n or not source.is_contiguous():
        raise ValueError(f"{n} tokens of layers {layers} into {where.hi - where.lo} slots")
    if hi <= lo:
        return
    block = 16
    with on(anchor.device):
        copies.load[(-(-n // block), hi - lo, 2 * heads)](
            source,
            anchor,
            pages,
            where.lo,
            n,
            lo,
            heads,
            source.stride(0),
            source.stride(1),
            source.stride(2),
            where.layer,
            where.value,
            where.head,
            DIM=dim,
            DIM_PAD=power(dim),
            PAGE=page_size,
            BLOCK=block,
            num_warps=4,
        )


def deviation(
    k: torch.Tensor,
    v: torch.Tensor,
    anchor: torch.Tensor,
    cached: Sequence[KV],
    shifts: Sequence[Shift | None],
    geometry: Geometry,
    layer: int = 0,
    page: int = 16,
) -> torch.Tensor:
    """How far each row's fresh keys and values are from the cached ones (CacheBlend, section 4.3).

    Args:
        k, v: ``[kv_heads, rows, head_dim]``; keys rotated at the rows' positions in the prompt.
        cached: pieces that hold the rows' cached tokens, in order, ``rows`` slots in all.
        shifts: of each piece, its rotation by minus its base, or None.

    Returns:
        ``[rows]`` fp32, on the device.
    """
    rows, at = k.shape[1], 0
    writes, turns, index = [], [], torch.zeros(rows, dtype=torch.int32)
    for kv, shift in zip(cached, shifts, strict=True):
        end = at + kv.hi - kv.lo
        writes.append((at, end, kv))
        if shift is not None:
            turns.append(shift)
            index[at:end] = len(turns)
        at = end
    if at != rows:
        raise ValueError(f"{rows} rows beside {at} cached tokens")
    k, v = dense(k), dense(v)
    places = torch.from_numpy(places_of(writes, rows, geometry.dim, page)).to(k.device)
    cos, sin = turns_of(turns, geometry.half, k.device)
    out = torch.empty(rows, dtype=torch.float32, device=k.device)
    block = 16
    with on(k.device):
        kernels.deviation[(-(-rows // block),)](
            k,
            v,
            anchor,
            places,
            index.to(k.device),
            cos,
            sin,
            out,
            layer,
            rows,
            geometry.kv_heads,
            k.stride(1),
            k.stride(0),
            v.stride(1),
            v.stride(0),
            DIM=geometry.dim,
            DIM_PAD=power(geometry.dim),
            HALF=geometry.half,
            INTERLEAVED=geometry.interleaved,
            BLOCK=block,
            num_warps=4,
        )
    return out


def top_percent(deviations: torch.Tensor, percent: float) -> torch.Tensor:
    """Indices of the ``percent`` of rows that deviate most, ascending, ``int64`` on the device; of equal ones the
    earlier. The number is known on the host, so nothing waits for the device."""
    count = round(len(deviations) * percent / 100)
    order = torch.sort(deviations, descending=True, stable=True).indices
    return torch.sort(order[:count]).values
