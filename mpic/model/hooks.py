"""The seam in transformers: our attention function and the step it serves (DESIGN section 3).

A model's attention layers call ``mpic`` through transformers' attention interface with q and k already rotated at the
rows' own positions. Rows' keys and values are written into their extents first and attended to after: the single
step with a dummy cache of MPIC, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mpic.errors import ModelRefused
from mpic.kernels.spans import Partial, Shift, SingleRows, SpanCall, attend
from mpic.kv.gate import Waits

NAME = "mpic"
_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}


class Layers:
    """Slots of an extent, layer by layer: ``keys[i], values[i] [kv_heads, n, head_dim]``. Views are made when they are
    first asked for: an implementation that takes whole steps needs only where they lie.

    Args:
        kv: ``[layers, 2, ...]``.
    """

    __slots__ = ("_apart", "kv")

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self._apart: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] | None = None

    def _take_apart(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        keys, values = self.kv.unbind(1)
        self._apart = keys.unbind(0), values.unbind(0)
        return self._apart

    @property
    def keys(self) -> tuple[torch.Tensor, ...]:
        return (self._apart or self._take_apart())[0]

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return (self._apart or self._take_apart())[1]


def layers_of(view: torch.Tensor, lo: int, hi: int) -> Layers:
    """Cut a piece out of an extent's ``view [layers, 2, kv_heads, tokens, head_dim]``."""
    return Layers(view[:, :, :, lo:hi])


class Write(NamedTuple):
    """Rows ``[start, stop)`` of the step are written to a piece of as many slots."""

    rows: slice
    piece: Layers


class Whole(Protocol):
    """An implementation that takes a step as a whole and reads its own tables of it (Triton)."""

    def scatter(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the rows' keys and values ``[kv_heads, T, head_dim]`` to their slots."""

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``q [heads, T, head_dim]`` -> ``[T, heads, head_dim]`` and its log-sum-exp."""


class Attend(NamedTuple):
    """A ``SpanCall`` before the layer is known."""

    rows: slice
    piece: Layers
    causal: bool
    shift: Shift | None
    first: bool


@dataclass
class Step:
    """Everything a packed forward of T rows needs beside its input embeddings.

    Args:
        writes: cover every row once.
        calls: of blocks of rows; each row's first call has ``first`` set.
        partial: the attention implementation.
        window: longest attention distance the step can have (its longest context), to admit sliding windows.
        singles: rows that stand alone, or None; blocks and singles cover every row once.
        whole: takes writes and calls as a whole, instead of ``partial`` call by call; then there are no ``singles``.
        waits: loads that this step runs beside, or None.
    """

    writes: list[Write]
    calls: list[Attend]
    partial: Partial
    window: int
    singles: SingleRows | None = None
    whole: Whole | None = None
    waits: Waits | None = None
    layers_seen: set[int] = field(default_factory=set)


class Decided(Exception):
    """Ends a forward at a probe's layer."""


@dataclass
class Probe:
    """A forward of one whole prompt that ends at ``layer`` with that layer's keys and values.

    Layers before it attend causally over all rows; nothing is written anywhere.
    """

    layer: int
    partial: Partial
    window: int
    keys: torch.Tensor | None = None  # [kv_heads, T, head_dim], rotated at the rows' positions
    values: torch.Tensor | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Raises Decided at the probe's layer."""
        if layer == self.layer:
            self.keys, self.values = key[0], value[0]
            raise Decided
        out, _ = self.partial(query, key, value, True, scale)
        return out.transpose(1, 2).to(query.dtype)


_step: ContextVar[Step | Probe | None] = ContextVar("mpic_step", default=None)


@contextmanager
def running(step: Step | Probe) -> Iterator[None]:
    """Make a step the one that attention layers on this thread serve."""
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
    sliding_window: int | None = None,
    **unread: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: ``query [1, heads, T, d]``, ``key/value [1, kv_heads, T, d]`` ->
    ``[1, T, heads, d]``.

    Raises:
        ModelRefused: an argument we do not read would change the result (softcap, attention sinks, windows).
    """
    step = _step.get()
    if step is None:
        raise RuntimeError("a model hooked by MPIC was called outside of a step")
    meaning = {k for k, v in unread.items() if v is not None and v is not False and k not in _HARMLESS}
    if meaning or attention_mask is not None or dropout:
        raise ModelRefused(
            f"attention arguments that are not supported: {sorted(meaning) or 'mask or dropout'}"
        )
    if sliding_window is not None and step.window > sliding_window:
        raise ModelRefused(
            f"a context of {step.window} tokens does not fit the sliding window of {sliding_window}"
        )
    layer = module.layer_idx
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if isinstance(step, Probe):
        return step.attend(layer, query, key, value, scale), None
    k, v = key[0], value[0]
    step.layers_seen.add(layer)
    if step.whole is not None:
        step.whole.scatter(layer, k, v)
        if step.waits is not None:
            step.waits.before(layer)
        return step.whole.attend(layer, query[0], scale)[0][None], None
    for rows, piece in step.writes:
        piece.keys[layer].copy_(k[:, rows])
        piece.values[layer].copy_(v[:, rows])
    if step.waits is not None:
        step.waits.before(layer)
    calls = [
        SpanCall(c.rows, c.piece.keys[layer], c.piece.values[layer], c.causal, c.shift, c.first)
        for c in step.calls
    ]
    out = attend(query[0], calls, scale, step.partial, step.singles, layer)
    return out[None].to(query.dtype), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
