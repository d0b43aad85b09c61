"""Joins the partial results of rows whose tiles were cut, in Triton. Its time is bound by reading the partials."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["total"])
def merge(
    out,  # [rows, heads, DIM]
    lse,  # [heads, rows] fp32
    part,  # [partials, heads, DIM] fp32
    part_lse,  # [partials, heads] fp32
    merged,  # [merged rows] int32; negative: none
    ends,  # [merged rows + 1] int32, into partial_of
    partial_of,  # [partials] int32
    total,
    heads,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Join the partial results of one row and head. Grid ``(merged rows, heads)``."""
    row = tl.load(merged + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    lo = tl.load(ends + tl.program_id(0))
    hi = tl.load(ends + tl.program_id(0) + 1)
    d = tl.arange(0, DIM_PAD)
    top = tl.full([1], float("-inf"), tl.float32)
    norm = tl.zeros([1], tl.float32)
    acc = tl.zeros([DIM_PAD], tl.float32)
    for j in range(lo, hi, BLOCK_S):
        s = j + tl.arange(0, BLOCK_S)
        present = s < hi
        entry = tl.load(partial_of + s, mask=present, other=0).to(tl.int64) * heads + head
        l = tl.load(part_lse + entry, mask=present, other=float("-inf"))
        o = tl.load(
            part + entry[:, None] * DIM + d[None, :], mask=present[:, None] & (d < DIM)[None, :], other=0.0
        )
        new = tl.maximum(top, tl.max(l, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp(l - safe)
        keep = tl.exp(top - safe)
        norm = norm * keep + tl.sum(weight, 0)
        acc = acc * keep + tl.sum(o * weight[:, None], 0)
        top = new
    seen_any = norm > 0.0
    total_weight = tl.where(seen_any, norm, 1.0)
    result = acc / total_weight
    tl.store(
        out + (row * heads + head) * DIM + d,
        result.to(out.dtype.element_ty),
        mask=(d < DIM) & (d * 0 + row >= 0),
    )
    log_sum = tl.where(seen_any, top + tl.log(total_weight), float("-inf"))
    one = tl.arange(0, 1)
    tl.store(lse + head.to(tl.int64) * total + row + one, log_sum, mask=one + row >= 0)
