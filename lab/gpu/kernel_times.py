"""Times the attention kernels with different tile sizes: every candidate runs a prefill and a decoding step of one
layer, beside the sizes that the kernels have (``mpic.kernels.triton.tuning``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from mpic.kernels.triton.tuning import tiles_for
from mpic_lab.bench.harness import BenchDevice, BenchFailed, median_seconds
from mpic_lab.gpu.attention_cases import Case, segment_attention
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.supervise import SectionRun

TileSizes = tuple[int, ...]


def tuning(run: SectionRun) -> None:
    """Measure candidates, a row each, and name the fastest."""
    context = Context(run)
    sizes, placement = context.sizes, context.placement
    prefill, decode = sizes.cases
    group = prefill.heads // prefill.kv_heads
    for dim in sizes.tuned_dims:
        base = tiles_for(placement.device, placement.dtype, dim)
        used = (base[:4], base[4:7])

        def write(cases: Sequence[Case], one: TileSizes, taken: float | None, used=used) -> None:
            case, *others = cases
            what = f"{case.name}, {one}{', the default' if one in used else ''}"
            if taken is None:
                context.left_out("tiles", what, "the device has no room for them")
            else:
                cost = sum((other.cost(placement.dtype) for other in others), case.cost(placement.dtype))
                context.timed("tiles", case.words, what, taken, cost, "us")

        tried = [dict.fromkeys((own, *more)) for own, more in zip(used, (sizes.blocks, sizes.singles))]
        best = tune(placement, dim, group, *tried, prefill, decode, sizes.kernel_repeats, write)
        run.row("tiles", f"{group} heads of {dim} a key head", "the fastest", f"{best[0]} and {best[1]}")


def tune(
    placement: BenchDevice,
    dim: int,
    group: int,
    blocks: Iterable[TileSizes],
    singles: Iterable[TileSizes],
    prefill: Case,
    decode: Case,
    repeats: int,
    seen: Callable[[Sequence[Case], TileSizes, float | None], None] = lambda cases, sizes, seconds: None,
) -> tuple[TileSizes, TileSizes]:
    """Measure the candidates for one head dimension and one number of query heads a key head, and return the best.
    Tiles of single rows are measured over chunks of each request's own and over the same chunks for all, one time after
    the other.

    Args:
        seen: called with the cases, every candidate and its seconds in all of them, None where the GPU has no room
            for it.

    Raises:
        BenchFailed: no candidate fits.
    """
    from triton.runtime.errors import OutOfResources

    base, best = tiles_for(placement.device, placement.dtype, dim), []
    flush = _flush(placement)
    shared = dataclasses.replace(decode, shared=True)
    for cases, tried, fields in (
        ([prefill], blocks, base._fields[:4]),
        ([decode, shared], singles, base._fields[4:7]),
    ):
        cases = [_of_group(case, dim, group) for case in cases]
        measured: dict[TileSizes, float] = {}
        for one in tried:
            tiles = base._replace(**dict(zip(fields, one, strict=True)))
            taken = None
            try:
                works = [segment_attention(case, placement, tiles) for case in cases]
                taken = sum(median_seconds(work, placement, repeats, flush.zero_) for work in works)
                measured[one] = taken
            except OutOfResources:
                pass  # `seen` reports it
            seen(cases, one, taken)
        if not measured:
            raise BenchFailed(f"no candidate fits this GPU for heads of {dim}")
        best.append(min(measured, key=measured.__getitem__))
    return best[0], best[1]


def _flush(placement: BenchDevice) -> torch.Tensor:
    """Return memory that is written before each run: keys are then not in the caches, and the host has time to launch
    the measured kernels, which for a decoding step takes longer on the host than on the device."""
    size = 1 << 30 if placement.device.type == "cuda" else 1
    return torch.empty(size, dtype=torch.uint8, device=placement.device)


def _of_group(case: Case, dim: int, group: int) -> Case:
    """Return the case with another head dimension and ``group`` query heads per key head, with about as many heads as
    before."""
    kv_heads = max(1, case.heads // group)
    return dataclasses.replace(case, dim=dim, kv_heads=kv_heads, heads=group * kv_heads)
