"""Attention of blocks of rows over all their spans on the CPU: builds ``block_spans.c``, proves it, calls it.

A row that links chunks attends to dozens of spans. Span by span (``attention.attend``), each of them turns the queries,
runs torch's flash kernel and merges its result into the earlier ones, and each of these reads and writes all rows.
Torch's kernel also computes both halves of a causal mask's blocks. This kernel takes a layer in one call.

The C file is compiled once for each head dimension and dtype (``c_kernel.py``). bf16 numbers are widened to fp32.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpic.kernels import c_kernel, instructions
from mpic.kernels.attention import (
    PLAIN,
    Extras,
    KVView,
    QueryRotation,
    Rotations,
    SpanCall,
    rotate,
)
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.kernels.span import Span

SOURCE = Path(__file__).with_name("block_spans.c")
LARGEST = 256
"""Largest head dimension: what a task keeps grows with it, and lies on a thread's stack."""
_LEAST_ROWS = 48
"""Rows of a task, in all heads of a group, for which packing a tile of keys pays."""
_TASKS = 4
"""Tasks that each thread should have, so that threads end together."""


class _BlocksStruct(ctypes.Structure):
    """``Step`` of block_spans.c."""

    _fields_ = [
        *(
            (n, ctypes.c_int64)
            for n in ["heads", "kv_heads", "half", "interleaved", "turned", "threads", "blocks"]
        ),
        *((n, ctypes.c_void_p) for n in ["call", "block", "order", "cosine", "sine"]),
    ]


