"""Tells whether the processor is fast at products of pairs of bf16 numbers: builds ``pairs.c`` and measures.

AVX-512 BF16 multiplies a pair of numbers in each lane with one instruction. On AMD's processors since Zen 4 that
takes, by published tables, as long as an instruction for one fp32 number a lane, so that bf16 doubles the speed. On
Intel's, which have a matrix unit for such products, it takes 1.6 to 1.8 times as long, and torch's products of bf16
numbers, which are made of it, about twice as long as those of fp32 numbers. That counts where a virtual machine hides
the unit.
"""

from __future__ import annotations

import ctypes
import functools

from mpic.kernels import c_kernel, instructions
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.kernels.linear import SOURCE as _BESIDE

SOURCE = _BESIDE.with_name("pairs.c")
MOST = 1.3
"""The time of an instruction for pairs over that of one for fp32 numbers up to which pairs are fast."""


@functools.cache
def over_singles() -> float:
    """Returns the time of an instruction for pairs over that of one for fp32 numbers.

    Raises:
        KernelUnavailable: the processor has no such instruction, or it cannot be measured.
    """
    if not instructions.pairs():
        raise KernelUnavailable("the processor has no AVX-512 BF16")
    function = c_kernel.build(SOURCE, "bf16", ["-mavx512bf16"]).pairs_over_singles
    function.restype = ctypes.c_double
    return float(function())


def are_fast() -> bool:
    """Returns whether the processor has products of pairs that are faster than those of as many fp32 numbers; False if
    that cannot be measured."""
    try:
        return over_singles() <= MOST
    except KernelUnavailable:
        return False
