"""A GPU's paged cache with kernels in plain Python, and chunks for it."""

from __future__ import annotations

import torch
from cuda_addressing import GPUAttention

from mpic.engine.vllm.plugin.paged_cache import PagedCache

LAYERS, HEADS, BLOCK, WIDTH, TOKENS = 3, 4, 16, 32, 41


def paged(tensor_rank: int = 0, workers: int = 1) -> PagedCache:
    heads = HEADS // workers
    layers = {i: GPUAttention(8, heads, BLOCK, WIDTH, torch.float32) for i in range(LAYERS)}
    return PagedCache(layers, BLOCK, tensor_rank * heads, (tensor_rank, 0), on_cpu=False)


def chunk(seed: int, n: int = TOKENS, heads: int = HEADS) -> torch.Tensor:
    return torch.randn(LAYERS, 2, heads, n, WIDTH, generator=torch.Generator().manual_seed(seed))
