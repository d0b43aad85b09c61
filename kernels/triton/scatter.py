"""Writes a step's own keys and values into their slots, in Triton.

The kernel only copies, so it is bound by DRAM: 4 T K d e bytes a layer are read and written, 2 MB for 512 rows of 8
heads of 128 in bf16, so in fact it is bound by its launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpic.kernels.triton.tables import TargetColumn

_WIDTH = tl.constexpr(len(TargetColumn))
_ORIGIN = tl.constexpr(int(TargetColumn.ORIGIN))
_VALUE = tl.constexpr(int(TargetColumn.VALUE))
_LAYER = tl.constexpr(int(TargetColumn.LAYER))
_HEAD = tl.constexpr(int(TargetColumn.HEAD))


@triton.jit(do_not_specialize=["layer", "total"])
def scatter(
    k,  # [kv_heads, rows, DIM] by strides k_head, k_row, 1
    v,  # [kv_heads, rows, DIM] by strides v_head, v_row, 1
    anchor,  # the KV memory that offsets count from
    targets,  # [rows, TargetColumn] int64
    layer,
    total,
    k_row,
    k_head,
    v_row,
    v_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write rows of ``k`` and ``v`` to their slots. Grid ``(rows / BLOCK, kv_heads)``; ``total`` is the number of
    rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    d = tl.arange(0, DIM_PAD)
    present = row < total
    both = present[:, None] & (d < DIM)[None, :]
    target = targets + row.to(tl.int64) * _WIDTH
    slot = tl.multiple_of(tl.load(target + _ORIGIN, mask=present, other=0), [16])
    value = tl.multiple_of(tl.load(target + _VALUE, mask=present, other=0), [16])
    both = both & (value != 0)[:, None]
    slot += tl.multiple_of(tl.load(target + _LAYER, mask=present, other=0), [16]) * layer
    slot += tl.multiple_of(tl.load(target + _HEAD, mask=present, other=0), [16]) * head
    wide = row.to(tl.int64)[:, None]
    key = tl.load(k + wide * k_row + head * k_head + d[None, :], mask=both)
    tl.store(anchor + slot[:, None] + d[None, :], key, mask=both)
    val = tl.load(v + wide * v_row + head * v_head + d[None, :], mask=both)
    tl.store(anchor + (slot + value)[:, None] + d[None, :], val, mask=both)
