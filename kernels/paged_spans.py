"""Attention over vLLM's paged cache for CPUs, in place: builds ``paged_spans.c`` and fills its tables.

The spans are those of ``mpic.kernels.attention``; only where keys and values lie is another's: in blocks of vLLM's
layout, keys transposed, a request's own tokens and the chunks that it maps alike.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mpic.kernels import c_kernel
from mpic.kernels.attention import QueryRotation
from mpic.kernels.c_kernel import KernelUnavailable

SOURCE = Path(__file__).with_name("paged_spans.c")
MOST = 128
"""Most queries of a task: rows times the heads that share a key head."""
TOGETHER = 32
"""Queries of a task where there are so many: a page of keys is then read once for all of them."""


class MappedSpan(NamedTuple):
    """A part of a chunk that a request maps.

    Args:
        blocks: ``[n]`` int32 the chunk's blocks, in order.
        lo, hi: its tokens, half-open.
        row: the first of the request's own tokens that sees it.
        turn: the rotation of queries; None for none.
    """

    blocks: np.ndarray
    lo: int
    hi: int
    row: int
    turn: QueryRotation | None


class SharedRows(NamedTuple):
    """Rows of one request in a step.

    Args:
        rows: its rows of the step.
        index: number of the first of them among the request's own tokens.
        blocks: ``[n]`` int32 the request's own blocks.
        spans: what it maps.
    """

    rows: slice
    index: int
    blocks: np.ndarray
    spans: Sequence[MappedSpan]


class _Plan(ctypes.Structure):
    """``Plan`` of paged_spans.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("jobs", "half", "interleaved")),
        *((name, ctypes.c_void_p) for name in ("job", "part", "block", "cosine", "sine")),
    ]


class PagePlan:
    """The rows of a step, ready for every layer.

    Args:
        requests: their rows, by request.
        group: heads that share a key head.
    """

    def __init__(self, requests: Sequence[SharedRows], group: int) -> None:
        jobs: list[tuple[int, ...]] = []
        parts: list[tuple[int, ...]] = []
        blocks: list[np.ndarray] = []
        turns: dict[int, tuple[int, QueryRotation]] = {}
        at, tile = 0, max(1, TOGETHER // group)
        for rows, index, own, spans in requests:
            first, count = len(parts), rows.stop - rows.start
            for numbers, lo, hi, row, turn in ((own, 0, index + count, -1, None), *spans):
                angle = -1 if turn is None else turns.setdefault(id(turn), (len(turns), turn))[0]
                parts.append((at, lo, hi, row, angle))
                blocks.append(numbers)
                at += len(numbers)
            for begin in range(0, count, tile):
                some = min(tile, count - begin)
                jobs.append((rows.start + begin, some, index + begin, first, len(parts)))
        found = [turn for _, turn in turns.values()]
        half = found[0].cos.shape[-1] if found else 0
        cosines, sines = (
            np.stack([each.numpy() for each in side]) if side else np.zeros((1, 1), np.float32)
            for side in ([turn.cos for turn in found], [turn.sin for turn in found])
        )
        self._arrays = [
            np.array(jobs, np.int64),
            np.array(parts, np.int64),
            np.concatenate(blocks).astype(np.int32),
            np.ascontiguousarray(cosines, np.float32),
            np.ascontiguousarray(sines, np.float32),
        ]
        interleaved = bool(found) and found[0].interleaved
        self.struct = _Plan(len(jobs), half, interleaved, *(array.ctypes.data for array in self._arrays))


class PagedSpans:
    """The built kernel for heads of one dimension and blocks of one size; made by ``load``."""

    def __init__(self, function: Any, head_dim: int, block: int) -> None:
        self._function, self._head_dim, self._block = function, head_dim, block
        i64, address = ctypes.c_int64, ctypes.c_void_p
        strided = [address, i64, address, i64, i64]
        function.argtypes = [ctypes.POINTER(_Plan), i64, i64, *strided, ctypes.c_float, address, i64, i64]
        function.restype = None

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, plan: PagePlan, scale: float, out: torch.Tensor
    ) -> None:
        """Attend to a layer's blocks.

        Args:
            query: ``[tokens, heads, head_dim]`` of all rows of the step, rotated at their own positions.
            cache: ``[blocks, kv_heads, block, 2 * head_dim]``.
            out: as ``query``; the rows of the plan are written.
        """
        heads, kv_heads = query.shape[1], cache.shape[1]
        shapes = (query.shape[2], out.shape[2], cache.shape[2], cache.shape[3])
        if shapes != (self._head_dim, self._head_dim, self._block, 2 * self._head_dim) or heads % kv_heads:
            raise ValueError(f"not built for queries {tuple(query.shape)} over {tuple(cache.shape)}")
        for tensor in (query, cache, out):
            if (
                tensor.dtype != torch.float32
                or tensor.stride(2) != math.prod(tensor.shape[3:])
                or tensor.stride(-1) != 1
            ):
                raise ValueError(f"float32 numbers side by side, not {tensor.dtype} with {tensor.stride()}")
        if query.stride(1) != self._head_dim or out.stride(1) != self._head_dim:
            raise ValueError("heads do not lie side by side")
        self._function(
            plan.struct,
            heads,
            kv_heads,
            query.data_ptr(),
            query.stride(0),
            cache.data_ptr(),
            cache.stride(0),
            cache.stride(1),
            scale,
            out.data_ptr(),
            out.stride(0),
            torch.get_num_threads(),
        )


@functools.cache
def load(head_dim: int, block: int, group: int) -> PagedSpans:
    """Return the kernel.

    Args:
        block: tokens of a block.
        group: heads that share a key head.

    Raises:
        KernelUnavailable: with the reason.
    """
    if head_dim % 16 or block % 32 or group > MOST:
        raise KernelUnavailable(
            f"heads of {head_dim}, blocks of {block} or {group} heads a key head are not known"
        )
    options = [f"-DDIM={head_dim}", f"-DBLOCK={block}", "-DBFLOAT16=0", "-DHALF_KV=0"]
    built = c_kernel.build(SOURCE, f"{head_dim}-{block}", options)
    return PagedSpans(built.attend_pages, head_dim, block)
