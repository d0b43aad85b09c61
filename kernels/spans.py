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

Rows = slice | torch.Tensor


class Shift(NamedTuple):
    """Rotation by minus a span's base: ``cos, sin [rotary_dim / 2]`` fp32 in frequency order, or
    ``[rows, rotary_dim / 2]`` when rows of several requests see one span at different bases.

    ``interleaved`` pairs dimensions (2i, 2i+1) as Cohere and GLM do; otherwise (i, i + rotary_dim / 2) as Llama does.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


class SpanCall(NamedTuple):
    """One attention call of a layer.

    Args:
        rows: which of the step's queries attend (a slice, or ``[r]`` int64 when requests share a span).
        keys: ``[kv_heads, n, head_dim]``, n >= 1.
        values: ``[kv_heads, n, head_dim]``.
        causal: rows are the keys' own tokens (r == n): row i sees keys 0..i. Otherwise every row sees every key.
        shift: applied to the queries; None when the span's base is 0.
        first: no earlier call of this layer covered any of these rows, so the result is stored, not merged.
    """

    rows: Rows
    keys: torch.Tensor
    values: torch.Tensor
    causal: bool
    shift: Shift | None
    first: bool


Partial = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""``(q [heads, r, d], k [kv_heads, n, d], v, causal, scale) -> (out [heads, r, d], lse [heads, r] fp32)``."""


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


def attend(q: torch.Tensor, calls: Sequence[SpanCall], scale: float, partial: Partial) -> torch.Tensor:
    """Attention of a step's rows over their spans.

    Args:
        q: ``[heads, rows, head_dim]``, rotated at the rows' own positions.
        calls: in an order in which every row's first call has ``first=True``; every row is covered at least once.
        scale: softmax scale.
        partial: the implementation (see ``backend``).

    Returns:
        ``[rows, heads, head_dim]`` in q's dtype.
    """
    heads, rows, dim = q.shape
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=q.device).transpose(0, 1)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    for call in calls:
        queries = q[:, call.rows]
        if call.shift is not None:
            queries = rotate(queries, call.shift)
        o, l = partial(queries, call.keys, call.values, call.causal, scale)
        if call.first:
            out[:, call.rows] = o.float()
            lse[:, call.rows] = l
            continue
        held, held_lse = out[:, call.rows], lse[:, call.rows]
        weight = torch.sigmoid(l - held_lse)
        merged_lse = torch.logaddexp(held_lse, l)
        if isinstance(call.rows, slice):
            held.lerp_(o.float(), weight[..., None])
            held_lse.copy_(merged_lse)
        else:
            out[:, call.rows] = held.lerp(o.float(), weight[..., None])
            lse[:, call.rows] = merged_lse
    return out.transpose(0, 1).to(q.dtype)


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
