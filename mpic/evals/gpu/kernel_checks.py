"""The attention kernels on this device against ``mpic.kernels.reference``: the core of the tests in ``tests/kernels``,
without the packages that those need, and with the head sizes, groups and dtypes of real models."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mpic.evals.gpu.context import Context
from mpic.evals.gpu.supervise import Run
from mpic.kernels import cpu, cuda, reference
from mpic.kernels.spans import Partial, Shift, SpanCall, attend

EXACT, ROUNDED = 1e-5, 2e-2
"""Largest absolute error in fp32, largest relative norm of the error in half precision."""
EXACT_CUDA = 1e-4
"""Of torch's memory-efficient kernel, which multiplies fp32 in pieces of lower precision on tensor cores."""
TESTS = Path(__file__).resolve().parents[3] / "tests"


def kernels(run: Run) -> None:
    """The default implementation of the device first: it is what serves unless another is asked for."""
    context = Context(run)
    for name, partial, dtype in implementations(context):
        for dim in context.sizes.dims:
            for group in context.sizes.groups:
                shape = f"heads of {dim}, groups of {group}, {_short(dtype)}"
                work = functools.partial(_spans, context.where.device, partial, dtype, dim, group)
                limit, unit = _limit(dtype)
                limit = EXACT_CUDA if name == "cuda-efficient" else limit
                context.check("kernel check, steps over spans", shape, name, work, limit, unit)
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))  # for the steps that the tests are made of
    for number, (name, dim, group) in enumerate(context.sizes.kernels):
        dtype = getattr(torch, name)
        for page in (0, 16) if number == 0 else (0,):  # the engine's extents are contiguous
            shape = f"heads of {dim}, groups of {group}, {name}{', paged' if page else ''}"
            work = functools.partial(_whole_step, dtype, dim, group, page)
            context.check("kernel check, a whole step", shape, "triton", work, *_limit(dtype))
    for name, work in operations().items():
        context.check("kernel check, operation", name, "triton", work, EXACT, "max error")


def implementations(context: Context) -> Iterator[tuple[str, Partial, torch.dtype]]:
    if context.where.device.type == "cuda":
        yield "cuda-flash", cuda.flash_partial, torch.bfloat16
        yield "cuda-flash", cuda.flash_partial, torch.float16
        yield "cuda-efficient", cuda.efficient_partial, torch.float32
    else:
        yield "cpu-flash", cpu.partial, torch.float32


def _limit(dtype: torch.dtype) -> tuple[float, str]:
    return (EXACT, "max error") if dtype == torch.float32 else (ROUNDED, "relative norm of the error")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """In the measure of ``_limit``; a result that is not finite is infinitely wrong."""
    got32, expected = got.float(), expected.float()
    if not torch.isfinite(got32).all():
        return float("inf")
    difference = got32 - expected
    if got.dtype == torch.float32:
        return float(difference.abs().max())
    return float(difference.norm() / expected.norm())


