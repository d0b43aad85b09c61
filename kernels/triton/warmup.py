"""Compiles every variant of the kernels that an engine will launch before it serves, since compiling one under load
stalls all requests for seconds. The resources that a variant takes of a multiprocessor decide how finely tiles are cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from mpic.kernels.attention import QueryRotation, SpanCall, Write
from mpic.kernels.span import Span
from mpic.kernels.triton.launch import Geometry, interpreted, multiprocessors
from mpic.kernels.triton.step import TritonStep, strides_of
from mpic.kernels.triton.tiles import power
from mpic.kernels.triton.tuning import Tiles

_REGISTERS = 65536
"""Registers of a multiprocessor, on every GPU since sm_70."""
_BLOCK, _CHUNK = 4, 40
"""Rows of the block, and slots of the chunk, that are warmed up with."""


class ProgramsAtOnce(NamedTuple):
    """The numbers of programs that a device runs at once: for blocks of rows, and for single rows."""

    blocks: int
    singles: int


def warm_up(
    geometry: Geometry,
    tiles: Tiles,
    dtype: torch.dtype,
    device: torch.device,
    softcaps: Collection[bool],
    windows: bool,
) -> ProgramsAtOnce:
    """Launch every variant once.

    Args:
        softcaps: whether layers cap their scores; both values are possible in one model.
        windows: True if there are layers with windows.

    Returns:
        The numbers of programs that the device runs at once.
    """
    resident = None
    for holes, floors, softcap in itertools.product((False, True), {False, windows}, softcaps):
        step, q = _step(geometry, tiles, dtype, device, holes, floors)
        step.scatter(0, q[: geometry.kv_heads], q[: geometry.kv_heads])
        out = torch.empty(q.shape[1], *q.shape[::2], dtype=dtype, device=device)
        lse = torch.empty(q.shape[:2], device=device)
        kernels = step.launch(0, q, 1.0, 1.0 if softcap else None, out, lse)
        blocks, *_, singles = kernels
        resident = resident or ProgramsAtOnce(programs_of(blocks, device), programs_of(singles, device))
    assert resident is not None
    return resident


def _step(
    geometry: Geometry, tiles: Tiles, dtype: torch.dtype, device: torch.device, holes: bool, floors: bool
) -> tuple[TritonStep, torch.Tensor]:
    """Return a step with a block of rows, rows that share what they see, and rows that share nothing, each cut along
    its keys, and queries for it."""
    g = geometry
    sharing = max(16, power(g.group)) // g.group + 1  # too many rows for a tile of few rows
    rows = _BLOCK + sharing
    per_token = 2 * g.kv_heads * g.dim
    arena = torch.zeros((rows + _CHUNK) * per_token, dtype=dtype, device=device)

    def extent(first: int, tokens: int) -> Any:
        data = arena[first * per_token : (first + tokens) * per_token].view(1, 2, g.kv_heads, tokens, g.dim)
        return strides_of(data, arena)

    own, chunk = extent(0, rows), extent(rows, _CHUNK)
    visible = torch.arange(_BLOCK) if floors else None
    calls = [SpanCall(slice(0, _BLOCK), Span(own, 0, _BLOCK), True, True, visible)]
    cuts = [(0, 10), (12, _CHUNK)] if holes else [(0, _CHUNK)]
    calls += [SpanCall(slice(0, _BLOCK), Span(chunk, *cut, base=1)) for cut in cuts]
    for row in range(_BLOCK, rows):
        calls.append(SpanCall(slice(row, row + 1), Span(own, row, row + 1), first=True))
        calls += [SpanCall(slice(row, row + 1), Span(chunk, *cut, base=row)) for cut in cuts]
    writes = [Write(slice(0, rows), Span(own, 0, rows))]
    half = torch.ones(g.half, device=device)
    step = TritonStep(
        calls, rows, g, arena, lambda base: QueryRotation(half, half), writes, tiles, programs=64, least=16
    )
    return step, torch.zeros(rows, g.heads, g.dim, dtype=dtype, device=device).transpose(0, 1)


def programs_of(kernel: Any, device: torch.device) -> int:
    """Return how many programs of a compiled kernel a device runs at once."""
    if interpreted():
        return multiprocessors(device)
    properties = torch.cuda.get_device_properties(device)
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    sizes = (properties.shared_memory_per_multiprocessor, properties.max_threads_per_multi_processor)
    return properties.multi_processor_count * occupancy(kernel.n_regs, shared, warps, *sizes)


def occupancy(registers: int, shared: int, warps: int, shared_memory: int, threads: int) -> int:
    """Return how many programs a multiprocessor runs at once.

    Args:
        registers: registers per thread, which a warp is given in units of 256.
        shared: bytes of shared memory of a program, to which the driver adds 1 KiB.
        shared_memory, threads: shared memory and maximum number of threads of a multiprocessor.
    """
    of_warp = -(-registers * 32 // 256) * 256
    return max(
        1, min(_REGISTERS // (of_warp * warps), shared_memory // (shared + 1024), threads // (32 * warps))
    )
