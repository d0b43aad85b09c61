"""GPU cache kernels in plain Python, which address memory as the real ones do.

A torch operation on the CPU honours every stride of its arguments. The kernels do not: vLLM's
``reshape_and_cache_flash`` (CUDA and Triton) takes a pointer and the stride of a token, and expects heads and elements
to be contiguous within a token. A test that is to see such a defect must read the storage as the kernel reads it.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor's data pointer, to the end of its allocation, one element after the other."""
    whole = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return torch.as_strided(tensor, (whole,), (1,))


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write ``key, value [n, heads, head_dim]`` into caches ``[blocks, block, heads, head_dim]`` at ``slots [n]``."""
    _, heads, width = key.shape
    block = key_cache.shape[1]
    for source, cache in ((key, key_cache), (value, value_cache)):
        memory, target = flat(source), flat(cache)
        block_stride, slot_stride, head_stride, _ = cache.stride()
        for token, slot in enumerate(slots.tolist()):
            for head in range(heads):
                start = token * source.stride(0) + head * width  # no stride of a head or an element
                to = slot // block * block_stride + slot % block * slot_stride + head * head_stride
                target[to : to + width] = memory[start : start + width]


class GPUAttention:
    """Stands for vLLM's attention layer on a GPU: the backends' cache layout, and their kernel for writing."""

    def __init__(self, blocks: int, heads: int, block: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_kv_heads = heads
        self.kv_cache = torch.full((blocks, heads, block, 2 * head_dim), float("nan"), dtype=dtype)
        self.impl = SimpleNamespace(do_kv_cache_update=self._update)

    def _update(self, layer, key, value, kv_cache, slots) -> None:
        key_cache, value_cache = kv_cache.transpose(1, 2).chunk(2, -1)
        reshape_and_cache_flash(key, value, key_cache, value_cache, slots)
