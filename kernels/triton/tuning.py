"""Sizes of tiles by GPU; ``mpic_lab.gpu.kernel_times`` measures others beside them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """The tile sizes of a launch.

    Args:
        block_m, block_n, block_warps, block_stages: queries and keys of a tile of blocks.
        single_n, single_warps, single_stages: keys of a tile of single rows.
    """

    block_m: int
    block_n: int
    block_warps: int
    block_stages: int
    single_n: int
    single_warps: int
    single_stages: int


LARGE = 160 << 10
"""Bytes of shared memory of a multiprocessor (sm_80, sm_90) that three stages of keys and values fit."""


def defaults(dtype: torch.dtype, dim: int, shared: int = 0) -> Tiles:
    """Return sizes whose operands fit the shared memory of any GPU since sm_80 (checked by compiling).

    Args:
        shared: bytes of shared memory per multiprocessor, 0 for those of the smallest GPU; more memory allows more
            stages.
    """
    if dtype == torch.float32:
        if dim > 128:
            return Tiles(16, 16, 8, 1, 16, 8, 1)
        return Tiles(32, 32, 8 if dim > 64 else 4, 1, 32, 4, 2)
    stages = 3 if dim <= 64 or shared >= LARGE else 2
    if dim > 128:
        return Tiles(64, 32, 8, stages, 32, 4, stages)
    return Tiles(128, 64, 8, stages, 64, 4, stages)


def tiles_for(device: torch.device, dtype: torch.dtype, dim: int) -> Tiles:
    """Return the sizes for a device."""
    if device.type != "cuda":
        return defaults(dtype, dim)
    return defaults(dtype, dim, torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
