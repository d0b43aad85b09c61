"""Describes, writes and reads the part of vLLM's paged KV cache that this worker holds.

Writing goes through the backend's own ``do_kv_cache_update``. Reading needs the layout inside a block, of which two
are known: ``[heads, tokens, K | V]`` of the GPU backends (``v1/attention/backends/flash_attn.py``) and the CPU
backend's ``K^T [head_dim, tokens]`` followed by ``V [tokens, head_dim]`` (``v1/attention/backends/cpu_attn.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from mpic.errors import ModelRefused
from mpic.kv.chunk import KVShape

CPU_LAYOUTS = ("vec", "vec16")
GPU_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")


def geometry(config: VllmConfig) -> KVShape:
    """Return the shape of the model's KV over all workers."""
    model = config.model_config
    layers = model.hf_text_config.num_hidden_layers
    return KVShape(layers, model.get_total_num_kv_heads(), model.get_head_size())


class PagedCache:
    """The part of the paged KV cache that this worker holds.

    Args:
        attention: vLLM's attention layers by the number of their decoder layer.
        block: tokens of a block.
        first_head: number of the first KV head that it holds.
        rank: its tensor-parallel and pipeline-parallel ranks.
        on_cpu: the layout inside a block is the CPU backend's.

    Attributes:
        layers: numbers of the decoder layers it holds.
        attention: their attention layers, in the same order.
        heads: numbers of the KV heads it holds.

    Raises:
        ModelRefused: the layout, the backend or the division among workers is not known.
    """

    def __init__(
        self, attention: Mapping[int, Any], block: int, first_head: int, rank: tuple[int, int], on_cpu: bool
    ) -> None:
        self.layers = range(min(attention), max(attention) + 1)
        if sorted(attention) != list(self.layers):
            raise ModelRefused("some of its layers have no attention of the usual kind")
        self.attention = [attention[layer] for layer in self.layers]
        self.block, self.rank, self.on_cpu = block, rank, on_cpu
        first = self.attention[0]
        self.device = first.kv_cache.device
        self.heads = range(first_head, first_head + first.num_kv_heads)
        for layer in self.attention:
            if (
                layer.num_kv_heads != len(self.heads)
                or layer.kv_cache.shape[:3:2] != first.kv_cache.shape[:3:2]
            ):
                raise ModelRefused("its layers differ in heads or blocks")
        if first.kv_cache.shape[2] != block:
            raise ModelRefused("the attention backend divides blocks into smaller ones")

    @classmethod
    def of(cls, config: VllmConfig, context: dict[str, Any], block: int, backends: set[str]) -> PagedCache:
        """Return the cache of a worker, after its memory has been allocated.

        Args:
            context: vLLM's layers by name (``static_forward_context``).
            backends: names of the attention backends in use.
        """
        found = {
            extract_layer_index(name): layer
            for name, layer in context.items()
            if isinstance(layer, Attention)
            and isinstance(layer.kv_cache, torch.Tensor)
            and layer.kv_cache.numel()
        }
        on_cpu = all(layer.kv_cache.device.type == "cpu" for layer in found.values())
        if on_cpu:
            kinds = {getattr(layer, "isa", None) for layer in found.values()}
            if not kinds <= set(CPU_LAYOUTS):
                raise ModelRefused(
                    f"KV layout {kinds} of this CPU is not known; known: {', '.join(CPU_LAYOUTS)}"
                )
        elif not backends <= set(GPU_BACKENDS):
            raise ModelRefused(f"attention backend {backends} is not supported; supported: {GPU_BACKENDS}")
        rank = get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
        first_head = rank[0] * geometry(config).kv_heads // config.parallel_config.tensor_parallel_size
        return cls(found, block, first_head, rank, on_cpu)

    def slots(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots ``[n]`` of the sequence indices ``positions [n]`` of a request with these blocks."""
        return blocks[positions // self.block] * self.block + positions % self.block

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``keys, values [n, heads, head_dim]`` of a decoder layer into slots ``[n]``.

        The GPU backends' kernels read ``token * stride(0) + head * head_dim + i`` and ignore all other strides, so
        their arguments must be contiguous within a token.
        """
        attention = self.attention[layer - self.layers.start]
        if not self.on_cpu:
            keys, values = keys.contiguous(), values.contiguous()
        attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    def read(self, blocks: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        """Return KV ``[layers, 2, heads, hi - lo, head_dim]`` of a request's sequence indices from ``lo`` to ``hi``.

        The result lies in host memory, so the call waits for the device.
        """
        blocks = blocks.to(self.device)
        return torch.stack([self.read_layer(i, blocks, lo, hi).cpu() for i in range(len(self.layers))])

    def read_layer(self, number: int, blocks: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        """Return KV ``[2, heads, hi - lo, head_dim]`` of one of its layers, on the device.

        Args:
            number: index of the layer among this worker's layers.
            blocks: the request's blocks, on the device.
        """
        first, last = lo // self.block, -(-hi // self.block)
        within = slice(lo - first * self.block, hi - first * self.block)
        pages = self.attention[number].kv_cache[blocks[first:last]]
        return torch.stack([part[:, within] for part in halves(pages, self.on_cpu)])


def halves(pages: torch.Tensor, on_cpu: bool) -> Iterator[torch.Tensor]:
    """Yield keys, then values ``[heads, tokens, head_dim]`` of ``pages [blocks, heads, block, 2 * head_dim]``."""
    count, heads, size, width = pages.shape
    if on_cpu:
        halves = pages.reshape(count, heads, 2, size * width // 2)
        keys = halves[:, :, 0].view(count, heads, width // 2, size).permute(1, 0, 3, 2)
        values = halves[:, :, 1].view(count, heads, size, width // 2).permute(1, 0, 2, 3)
    else:
        keys, values = (half.permute(1, 0, 2, 3) for half in pages.chunk(2, -1))
    for half in (keys, values):
        yield half.reshape(heads, count * size, width // 2)
