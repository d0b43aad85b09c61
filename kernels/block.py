"""Attention of blocks of rows in bf16 on a CPU with AVX-512 BF16: builds ``block.c``, proves it, calls it.

Torch's flash kernel multiplies bf16 numbers in fp32 where the processor has no matrix unit, at the speed of fp32, and
computes both halves of a causal mask's blocks. This kernel multiplies pairs of bf16 numbers at once: on an AMD EPYC
it was 1.7 to 3.4 times as fast, and its results, which stay in fp32, are nearer to exact ones. Where there is a matrix
unit (AMX), ``block_tiles.py`` takes the work, and where products of pairs are slow (``pairs.py``), ``block_spans.py``,
which was 1.2 to 1.6 times as fast there, because it takes all spans in one call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mpic.kernels import c_kernel, instructions
from mpic.kernels.c_kernel import KernelUnavailable

SOURCE = Path(__file__).with_name("block.c")
LARGEST = 256
"""Largest head dimension: what a task keeps grows with it, and lies on a thread's stack."""


class _Call(ctypes.Structure):
    """``Call`` of block.c."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ["query", "keys", "values", "out", "lse"]),
        *(
            (n, ctypes.c_int64)
            for n in ["query_head", "query_row", "key_head", "key_token", "value_head", "value_token"]
        ),
        *((n, ctypes.c_int64) for n in ["heads", "kv_heads", "rows", "tokens", "causal", "threads"]),
        ("scale", ctypes.c_float),
    ]


class BlockKernel:
    """A ``mpic.kernels.attention.Partial`` for bf16; ``load`` makes it.

    Args:
        functions: the C function for each head dimension.
    """

    name = "cpu-blocks"

    def __init__(self, functions: Mapping[int, Any]) -> None:
        self._functions = functions

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends; shapes as ``mpic.kernels.attention.Partial``, and the result is fp32.

        Raises:
            ValueError: numbers that are not bf16 in the CPU's memory, heads whose numbers are not dense, a shape that
                it does not take.
        """
        batch, heads, rows, dim = q.shape
        kv_heads, tokens = k.shape[1:3]
        dense = all(
            x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(3) == 1 for x in (q, k, v)
        )
        square = rows == tokens or not causal
        if not (
            dense and square and k.shape == v.shape and k.shape[3] == dim and tokens and not heads % kv_heads
        ):
            raise ValueError(f"{self.name} cannot attend from {tuple(q.shape)} {q.dtype} to {tuple(k.shape)}")
        out = torch.empty(batch, heads, rows, dim)
        lse = torch.empty(batch, heads, rows)
        for i in range(batch):
            addresses = (x[i].data_ptr() for x in (q, k, v, out, lse))
            strides = (x.stride(n) for x in (q, k, v) for n in (1, 2))
            sizes = (heads, kv_heads, rows, tokens, causal, torch.get_num_threads())
            self._functions[dim](_Call(*addresses, *strides, *sizes, scale))
        return out, lse


def load(dims: Iterable[int]) -> BlockKernel:
    """Returns the kernel for heads of these dimensions, built (or taken from the cache folder) and proved.

    Raises:
        KernelUnavailable: with the reason.
    """
    if not instructions.pairs():
        raise KernelUnavailable("the processor has no AVX-512 BF16")
    for dim in dims:
        if dim % 2 or dim > LARGEST:
            raise KernelUnavailable(
                f"it takes heads of an even number of dimensions up to {LARGEST}, not {dim}"
            )
    return BlockKernel({dim: _function(dim) for dim in dims})


@functools.cache
def _function(dim: int) -> Any:
    function = c_kernel.build(SOURCE, str(dim), ["-mavx512bf16", f"-DDIM={dim}"]).attend_blocks
    function.argtypes, function.restype = [ctypes.POINTER(_Call)], None
    _prove(BlockKernel({dim: function}), dim)
    return function


def _prove(kernel: BlockKernel, dim: int) -> None:
    """Compares the kernel with torch on small examples: a wrong build must be found here, not in an
    answer. 130 keys are two whole tiles and a part of one, 7 rows of 6 heads are seven strips.

    Raises:
        KernelUnavailable: the results differ.
    """
    generator = torch.Generator().manual_seed(0)
    for rows, tokens, causal in ((7, 130, False), (130, 130, True)):
        q = torch.randn(1, 6, rows, dim, generator=generator).bfloat16()
        k, v = torch.randn(2, 1, 2, tokens, dim, generator=generator).bfloat16().unbind(0)
        out, lse = kernel(q, k, v, causal, dim**-0.5)
        keys, values = (x.float().repeat_interleave(3, 1) for x in (k, v))
        scores = q.float() @ keys.transpose(2, 3) * dim**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(rows, tokens).triu(1).bool(), float("-inf"))
        total = scores.logsumexp(-1)
        wrong = max(float((out - scores.softmax(-1) @ values).abs().max()), float((lse - total).abs().max()))
        if not wrong < 0.02:
            raise KernelUnavailable(f"the compiled kernel is wrong by {wrong:.1e}")
