"""Span attention: the work of one layer in a step, and the interface that its implementations share.

A step's rows (queries of all requests, packed) attend to *spans*: slots of KV extents, which are in memory as they were
compiled. Keys are rotated at their own, span-local positions; instead of re-rotating them, the query is rotated back by
the span's base, because RoPE scores depend on relative position only::

    R(p) q . R(s + j) k  ==  R(-s) (R(p) q) . R(j) k

so one ``[rotary_dim]`` cosine/sine pair a span suffices, whatever the number of rows or keys. Partial results over
spans are merged by log-sum-exp (``docs/design.md``, "Rotation on the query side" and "Spans"). To add an
implementation: one file with a ``Partial`` and one line in ``mpic.kernels.backends``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mpic.kernels import masked
from mpic.kernels.span import Span

_KEPT_CUTS = 16
"""Ranges of one view whose layers are kept apart; policies cut a chunk in few ways."""


class QueryRotation(NamedTuple):
    """Rotation by minus a span's base: ``cos, sin [rotary_dim / 2]`` fp32 in frequency order, or
    ``[rows, rotary_dim / 2]`` when rows of several requests see one span at different bases.

    ``interleaved`` pairs dimensions (2i, 2i+1) as Cohere and GLM do; otherwise (i, i + rotary_dim / 2) as Llama does.
    ``start`` is the first dimension that turns (the last ones do in multi-head latent attention).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    start: int = 0


Rotation = Callable[[int], QueryRotation | None]
"""Gives the rotation by minus a base; None for base 0."""

Rotations = Callable[[Sequence[int]], QueryRotation | None]
"""Gives the rotations by minus several bases, ``[bases, rotary_dim / 2]``; None when all bases are 0."""


