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
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from mpic.kernels.stream import Stream


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


class SingleRows(Protocol):
    """Rows that stand alone (decoding) and the spans they see, ready for every layer of one step.

    ``rows [R]`` int64 are the step's single rows. ``mpic.kernels.singles`` implements it over any ``Partial``;
    ``mpic.kernels.stream`` is a kernel of its own.
    """

    rows: torch.Tensor

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """``q [heads, T, head_dim]`` of all rows of the step -> fp32 ``[R, heads, head_dim]`` of the single rows."""
        ...


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
    singles: SingleRows | None = None,
    layer: int = 0,
) -> torch.Tensor:
    """Attention of a step's rows over their spans.

    Args:
        q: ``[heads, rows, head_dim]``, rotated at the rows' own positions.
        calls: of blocks of rows, in an order in which every row's first call has ``first=True``.
        scale: softmax scale.
        partial: the implementation (see ``backend``).
        singles: rows that stand alone.
        layer: the model's, of which ``singles`` read the keys and values.

    Returns:
        ``[rows, heads, head_dim]``, fp32; rows that no call covers are undefined.
    """
    heads, rows, dim = q.shape
    if singles is not None and not calls:  # then the single rows are all there are, in order
        return singles.attend(q, layer, scale)
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=q.device)
    if calls:
        _attend_blocks(q, calls, scale, partial, out.transpose(0, 1))
    if singles is not None:
        out[singles.rows] = singles.attend(q, layer, scale)
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


def backend(device: torch.device, dtype: torch.dtype) -> tuple[str, Partial]:
    """The implementation for a device, by name; chosen here and nowhere else, and shown in ``/health``.

    ``mpic.kernels.triton`` takes whole steps instead of calls and has to be asked for by name until it has been
    measured on a GPU (``LoadedModel.choose_attention``).
    """
    from mpic.kernels import cpu, cuda, reference

    if device.type == "cpu":
        return "cpu-flash", cpu.partial
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return "cuda-flash", cuda.flash_partial
    if device.type == "cuda":
        return "cuda-efficient", cuda.efficient_partial
    return "reference", reference.partial


def single_rows(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Stream | None, str]:
    """A kernel made for single rows, where the device has one, or None and the reason ("" where none exists)."""
    from mpic.kernels import stream

    if device.type != "cpu":
        return None, ""
    try:
        return stream.load(head_dim, dtype), ""
    except stream.Unavailable as error:
        return None, str(error)