def _spans(device: torch.device, partial: Partial, dtype: torch.dtype, dim: int, group: int) -> float:
    """Two requests, one of which decodes: own rows, chunks at bases, a chunk that later rows see, odd lengths."""
    torch.manual_seed(dim * 8 + group)
    kv_heads, worst = 2, 0.0

    def kv(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        pair = torch.randn(2, kv_heads, n + 3, dim, device=device).to(dtype)[:, :, 1 : n + 1]
        return pair[0], pair[1]

    for rows in (1, 2, 33, 65):
        calls = [SpanCall(slice(0, rows), *kv(rows), rows > 1, None, True)]
        for start, length, base in ((0, 1, 511), (rows // 2, 47, 30_000), (0, 128, 0), (rows - 1, 200, 7)):
            shift = _shift(base, dim // 2, device) if base else None
            calls.append(SpanCall(slice(start, rows), *kv(length), False, shift, False))
        calls.append(SpanCall(slice(rows, rows + 1), *kv(70), False, None, True))
        calls.append(SpanCall(slice(rows, rows + 1), *kv(33), False, _shift(900, dim // 2, device), False))
        q = torch.randn(rows + 1, kv_heads * group, dim, device=device).to(dtype).transpose(0, 1)
        got = attend(q, calls, dim**-0.5, partial)
        exact = [c._replace(keys=c.keys.float(), values=c.values.float()) for c in calls]
        expected = reference.attend(q.float(), exact, dim**-0.5)
        worst = max(worst, _error(got if dtype == torch.float32 else got.to(dtype), expected))
    return worst


def _shift(base: int, half: int, device: torch.device) -> Shift:
    angle = -base * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return Shift(angle.cos().float().to(device), angle.sin().float().to(device))


def _whole_step(dtype: torch.dtype, dim: int, group: int, page: int) -> float:
    """Blocks and single rows, chunks shared at different bases, cut along their keys or not."""
    from triton_kit import Described, World

    from mpic.kernels.triton.step import Geometry, Prepared

    worst = 0.0
    for programs in (1, 64):
        geometry = Geometry(2 * group, 2, dim, dim // 2)
        world = World(geometry, dtype, page, seed=dim)
        step = Described(world)
        shared = world.place(40, 3)
        step.add(0, 19, *world.place(19), causal=True)
        step.add(0, 19, *shared, base=511)
        step.add(5, 19, *world.place(33, 2), base=30_000)
        for row in (20, 21):  # row 19 sees nothing
            step.add(row, row + 1, *world.place(3 + row))
            step.add(row, row + 1, *shared, base=100 * row)
        prepared = Prepared(
            step.calls, 22, geometry, world.arena, step.shifts, programs=programs, least=16, page=page or 16
        )
        q = world.random(22, geometry.heads, dim).transpose(0, 1)
        out, lse = prepared.attend(1, q, dim**-0.5)
        expected, expected_lse = reference.attend_lse(q.float(), step.expected(1), dim**-0.5)
        finite = expected_lse > float("-inf")
        if not torch.equal(lse > float("-inf"), finite):
            return float("inf")
        worst = max(worst, _error(out, expected))
        if dtype == torch.float32:
            worst = max(worst, float((lse - expected_lse)[finite].abs().max()))
    return worst


def operations() -> dict[str, Any]:
    """What stands beside attention, each giving its largest error."""
    return {
        "scatter writes every row to its slot": _scatter,
        "a chunk is loaded into its pages": _load,
        "deviation of fresh from cached": _deviation,
        "the most deviating rows": _top_percent,
    }


def _scatter() -> float:
    from triton_kit import World

    from mpic.kernels.triton.step import Geometry, Prepared
    from mpic.kernels.triton.tiles import Call

    world = World(Geometry(4, 2, 128, 64), page=16)
    where, rows = world.reserve(21, 3), 21
    k, v = (world.random(rows, 2, 128).transpose(0, 1) for _ in range(2))
    prepared = Prepared(
        [Call(0, rows, where)], rows, world.geometry, world.arena, writes=[(0, rows, where)], page=16
    )
    before = int(world.arena.isnan().sum())
    prepared.scatter(1, k, v)
    got = world.get(where)[1]
    strayed = before - int(world.arena.isnan().sum()) != 2 * k.numel()
    return float("inf") if strayed else float(max((got[0] - k).abs().max(), (got[1] - v).abs().max()))


def _load() -> float:
    from triton_kit import DEVICE, LAYERS, World

    from mpic.kernels.triton import ops
    from mpic.kernels.triton.step import Geometry

    world = World(Geometry(4, 2, 128, 64), torch.bfloat16, page=16)
    where = world.reserve(40, 5)
    data = torch.randn(LAYERS, 2, 2, 40, 128).to(torch.bfloat16)
    source = data.pin_memory() if DEVICE.type == "cuda" else data  # read over the bus, as the engine has it
    ops.load_chunk(source, world.arena, torch.tensor(where.pages, device=DEVICE), where, 16)
    return float((world.get(where).float().cpu() - data.float()).abs().max())


def _deviation() -> float:
    from triton_kit import World, shift_of

    from mpic.kernels.triton import ops
    from mpic.kernels.triton.step import Geometry

    world = World(Geometry(4, 2, 128, 64), page=16)
    piece, _ = world.place(33, 2)
    k, v = (world.random(33, 2, 128).transpose(0, 1) for _ in range(2))
    shift = shift_of(30_000, 64)
    got = ops.deviation(k, v, world.arena, [piece], [shift], world.geometry, 1, 16)
    data = world.get(piece)[1]
    slots = [(data[0, :, i], data[1, :, i]) for i in range(33)]
    return float((got / reference.deviation(k, v, slots, [shift] * 33) - 1).abs().max())


def _top_percent() -> float:
    from triton_kit import DEVICE

    from mpic.kernels.triton import ops

    deviations = torch.randint(0, 9, (777,), generator=torch.Generator().manual_seed(1)).float()
    got = ops.top_percent(deviations.to(DEVICE), 15).tolist()
    return 0.0 if got == reference.top_percent(deviations, 15) else float("inf")
