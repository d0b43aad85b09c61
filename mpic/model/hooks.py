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
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mpic.errors import ModelRefused
from mpic.kernels.spans import Partial, Rows, Shift, SpanCall, attend

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


class Write(NamedTuple):
    """Rows ``[start, stop)`` go to slots ``slot, slot + 1, ...`` of an extent's view."""

    rows: slice
    view: torch.Tensor
    slot: int


class Attend(NamedTuple):
    """A ``SpanCall`` before the layer is known: slots ``[lo, hi)`` of an extent's view."""

    rows: Rows
    view: torch.Tensor
    lo: int
    hi: int
    causal: bool
    shift: Shift | None
    first: bool


@dataclass
class Step:
    """Everything a packed forward of T rows needs beside its input embeddings.

    Args:
        writes: cover every row once.
        calls: cover every row; each row's first call has ``first`` set.
        partial: the attention implementation.
        window: longest attention distance the step can have (its longest context), to admit sliding windows.
    """

    writes: list[Write]
    calls: list[Attend]
    partial: Partial
    window: int
    layers_seen: set[int] = field(default_factory=set)


_step: ContextVar[Step | None] = ContextVar("mpic_step", default=None)


@contextmanager
def running(step: Step) -> Iterator[None]:
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
    k, v = key[0], value[0]
    for rows, view, slot in step.writes:
        n = rows.stop - rows.start
        view[layer, 0, :, slot : slot + n] = k[:, rows]
        view[layer, 1, :, slot : slot + n] = v[:, rows]
    calls = [
        SpanCall(
            c.rows,
            c.view[layer, 0, :, c.lo : c.hi],
            c.view[layer, 1, :, c.lo : c.hi],
            c.causal,
            c.shift,
            c.first,
        )
        for c in step.calls
    ]
    step.layers_seen.add(layer)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend(query[0], calls, scale, step.partial)[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
