"""The hook into transformers: our attention function and the step it serves (``docs/design.md``, "One step").

A model's attention layers call ``mpic`` through transformers' attention interface with q and k already rotated at the
rows' own positions. Rows' keys and values are written into their extents first and attended to after: the single
step with a dummy cache of MPIC, section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mpic.errors import ModelRefused
from mpic.kernels.attention import (
    PLAIN,
    Extras,
    KVView,
    Partial,
    Rotation,
    SingleRows,
    SpanCall,
    Write,
    attend,
)
from mpic.kernels.block_spans import BlockSpans
from mpic.kernels.patterns import Pattern, fresh_calls
from mpic.kernels.span import Span
from mpic.kernels.writes import RowWrites, narrowed
from mpic.kv.barrier import LayerBarrier
from mpic.model.latent import ATTRIBUTE as LATENT
from mpic.model.trace import ForwardTrace

NAME = "mpic"
TRACED = "mpic-traced"
"""The same attention, with a mask function. Under ``NAME`` none is registered: then transformers makes no mask, and
does not look at the positions on the device for packed sequences first, which would make the host wait every step."""


class StepKernel(Protocol):
    """The attention of one step by an implementation that takes it whole (Triton)."""

    def scatter(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the rows' keys and values ``[kv_heads, T, head_dim]`` to their slots."""

    def attend(
        self, layer: int, q: torch.Tensor, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, heads, head_dim]`` for ``q [heads, T, head_dim]``, and its log-sum-exp ``[heads, T]``."""


class KindCalls(NamedTuple):
    """The calls that the layers of one kind make in a step.

    Args:
        calls: the calls of blocks of rows; each row's first call has ``first`` set.
        singles: the rows that stand alone, or None; blocks and singles cover every row once.
        rotation: function that returns the query rotation of a base.
        kv_heads: number of KV heads of the layers, if the model also has layers with more or larger heads; else None.
        blocks: the tables of ``calls`` for a kernel that takes all of them at once, or None.
    """

    calls: list[SpanCall]
    singles: SingleRows | None
    rotation: Rotation
    kv_heads: int | None = None
    blocks: BlockSpans | None = None

    def attend(
        self, q: torch.Tensor, layer: int, scale: float, partial: Partial, extras: Extras = PLAIN
    ) -> torch.Tensor:
        """Compute a layer's attention; arguments and result as ``mpic.kernels.attention.attend``."""
        if self.blocks is None:
            arguments = (partial, self.rotation, self.singles, layer, extras, self.kv_heads)
            return attend(q, self.calls, scale, *arguments)
        out = self.blocks.attend(q, layer, scale, extras)
        if self.singles is not None:
            out[self.singles.rows] = self.singles.attend(q, layer, scale, extras)
        return out


@dataclass
class Observed:
    """The queries of the last ``count`` rows of a chunk that is being compiled, for a press, as layers saw them.

    ``queries`` has parts ``[heads, rows, head_dim]`` in order, and ``scales`` the scale of the softmax, by layer.
    """

    count: int
    queries: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)

    def take(self, layer: int, queries: torch.Tensor, scale: float) -> None:
        self.queries.setdefault(layer, []).append(queries.clone())
        self.scales[layer] = scale


@dataclass
class Step:
    """Everything that a packed forward of T rows needs in addition to its input embeddings.

    Args:
        writes: the writes of blocks of rows; with ``single_writes`` they cover every row once.
        kinds: the calls for each kind of layer (``mpic.model.trace.LayerKind``).
        kind_of: the kind of each layer.
        partial: the attention implementation.
        kernel: takes all writes and calls instead of ``partial`` call by call; then there are no ``singles``.
        barrier: the loads that this step follows, or None.
        single_writes: the writes of the rows that stand alone, or None.
        observed: the rows whose queries are kept for presses, and the objects that keep them.
    """

    writes: list[Write]
    kinds: list[KindCalls]
    kind_of: Sequence[int]
    partial: Partial
    kernel: StepKernel | None = None
    barrier: LayerBarrier | None = None
    single_writes: RowWrites | None = None
    observed: list[tuple[slice, Observed]] = field(default_factory=list)
    layers_seen: set[int] = field(default_factory=set)


class LayerCall(NamedTuple):
    """A layer's attention: ``query [1, heads, T, d]`` over ``key, value [1, kv_heads, T, d]``, whose heads have one
    size; scores are multiplied by ``scale``."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    extras: Extras


class ProbeFinished(Exception):
    """Ends a forward at a probe's layer."""


