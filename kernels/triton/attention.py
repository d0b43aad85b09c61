"""Segment attention in Triton: the attention of a whole step's rows over all their spans, in one launch a layer.

A program holds the queries of one tile (rows x the query heads of one KV head) and walks over the segments the tile
sees. Keys lie as they were compiled; at each segment the *query* is turned back by the segment's base, in registers,
once per (row, segment) (DESIGN section 3). One running softmax goes over all segments, so nothing is merged unless
the work list cut a tile: then each item writes a partial result with its log-sum-exp, and ``_merge`` joins them.
Positions with several axes (M-RoPE) need nothing of their own: a base shifts all axes alike, so one cosine and sine
row a base is right; dimensions beyond the rotary ones (partial rotary) pass unchanged.

A step that holds both blocks of rows (prefill) and rows that stand alone (decoding) takes two launches, because their
tiles differ in size by up to eight and a launch has one size; cut tiles add the merge.

Roofline of a launch, with e bytes an element, H query and K key heads, d = head_dim, N the keys of all segments (of a
tile), M the rows of a tile, R rows in all:

- FLOPs: 4 H d for each visible (row, key), plus 6 H d for each (row, segment) that is turned.
- Bytes from DRAM: keys and values of every distinct segment once, 2 K d e a key, if the tiles that share it run close
  enough for the L2 cache (items are launched so: all tiles of a KV head, then the next head); queries and outputs
  2 R H d e; partials 8 (d + 1) H bytes a row and item, written and read.
- Floor: max(FLOPs / tensor throughput, bytes / DRAM bandwidth). Intensity is 4 H d R / (2 K d e) = 2 R group / e FLOPs
  a byte: on an H200 (989 TFLOP/s bf16 dense, 4.8 TB/s, ridge at 206) a link with R x group >= 206 is bound by tensor
  cores, and in practice by exponentials beside them at d = 64; decoding one row (R = 1, group 1..8) is bound by DRAM by
  a factor of 25 and more, and shared chunks multiply R. fp32 uses IEEE products, which no tensor core does: it is for
  correctness.
- Padding costs what it adds: head_dim 80 and 96 run as 128 in the products (not in memory traffic), a tile of single
  rows as 16.

Numbers that change from layer to layer and step to step (``layer``, ``total``) are not specialized on, or a server
would stop to compile at its second layer, at its first step of 16 rows, and so on.

Never run on a GPU so far: checked through Triton's interpreter, and compiled to machine code for sm_80 and sm_90.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _turned(
    q,
    here,
    d,
    live,
    cos,
    sin,
    angle,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Queries ``[BLOCK_M, DIM_PAD]`` rotated by their rows of the tables; arithmetic in fp32, result in q's dtype."""
    if INTERLEAVED:
        frequency = d // 2
        pair = d ^ 1
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        frequency = d % HALF
        pair = tl.where(d < HALF, d + HALF, d - HALF)
        sign = tl.where(d < HALF, -1.0, 1.0)
    moving = live[:, None] & (d < 2 * HALF)[None, :]
    own = tl.load(q + here[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    other = tl.load(q + here[:, None] + pair[None, :], mask=moving, other=0.0)
    at = angle[:, None] * HALF + frequency[None, :]
    c = tl.load(cos + at, mask=moving, other=1.0)
    s = tl.load(sin + at, mask=moving, other=0.0)
    return (own.to(tl.float32) * c + other.to(tl.float32) * s * sign[None, :]).to(own.dtype)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Product summed in fp32. ``WIDEN`` for the interpreter, whose dot takes bf16 for the integers it is kept in."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit(do_not_specialize=["layer", "total"])
def attend(
    q,
    anchor,
    out,
    lse,
    part,
    part_lse,
    cos,
    sin,
    segments,
    items,
    rows,
    shift_of,
    seen,
    pages,
    layer,
    scale,
    total,
    q_row,
    q_head,
    heads,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
    HOLES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One item of one KV head. Grid ``(items, kv_heads)``.

    Args:
        q: ``[heads, rows, head_dim]`` by strides ``q_head, q_row, 1``, rotated at the rows' own positions.
        anchor: what the offsets of keys and values count from.
        out, lse: ``[rows, heads, head_dim]`` and ``[heads, rows]`` fp32, written by items that are not cut.
        part, part_lse: ``[partials, heads, head_dim]`` and ``[partials, heads]`` fp32, written by the others.
        cos, sin: ``[bases, HALF]`` fp32, the rotations by minus each base.
        segments, items, rows, shift_of, seen, pages: tables of ``WorkList``.
    """
    item = items + tl.program_id(0) * 8
    kv_head = tl.program_id(1)
    row_at = tl.load(item)
    count = tl.load(item + 1)
    seg_lo = tl.load(item + 2)
    seg_hi = tl.load(item + 3)
    slot = tl.load(item + 4)

    m = tl.arange(0, BLOCK_M)
    i = m // GROUP
    live = i < count
    row = tl.load(rows + row_at + i, mask=live, other=0)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, DIM_PAD)
    inner = d < DIM
    here = row.to(tl.int64) * q_row + head.to(tl.int64) * q_head
    factor = scale * _LOG2E

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    for index in range(seg_lo, seg_hi):
        entry = segments + index * 12
        origin = tl.load(entry)
        value = tl.multiple_of(tl.load(entry + 1), 16)
        in_layer = (
            tl.multiple_of(tl.load(entry + 2), 16) * layer + tl.multiple_of(tl.load(entry + 3), 16) * kv_head
        )
        lo = tl.load(entry + 4).to(tl.int32)
        hi = tl.load(entry + 5).to(tl.int32)
        shift = tl.load(entry + 6).to(tl.int32)
        step = tl.load(entry + 7).to(tl.int32)
        row_min = tl.load(entry + 8)
        row_max = tl.load(entry + 9)
        diagonal = tl.load(entry + 10)
        mask_at = tl.load(entry + 11).to(tl.int32)

        if shift >= 0:
            angle = tl.load(shift_of + shift + i * step, mask=live, other=0)
            query = _turned(q, here, d, live, cos, sin, angle, DIM, HALF, INTERLEAVED)
        else:
            query = tl.load(q + here[:, None] + d[None, :], mask=live[:, None] & inner[None, :], other=0.0)
        sees = live & (row >= row_min) & (row < row_max)
        limit = tl.where(sees, tl.minimum(hi, row + diagonal), lo).to(tl.int32)

        for j in range(lo, hi, BLOCK_N):
            n = j + tl.arange(0, BLOCK_N)
            there = n < hi
            if HOLES:
                first = tl.load(seen + mask_at + (n - lo), mask=there & (n * 0 + mask_at >= 0), other=0)
                there = there & (first < 2147483647)
            if PAGED:
                base = tl.load(pages + origin + n // PAGE, mask=there, other=0)
                at = tl.multiple_of(base, [16]) + (n % PAGE).to(tl.int64) * DIM
            else:
                at = tl.multiple_of(origin, 16) + n.to(tl.int64) * DIM
            at += in_layer
            k = tl.load(anchor + at[None, :] + d[:, None], mask=there[None, :] & inner[:, None], other=0.0)
            x = _product(query, k, PRECISION, WIDEN) * factor
            visible = n[None, :] < limit[:, None]
            if HOLES:
                visible = visible & there[None, :] & (row[:, None] >= first[None, :])
            x = tl.where(visible, x, float("-inf"))
            new = tl.maximum(top, tl.max(x, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(x - safe[:, None])
            keep = tl.exp2(top - safe)
            norm = norm * keep + tl.sum(p, 1)
            v = tl.load(
                anchor + value + at[:, None] + d[None, :], mask=there[:, None] & inner[None, :], other=0.0
            )
            acc = acc * keep[:, None] + _product(p.to(v.dtype), v, PRECISION, WIDEN)
            top = new

    some = norm > 0.0
    result = acc / tl.where(some, norm, 1.0)[:, None]
    found = tl.where(some, (top + tl.log2(tl.where(some, norm, 1.0))) * _LN2, float("-inf"))
    keep_mask = live[:, None] & inner[None, :]
    if slot >= 0:
        at = (slot + i).to(tl.int64) * heads + head
        tl.store(part + at[:, None] * DIM + d[None, :], result, mask=keep_mask)
        tl.store(part_lse + at, found, mask=live)
    else:
        at = row.to(tl.int64) * heads + head
        tl.store(out + at[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=keep_mask)
        tl.store(lse + head.to(tl.int64) * total + row, found, mask=live)


@triton.jit(do_not_specialize=["total"])
def merge(
    out,
    lse,
    part,
    part_lse,
    merged,
    ptr,
    slots,
    total,
    heads,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Join the partial results of one row and head. Grid ``(merged rows, heads)``; bound by reading the partials."""
    row = tl.load(merged + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    lo = tl.load(ptr + tl.program_id(0))
    hi = tl.load(ptr + tl.program_id(0) + 1)
    d = tl.arange(0, DIM_PAD)
    top = tl.full([1], float("-inf"), tl.float32)
    norm = tl.zeros([1], tl.float32)
    acc = tl.zeros([DIM_PAD], tl.float32)
    for j in range(lo, hi, BLOCK_S):
        s = j + tl.arange(0, BLOCK_S)
        there = s < hi
        at = tl.load(slots + s, mask=there, other=0).to(tl.int64) * heads + head
        l = tl.load(part_lse + at, mask=there, other=float("-inf"))
        o = tl.load(
            part + at[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0
        )
        new = tl.maximum(top, tl.max(l, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp(l - safe)
        keep = tl.exp(top - safe)
        norm = norm * keep + tl.sum(weight, 0)
        acc = acc * keep + tl.sum(o * weight[:, None], 0)
        top = new
    some = norm > 0.0
    result = acc / tl.where(some, norm, 1.0)
    tl.store(out + (row * heads + head) * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)
    found = tl.where(some, top + tl.log(tl.where(some, norm, 1.0)), float("-inf"))
    tl.store(lse + head.to(tl.int64) * total + row + tl.arange(0, 1), found)
