"""The matrix products of linear layers on the CPU: chooses among the kernels, by the number of rows.

Few rows are multiplied at the speed at which weights are read (``linear.py``), blocks of rows on a matrix unit where
the processor has one for the dtype (``linear_tiles.py``), as fp32 numbers where these are multiplied faster than bf16
(``linear_widened.py``), and all others by torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from mpic.kernels import c_kernel, instructions, linear, linear_tiles, linear_widened
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.kernels.linear import LinearKernel, Product
from mpic.kernels.linear_tiles import LinearTilesKernel
from mpic.kernels.linear_widened import WidenedKernel

BlockProducts = LinearTilesKernel | WidenedKernel


class Products:
    """The kernels for one dtype; ``load`` makes it.

    Args:
        few: for few rows.
        blocks: for blocks of rows; None: torch multiplies these.
        blocks_note: why the processor's matrix unit for the dtype is not used; empty if it is or there is none.
    """

    def __init__(self, few: LinearKernel, blocks: BlockProducts | None, blocks_note: str = "") -> None:
        self.few, self.blocks, self.blocks_note = few, blocks, blocks_note

    @property
    def tiles(self) -> LinearTilesKernel | None:
        """The kernel for a matrix unit, if that is the one for blocks."""
        return self.blocks if isinstance(self.blocks, LinearTilesKernel) else None

    def takes(self, rows: int, inputs: int) -> bool:
        """Return whether a kernel multiplies so many rows of so many numbers faster than torch does."""
        return rows <= self.few.most_rows or self._is_block(rows, inputs)

    def __call__(self, x: torch.Tensor, by: Product) -> torch.Tensor:
        """Return ``x W^T + b``, ``[..., outputs]``, for ``x [..., inputs]``.

        Raises:
            ValueError: other dtypes or devices, weights that do not lie row by row, sizes that do not fit.
        """
        out = torch.empty((*x.shape[:-1], len(by.weight)), dtype=x.dtype)
        self.into(x, [by], [out])
        return out

    def into(self, x: torch.Tensor, products: Sequence[Product], outs: Sequence[torch.Tensor]) -> None:
        """Write the same for some weights to contiguous memory ``[..., outputs]`` for each.

        Raises:
            ValueError: as above.
        """
        inputs = x.shape[-1]
        rows = x.numel() // inputs
        if self._is_block(rows, inputs):
            self.blocks(x, products, outs)  # ty: ignore[not-callable] (`_is_block` asks for it)
            return
        for by, out in zip(products, outs, strict=True):
            if rows <= self.few.most_rows:
                self.few(x, by.weight, by.bias, out)
            else:
                linear.refuse(self.few, x, by.weight, by.bias, out)
                _multiply(x.reshape(rows, inputs), by, out.view(rows, -1))

    def _is_block(self, rows: int, inputs: int) -> bool:
        return self.blocks is not None and rows >= self.blocks.least_rows and self.blocks.takes(inputs)


def _multiply(x: torch.Tensor, by: Product, out: torch.Tensor) -> None:
    if by.bias is None:
        torch.mm(x, by.weight.t(), out=out)
    else:
        torch.addmm(by.bias, x, by.weight.t(), out=out)


@functools.cache
def load(dtype: torch.dtype) -> Products:
    """Return the kernels for a dtype.

    Raises:
        KernelUnavailable: there is none; the message says why.
    """
    few = linear.load(dtype)
    if dtype is not torch.bfloat16:
        return Products(few, None)
    withheld = c_kernel.why_no_unit() if instructions.unit() else ""  # from torch, too
    if withheld or not instructions.unit():
        return Products(few, None if instructions.fast_pairs() else linear_widened.load(), withheld)
    try:
        return Products(few, linear_tiles.load())
    except KernelUnavailable as error:
        return Products(few, None, str(error))
