"""The attention kernels on this device against ``mpic.kernels.reference``: the core of the tests in ``tests/kernels``,
without the packages that those need, and with the head sizes, groups and dtypes of real models."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from mpic.kernels import cpu, cuda, reference
from mpic.kernels.attention import Extras, KVView, Partial, QueryRotation, SpanCall, attend
from mpic.kernels.span import Span
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.supervise import SectionRun

EXACT, ROUNDED = 1e-5, 2e-2
"""Largest absolute error in fp32, largest relative norm of the error in half precision."""
EXACT_CUDA = 1e-4
"""For torch's memory-efficient kernel, which multiplies fp32 in pieces of lower precision on tensor cores."""
TESTS = Path(__file__).resolve().parents[2] / "tests"


def kernels(run: SectionRun) -> None:
    """Checks the device's default implementation first, because it serves unless another is requested."""
    context = Context(run)
    for name, partial, dtype in implementations(context):
        for dim in context.sizes.dims:
            for group in context.sizes.groups:
                shape = f"heads of {dim}, groups of {group}, {str(dtype).removeprefix('torch.')}"
                work = functools.partial(_spans, context.placement.device, partial, dtype, dim, group)
                limit, unit = _limit(dtype)
                limit = EXACT_CUDA if name == "cuda-efficient" else limit
                context.check("kernel check, steps over spans", shape, name, work, limit, unit)
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))  # for the steps that the tests are made of
    for name, dim, group in context.sizes.kernels:
        dtype = getattr(torch, name)
        shape = f"heads of {dim}, groups of {group}, {name}"
        work = functools.partial(_whole_step, dtype, dim, group)
        context.check("kernel check, a whole step", shape, "triton", work, *_limit(dtype))
    name, dim, group = context.sizes.kernels[0]
    dtype = getattr(torch, name)
    shape = f"heads of {dim}, groups of {group}, {name}"
    work = functools.partial(_windowed, dtype, dim, group)
    context.check("kernel check, windows and capped scores", shape, "triton", work, *_limit(dtype))
    what = "scatter writes every row to its slot"
    context.check("kernel check, operation", what, "triton", _scatter, EXACT, "max error")


def implementations(context: Context) -> Iterator[tuple[str, Partial, torch.dtype]]:
    if context.placement.device.type == "cuda":
        yield "cuda-flash", cuda.flash_partial, torch.bfloat16
        yield "cuda-flash", cuda.flash_partial, torch.float16
        yield "cuda-efficient", cuda.efficient_partial, torch.float32
    else:
        yield "cpu-flash", cpu.partial, torch.float32


