"""Chooses the implementation of span attention for a device. Each is imported only when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpic.kernels import instructions
from mpic.kernels.attention import Partial

if TYPE_CHECKING:
    from mpic.kernels.block_spans import BlockSpanKernel
    from mpic.kernels.stream import StreamKernel


def backend(device: torch.device, dtype: torch.dtype) -> tuple[str, Partial]:
    """Returns the name and the implementation for a device. The choice is made only here, and is shown in ``/health``.

    ``mpic.kernels.triton`` takes whole steps instead of calls, so it is chosen elsewhere: by name, or by the engine
    where it serves best (``LoadedModel.choose_attention``, ``mpic.engine.load_engine``).
    """
    from mpic.kernels import cpu, cuda, reference

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
    """Returns a kernel for single rows, if the device has one, or None and the reason ("" where none exists for the
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
    """Returns a kernel for blocks of rows over all their spans for each of some head dimensions, or none: the one for a
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
