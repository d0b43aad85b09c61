"""Matrix products of few rows on the CPU: builds ``linear.c``, proves it, calls it.

Decoding multiplies one row a request with every weight, so that a step cannot be shorter than reading the weights once.
For one row torch's products read them at about half the speed of memory, and for a few rows at less; this kernel was
1.5 to 3.4 times as fast in fp32 and 1.4 to 2.7 times in bf16 on an AMD EPYC with AVX-512, and 1.2 to 4.5 and 1.5 to 3.4
times with AVX2. Blocks of rows have kernels of their own (``products.py``).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from mpic.kernels import c_kernel, instructions
from mpic.kernels.c_kernel import KernelUnavailable

SOURCE = Path(__file__).with_name("linear.c")
MOST_ROWS = {
    ("AVX512", "fp32"): 16,
    ("AVX512", "bf16 pairs"): 16,
    ("AVX512", "bf16"): 16,
    ("AVX2", "fp32"): 12,
    ("AVX2", "bf16"): 16,
}
"""Rows up to which the kernel was measured to be the fastest, by the processor and by how it multiplies: pairs of bf16
numbers at once, or each of them widened."""
DTYPES = (torch.float32, torch.bfloat16)


class Product(NamedTuple):
    """A linear layer: ``weight [outputs, inputs]`` and ``bias [outputs]`` or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class _Named(Protocol):
    """A kernel of products."""

    name: str
    dtype: torch.dtype


class LinearKernel:
    """Multiplies a few rows with weights of one dtype; ``load`` makes it.

    Args:
        function: ``multiply`` of linear.c.
        most_rows: up to how many rows it is faster than torch.
    """

    name = "cpu-linear"

    def __init__(self, function: Any, dtype: torch.dtype, most_rows: int) -> None:
        self._function, self.dtype, self.most_rows = function, dtype, most_rows

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``x W^T + b``, ``[..., outputs]``, for ``x [..., inputs]``, ``weight [outputs, inputs]`` and
        ``bias [outputs]``; any number of rows. ``out`` is contiguous memory of that size, or None.

        Raises:
            ValueError: other dtypes or devices, weights that do not lie row by row, sizes that do not fit.
        """
        refuse(self, x, weight, bias, out)
        outputs, inputs = weight.shape
        rows = x.contiguous()
        if out is None:
            out = torch.empty((*x.shape[:-1], outputs), dtype=self.dtype)
        self._function(
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows.data_ptr(),
            inputs,
            *(out.data_ptr(), outputs, out.numel() // outputs, outputs, inputs, torch.get_num_threads()),
        )
        return out


def refuse(
    kernel: _Named, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> None:
    """Raise ValueError if a kernel of products cannot read these tensors, or write to ``out``."""
    outputs, inputs = weight.shape
    dtype = kernel.dtype
    fits = x.dtype is dtype and x.is_cpu and x.shape[-1] == inputs
    fits = fits and weight.dtype is dtype and weight.is_cpu and weight.is_contiguous()
    if fits and bias is not None:
        fits = bias.dtype is dtype and bias.is_cpu and bias.shape == (outputs,) and bias.is_contiguous()
    if fits and out is not None:
        fits = out.dtype is dtype and out.shape == (*x.shape[:-1], outputs) and out.is_contiguous()
    if not fits:
        raise ValueError(
            f"{kernel.name} cannot multiply {tuple(x.shape)} {x.dtype} with {tuple(weight.shape)}"
        )


@functools.cache
def load(dtype: torch.dtype) -> LinearKernel:
    """Build the kernel, or take it from the cache folder, and prove it on a small example.

    Raises:
        KernelUnavailable: with the reason.
    """
    how, options = variant(dtype)
    level = instructions.level()
    if (level, how) not in MOST_ROWS:
        raise KernelUnavailable(f"torch is as fast, or was not compared, on {level} with {how}")
    function = c_kernel.build(SOURCE, how.replace(" ", "-"), options).multiply
    address, i64 = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [address, address, address, i64, address, *[i64] * 5]
    function.restype = None
    kernel = LinearKernel(function, dtype, MOST_ROWS[level, how])
    _prove(kernel)
    return kernel


def variant(dtype: torch.dtype) -> tuple[str, list[str]]:
    """Return how numbers of a dtype are multiplied on this processor, and the options that compile it.

    Raises:
        KernelUnavailable: it multiplies other dtypes.
    """
    if dtype not in DTYPES:
        raise KernelUnavailable(
            f"it multiplies float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
        )
    bf16 = dtype == torch.bfloat16
    pairs = bf16 and instructions.pairs()
    how = "bf16 pairs" if pairs else "bf16" if bf16 else "fp32"
    return how, [f"-DBFLOAT16={int(bf16)}", *(["-mavx512bf16"] if pairs else [])]


def _prove(kernel: LinearKernel) -> None:
    """Compare the kernel with torch on a small example, whose 7 rows, 9 outputs and 70 inputs all leave a rest.

    Raises:
        KernelUnavailable: the results differ.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(kernel.dtype) for shape in ((7, 70), (9, 70), (9,))
    )
    wanted = x.double() @ weight.double().T + bias.double()
    wrong = float(((kernel(x, weight, bias) - wanted).abs() / wanted.abs().clamp(min=1)).max())
    if not wrong < (1e-5 if kernel.dtype == torch.float32 else 2.0**-8):
        raise KernelUnavailable(f"the compiled kernel is wrong by {wrong:.1e}")