class _QueriesStruct(ctypes.Structure):
    """``Layer`` of block_spans.c."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ["layer", "head_stride", "row_stride"]),
        *((n, ctypes.c_void_p) for n in ["query", "sinks", "out"]),
        ("scale", ctypes.c_float),
    ]


class BlockSpans:
    """The calls of a step's blocks of rows, ready for every layer of one kind; made by ``BlockSpanKernel.blocks``."""

    def __init__(
        self,
        kernel: BlockSpanKernel,
        calls: Sequence[SpanCall],
        heads: int,
        rotations: Rotations,
        kv_heads: int | None = None,
    ) -> None:
        self._kernel, self._heads = kernel, heads
        self._kept: list[object] = [list(calls)]  # kept alive, because C holds their addresses
        bases: dict[int, int] = {}
        rows = [self._call(call, heads, kv_heads, bases) for call in calls]
        table = np.array(rows, dtype=np.int64)
        firsts = [call.rows for call in calls if call.first]
        of_kv = kv_heads or calls[0].span.source.data.shape[2]
        blocks, order = _blocks(kernel, firsts, table[:, 5:7], heads // of_kv, of_kv)
        self._rows = max(rows.stop for rows in firsts)
        turn = rotations(list(bases)) if bases else None
        cosine, sine, interleaved, turned = turn or QueryRotation(torch.zeros(0, 0), torch.zeros(0, 0))
        self._kept += [table, blocks, order, cosine, sine]
        self._step = _BlocksStruct(
            *(heads, of_kv, cosine.shape[1], interleaved, turned, torch.get_num_threads(), len(blocks)),
            *(t.ctypes.data for t in (table, blocks, order)),
            *(cosine.data_ptr(), sine.data_ptr()),
        )

    def attend(self, q: torch.Tensor, layer: int, scale: float, extras: Extras = PLAIN) -> torch.Tensor:
        """Attend in one layer.

        Args:
            q: ``[heads, rows, head_dim]``, rotated at the rows' own positions.
            extras: without a softcap.

        Returns:
            ``[rows, heads, head_dim]``, fp32; rows that no call covers are undefined.

        Raises:
            ValueError: queries that the kernel cannot read, a softcap, or a scale that is not above zero.
        """
        heads, rows, dim = q.shape
        fits = q.dtype == self._kernel.dtype and q.device.type == "cpu" and q.stride(2) == 1
        if not fits or (heads, dim) != (self._heads, self._kernel.head_dim) or rows < self._rows:
            raise ValueError(f"{self._kernel} cannot read queries {tuple(q.shape)} {q.dtype}")
        if extras.softcap is not None or scale <= 0:
            raise ValueError(f"{self._kernel} does not cap scores, and does not scale them by {scale}")
        out = torch.empty(rows, heads, dim)
        sinks = None if extras.sinks is None else extras.sinks.float().contiguous()
        addresses = (q.data_ptr(), None if sinks is None else sinks.data_ptr(), out.data_ptr())
        self._kernel.function(self._step, _QueriesStruct(layer, q.stride(0), q.stride(1), *addresses, scale))
        return out

    def _call(
        self,
        call: SpanCall,
        heads: int,
        kv_heads: int | None,
        bases: dict[int, int],
    ) -> tuple[int, ...]:
        """Return a call as a row of the table (``Call`` of block_spans.c). ``bases`` numbers those that turn."""
        span, rows, slots = call.span, call.rows, call.slots
        kv = span.source.data
        self._kernel.check(call, heads, kv_heads)
        to_layer, to_part, to_head, to_slot, _ = kv.stride()
        size = kv.element_size()
        keys = kv.data_ptr() + (span.lo * to_slot * size if slots is None else 0)
        values = keys + (to_part * size if kv.shape[1] == 2 else 0)  # else the values are the keys
        hidden = 0
        if call.visible is not None:
            visible = call.visible.contiguous()
            self._kept.append(visible)
            hidden = visible.data_ptr()
        listed = 0 if slots is None else slots.data_ptr() + span.lo * slots.element_size()
        angle = bases.setdefault(span.base, len(bases)) if span.base else -1
        return (
            *(keys, values, to_layer, to_head, to_slot, rows.start, rows.stop),
            *(span.tokens, call.causal, angle, listed, hidden),
        )


def _blocks(
    kernel: BlockSpanKernel, firsts: Sequence[slice], ranges: np.ndarray, group: int, kv_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut rows into the blocks of tasks, of about the same size.

    Args:
        kernel: will run the tasks.
        firsts: rows that are covered, once each.
        ranges: ``[calls, 2]``, the rows of each call.

    Returns:
        ``[blocks, 4]`` (``Block`` of block_spans.c), and the calls of one block after the other.
    """
    folded = group * sum(rows.stop - rows.start for rows in firsts)
    even = -(-folded * kv_heads // (_TASKS * torch.get_num_threads()))
    most = min(max(even, _LEAST_ROWS), kernel.most_rows)
    cuts: list[tuple[int, int]] = []
    for rows in firsts:
        count = rows.stop - rows.start
        each = -(-count // -(-count * group // most))
        strips = -(-each * group // kernel.strip)
        each = max(min(strips * kernel.strip, kernel.most_rows) // group, 1)
        cuts += [(at, min(at + each, rows.stop)) for at in range(rows.start, rows.stop, each)]
    edges = np.array(cuts, dtype=np.int64)
    overlap = (ranges[:, 0] < edges[:, 1:]) & (ranges[:, 1] > edges[:, :1])  # [blocks, calls]
    ends = np.cumsum(overlap.sum(1))
    table = np.column_stack([edges, np.concatenate([[0], ends[:-1]]), ends])
    return np.ascontiguousarray(table), np.ascontiguousarray(np.nonzero(overlap)[1])


class BlockSpanKernel:
    """The kernel for one head dimension, dtype of queries and dtype of keys and values; ``load`` makes it.

    Args:
        function: ``attend_blocks`` of the C file.

    ``most_rows`` and ``strip`` are ``BLOCK`` and ``STRIP`` of the C file: the most rows of a task in all heads of a
    group, and how many are computed together.
    """

    name = "cpu-block-spans"
    most_rows, strip = 192, 6

    def __init__(self, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, function: Any) -> None:
        function.argtypes = [ctypes.POINTER(_BlocksStruct), ctypes.POINTER(_QueriesStruct)]
        function.restype = None
        self.head_dim, self.dtype, self.kv_dtype, self.function = head_dim, dtype, kv_dtype, function

    def __repr__(self) -> str:
        return f"{self.name} for head_dim {self.head_dim} {self.dtype}"

    def blocks(
        self,
        calls: Sequence[SpanCall],
        heads: int,
        rotations: Rotations,
        kv_heads: int | None = None,
    ) -> BlockSpans:
        """Build the tables of one step.

        Args:
            calls: at least one; each row's first call has ``first`` set.
            heads: number of query heads.
            kv_heads: number of the layers' KV heads, if views have more or larger ones.

        Raises:
            ValueError: the kernel cannot read a span.
        """
        return BlockSpans(self, calls, heads, rotations, kv_heads)

    def check(self, call: SpanCall, heads: int, part: int | None) -> None:
        """Raise ValueError if the kernel cannot read a call's span (``part`` heads of it, if given) for this number of
        heads."""
        kv, span = call.span.source.data, call.span
        _, parts, kv_heads, slots, dim = kv.shape
        if part is not None and part <= kv_heads and self.head_dim <= dim:
            kv_heads, dim = part, self.head_dim
        fits = (dim, kv.dtype, kv.stride(4), kv.device.type) == (self.head_dim, self.kv_dtype, 1, "cpu")
        fits = fits and parts in (1, 2) and not heads % kv_heads and heads // kv_heads <= self.most_rows
        fits = fits and 0 <= span.lo < span.hi <= (slots if call.slots is None else len(call.slots))
        rows = call.rows.stop - call.rows.start
        fits = fits and rows > 0 and (not call.causal or rows == span.tokens)
        visible = call.visible
        fits = fits and (visible is None or (visible.dtype == torch.int64 and visible.shape == (rows,)))
        if not fits:
            raise ValueError(
                f"{self} cannot read a span {tuple(kv.shape)} {kv.dtype} of slots {span.lo} to {span.hi} for "
                f"{rows} rows of {heads} heads"
            )


@functools.cache
def load(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> BlockSpanKernel:
    """Build the kernel, or take it from the cache folder, and prove it on a small example.

    Args:
        kv_dtype: of keys and values; None: that of the queries.

    Raises:
        KernelUnavailable: with the reason.
    """
    kv_dtype = kv_dtype or dtype
    name, options = c_kernel.variant(head_dim, dtype, kv_dtype)
    level = instructions.level()
    if level not in ("AVX512", "AVX2") and kv_dtype is dtype:
        raise KernelUnavailable(f"it was not compared with torch on {level}")
    if head_dim > LARGEST:
        raise KernelUnavailable(f"it takes heads of up to {LARGEST} dimensions, not {head_dim}")
    function = c_kernel.build(SOURCE, name, options).attend_blocks
    kernel = BlockSpanKernel(head_dim, dtype, kv_dtype, function)
    prove(kernel, 1e-5)
    return kernel


def prove(kernel: BlockSpanKernel, tolerance: float) -> None:
    """Compare the kernel with one softmax in double precision on a small example, because a wrong build must be found
    here, not in an answer: 70 own tokens, which are causal; 130 others at another base, the first of which are hidden
    from some rows; 75 that are listed, to which one head gives much higher scores; a sink.

    Args:
        tolerance: largest difference of results, which are near 1.

    Raises:
        KernelUnavailable: the results differ.
    """
    generator = torch.Generator().manual_seed(0)
    dim, rows, others, listed = kernel.head_dim, 70, 130, 75
    q = torch.randn(4, rows, dim, generator=generator).to(kernel.dtype)
    kv = torch.randn(1, 2, 2, rows + others, dim, generator=generator).to(kernel.kv_dtype)
    q[1, :, 0], raised = 4, kv.clone()
    raised[:, 0, ..., 0] = 2 * dim**0.5
    angle, sinks = torch.rand(dim // 2, generator=generator), 4 + torch.randn(4, generator=generator)
    turn = QueryRotation(angle.cos()[None], angle.sin()[None])
    view, block = KVView(kv), slice(0, rows)
    hidden = torch.arange(rows) * 2
    slots = torch.randperm(rows + others, generator=generator)[:listed]
    high = KVView(raised)
    calls = [
        SpanCall(block, Span(view, 0, rows), causal=True, first=True),
        SpanCall(block, Span(view, rows, rows + others, base=7), visible=hidden),
        SpanCall(block, Span(high, 0, listed), slots=slots),
    ]
    got = kernel.blocks(calls, 4, lambda bases: turn).attend(q, 0, dim**-0.5, Extras(None, sinks))
    keys, values = kv[0].double().repeat_interleave(2, 1)
    turned = rotate(q.float(), QueryRotation(angle.cos(), angle.sin())).double()
    parts = [
        (q.double() @ keys[:, :rows].mT).masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf),
        (turned @ keys[:, rows:].mT).masked_fill(torch.arange(others) < hidden[:, None], -torch.inf),
        q.double() @ raised[0, 0].double().repeat_interleave(2, 0)[:, slots].mT,
    ]
    scores = torch.cat(
        [*(part * dim**-0.5 for part in parts), sinks.double().expand(rows, 1, 4).permute(2, 0, 1)], 2
    )
    seen = torch.cat([values, values[:, slots], torch.zeros(4, 1, dim)], 1)
    wrong = float((got - (scores.softmax(-1) @ seen).transpose(0, 1)).abs().max())
    if not wrong < tolerance:
        raise KernelUnavailable(f"the compiled kernel is wrong by {wrong:.1e}")
