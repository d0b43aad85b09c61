"""Times the attention kernels with different tile sizes.

``make tune-gpu`` (``python -m mpic_lab.gpu.kernel_times TABLE``) fills the table of tile sizes for this machine's
GPU: every candidate runs a prefill and a decoding step of one layer, and the fastest of each is written with the GPU's
name, the date and the versions.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

import torch

from mpic.errors import MPICError
from mpic.kernels.triton.tuning import SCHEMA, defaults_of, read_table
from mpic.model.load import choose_device
from mpic_lab.bench.harness import BenchDevice, BenchFailed, median_seconds
from mpic_lab.gpu.attention_cases import DECODE, PREFILL, Case, segment_attention
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.supervise import SectionRun

TileSizes = tuple[int, ...]
BLOCKS: tuple[TileSizes, ...] = tuple(product((64, 128), (32, 64, 128), (4, 8), (2, 3)))
"""Rows and keys of a tile, warps, stages."""
SINGLES: tuple[TileSizes, ...] = tuple(product((32, 64, 128), (2, 4, 8), (2, 3, 4)))
"""Keys of a tile, warps, stages."""
DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 4, 7)


def tuning(run: SectionRun) -> None:
    """Measure candidates, a row each; the fastest go into a table beside the report's file, in the form of
    ``tuned.json``."""
    context = Context(run)
    sizes, placement = context.sizes, context.placement
    path = run.out.with_name(run.out.name + ".tuned.json")
    on_cuda = placement.device.type == "cuda"
    gpu = torch.cuda.get_device_name(placement.device) if on_cuda else "Triton's interpreter"
    prefill, decode = sizes.cases
    group = prefill.heads // prefill.kv_heads
    for dim in sizes.tuned_dims:
        base = defaults_of(placement.device, placement.dtype, dim)
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
        best = tune(path, gpu, placement, dim, group, *tried, prefill, decode, sizes.kernel_repeats, write)
        run.row("tiles", f"{group} heads of {dim} a key head", "the fastest", f"{best[0]} and {best[1]}")


def tune(
    path: Path,
    gpu: str,
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
    """Measure the candidates for one head dimension and one number of query heads a key head, write the best into the
    table at ``path``, beside its other entries, and return them. Tiles of single rows are measured over chunks of each
    request's own and over the same chunks for all, one time after the other.

    Args:
        seen: called with the cases, every candidate and its seconds in all of them, None where the GPU has no room
            for it.

    Raises:
        BenchFailed: no candidate fits.
    """
    from triton.runtime.errors import OutOfResources

    base, best = defaults_of(placement.device, placement.dtype, dim), []
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
    _enter(path, gpu, f"{str(placement.dtype).removeprefix('torch.')}/{dim}/{group}", *best)
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


def _enter(path: Path, gpu: str, name: str, block: TileSizes, single: TileSizes) -> None:
    """Write the sizes of one GPU for a dtype, head dimension and group (``name``) into the table at ``path``."""
    import triton

    table = read_table(path) if path.exists() else {"schema": SCHEMA, "gpus": {}}
    when = f"{datetime.date.today()}, torch {torch.__version__}, triton {triton.__version__}"
    table["gpus"].setdefault(gpu, {})[name] = {"block": block, "single": single, "measured": when}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure tile sizes on this machine's GPU.")
    parser.add_argument("table", type=Path)
    path = parser.parse_args().table
    try:
        device = choose_device("cuda")
    except MPICError as error:
        raise SystemExit(str(error)) from None
    gpu = torch.cuda.get_device_name(device)
    for dtype in (torch.bfloat16, torch.float16):
        for dim, group in product(DIMS, GROUPS):
            tune(path, gpu, BenchDevice(device, dtype), dim, group, BLOCKS, SINGLES, PREFILL, DECODE, 10)


if __name__ == "__main__":
    main()
