"""The seam in transformers: our attention function and the step it serves (``docs/design.md``, "One step").

A model's attention layers call ``mpic`` through transformers' attention interface with q and k already rotated at the
rows' own positions. Rows' keys and values are written into their extents first and attended to after: the single
step with a dummy cache of MPIC, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    Extras,
    KVView,
    Partial,
    Rotation,
    SingleRows,
    SpanCall,
    Write,
    attend,
)
from mpic.kernels.patterns import Pattern, fresh_calls
from mpic.kernels.span import Span
from mpic.kernels.writes import RowWrites
from mpic.kv.barrier import LayerBarrier
from mpic.model.latent import ATTRIBUTE as LATENT
from mpic.model.trace import Trace

NAME = "mpic"
TRACED = "mpic-traced"
"""The same attention, with a mask function. Under ``NAME`` none is registered: then transformers makes no mask, and
does not look at the positions on the device for packed sequences first, which would make the host wait every step."""


class StepKernel(Protocol):
    """The attention of one step by an implementation that takes it whole (Triton)."""

    def scatter(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes the rows' keys and values ``[kv_heads, T, head_dim]`` to their slots."""

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``[T, heads, head_dim]`` for ``q [heads, T, head_dim]``, and its log-sum-exp ``[heads, T]``."""


class KindCalls(NamedTuple):
    """The calls that the layers of one kind make in a step.

    Args:
        calls: of blocks of rows; each row's first call has ``first`` set.
        singles: rows that stand alone, or None; blocks and singles cover every row once.
        rotation: gives the query rotation of a base.
        kv_heads: of the layers, where the model has layers with more or larger heads; else None.
    """

    calls: list[SpanCall]
    singles: SingleRows | None
    rotation: Rotation
    kv_heads: int | None = None


@dataclass
class Step:
    """Everything a packed forward of T rows needs beside its input embeddings.

    Args:
        writes: of blocks of rows; with ``single_writes`` they cover every row once.
        kinds: by kind of layer (``mpic.model.trace.LayerKind``).
        kind_of: the kind of each layer.
        partial: the attention implementation.
        kernel: takes all writes and calls instead of ``partial`` call by call; then there are no ``singles``.
        barrier: loads that this step runs beside, or None.
        single_writes: where the keys and values of rows that stand alone go, or None.
    """

    writes: list[Write]
    kinds: list[KindCalls]
    kind_of: Sequence[int]
    partial: Partial
    kernel: StepKernel | None = None
    barrier: LayerBarrier | None = None
    single_writes: RowWrites | None = None
    layers_seen: set[int] = field(default_factory=set)


class Decided(Exception):
    """Ends a forward at a probe's layer."""


@dataclass
class Probe:
    """A forward of one whole prompt that ends at ``layer`` and keeps that layer's queries, keys and values.

    Layers before it attend as in a full prefill of all rows; nothing is written anywhere. ``patterns`` has an entry a
    layer; ``blocks`` are rows ``[lo, hi)`` that attend to each other in both directions.
    """

    layer: int
    partial: Partial
    patterns: Sequence[Pattern]
    blocks: Sequence[tuple[int, int]] = ()
    keys: torch.Tensor | None = None  # [kv_heads, T, head_dim], rotated at the rows' positions
    values: torch.Tensor | None = None
    queries: torch.Tensor | None = None  # [heads, T, head_dim], as the keys
    scale: float = 1.0

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        extras: Extras,
    ) -> torch.Tensor:
        """Returns ``[1, T, heads, d]``. Raises Decided: this is the probe's layer."""
        if layer == self.layer:
            self.queries, self.keys, self.values, self.scale = query[0], key[0], value[0], scale
            raise Decided
        rows = query.shape[2]
        fresh = Span(KVView(torch.stack([key[0], value[0]])[None]), 0, rows)
        calls = fresh_calls(self.patterns[layer], 0, np.arange(rows), fresh, blocks=self.blocks)
        out = attend(query[0], calls, scale, self.partial, lambda base: None, extras=extras)
        return out[None].to(query.dtype)


_step: ContextVar[Step | Probe | Trace | None] = ContextVar("mpic_step", default=None)


@contextmanager
def running(step: Step | Probe | Trace) -> Iterator[None]:
    """Makes a step the one that attention layers on this thread serve."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _attention(
    module: torch.nn.Module,
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
    """Implements transformers' attention interface: returns ``[1, T, heads, d]`` for ``query [1, heads, T, d]`` and
    ``key, value [1, kv_heads, T, d]``. What else a layer gives has been looked at when the model was loaded."""
    step = _step.get()
    if step is None:
        raise RuntimeError("a model hooked by MPIC was called outside of a step")
    if isinstance(step, Trace):
        given = {**given, "softcap": softcap, "s_aux": s_aux}
        return step.attend(module, query, key, value, attention_mask, given), None
    if attention_mask is not None or dropout:
        raise ModelRefused(
            "a layer was given a mask or dropout that it was not given when the model was loaded"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    extras = Extras(softcap, s_aux)
    latent = getattr(module, LATENT, None)
    if latent is not None:
        query, key = latent.absorb(query, key)
        return latent.expand(_layer(step, module.layer_idx, query, key, key, scale, extras)), None
    size, value_size = key.shape[-1], value.shape[-1]
    if size == value_size:
        return _layer(step, module.layer_idx, query, key, value, scale, extras), None
    size = max(size, value_size)  # zeros change neither scores nor what is kept of the values
    query, key, value = (pad(x, (0, size - x.shape[-1])) for x in (query, key, value))
    return _layer(step, module.layer_idx, query, key, value, scale, extras)[..., :value_size], None


def _layer(
    step: Step | Probe,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    extras: Extras,
) -> torch.Tensor:
    """Returns what a layer attends to; keys and values have heads of one size."""
    if isinstance(step, Probe):
        return step.attend(layer, query, key, value, scale, extras)
    k, v = key[0], value[0]
    step.layers_seen.add(layer)
    if step.kernel is not None:
        step.kernel.scatter(layer, k, v)
        if step.barrier is not None:
            step.barrier.wait(layer)
        out, lse = step.kernel.attend(layer, query[0], scale)
        if extras.sinks is not None:
            out = out * torch.sigmoid(lse - extras.sinks.float()[:, None]).T[..., None].to(out.dtype)
        return out[None]
    kind = step.kinds[step.kind_of[layer]]
    if step.single_writes is not None:
        step.single_writes.write(layer, k, v)
    for rows, span in step.writes:
        keys, values = span.source.layers(span.lo, span.hi)[layer]
        if kind.kv_heads is not None:
            heads, _, size = k.shape
            for rest in (keys, values):  # of what the memory held before, nothing may get into a chunk's file
                rest[heads:], rest[:heads, :, size:] = 0, 0
            keys, values = keys[:heads, :, :size], values[:heads, :, :size]
        keys.copy_(k[:, rows])
        values.copy_(v[:, rows])
    if step.barrier is not None:
        step.barrier.wait(layer)
    arguments = (step.partial, kind.rotation, kind.singles, layer, extras, kind.kv_heads)
    return attend(query[0], kind.calls, scale, *arguments)[None].to(query.dtype)


def _mask(
    *, mask_function: Any, q_length: int, kv_length: int, dtype: torch.dtype | None = None, **unread: Any
) -> torch.Tensor | None:
    """Implements transformers' mask interface. There are no masks in a step: a layer's kind says what its rows see."""
    step = _step.get()
    return step.mask(mask_function, q_length, kv_length, dtype) if isinstance(step, Trace) else None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_ATTENTION_FUNCTIONS.register(TRACED, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRACED, _mask)
