"""Matrix products of blocks of rows in bf16 on a CPU with a matrix unit (AMX): builds ``linear_tiles.c``, proves it,
calls it.

Torch's products on the unit bring the weights into its order in every call. This kernel reads them as they lie, several
weights for the same rows in one call, and gives a thread its next outputs when it is done with some, because one core's
unit may be three times as slow as another's while something else runs on it. On a Xeon with AMX it was 1.1 to 2.2 times
as fast for 64 and more rows, and from ``LEAST_ROWS`` on faster than ``linear.c``.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpic.kernels import c_kernel, linear
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.kernels.linear import Product

SOURCE = linear.SOURCE.with_name("linear_tiles.c")
LEAST_ROWS = 5
"""Rows from which it was measured to be faster than ``linear.c``: at 4 rows 0.7 to 1.4 times as fast, depending on the
size, at 6 rows 1.0 to 1.8, at 16 rows 2.1 to 4.3."""
DEPTH = 32
"""Inputs that the unit multiplies at once. The kernel takes multiples of it."""
ROWS = 256
"""Rows that are in the unit's order at a time."""
RUN = 2048
"""Inputs that are multiplied in a row: with ``ROWS`` a megabyte, half of a core's second cache."""
_PANEL, _TILE = 256, 1024
"""Outputs of a task, if there are enough, and bytes of a tile."""
_ALIGNED = 64


class _ProductStruct(ctypes.Structure):
    """``Product`` of linear_tiles.c."""

    _fields_ = [*((n, ctypes.c_void_p) for n in ["weight", "bias", "out"]), ("outputs", ctypes.c_int64)]


class _CallStruct(ctypes.Structure):
    """``Call`` of linear_tiles.c."""

    _fields_ = [
        ("product", ctypes.POINTER(_ProductStruct)),
        ("products", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ["rows", "inputs", "threads"]),
        *((n, ctypes.c_void_p) for n in ["packed", "sums"]),
    ]


class UnitFunctions(NamedTuple):
    """Addresses of functions of linear_tiles.c that a team of threads calls together (``decoder.c``: ``Unit``)."""

    start: int
    stop: int
    pack: int
    multiply: int


class LinearTilesKernel:
    """Multiplies blocks of rows; ``load`` makes it.

    Args:
        library: built of linear_tiles.c.
    """

    name = "cpu-linear-tiles"
    dtype, least_rows = torch.bfloat16, LEAST_ROWS

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.multiply_blocks
        self._function.argtypes, self._function.restype = [ctypes.POINTER(_CallStruct)], None
        self._memory = threading.local()
        names = ("start_unit", "stop_unit", "pack_rows", "multiply_rows")
        self.functions = UnitFunctions(
            *(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
        )

    def takes(self, inputs: int) -> bool:
        """Return whether it multiplies rows of so many numbers."""
        return not inputs % DEPTH

    def __call__(self, x: torch.Tensor, products: Sequence[Product], outs: Sequence[torch.Tensor]) -> None:
        """Write ``x W^T + b`` for some weights.

        Args:
            x: ``[..., inputs]``; any number of rows.
            products: weights ``[outputs, inputs]`` and biases ``[outputs]`` or None.
            outs: contiguous memory ``[..., outputs]`` for each.

        Raises:
            ValueError: other dtypes or devices, weights that do not lie row by row, sizes that do not fit.
        """
        inputs = x.shape[-1]
        for by, out in zip(products, outs, strict=True):
            linear.refuse(self, x, by.weight, by.bias, out)
        if not self.takes(inputs):
            raise ValueError(f"{self.name} takes rows of multiples of {DEPTH} numbers, not of {inputs}")
        rows = x.contiguous()
        count, threads = rows.numel() // inputs, torch.get_num_threads()
        packed, sums = self._room(self.memory(count, inputs, threads))
        table = (_ProductStruct * len(products))(
            *(
                _ProductStruct(
                    by.weight.data_ptr(),
                    None if by.bias is None else by.bias.data_ptr(),
                    out.data_ptr(),
                    len(by.weight),
                )
                for by, out in zip(products, outs, strict=True)
            )
        )
        call = _CallStruct(table, len(products), rows.data_ptr(), count, inputs, threads)
        call.packed, call.sums = aligned(packed), aligned(sums)
        self._function(call)

    def _room(self, sizes: tuple[int, int]) -> list[torch.Tensor]:
        """Return memory of at least these bytes, which the calling thread keeps: the packed rows of the widest layer,
        and 256 KiB for each thread of the team where sums are carried."""
        kept: list[torch.Tensor] = getattr(self._memory, "room", [torch.empty(0)] * len(sizes))
        self._memory.room = [
            memory if len(memory) >= size else torch.empty(size, dtype=torch.uint8)
            for size, memory in zip(sizes, kept, strict=True)
        ]
        return self._memory.room

    def memory(self, rows: int, inputs: int, threads: int) -> tuple[int, int]:
        """Return the bytes that the kernel works in, to be passed as ``aligned`` gives them: for rows in the unit's
        order, and for sums that are carried from one run of inputs to the next."""
        pairs = -(-min(rows, ROWS) // DEPTH)
        sums = threads * (_PANEL // DEPTH) * (ROWS // DEPTH) * 4 * _TILE if inputs > RUN else 0
        return pairs * (inputs // DEPTH) * 2 * _TILE + _ALIGNED, sums + _ALIGNED


def aligned(memory: torch.Tensor) -> int:
    """Return the first address in some memory at which a cache line begins."""
    return -(-memory.data_ptr() // _ALIGNED) * _ALIGNED


@functools.cache
def load(*, emulated: bool = False) -> LinearTilesKernel:
    """Build the kernel, or take it from the cache folder, and prove it on a small example.

    Args:
        emulated: the matrix unit's work is done by plain C, which is slow and runs on any processor (for tests).

    Raises:
        KernelUnavailable: with the reason.
    """
    sizes = [f"-DROWS={ROWS}", f"-DRUN={RUN}", f"-DPANEL={_PANEL}"]
    options = [*c_kernel.unit_options(emulated=emulated), *sizes]
    kernel = LinearTilesKernel(c_kernel.build(SOURCE, "emulated" if emulated else "bf16", options))
    _prove(kernel)
    return kernel


def _prove(kernel: LinearTilesKernel) -> None:
    """Compare the kernel with double precision on a small example: two products of rows and outputs that leave a
    rest, over inputs that take two runs.

    Raises:
        KernelUnavailable: the results differ.
    """
    generator = torch.Generator().manual_seed(0)
    inputs, sizes = RUN + DEPTH, (2 * DEPTH + 1, DEPTH)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kernel.dtype)

    x = some(DEPTH + 7, inputs)
    products = [Product(some(size, inputs), some(size)) for size in sizes]
    outs = [torch.empty(len(x), size, dtype=kernel.dtype) for size in sizes]
    kernel(x, products, outs)
    for (weight, bias), out in zip(products, outs, strict=True):
        assert bias is not None
        wanted = x.double() @ weight.double().T + bias.double()
        wrong = float(((out - wanted).abs() / wanted.abs().clamp(min=1)).max())
        if not wrong < 2.0**-8:
            raise KernelUnavailable(f"the compiled kernel is wrong by {wrong:.1e}")
