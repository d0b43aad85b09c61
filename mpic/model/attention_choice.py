"""The implementations that serve a model's rows on a device: those of blocks, and those of rows that stand alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpic.errors import ModelRefused
from mpic.kernels import reference
from mpic.kernels.attention import Partial
from mpic.kernels.backends import backend, block_spans, single_rows

if TYPE_CHECKING:
    from mpic.kernels.block_spans import BlockSpanKernel
    from mpic.kernels.stream import StreamKernel
    from mpic.model.trace import LayerFacts, LayerKind


class AttentionChoice(NamedTuple):
    """The implementations of one name.

    Args:
        name: shown in ``/health``.
        blocks: the name of what serves blocks of rows.
        partial: serves blocks span by span, and single rows where ``streams`` is empty.
        streams: serve single rows, one for each kind of layer, or none.
        spans: serve blocks over all their spans, one for each kind of layer, or none.
        note: the reason why single rows are slower than they could be; empty where they are not.
        blocks_note: the same of blocks.
    """

    name: str
    blocks: str
    partial: Partial
    streams: Sequence[StreamKernel] = ()
    spans: Sequence[BlockSpanKernel] = ()
    note: str = ""
    blocks_note: str = ""


def choose(
    name: str,
    kinds: Sequence[LayerKind],
    layers: Sequence[LayerFacts],
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> AttentionChoice:
    """Returns the implementations of a name, or those that are best here (``auto``).

    Raises:
        ModelRefused: it is not available for this device and these dtypes.
    """
    own, partial = backend(device, dtype)
    choices = [
        AttentionChoice(own, own, partial),
        AttentionChoice("reference", "reference", reference.partial),
    ]
    found = [single_rows(device, dtype, kind.dim, kv_dtype) for kind in kinds]
    reason = next((f"no cpu-stream: {reason}" for _, reason in found if reason), "")
    streams = [stream for stream, _ in found if stream is not None]
    if len(streams) == len(kinds):
        choices.insert(0, _compiled(choices[0], streams, kinds, layers, device, dtype, kv_dtype))
    if kv_dtype is not dtype:
        choices = [_other_kv(choices[0], device, dtype, kv_dtype, reason)]
    for choice in choices:
        if name in ("auto", choice.name):
            return choice._replace(note=reason)
    available = ", ".join(choice.name for choice in choices)
    raise ModelRefused(
        f"attention '{name}' does not run on {device} with {dtype}; available: auto, {available}, triton (CUDA)"
        + (f"; {reason}" if reason else "")
    )


def _other_kv(
    choice: AttentionChoice, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, reason: str
) -> AttentionChoice:
    """Returns a choice whose kernels read keys and values in another dtype than the model's.

    Raises:
        ModelRefused: there are none.
    """
    kept, own = (str(one).removeprefix("torch.") for one in (kv_dtype, dtype))
    if device.type != "cpu" or dtype is not torch.float32:
        raise ModelRefused(f"kv_dtype {kept} is for models in float32 on the CPU, not in {own} on {device}")
    if not choice.spans:
        why = "; ".join(filter(None, (reason, choice.blocks_note)))
        raise ModelRefused(f"kv_dtype {kept} needs our own kernels for the CPU: {why}")
    return choice


def _compiled(
    torchs: AttentionChoice,
    streams: Sequence[StreamKernel],
    kinds: Sequence[LayerKind],
    layers: Sequence[LayerFacts],
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> AttentionChoice:
    """Returns our own kernels: for blocks the one that takes all spans; torch's where it does not serve the layers."""
    choice = torchs._replace(name=streams[0].name, streams=streams)
    if any(facts.softcap for facts in layers):
        spans, reason = [], "its scores are capped"
    else:
        spans, reason = block_spans(device, dtype, [kind.dim for kind in kinds], kv_dtype)
    if spans:
        return choice._replace(blocks=spans[0].name, spans=spans, blocks_note=reason)
    return choice._replace(blocks_note=f"no cpu-block-spans: {reason}")
