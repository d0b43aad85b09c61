"""Where vLLM keeps keys and values: the attention layers of this worker, their slots, and reading them back.

Writing goes through the backend's own ``do_kv_cache_update``. Reading needs the layout inside a block, of which two
are known: ``[heads, tokens, K | V]`` of the GPU backends (``v1/attention/backends/flash_attn.py``) and the CPU
backend's ``K^T [head_dim, tokens]`` followed by ``V [tokens, head_dim]`` (``v1/attention/backends/cpu_attn.py``).
"""

from __future__ import annotations

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
    """Of the model over all workers."""
    model = config.model_config
    layers = model.hf_text_config.num_hidden_layers
    return KVShape(layers, model.get_total_num_kv_heads(), model.get_head_size())


def deepstack_layers(config: Any) -> int:
    """How many layers an image's DeepStack features have (Qwen3-VL); 0 for models without."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


class Paged:
    """The part of the paged KV cache that this worker holds.

    Attributes:
        layers: numbers of the decoder layers it holds.
        heads: numbers of the KV heads it holds.
        block: tokens of a block.

    Raises:
        ModelRefused: a layout, backend or division that is not known.
    """

    def __init__(self, config: VllmConfig, context: dict[str, Any], block: int, backends: set[str]) -> None:
        found = {
            extract_layer_index(name): layer
            for name, layer in context.items()
            if isinstance(layer, Attention)
            and isinstance(layer.kv_cache, torch.Tensor)
            and layer.kv_cache.numel()
        }
        self.layers = range(min(found), max(found) + 1)
        if sorted(found) != list(self.layers):
            raise ModelRefused("some of its layers have no attention of the usual kind")
        self._attention = [found[layer] for layer in self.layers]
        self.block, self.device = block, self._attention[0].kv_cache.device
        total, mine = geometry(config).kv_heads, self._attention[0].num_kv_heads
        ranks = config.parallel_config.tensor_parallel_size
        first = get_tensor_model_parallel_rank() * total // ranks
        self.heads = range(first, first + mine)
        self.rank = f"{get_tensor_model_parallel_rank()}-{get_pp_group().rank_in_group}"
        for layer in self._attention:
            if (
                layer.num_kv_heads != mine
                or layer.kv_cache.shape[:3:2] != self._attention[0].kv_cache.shape[:3:2]
            ):
                raise ModelRefused("its layers differ in heads or blocks")
        if self._attention[0].kv_cache.shape[2] != block:
            raise ModelRefused("the attention backend cuts blocks into smaller ones")
        if self.device.type == "cpu":
            kinds = {getattr(layer, "isa", None) for layer in self._attention}
            if not kinds <= set(CPU_LAYOUTS):
                raise ModelRefused(
                    f"KV layout {kinds} of this CPU is not known; known: {', '.join(CPU_LAYOUTS)}"
                )
        elif not backends <= set(GPU_BACKENDS):
            raise ModelRefused(f"attention backend {backends} is not supported; supported: {GPU_BACKENDS}")

    def slots(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots ``[n]`` of the sequence indices ``positions [n]`` of a request with these blocks."""
        return blocks[positions // self.block] * self.block + positions % self.block

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Put ``keys, values [n, heads, head_dim]`` of a decoder layer into slots ``[n]``."""
        attention = self._attention[layer - self.layers.start]
        attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)

    def read(self, blocks: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        """KV ``[layers, 2, heads, hi - lo, head_dim]`` of the sequence indices from ``lo`` to ``hi`` of a request."""
        first, last = lo // self.block, -(-hi // self.block)
        within = slice(lo - first * self.block, hi - first * self.block)
        blocks = blocks[first:last].to(self.device)
        kv = []
        for attention in self._attention:
            pages = attention.kv_cache[blocks]
            count, heads, size, width = pages.shape
            if self.device.type == "cpu":
                halves = pages.reshape(count, heads, 2, size * width // 2)
                keys = halves[:, :, 0].view(count, heads, width // 2, size).permute(1, 0, 3, 2)
                values = halves[:, :, 1].view(count, heads, size, width // 2).permute(1, 0, 2, 3)
            else:
                keys, values = (half.permute(1, 0, 2, 3) for half in pages.chunk(2, -1))
            pair = [half.reshape(heads, count * size, width // 2)[:, within] for half in (keys, values)]
            kv.append(torch.stack(pair))
        return torch.stack(kv).cpu()
