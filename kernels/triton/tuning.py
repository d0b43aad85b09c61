"""Tile sizes by GPU, in a table in the repository that is filled by measuring and never guessed silently.

``tuned.json`` holds ``{"schema": 2, "gpus": {"NVIDIA H100 80GB HBM3": {"bfloat16/128/4": {"block": [...], "single":
[...], "measured": "..."}}}}``, by dtype, head size and query heads of a key head; an entry is ``[queries, keys, warps,
stages]`` of a block tile and ``[keys, warps, stages]`` of a tile of single rows. ``make tune-gpu FILE`` measures the
candidates and writes such a table. A GPU that is not in it uses the defaults below, and all reports then say *untuned*.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

SCHEMA = 2


class Tiles(NamedTuple):
    """The tile sizes of a launch.

    Args:
        block_m, block_n, block_warps, block_stages: queries and keys of a tile of blocks.
        single_n, single_warps, single_stages: keys of a tile of single rows.
        source: origin of the sizes, for ``/health`` and the bench's header.
    """

    block_m: int
    block_n: int
    block_warps: int
    block_stages: int
    single_n: int
    single_warps: int
    single_stages: int
    source: str


LARGE = 160 << 10
"""Bytes of shared memory of a multiprocessor (sm_80, sm_90) that three stages of keys and values fit."""


def defaults(dtype: torch.dtype, dim: int, shared: int = 0) -> Tiles:
    """Return unmeasured sizes whose operands fit the shared memory of any GPU since sm_80 (checked by compiling).

    Args:
        shared: bytes of shared memory per multiprocessor, 0 for those of the smallest GPU; more memory allows more
            stages.
    """
    if dtype == torch.float32:
        if dim > 128:
            return Tiles(16, 16, 8, 1, 16, 8, 1, "untuned")
        return Tiles(32, 32, 8 if dim > 64 else 4, 1, 32, 4, 2, "untuned")
    stages = 3 if dim <= 64 or shared >= LARGE else 2
    if dim > 128:
        return Tiles(64, 32, 8, stages, 32, 4, stages, "untuned")
    return Tiles(128, 64, 8, stages, 64, 4, stages, "untuned")


def read_table(path: Path | None = None) -> dict[str, Any]:
    """Return the table in the package, or one at ``path``.

    Raises:
        ValueError: the table has another schema, or an entry is malformed.
    """
    text = (path or files("mpic.kernels.triton") / "tuned.json").read_text(encoding="utf-8")
    table = json.loads(text)
    if table.get("schema") != SCHEMA:
        raise ValueError(f"tuned.json has schema {table.get('schema')}; this version reads {SCHEMA}")
    for gpu, entries in table["gpus"].items():
        for key, entry in entries.items():
            sizes = [*entry.get("block", ()), *entry.get("single", ())]
            good = len(sizes) == 7 and all(
                isinstance(n, int) and n > 0 and n & (n - 1) == 0 for n in _tiles(sizes)
            )
            if not good or not entry.get("measured"):
                raise ValueError(f"tuned.json: {gpu}, {key}: not an entry: {entry}")
    return table


def _tiles(sizes: list[int]) -> list[int]:
    """Return the sizes that must be a power of two: all but the numbers of stages."""
    return [n for i, n in enumerate(sizes) if i not in (3, 6)]


def tiles_for(
    device: torch.device, dtype: torch.dtype, dim: int, group: int, table: dict[str, Any] | None = None
) -> Tiles:
    """Return the sizes for a device: from the table if it has exactly this GPU, else the defaults."""
    tuned = None
    if device.type == "cuda":
        tuned = look_up(table or read_table(), torch.cuda.get_device_name(device), dtype, dim, group)
    return tuned or defaults_of(device, dtype, dim)


def defaults_of(device: torch.device, dtype: torch.dtype, dim: int) -> Tiles:
    """Return the unmeasured sizes for a device."""
    if device.type != "cuda":
        return defaults(dtype, dim)
    return defaults(dtype, dim, torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def look_up(table: dict[str, Any], gpu: str, dtype: torch.dtype, dim: int, group: int) -> Tiles | None:
    """Return the table's sizes for a GPU; None where it has none."""
    name = f"{str(dtype).removeprefix('torch.')}/{dim}/{group}"
    entry = table["gpus"].get(gpu, {}).get(name)
    return None if entry is None else Tiles(*entry["block"], *entry["single"], f"tuned on {gpu}")