def _limit(dtype: torch.dtype) -> tuple[float, str]:
    return (EXACT, "max error") if dtype == torch.float32 else (ROUNDED, "relative norm of the error")


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the error in the measure of ``_limit``; a result that is not finite is infinitely wrong."""
    got32, expected = got.float(), expected.float()
    if not torch.isfinite(got32).all():
        return float("inf")
    difference = got32 - expected
    if got.dtype == torch.float32:
        return float(difference.abs().max())
    return float(difference.norm() / expected.norm())


def _spans(device: torch.device, partial: Partial, dtype: torch.dtype, dim: int, group: int) -> float:
    """Returns the worst error of two requests, one decoding: own rows, chunks at bases, a chunk for later rows, odd
    lengths."""
    torch.manual_seed(dim * 8 + group)
    kv_heads, worst = 2, 0.0

    def span(n: int, base: int = 0) -> Span[KVView]:
        data = torch.randn(1, 2, kv_heads, n + 3, dim, device=device)
        return Span(KVView(data.to(dtype)), 1, n + 1, base)

    def rotation(base: int) -> QueryRotation | None:
        angle = -base * 10_000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
        cos, sin = angle.cos().float().to(device), angle.sin().float().to(device)
        return QueryRotation(cos, sin) if base else None

    for rows in (1, 2, 33, 65):
        calls = [SpanCall(slice(0, rows), span(rows), causal=rows > 1, first=True)]
        for start, length, base in ((0, 1, 511), (rows // 2, 47, 30_000), (0, 128, 0), (rows - 1, 200, 7)):
            calls.append(SpanCall(slice(start, rows), span(length, base)))
        calls.append(SpanCall(slice(rows, rows + 1), span(70), first=True))
        calls.append(SpanCall(slice(rows, rows + 1), span(33, 900)))
        q = torch.randn(rows + 1, kv_heads * group, dim, device=device).to(dtype).transpose(0, 1)
        got = attend(q, calls, dim**-0.5, partial, rotation)
        expected = reference.attend(q.float(), calls, dim**-0.5, rotation)
        worst = max(worst, _error(got if dtype == torch.float32 else got.to(dtype), expected))
    return worst


def _whole_step(dtype: torch.dtype, dim: int, group: int) -> float:
    """Returns the worst error of blocks and single rows, chunks shared at different bases, cut along their keys or
    not."""
    from triton_kit import Described, World, rotary_of

    from mpic.kernels.triton.launch import Geometry
    from mpic.kernels.triton.step import TritonStep

    worst = 0.0
    for programs in (1, 64):
        geometry = Geometry(2 * group, 2, dim, dim // 2)
        world, rotation = World(geometry, dtype, seed=dim), rotary_of(geometry).rotation
        step = Described(world)
        shared = world.fill(40, 3)
        step.add(0, 19, *world.fill(19), causal=True)
        step.add(0, 19, *shared, base=511)
        step.add(5, 19, *world.fill(33, 2), base=30_000)
        for row in (20, 21):  # row 19 sees nothing
            step.add(row, row + 1, *world.fill(3 + row))
            step.add(row, row + 1, *shared, base=100 * row)
        prepared = TritonStep(step.calls, 22, geometry, world.arena, rotation, programs=programs, least=16)
        q = world.random(22, geometry.heads, dim).transpose(0, 1)
        out, lse = prepared.attend(1, q, dim**-0.5)
        expected, expected_lse = reference.attend_lse(q.float(), step.expected, dim**-0.5, rotation, 1)
        finite = expected_lse > float("-inf")
        if not torch.equal(lse > float("-inf"), finite):
            return float("inf")
        worst = max(worst, _error(out, expected))
        if dtype == torch.float32:
            worst = max(worst, float((lse - expected_lse)[finite].abs().max()))
    return worst


def _windowed(dtype: torch.dtype, dim: int, group: int) -> float:
    """Returns the error of a block of rows and a chunk before it through windows, with capped scores."""
    from triton_kit import Described, World, rotary_of

    from mpic.kernels.triton.launch import Geometry
    from mpic.kernels.triton.step import TritonStep

    geometry, count = Geometry(2 * group, 2, dim, dim // 2), 45
    world, rotation = World(geometry, dtype, seed=dim), rotary_of(geometry).rotation
    step = Described(world)
    (own, data), (chunk, chunk_data) = world.fill(count), world.fill(25)
    step.add(0, count, own, data, causal=True)
    step.add(0, count, chunk, chunk_data, base=511)
    hidden = torch.arange(count)
    for calls in (step.calls, step.expected):
        calls[0] = calls[0]._replace(visible=(hidden - 8).clamp_min(0))
        calls[1] = calls[1]._replace(visible=(hidden // 2).clamp_max(24))
    prepared = TritonStep(step.calls, count, geometry, world.arena, rotation, programs=64, least=16)
    q = world.random(count, geometry.heads, dim).transpose(0, 1)
    out, _ = prepared.attend(1, q, dim**-0.5, 0.7)
    extras = Extras(softcap=0.7)
    return _error(out, reference.attend(q.float(), step.expected, dim**-0.5, rotation, 1, extras))


def _scatter() -> float:
    from triton_kit import World

    from mpic.kernels.attention import Write
    from mpic.kernels.triton.launch import Geometry
    from mpic.kernels.triton.step import TritonStep

    world, rows = World(Geometry(4, 2, 128, 64)), 21
    span = world.reserve(rows, 3)
    k, v = (world.random(rows, 2, 128).transpose(0, 1) for _ in range(2))
    all_rows = slice(0, rows)
    calls, writes = [SpanCall(all_rows, span)], [Write(all_rows, span)]
    step = TritonStep(calls, rows, world.geometry, world.arena, lambda base: None, writes)
    before = int(world.arena.isnan().sum())
    step.scatter(1, k, v)
    got = world.get(span)[1]
    strayed = before - int(world.arena.isnan().sum()) != 2 * k.numel()
    return float("inf") if strayed else float(max((got[0] - k).abs().max(), (got[1] - v).abs().max()))
