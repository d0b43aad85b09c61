"""Segment attention in Triton: the attention of a whole step's rows over all their spans, in one launch a layer.

A program holds the queries of one tile (rows x the query heads of one KV head) and walks over the segments the tile
sees. Keys stay as they were compiled; at each segment the *query* is turned back by the segment's base, in registers,
once per (row, segment) (``docs/design.md``, "Rotation on the query side"). One running softmax goes over all segments,
so nothing is merged unless the work list cut a tile: then each item writes a partial result with its log-sum-exp, and
``merge`` joins them.
Positions with several axes (M-RoPE) need nothing special: a base shifts all axes by the same amount, so one cosine and
sine row per base is right; dimensions beyond the rotary ones (partial rotary) pass unchanged.

A step takes up to three launches, because their tiles differ in size by up to eight and a launch has one size: blocks
of rows (prefill), rows that stand alone (decoding) and share spans, and such rows over spans of their own; cut tiles
add the merge. Slots that every row of a tile sees are taken without a mask, in whole blocks.

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
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpic.kernels.triton.tables import ITEM_WIDTH, NO_FLOORS, ItemColumn, SegmentColumn
from mpic.kernels.triton.tiles import NEVER

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NEVER = tl.constexpr(NEVER)

_SEGMENT_WIDTH = tl.constexpr(len(SegmentColumn))
_ORIGIN = tl.constexpr(int(SegmentColumn.ORIGIN))
_VALUE = tl.constexpr(int(SegmentColumn.VALUE))
_LAYER = tl.constexpr(int(SegmentColumn.LAYER))
_HEAD = tl.constexpr(int(SegmentColumn.HEAD))
_LO = tl.constexpr(int(SegmentColumn.LO))
_HI = tl.constexpr(int(SegmentColumn.HI))
_ROTATION = tl.constexpr(int(SegmentColumn.ROTATION))
_ROTATION_STEP = tl.constexpr(int(SegmentColumn.ROTATION_STEP))
_ROW_MIN = tl.constexpr(int(SegmentColumn.ROW_MIN))
_ROW_MAX = tl.constexpr(int(SegmentColumn.ROW_MAX))
_DIAGONAL = tl.constexpr(int(SegmentColumn.DIAGONAL))
_FIRST_ROW = tl.constexpr(int(SegmentColumn.FIRST_ROW))
_FLOORS = tl.constexpr(int(SegmentColumn.FLOORS))
_NO_FLOORS = tl.constexpr(NO_FLOORS)

_ITEM_WIDTH = tl.constexpr(ITEM_WIDTH)
_ITEM_ROW = tl.constexpr(int(ItemColumn.ROW))
_ITEM_ROWS = tl.constexpr(int(ItemColumn.ROWS))
_ITEM_SEGMENT_LO = tl.constexpr(int(ItemColumn.SEGMENT_LO))
_ITEM_SEGMENT_HI = tl.constexpr(int(ItemColumn.SEGMENT_HI))
_ITEM_PARTIAL = tl.constexpr(int(ItemColumn.PARTIAL))


@triton.jit
def _rotated(
    q,  # [heads, rows, DIM] by the strides in q_offset
    q_offset,  # [BLOCK_M] of each query
    d,
    live,
    cos,  # [bases, HALF] fp32
    sin,  # [bases, HALF] fp32
    angle,  # [BLOCK_M] row of cos and sin
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return queries ``[BLOCK_M, DIM_PAD]`` in q's dtype, rotated in fp32 by their rows of the tables."""
    if INTERLEAVED:
        frequency = d // 2
        pair = d ^ 1
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        frequency = d % HALF
        pair = tl.where(d < HALF, d + HALF, d - HALF)
        sign = tl.where(d < HALF, -1.0, 1.0)
    moving = live[:, None] & (d < 2 * HALF)[None, :]
    own = tl.load(q + q_offset[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    other = tl.load(q + q_offset[:, None] + pair[None, :], mask=moving, other=0.0)
    entry = angle[:, None] * HALF + frequency[None, :]
    c = tl.load(cos + entry, mask=moving, other=1.0)
    s = tl.load(sin + entry, mask=moving, other=0.0)
    return (own.to(tl.float32) * c + other.to(tl.float32) * s * sign[None, :]).to(own.dtype)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Return the product summed in fp32. ``WIDEN`` is for the interpreter, whose dot takes bf16 for the integers that
    it is kept in."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _located(segment, layer, kv_head):
    """Return the offsets of a segment's keys in one layer and head and from a key to its value, and its slots
    ``[lo, hi)``."""
    origin = tl.multiple_of(tl.load(segment + _ORIGIN), 16)
    origin += tl.multiple_of(tl.load(segment + _LAYER), 16) * layer
    origin += tl.multiple_of(tl.load(segment + _HEAD), 16) * kv_head
    value = tl.multiple_of(tl.load(segment + _VALUE), 16)
    return origin, value, tl.load(segment + _LO).to(tl.int32), tl.load(segment + _HI).to(tl.int32)


@triton.jit
def _limit(segment, row, live, lo, hi):
    """Return the end of the slots that each row sees, ``lo`` where it sees none."""
    sees = live & (row >= tl.load(segment + _ROW_MIN)) & (row < tl.load(segment + _ROW_MAX))
    return tl.where(sees, tl.minimum(hi, row + tl.load(segment + _DIAGONAL)), lo).to(tl.int32)


@triton.jit
def _scores(x, scale, softcap, SOFTCAP: tl.constexpr):
    """Return the scores of products in base 2, capped as ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv
    2408.00118, section 2)."""
    if SOFTCAP:
        doubled = x * (scale * 2 * _LOG2E / softcap)
        falls = tl.exp2(-tl.abs(doubled))
        return tl.where(doubled < 0, falls - 1, 1 - falls) / (1 + falls) * (softcap * _LOG2E)
    return x * (scale * _LOG2E)


@triton.jit
def _visible(n, row, floor, limit, present, first, HOLES: tl.constexpr, FLOORED: tl.constexpr):
    """Return ``[BLOCK_M, BLOCK_N]``, whether each row sees each of the slots ``n``. With ``HOLES``, ``first`` is the
    first row that sees a slot, where it is ``present``."""
    visible = n[None, :] < limit[:, None]
    if FLOORED:
        visible = visible & (n[None, :] >= floor[:, None])
    if HOLES:
        visible = visible & present[None, :] & (row[:, None] >= first[None, :])
    return visible


@triton.jit
def _over_keys(
    query,
    row,
    floor,
    limit,
    d,
    anchor,  # the KV memory that origin counts from
    first_rows,  # [slots of segments with holes]
    origin,
    value,
    begin,
    lo,
    hi,
    first_row,
    scale,
    softcap,
    top,
    norm,
    acc,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    HOLES: tl.constexpr,
    FLOORED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take slots ``[lo, hi)`` of a segment that begins at ``begin`` into the running softmax: per query its largest
    score ``top [BLOCK_M]``, the sum of weights ``norm [BLOCK_M]`` and the weighted values ``acc [BLOCK_M, DIM_PAD]``.
    Without ``MASKED`` every row sees all of them, and they fill whole blocks."""
    inner = d < DIM
    for j in range(lo, hi, BLOCK_N):
        n = j + tl.arange(0, BLOCK_N)
        present = n < hi
        first = n
        if MASKED and HOLES:
            has_table = present & (n * 0 + first_row >= 0)
            first = tl.load(first_rows + first_row + (n - begin), mask=has_table, other=0)
            present = present & (first < _NEVER)
        key_offset = origin + n.to(tl.int64) * DIM
        k_slots = anchor + key_offset[None, :] + d[:, None]
        v_slots = anchor + value + key_offset[:, None] + d[None, :]
        k_mask = present[None, :] & inner[:, None] if MASKED else inner[:, None]
        k = tl.load(k_slots, mask=k_mask, other=0.0)
        x = _scores(_product(query, k, PRECISION, WIDEN), scale, softcap, SOFTCAP)
        if MASKED:
            visible = _visible(n, row, floor, limit, present, first, HOLES, FLOORED)
            x = tl.where(visible, x, float("-inf"))
        new = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
        p = tl.exp2(x - safe[:, None])
        keep = tl.exp2(top - safe)
        norm = norm * keep + tl.sum(p, 1)
        v_mask = present[:, None] & inner[None, :] if MASKED else inner[None, :]
        v = tl.load(v_slots, mask=v_mask, other=0.0)
        acc = acc * keep[:, None] + _product(p.to(v.dtype), v, PRECISION, WIDEN)
        top = new
    return top, norm, acc


@triton.jit
def _turned(
    segment,  # [SegmentColumn] int64
    q,  # [heads, rows, DIM] by the strides in q_offset
    cos,  # [bases, HALF] fp32
    sin,  # [bases, HALF] fp32
    rotation_of,  # [rotations of all segments] int32
    q_offset,
    i,
    live,
    d,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return queries ``[BLOCK_M, DIM_PAD]``, turned back by the base of a segment."""
    rotation = tl.load(segment + _ROTATION).to(tl.int32)
    if rotation >= 0:
        step = tl.load(segment + _ROTATION_STEP).to(tl.int32)
        angle = tl.load(rotation_of + rotation + i * step, mask=live, other=0)
        query = _rotated(q, q_offset, d, live, cos, sin, angle, DIM, HALF, INTERLEAVED)
    else:
        inner = live[:, None] & (d < DIM)[None, :]
        query = tl.load(q + q_offset[:, None] + d[None, :], mask=inner, other=0.0)
    return query


@triton.jit
def _over_segment(
    segment,  # [SegmentColumn] int64
    q,  # [heads, rows, DIM] by the strides in q_offset
    anchor,  # the KV memory that offsets count from
    cos,  # [bases, HALF] fp32
    sin,  # [bases, HALF] fp32
    rotation_of,  # [rotations of all segments] int32
    first_rows,  # [slots of segments with holes] int32
    floors,  # [rows of windowed segments] int32
    q_offset,
    row,
    i,
    live,
    d,
    layer,
    kv_head,
    scale,
    softcap,
    top,
    norm,
    acc,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HOLES: tl.constexpr,
    FLOORED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take one segment into the running softmax (``_over_keys``), with the queries turned back by its base."""
    origin, value, lo, hi = _located(segment, layer, kv_head)
    query = _turned(segment, q, cos, sin, rotation_of, q_offset, i, live, d, DIM, HALF, INTERLEAVED)
    limit = _limit(segment, row, live, lo, hi)
    first_row = tl.load(segment + _FIRST_ROW).to(tl.int32)
    floor = limit * 0
    if FLOORED:
        first_floor = tl.load(segment + _FLOORS)
        sees = live & (row * 0 + first_floor != _NO_FLOORS) & (limit > lo)
        floor = tl.load(floors + first_floor + row, mask=sees, other=0)
    # fmt: off
    whole = lo
    if DIM <= 128:  # two loops over larger heads would not fit the registers
        # slots that all rows see, in whole blocks; results of rows that are not live are never read
        seen = tl.min(tl.where(live, limit, hi), 0) - lo
        if FLOORED:
            seen = tl.where(first_floor != _NO_FLOORS, 0, seen)
        if HOLES:
            seen = tl.where(first_row >= 0, 0, seen)
        whole = lo + tl.maximum(seen, 0) // BLOCK_N * BLOCK_N
        top, norm, acc = _over_keys(
            query, row, floor, limit, d, anchor, first_rows, origin, value, lo, lo, whole, first_row,
            scale, softcap, top, norm, acc, DIM, False, HOLES, FLOORED, SOFTCAP, PRECISION, WIDEN, BLOCK_N,
        )
    return _over_keys(
        query, row, floor, limit, d, anchor, first_rows, origin, value, lo, whole, hi, first_row,
        scale, softcap, top, norm, acc, DIM, True, HOLES, FLOORED, SOFTCAP, PRECISION, WIDEN, BLOCK_N,
    )
    # fmt: on


@triton.jit
def _finished(top, norm, acc):
    """Return the result of a running softmax and its log-sum-exp; zeros and minus infinity where no row saw a key."""
    seen_any = norm > 0.0
    total_weight = tl.where(seen_any, norm, 1.0)
    log_sum = tl.where(seen_any, (top + tl.log2(total_weight)) * _LN2, float("-inf"))
    return acc / total_weight[:, None], log_sum


@triton.jit
def _write(
    result,  # [BLOCK_M, DIM_PAD] fp32
    log_sum,  # [BLOCK_M] fp32
    out,  # [entries, DIM]
    lse,  # [lse entries] fp32
    entry,  # [BLOCK_M] int64, into out
    lse_entry,  # [BLOCK_M] int64, into lse
    live,
    d,
    DIM: tl.constexpr,
):
    """Write the rows of a tile that are live."""
    inner = live[:, None] & (d < DIM)[None, :]
    tl.store(out + entry[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=inner)
    tl.store(lse + lse_entry, log_sum, mask=live)


@triton.jit(do_not_specialize=["layer", "total"])
def attend(
    q,  # [heads, rows, DIM] by strides q_head, q_row, 1; rotated at the rows' own positions
    anchor,  # the KV memory that offsets count from
    out,  # [rows, heads, DIM], written by items that are not cut
    lse,  # [heads, rows] fp32, with out
    part,  # [partials, heads, DIM] fp32, written by items that are cut
    part_lse,  # [partials, heads] fp32, with part
    cos,  # [bases, HALF] fp32, rotations by minus each base
    sin,  # [bases, HALF] fp32
    segments,  # [segments, SegmentColumn] int64
    items,  # [items, ITEM_WIDTH] int32, ItemColumn
    rows,  # [rows of all items] int32
    rotation_of,  # [rotations of all segments] int32, rows of cos and sin
    first_rows,  # [slots of segments with holes] int32
    floors,  # [rows of windowed segments] int32
    layer,
    scale,
    softcap,
    total,
    q_row,
    q_head,
    heads,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HOLES: tl.constexpr,
    FLOORED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend for one item and KV head. Grid ``(items, kv_heads)``; ``total`` is the number of rows."""
    item, kv_head = items + tl.program_id(0) * _ITEM_WIDTH, tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    i = m // GROUP
    live = i < tl.load(item + _ITEM_ROWS)
    row = tl.load(rows + tl.load(item + _ITEM_ROW) + i, mask=live, other=0)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, DIM_PAD)
    q_offset = row.to(tl.int64) * q_row + head.to(tl.int64) * q_head
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    for index in range(tl.load(item + _ITEM_SEGMENT_LO), tl.load(item + _ITEM_SEGMENT_HI)):
        top, norm, acc = _over_segment(
            segments + index * _SEGMENT_WIDTH, q, anchor, cos, sin, rotation_of, first_rows, floors, q_offset, row, i,
            live, d, layer, kv_head, scale, softcap, top, norm, acc, DIM, HALF, INTERLEAVED, HOLES, FLOORED, SOFTCAP,
            PRECISION, WIDEN, BLOCK_N,
        )  # fmt: skip
    result, log_sum = _finished(top, norm, acc)
    partial = tl.load(item + _ITEM_PARTIAL)
    if partial >= 0:
        entry = (partial + i).to(tl.int64) * heads + head
        _write(result, log_sum, part, part_lse, entry, entry, live, d, DIM)
    else:
        entry = row.to(tl.int64) * heads + head
        _write(result, log_sum, out, lse, entry, head.to(tl.int64) * total + row, live, d, DIM)