class KVView:
    """Keys and values of an extent in memory, valid until the extent moves.

    Args:
        data: ``[layers, parts, kv_heads, slots, head_dim]``, any strides with head_dim dense. The parts are keys and
            values; where there is one, the values are the keys (``mpic.model.latent``).
    """

    __slots__ = ("_cuts", "data")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self._cuts: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def layers(self, lo: int, hi: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of slots ``[lo, hi)``, ``[kv_heads, hi - lo, head_dim]`` each, layer by layer; one
        tensor twice where the values are the keys."""
        cut = self._cuts.get((lo, hi))
        if cut is None:
            if len(self._cuts) >= _KEPT_CUTS:
                self._cuts.clear()
            by_part = [part.unbind(0) for part in self.data[:, :, :, lo:hi].unbind(1)]
            cut = self._cuts[lo, hi] = list(zip(by_part[0], by_part[-1], strict=True))
        return cut


class Write(NamedTuple):
    """A write of the keys and values of some of a step's rows to the same number of slots."""

    rows: slice
    span: Span[Any]  # of a KVView; in the Triton kernels of its Strides


class SpanCall(NamedTuple):
    """Rows of a step that attend to a span.

    Args:
        rows: the rows of the step whose queries attend.
        span: at least one slot; the queries are rotated by minus its base.
        causal: True if the rows are the span's own tokens, one per slot, so that row i sees slots up to its own.
            Otherwise every row sees every slot.
        first: True if no earlier call of the step covers any of these rows, so that the result is stored, not merged.
        visible: ``[rows]`` int64, the number of first slots that each row does not see (a window); None: it sees all.
        slots: int64, the extent's slots in the order in which the span counts them, where many spans of a chunk are
            read as if they lay side by side (``mpic.kernels.gathered``); None: as they lie. ``attend`` takes none of
            these calls.
    """

    rows: slice
    span: Span[Any]  # as above
    causal: bool = False
    first: bool = False
    visible: torch.Tensor | None = None
    slots: torch.Tensor | None = None


class Extras(NamedTuple):
    """The parts of a layer's softmax other than its scores.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        sinks: ``[heads]``, one logit per head that joins the softmax of every row once and has no value (gpt-oss), or
            None.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None


PLAIN = Extras()


class SingleRows(Protocol):
    """Rows that stand alone (decoding) and the spans they see, ready for every layer of one step.

    ``rows [R]`` int64 are the step's single rows. ``mpic.kernels.singles`` implements it over any ``Partial``;
    ``mpic.kernels.stream`` is a kernel of its own.
    """

    rows: torch.Tensor

    def advance(self) -> SingleRows | None:
        """Return the same rows one step later, if each has one more own token (a span whose call is ``first``) and
        nothing else has changed; None if they have to be made anew. The old object must not be used afterwards."""
        ...

    def attend(self, q: torch.Tensor, layer: int, scale: float, extras: Extras = PLAIN) -> torch.Tensor:
        """Return fp32 ``[R, heads, head_dim]`` of the single rows for ``q [heads, T, head_dim]`` of all rows."""
        ...


Partial = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""``(q [b, heads, r, d], k [b, kv_heads, n, d], v, causal, scale) -> (out [b, heads, r, d], lse [b, heads, r] fp32)``;
any strides as long as head_dim is dense."""


def rotate(q: torch.Tensor, rotation: QueryRotation) -> torch.Tensor:
    """Return ``q [heads, r, head_dim]`` rotated; arithmetic in fp32, result contiguous in q's dtype.

    Dimensions beyond ``rotary_dim`` (partial rotary, Phi-3) pass unchanged.
    """
    half = rotation.cos.shape[-1]
    dim = 2 * half
    if rotation.start:
        out = q.clone(memory_format=torch.contiguous_format)
        out[..., rotation.start :] = rotate(q[..., rotation.start :], rotation._replace(start=0))
        return out
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rotation.interleaved:
        a, b, out_a, out_b = q[..., 0:dim:2], q[..., 1:dim:2], out[..., 0:dim:2], out[..., 1:dim:2]
    else:
        a, b, out_a, out_b = q[..., :half], q[..., half:dim], out[..., :half], out[..., half:dim]
    if q.dtype == torch.float32:
        torch.mul(a, rotation.cos, out=out_a).addcmul_(b, rotation.sin, value=-1)
        torch.mul(b, rotation.cos, out=out_b).addcmul_(a, rotation.sin)
    else:
        a32, b32 = a.float(), b.float()
        out_a.copy_(a32 * rotation.cos - b32 * rotation.sin)
        out_b.copy_(b32 * rotation.cos + a32 * rotation.sin)
    if dim < q.shape[-1]:
        out[..., dim:] = q[..., dim:]
    return out


def attend(
    q: torch.Tensor,
    calls: Sequence[SpanCall],
    scale: float,
    partial: Partial,
    rotation: Rotation,
    singles: SingleRows | None = None,
    layer: int = 0,
    extras: Extras = PLAIN,
    kv_heads: int | None = None,
) -> torch.Tensor:
    """Compute the attention of a step's rows over their spans.

    Args:
        q: ``[heads, rows, head_dim]``, rotated at the rows' own positions.
        calls: the calls of blocks of rows, in an order in which every row's first call has ``first=True``.
        scale: softmax scale.
        partial: the implementation (see ``mpic.kernels.backends``).
        singles: the rows that stand alone.
        layer: number of the model's layer whose keys and values are read.
        kv_heads: number of the layer's KV heads, which have q's size, if it has fewer or smaller ones than the views.

    Returns:
        ``[rows, heads, head_dim]``, fp32; rows that no call covers are undefined.
    """
    heads, rows, dim = q.shape
    if singles is not None and not calls:  # then all rows of the step are single rows, in order
        return singles.attend(q, layer, scale, extras)
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    for call in calls:
        keys, values = call.span.source.layers(call.span.lo, call.span.hi)[layer]
        queries, turn = q[:, call.rows], rotation(call.span.base)
        if turn is not None:
            queries = rotate(queries, turn)
        if kv_heads is not None:
            keys, values = keys[:kv_heads, :, :dim], values[:kv_heads, :, :dim]
        if call.visible is None and extras.softcap is None:
            o, l = partial(queries[None], keys[None], values[None], call.causal, scale)
        else:
            arguments = (call.causal, scale, call.visible, extras.softcap)
            o, l = masked.partial(queries[None], keys[None], values[None], *arguments)
        _merge(out.transpose(0, 1)[:, call.rows], lse[:, call.rows], o[0], l[0], call.first)
    if extras.sinks is not None:
        out *= torch.sigmoid(lse - extras.sinks.float()[:, None]).T[..., None]
    if singles is not None:
        out[singles.rows] = singles.attend(q, layer, scale, extras)
    return out


def _merge(out: torch.Tensor, lse: torch.Tensor, o: torch.Tensor, l: torch.Tensor, first: bool) -> None:
    """Join a partial result into ``out [heads, r, head_dim]`` and ``lse [heads, r]``, or store the first one."""
    if first:
        out.copy_(o)
        lse.copy_(l)
        return
    out.lerp_(o.float(), torch.sigmoid(l - lse)[..., None])
    lse.copy_(torch.logaddexp(lse, l))
