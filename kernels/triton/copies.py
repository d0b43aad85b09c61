"""Moving keys and values in Triton: a step's own into their slots, a chunk's from a buffer into its slots.

Both only copy: bytes read plus bytes written and nothing else, so a launch is bound by DRAM (``scatter``: 4 T K d e
bytes a layer, 2 MB for 512 rows of 8 heads of 128 in bf16, so in fact by its launch) or by the link to the host
(``load``: 2 n K d e bytes a layer, read once over PCIe when the buffer is pinned host memory).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer", "total"])
def scatter(
    k,
    v,
    anchor,
    places,
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
    """Rows of ``k, v [kv_heads, rows, head_dim]`` to their slots. Grid ``(rows / BLOCK, kv_heads)``.

    ``places [rows, 4]`` int64: offset of the row's key in layer 0 and head 0, and the strides from key to value, from
    layer to layer, from head to head.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    d = tl.arange(0, DIM_PAD)
    there = row < total
    both = there[:, None] & (d < DIM)[None, :]
    place = places + row.to(tl.int64) * 4
    at = tl.multiple_of(tl.load(place, mask=there, other=0), [16])
    value = tl.multiple_of(tl.load(place + 1, mask=there, other=0), [16])
    at += tl.multiple_of(tl.load(place + 2, mask=there, other=0), [16]) * layer
    at += tl.multiple_of(tl.load(place + 3, mask=there, other=0), [16]) * head
    wide = row.to(tl.int64)[:, None]
    key = tl.load(k + wide * k_row + head * k_head + d[None, :], mask=both)
    tl.store(anchor + at[:, None] + d[None, :], key, mask=both)
    val = tl.load(v + wide * v_row + head * v_head + d[None, :], mask=both)
    tl.store(anchor + (at + value)[:, None] + d[None, :], val, mask=both)


@triton.jit(do_not_specialize=["first", "tokens", "layer_lo"])
def load(
    source,
    anchor,
    pages,
    first,
    tokens,
    layer_lo,
    kv_heads,
    s_layer,
    s_kv,
    s_head,
    t_layer,
    t_value,
    t_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Token j of ``source [layers, 2, kv_heads, tokens, head_dim]`` (by strides) to slot ``first + j`` of a page table.
    Grid ``(tokens / BLOCK, layers of the group, 2 * kv_heads)``."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = (layer_lo + tl.program_id(1)).to(tl.int64)
    kv = tl.program_id(2) // kv_heads
    head = tl.program_id(2) % kv_heads
    d = tl.arange(0, DIM_PAD)
    there = j < tokens
    both = there[:, None] & (d < DIM)[None, :]
    slot = first + j
    page = tl.multiple_of(tl.load(pages + slot // PAGE, mask=there, other=0), [16])
    at = page + (slot % PAGE).to(tl.int64) * DIM + layer * t_layer + kv * t_value + head * t_head
    begin = layer * s_layer + kv * s_kv + head * s_head
    data = tl.load(source + begin + j.to(tl.int64)[:, None] * DIM + d[None, :], mask=both)
    tl.store(anchor + at[:, None] + d[None, :], data, mask=both)
