"""Matrix products of blocks of rows in bf16 on a CPU that multiplies fp32 numbers faster: torch's products of fp32
numbers over weights that are widened a panel at a time.

Where the processor has neither a matrix unit nor fast products of pairs (``instructions.fast_pairs``), torch's products
of bf16 numbers take longer than those of fp32 numbers. On two cores of a Xeon they reached 160 GFLOP/s with slow pairs,
60 where torch was held to AVX-512 without them, and 25 where it was held to AVX2, beside 300 and 155 in fp32; this
kernel reached 260 and 140. Only a panel's weights are in fp32 at a time, for each caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mpic.kernels import instructions, linear
from mpic.kernels.linear import Product

PANEL_BYTES, PANEL_OUTPUTS = 8 << 20, 512
"""Bytes of a panel in fp32, and the outputs that it has at least. What is multiplied with it stays near the cores. With
a megabyte, or with 230 of 1,536 outputs, products reach two thirds of the speed, because threads meet behind each."""
LEAST_ROWS = {True: 80, False: 17}
"""Rows from which it was measured to be the fastest, with products of pairs and without. With them torch is as fast at
64 rows, and takes 1.3 times as long at 128 and 1.6 times as long at 512; without them ``linear.c`` is as fast at 16."""
ROWS = 1024
"""Rows that are multiplied with a panel at once, so that their results are still in a cache when they are rounded."""


class WidenedKernel:
    """Multiplies blocks of rows; ``load`` makes it.

    Args:
        least_rows: from how many rows it is the fastest.
    """

    name = "cpu-linear-widened"
    dtype = torch.bfloat16

    def __init__(self, least_rows: int) -> None:
        self.least_rows = least_rows
        self._rooms: deque[torch.Tensor] = deque()  # as many as callers were here at once

    def takes(self, inputs: int) -> bool:
        """Return whether it multiplies rows of so many numbers."""
        return True

    def __call__(self, x: torch.Tensor, products: Sequence[Product], outs: Sequence[torch.Tensor]) -> None:
        """Write ``x W^T + b`` for some weights; shapes and errors as ``LinearTilesKernel.__call__``, for rows of any
        number of inputs."""
        inputs = x.shape[-1]
        for by, out in zip(products, outs, strict=True):
            linear.refuse(self, x, by.weight, by.bias, out)
        wide = x.reshape(-1, inputs).float()
        for by, out in zip(products, outs, strict=True):
            self._multiply(wide, by, out.view(len(wide), len(by.weight)))

    def _multiply(self, wide: torch.Tensor, by: Product, out: torch.Tensor) -> None:
        rows, inputs = wide.shape
        outputs = len(by.weight)
        each = min(outputs, max(PANEL_OUTPUTS, PANEL_BYTES // (4 * inputs)))
        block = max(1, min(rows, ROWS))
        with self._room(each * (inputs + block)) as room:
            panel_room, result_room = room[: each * inputs], room[each * inputs :]
            for first in range(0, outputs, each):
                end = min(first + each, outputs)
                panel = panel_room[: (end - first) * inputs].view(end - first, inputs)
                panel.copy_(by.weight[first:end])
                bias = None if by.bias is None else by.bias[first:end].float()
                for at in range(0, rows, block):
                    some = wide[at : at + block]
                    result = result_room[: len(some) * (end - first)].view(len(some), end - first)
                    if bias is None:
                        torch.mm(some, panel.t(), out=result)
                    else:
                        torch.addmm(bias, some, panel.t(), out=result)
                    out[at : at + block, first:end].copy_(result)

    @contextmanager
    def _room(self, numbers: int) -> Iterator[torch.Tensor]:
        """Yield memory for at least so many fp32 numbers, which nobody else has meanwhile. It is kept, because memory
        that has never been written takes longer to write."""
        try:
            room = self._rooms.pop()
        except IndexError:
            room = torch.empty(0)
        if len(room) < numbers:
            with torch.inference_mode(False):  # it is written outside of that mode, too
                room = torch.empty(numbers)
        yield room
        self._rooms.append(room)


def load() -> WidenedKernel:
    """Return the kernel for this processor."""
    return WidenedKernel(LEAST_ROWS[instructions.pairs()])
