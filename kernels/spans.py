"""Span attention: what one layer of a step has to do, and the seam its implementations share (DESIGN section 3).

A step's rows (queries of all requests, packed) attend to *spans*: pieces of KV extents that lie in memory as they were
compiled. Keys are rotated at their own, span-local positions; instead of re-rotating them, the query is rotated back
by the span's base, because RoPE scores depend on relative position only::

    R(p) q . R(s + j) k  ==  R(-s) (R(p) q) . R(j) k

so one ``[rotary_dim]`` cosine/sine pair a span suffices, whatever the number of rows or keys. Partial results over
spans are merged by log-sum-exp. To add an implementation: one file with a ``Partial`` and one line in ``backend``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Shift(NamedTuple):
    """Rotation by minus a span's base: ``cos, sin [rotary_dim / 2]`` fp32 in frequency order, or
    ``[rows, rotary_dim / 2]`` when rows of several requests see one span at different bases.

    ``interleaved`` pairs dimensions (2i, 2i+1) as Cohere and GLM do; otherwise (i, i + rotary_dim / 2) as Llama does.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


class SpanCall(NamedTuple):
    """One attention call of a layer by a block of rows.

    Args:
        rows: which of the step's queries attend.
        keys: ``[kv_heads, n, head_dim]``, n >= 1.
        values: ``[kv_heads, n, head_dim]``.
        causal: rows are the keys' own tokens (r == n): row i sees keys 0..i. Otherwise every row sees every key.
        shift: applied to the queries; None when the span's base is 0.
        first: no earlier call of this layer covered any of these rows, so the result is stored, not merged.
    """

    rows: slice
    keys: torch.Tensor
    values: torch.Tensor
    causal: bool
    shift: Shift | None
    first: bool


class Singles(NamedTuple):
    """Rows that stand alone (decoding): every (row, span) pair is a *partial*, all of them are merged at once.

    Partials that read the same span are adjacent, so requests that share a chunk read its keys once. Spans that are
    equally long and evenly spaced in memory (chunks of one size, compiled one after the other) are one batch.

    Args:
        rows: ``[R]`` int64, the step's single rows.
        source: ``[P]`` int64, the step row of each partial.
        shift: ``cos, sin [P, rotary_dim / 2]`` of each partial, or None when no span lies elsewhere.
        slots: ``[R, S]`` int64, the partials of each row, padded with P.
        batches: (first partial, spans, partials of each span), in the order in which keys and values are given.
    """

    rows: torch.Tensor
    source: torch.Tensor
    shift: Shift | None
    slots: torch.Tensor
    batches: tuple[tuple[int, int, int], ...]


