"""Chooses the implementations of span attention that serve the rows of a model on a device: those of blocks, and those
of rows that stand alone. Each is imported only when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpic.errors import ModelRefused
from mpic.kernels import instructions, reference
from mpic.kernels.attention import Partial

if TYPE_CHECKING:
    from mpic.kernels.block_spans import BlockSpanKernel
    from mpic.kernels.stream import StreamKernel


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
    dims: Sequence[int],
    capped: bool,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> AttentionChoice:
    """Return the implementations of a name, or those that are best here (``auto``).

    Args:
        dims: the head dimension of each kind of layer.
        capped: whether a layer caps its scores.

    Raises:
        ModelRefused: it is not available for this device and these dtypes.
    """
    own, partial = backend(device, dtype)
    choices = [
        AttentionChoice(own, own, partial),
        AttentionChoice("reference", "reference", reference.partial),
    ]
    found = [single_rows(device, dtype, dim, kv_dtype) for dim in dims]
    reason = next((f"no cpu-stream: {reason}" for _, reason in found if reason), "")
    streams = [stream for stream, _ in found if stream is not None]
    if len(streams) == len(dims):
        choices.insert(0, _compiled(choices[0], streams, dims, capped, device, dtype, kv_dtype))
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
    """Return a choice whose kernels read keys and values in another dtype than the model's.

    Raises:
        ModelRefused: no kernel reads this dtype.
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
    dims: Sequence[int],
    capped: bool,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> AttentionChoice:
    """Return our own kernels: for blocks the one that takes all spans; torch's where it does not serve the layers."""
    choice = torchs._replace(name=streams[0].name, streams=streams)
    if capped:
        spans, reason = [], "its scores are capped"
    else:
        spans, reason = block_spans(device, dtype, dims, kv_dtype)
    if spans:
        return choice._replace(blocks=spans[0].name, spans=spans, blocks_note=reason)
    return choice._replace(blocks_note=f"no cpu-block-spans: {reason}")


def backend(device: torch.device, dtype: torch.dtype) -> tuple[str, Partial]:
    """Return the name and the implementation for a device. The choice is made only here, and is shown in ``/health``.

    ``mpic.kernels.triton`` takes whole steps instead of calls, so it is chosen elsewhere: by name, or by the engine
    where it serves best (``LoadedModel.choose_attention``, ``mpic.engine.load_engine``).
    """
    from mpic.kernels import cpu, cuda

    if device.type == "cpu":
        return "cpu-flash", cpu.partial
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return "cuda-flash", cuda.flash_partial
    if device.type == "cuda":
        return "cuda-efficient", cuda.efficient_partial
    return "reference", reference.partial


def single_rows(
    device: torch.device, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None
) -> tuple[StreamKernel | None, str]:
    """Return a kernel for single rows, if the device has one, or None and the reason ("" where none exists for the
    device)."""
    from mpic.kernels import stream

    if device.type != "cpu":
        return None, ""
    try:
        return stream.load(head_dim, dtype, kv_dtype), ""
    except stream.KernelUnavailable as error:
        return None, str(error)


def block_spans(
    device: torch.device, dtype: torch.dtype, dims: Sequence[int], kv_dtype: torch.dtype | None = None
) -> tuple[list[BlockSpanKernel], str]:
    """Return a kernel for blocks of rows over all their spans for each of some head dimensions, or none: the one for a
    matrix unit where the processor has it. The text beside them says why there is no better one ("" where none exists
    for the device)."""
    from mpic.kernels import block_spans, block_tiles, c_kernel
    from mpic.kernels.c_kernel import KernelUnavailable

    if device.type != "cpu":
        return [], ""
    unit = dtype is torch.bfloat16 and kv_dtype in (None, dtype) and instructions.unit()
    withheld = c_kernel.why_no_unit() if unit else ""
    try:
        if unit and not withheld:
            return [block_tiles.load(dim) for dim in dims], ""
        return [block_spans.load(dim, dtype, kv_dtype) for dim in dims], withheld
    except KernelUnavailable as error:
        return [], str(error)
