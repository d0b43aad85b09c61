"""Attention of blocks of rows over all their spans in bf16 on a CPU with a matrix unit (AMX): builds ``block_tiles.c``,
proves it, calls it.

It takes the tables of ``block_spans.py``, a layer in one call. Torch's flash kernel multiplies on the unit, too, but
serves one span at a time and both halves of a causal mask's blocks.
"""

from __future__ import annotations

import functools

import torch

from mpic.kernels import block_spans, c_kernel
from mpic.kernels.block_spans import BlockSpanKernel
from mpic.kernels.c_kernel import KernelUnavailable

SOURCE = block_spans.SOURCE.with_name("block_tiles.c")
TOLERANCE = 0.02
"""For results near 1: weights, queries that were turned, and values have 8 significant bits."""


class BlockTileKernel(BlockSpanKernel):
    """The kernel for one head dimension; ``load`` makes it."""

    name = "cpu-block-tiles"
    most_rows, strip = 384, 32


@functools.cache
def load(head_dim: int, *, emulated: bool = False) -> BlockTileKernel:
    """Build the kernel, or take it from the cache folder, and prove it on a small example.

    Args:
        emulated: the matrix unit's work is done by plain C, which is slow and runs on any processor (for tests).

    Raises:
        KernelUnavailable: with the reason.
    """
    if head_dim > block_spans.LARGEST:
        raise KernelUnavailable(f"it takes heads of up to {block_spans.LARGEST} dimensions, not {head_dim}")
    options = [f"-DDIM={head_dim}", *c_kernel.unit_options(emulated=emulated)]
    name = f"{head_dim}-emulated" if emulated else str(head_dim)
    function = c_kernel.build(SOURCE, name, options).attend_blocks
    kernel = BlockTileKernel(head_dim, torch.bfloat16, torch.bfloat16, function)
    block_spans.prove(kernel, TOLERANCE)
    return kernel
