"""GPU cache kernels in plain Python, which address memory as the real ones do.

A torch operation on the CPU honours every stride of its arguments. The kernels do not: vLLM's
``reshape_and_cache_flash`` (CUDA and Triton) takes a pointer and the stride of a token, and expects heads and elements
to be contiguous within a token. A test for arguments that are not must read the storage as the kernel reads it.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from a tensor's data pointer to the end of its allocation, one element after the other."""
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
                start = token * source.stride(0) + head * width  # it knows no stride of heads or elements
                to = slot // block * block_stride + slot % block * slot_stride + head * head_stride
                target[to : to + width] = memory[start : start + width]


class GPUAttention:
    """A stub of vLLM's attention layer on a GPU: the backends' cache layout, and their kernels in plain Python."""

    def __init__(self, blocks: int, heads: int, block: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_kv_heads, self.num_heads = heads, 2 * heads
        self.kv_cache = torch.full((blocks, heads, block, 2 * head_dim), float("nan"), dtype=dtype)
        self.impl = SimpleNamespace(do_kv_cache_update=_update, forward=_forward, scale=head_dim**-0.5)


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return caches ``[blocks, block, heads, head_dim]`` of keys and of values."""
    return kv_cache.transpose(1, 2).chunk(2, -1)


def _update(layer, key, value, kv_cache, slots) -> None:
    reshape_and_cache_flash(key, value, *_halves(kv_cache), slots)


def _forward(layer, query, key, value, kv_cache, metadata, output) -> None:
    """Compute one row of one query; ``metadata`` has its ``blocks`` and its length ``end``."""
    keys, values = (half[metadata.blocks].flatten(0, 1)[: metadata.end] for half in _halves(kv_cache))
    group = layer.num_heads // layer.num_kv_heads
    keys, values = (half.repeat_interleave(group, 1) for half in (keys, values))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query[0], keys) * layer.impl.scale, -1)
    output[0] = torch.einsum("hn,nhd->hd", weights, values)