Partial = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""``(q [b, heads, r, d], k [b, kv_heads, n, d], v, causal, scale) -> (out [b, heads, r, d], lse [b, heads, r] fp32)``;
any strides as long as head_dim is dense."""


def rotate(q: torch.Tensor, shift: Shift) -> torch.Tensor:
    """Rotate ``q [heads, r, head_dim]`` by a shift; arithmetic in fp32, result contiguous in q's dtype.

    Dimensions beyond ``rotary_dim`` (partial rotary, Phi-3) pass unchanged.
    """
    half = shift.cos.shape[-1]
    dim = 2 * half
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if shift.interleaved:
        a, b, out_a, out_b = q[..., 0:dim:2], q[..., 1:dim:2], out[..., 0:dim:2], out[..., 1:dim:2]
    else:
        a, b, out_a, out_b = q[..., :half], q[..., half:dim], out[..., :half], out[..., half:dim]
    if q.dtype == torch.float32:
        torch.mul(a, shift.cos, out=out_a).addcmul_(b, shift.sin, value=-1)
        torch.mul(b, shift.cos, out=out_b).addcmul_(a, shift.sin)
    else:
        a32, b32 = a.float(), b.float()
        out_a.copy_(a32 * shift.cos - b32 * shift.sin)
        out_b.copy_(b32 * shift.cos + a32 * shift.sin)
    if dim < q.shape[-1]:
        out[..., dim:] = q[..., dim:]
    return out


def attend(
    q: torch.Tensor,
    calls: Sequence[SpanCall],
    scale: float,
    partial: Partial,
    singles: Singles | None = None,
    layer: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> torch.Tensor:
    """Attention of a step's rows over their spans.

    Args:
        q: ``[heads, rows, head_dim]``, rotated at the rows' own positions.
        calls: of blocks of rows, in an order in which every row's first call has ``first=True``.
        scale: softmax scale.
        partial: the implementation (see ``backend``).
        singles, layer: rows that stand alone, and this layer's ``(keys, values)`` of their batches of spans.

    Returns:
        ``[rows, heads, head_dim]``, fp32; rows that no call covers are undefined.
    """
    heads, rows, dim = q.shape
    if singles is not None and not calls:  # then the single rows are all there are, in order
        return attend_singles(q, singles, layer, scale, partial)
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=q.device)
    if calls:
        _attend_blocks(q, calls, scale, partial, out.transpose(0, 1))
    if singles is not None:
        out[singles.rows] = attend_singles(q, singles, layer, scale, partial)
    return out


def _attend_blocks(
    q: torch.Tensor, calls: Sequence[SpanCall], scale: float, partial: Partial, out: torch.Tensor
) -> None:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for call in calls:
        queries = q[:, call.rows]
        if call.shift is not None:
            queries = rotate(queries, call.shift)
        o, l = partial(queries[None], call.keys[None], call.values[None], call.causal, scale)
        o, l = o[0], l[0]
        if call.first:
            out[:, call.rows] = o.float()
            lse[:, call.rows] = l
            continue
        held, held_lse = out[:, call.rows], lse[:, call.rows]
        held.lerp_(o.float(), torch.sigmoid(l - held_lse)[..., None])
        held_lse.copy_(torch.logaddexp(held_lse, l))


def attend_singles(
    q: torch.Tensor,
    singles: Singles,
    spans: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
    partial: Partial,
) -> torch.Tensor:
    """Attention of single rows; returns fp32 ``[R, heads, head_dim]``.

    One kernel call a batch of spans and a handful of operations for all merges: decoding with many chunks is bound by
    reading them, not by launching.

    Args:
        spans: this layer's ``(keys, values)`` of each batch, ``[spans, kv_heads, n, head_dim]``.
    """
    heads, _, dim = q.shape
    partials = singles.source.shape[0]
    queries = q.expand(heads, partials, dim) if q.shape[1] == 1 else q[:, singles.source]
    if singles.shift is not None:
        queries = rotate(queries, singles.shift)
    outs, lses = [], []
    for (start, batch, count), (keys, values) in zip(singles.batches, spans, strict=True):
        block = queries[:, start : start + batch * count].unflatten(1, (batch, count)).transpose(0, 1)
        o, l = partial(block, keys, values, False, scale)
        outs.append(o.transpose(0, 1).flatten(1, 2))
        lses.append(l.transpose(0, 1).flatten(1, 2))
    o, l = torch.cat(outs, 1), torch.cat(lses, 1)
    rows, width = singles.slots.shape
    if rows == 1:  # all partials belong to it
        return (torch.softmax(l, 1)[..., None] * o).sum(1)[None].float()
    if rows * width > partials:  # some rows have fewer: an empty partial fills their slots
        l = torch.cat([l, l.new_full((heads, 1), float("-inf"))], 1)
        o = torch.cat([o, o.new_zeros(heads, 1, dim)], 1)
    l = l[:, singles.slots]  # [heads, R, S]
    o = o[:, singles.slots.reshape(-1)].view(heads, rows, width, dim)
    return (torch.softmax(l, 2)[..., None] * o).sum(2).transpose(0, 1).float()


def backend(device: torch.device, dtype: torch.dtype) -> tuple[str, Partial]:
    """The implementation for a device, by name; chosen here and nowhere else, and shown in ``/health``."""
    from mpic.kernels import cpu, cuda, reference

    if device.type == "cpu":
        return "cpu-flash", cpu.partial
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return "cuda-flash", cuda.flash_partial
    if device.type == "cuda":
        return "cuda-efficient", cuda.efficient_partial
    return "reference", reference.partial