@dataclass
class Probe:
    """A forward of whole prompts that ends at ``layer`` and keeps that layer's queries, keys and values.

    Layers before it attend as in a full prefill of the rows of each prompt (``lengths``); nothing is written anywhere.

    Args:
        layer_calls: makes the attention of a layer and its calls, over keys and values in ``kv_dtype``.
        patterns: an entry for each layer.
        blocks: of each prompt, its rows ``[lo, hi)`` that attend to each other in both directions.
    """

    layer: int
    layer_calls: Callable[[int, list[SpanCall]], KindCalls]
    kv_dtype: torch.dtype
    partial: Partial
    patterns: Sequence[Pattern]
    lengths: Sequence[int]
    blocks: Sequence[Sequence[tuple[int, int]]]
    keys: torch.Tensor | None = None  # [kv_heads, T, head_dim], rotated at the rows' positions
    values: torch.Tensor | None = None
    queries: torch.Tensor | None = None  # [heads, T, head_dim], as the keys
    scale: float = 1.0

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Return ``[1, T, heads, d]``. Raise ProbeFinished: this is the probe's layer."""
        layer, query, key, value, scale, extras = call
        if layer == self.layer:
            self.queries, self.keys, self.values, self.scale = query[0], key[0], value[0], scale
            raise ProbeFinished
        fresh, pattern = (
            KVView(narrowed(torch.stack([key[0], value[0]])[None], self.kv_dtype)),
            self.patterns[layer],
        )
        calls: list[SpanCall] = []
        start = 0
        for length, blocks in zip(self.lengths, self.blocks, strict=True):
            span = Span(fresh, start, start + length)
            calls += fresh_calls(pattern, start, np.arange(length), span, blocks=blocks)
            start += length
        out = self.layer_calls(layer, calls).attend(query[0], 0, scale, self.partial, extras)
        return out[None].to(query.dtype)


class Attends(Protocol):
    """Something that computes the attention of a forward's layers itself (``Probe``, ``piecewise.CutForward``)."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Return ``[1, T, heads, d]``."""


_step: ContextVar[Step | Attends | ForwardTrace | None] = ContextVar("mpic_step", default=None)


@contextmanager
def running(step: Step | Attends | ForwardTrace) -> Iterator[None]:
    """Make attention layers on this thread serve a step inside the block."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface: return ``[1, T, heads, d]`` for ``query [1, heads, T, d]`` and
    ``key, value [1, kv_heads, T, d]``. A layer's other arguments have been checked when the model was loaded."""
    step = _step.get()
    if step is None:
        raise RuntimeError("a model hooked by MPIC was called outside of a step")
    if isinstance(step, ForwardTrace):
        given = {**given, "softcap": softcap, "s_aux": s_aux}
        return step.attend(module, query, key, value, attention_mask, given), None
    if attention_mask is not None or dropout:
        raise ModelRefused(
            "a layer was given a mask or dropout that it was not given when the model was loaded"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    extras = PLAIN if softcap is None and s_aux is None else Extras(softcap, s_aux)
    latent = module.__dict__.get(LATENT)  # getattr takes ten times as long where there is none
    if latent is not None:
        query, key = latent.absorb(query, key)
        call = LayerCall(module.layer_idx, query, key, key, scale, extras)
        return latent.expand(_attended(step, call)), None
    size, value_size = key.shape[-1], value.shape[-1]
    if size == value_size:
        return _attended(step, LayerCall(module.layer_idx, query, key, value, scale, extras)), None
    size = max(size, value_size)  # padding with zeros changes neither scores nor the kept part of the values
    query, key, value = (pad(x, (0, size - x.shape[-1])) for x in (query, key, value))
    call = LayerCall(module.layer_idx, query, key, value, scale, extras)
    return _attended(step, call)[..., :value_size], None


def _attended(step: Step | Attends, call: LayerCall) -> torch.Tensor:
    return attend_layer(step, call) if isinstance(step, Step) else step.attend(call)


def attend_layer(step: Step, call: LayerCall) -> torch.Tensor:
    """Write the keys and values of a step's rows in one layer, wait for the layer of the loads that it follows, and
    compute the attention; return ``[1, T, heads, d]``."""
    layer, query, key, value, scale, extras = call
    k, v = key[0], value[0]
    step.layers_seen.add(layer)
    for rows, observed in step.observed:
        observed.take(layer, query[0][:, rows], scale)
    if step.kernel is not None:
        step.kernel.scatter(layer, k, v)
        if step.barrier is not None:
            step.barrier.wait(layer)
        out, lse = step.kernel.attend(layer, query[0], scale, extras.softcap)
        if extras.sinks is not None:
            out = out * torch.sigmoid(lse - extras.sinks.float()[:, None]).T[..., None].to(out.dtype)
        return out[None]
    kind = step.kinds[step.kind_of[layer]]
    if step.single_writes is not None:
        step.single_writes.write(layer, k, v)
    for rows, span in step.writes:
        keys, values = span.source.layers(span.lo, span.hi)[layer]
        is_pair = values is not keys  # else the values are the keys
        if kind.kv_heads is not None:
            heads, _, size = k.shape
            for rest in (keys, values):  # earlier contents of the memory must not get into a chunk's file
                rest[heads:], rest[:heads, :, size:] = 0, 0
            keys, values = keys[:heads, :, :size], values[:heads, :, :size]
        keys.copy_(narrowed(k[:, rows], keys.dtype))
        if is_pair:
            values.copy_(narrowed(v[:, rows], values.dtype))
    if step.barrier is not None:
        step.barrier.wait(layer)
    out = kind.attend(query[0], layer, scale, step.partial, extras)[None]
    return out if out.dtype is query.dtype else out.to(query.dtype)


def _mask(
    *,
    mask_function: Any,
    q_length: int,
    kv_length: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **unread: Any,
) -> torch.Tensor | None:
    """Implement transformers' mask interface. There are no masks in a step, because a layer's kind determines what its
    rows see."""
    step = _step.get()
    if not isinstance(step, ForwardTrace):
        return None
    return step.mask(mask_function, q_length, kv_length, dtype, device)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_ATTENTION_FUNCTIONS.register(TRACED, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRACED, _mask)
