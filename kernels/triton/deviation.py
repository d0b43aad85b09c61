"""Per-token KV deviation in Triton, for policies that choose what to recompute (CacheBlend, section 4.3).

A launch reads the fresh and the cached keys and values of every row once (4 R K d e bytes) and writes four bytes a row:
bound by DRAM, floor bytes / bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer", "total"])
def deviation(
    k,
    v,
    anchor,
    places,
    shift_of,
    cos,
    sin,
    out,
    layer,
    total,
    kv_heads,
    k_row,
    k_head,
    v_row,
    v_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum over heads and dimensions of the squared difference of a row's fresh keys and values to cached ones; fresh
    keys are turned back by the chunk's base, as queries are. Grid ``(rows / BLOCK,)``; ``places`` as in ``scatter``."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM_PAD)
    there = row < total
    both = there[:, None] & (d < DIM)[None, :]
    if INTERLEAVED:
        frequency = d // 2
        pair = d ^ 1
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        frequency = d % HALF
        pair = tl.where(d < HALF, d + HALF, d - HALF)
        sign = tl.where(d < HALF, -1.0, 1.0)
    moving = there[:, None] & (d < 2 * HALF)[None, :]
    turn = tl.load(shift_of + row, mask=there, other=0)[:, None] * HALF + frequency[None, :]
    c = tl.load(cos + turn, mask=moving, other=1.0)
    s = tl.load(sin + turn, mask=moving, other=0.0) * sign[None, :]
    place = places + row.to(tl.int64) * 4
    at = tl.multiple_of(tl.load(place, mask=there, other=0), [16])
    value = tl.multiple_of(tl.load(place + 1, mask=there, other=0), [16])
    at += tl.multiple_of(tl.load(place + 2, mask=there, other=0), [16]) * layer
    stride = tl.multiple_of(tl.load(place + 3, mask=there, other=0), [16])
    wide = row.to(tl.int64)[:, None]
    found = tl.zeros([BLOCK], tl.float32)
    for head in range(0, kv_heads):
        here = wide * k_row + head * k_head
        key = tl.load(k + here + d[None, :], mask=both, other=0.0).to(tl.float32)
        other = tl.load(k + here + pair[None, :], mask=moving, other=0.0).to(tl.float32)
        slot = (at + stride * head)[:, None]
        held = tl.load(anchor + slot + d[None, :], mask=both, other=0.0).to(tl.float32)
        difference = key * c + other * s - held
        found += tl.sum(difference * difference, 1)
        val = tl.load(v + wide * v_row + head * v_head + d[None, :], mask=both, other=0.0).to(tl.float32)
        held = tl.load(anchor + slot + value[:, None] + d[None, :], mask=both, other=0.0).to(tl.float32)
        found += tl.sum((val - held) * (val - held), 1)
    tl.store(out + row, found, mask=there)
