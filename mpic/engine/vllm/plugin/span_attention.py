"""Attention over resident chunks, as a vLLM attention backend that replaces ``CPU_ATTN`` (MEPIC, section 3.3.3).

Rows of plain requests go to vLLM's own forward. Rows of links that map resident chunks attend to their own tokens,
which are vLLM's sequence, and to spans of chunks, which lie in the same cache with keys as they were compiled: for each
span the query is rotated by minus its base (``mpic.kernels.attention``). Both write into the same output. A step
without such links runs vLLM's backend unchanged.

The spans are read in place by a kernel in C (``mpic.kernels.paged_spans``), or, where it cannot be built, gathered by
torch, slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.attention import selector
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from mpic.engine.vllm.plugin.paged_cache import halves
from mpic.engine.vllm.plugin.shared_rows import SpanMetadata
from mpic.errors import ModelRefused
from mpic.kernels import paged_spans
from mpic.kernels.attention import rotate
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.kernels.paged_spans import PagedSpans, SharedRows

logger = init_logger(__name__)
SCORES = 1 << 24
"""Maximum scores held at once."""


class SpanAttentionBackend(CPUAttentionBackend):
    """See the module's docstring. It keeps the name of vLLM's backend, because it replaces that."""

    @staticmethod
    def get_impl_cls() -> type[SpanAttention]:
        return SpanAttention


class SpanAttention(CPUAttentionBackendImpl):
    """The attention of one layer.

    Raises:
        ModelRefused: the layer does more than attend to all keys before it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        extras = {
            "ALiBi": self.alibi_slopes is not None,
            "capped scores": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            "layers that read another layer's cache": self.kv_sharing_target_layer_name is not None,
        }
        for what, applies in extras.items():
            if applies and self.attn_type == "decoder":
                raise ModelRefused(
                    f"sharing chunks in vLLM: {what} are not supported; switch vllm_sharing off"
                )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        forward = super().forward
        if not isinstance(attn_metadata, SpanMetadata):
            return forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **options)
        stock, index, shared = attn_metadata.stock, attn_metadata.index, attn_metadata.shared
        if stock is not None:
            rows = (each[index] for each in (query, key, value))
            some = output.new_empty(len(index), *output.shape[1:])
            output[index] = forward(layer, *rows, kv_cache, stock, some, *args, **options)
        group = self.num_queries_per_kv
        kernel = kernel_for(self.head_size, kv_cache.shape[2], group)
        if kernel is not None:
            kernel.attend(query, kv_cache, attn_metadata.plan(group), self.scale, output.view_as(query))
            return output
        for one in shared:
            attended = attend_shared(query[one.rows], kv_cache, one, self.scale)
            output[one.rows] = attended.view_as(output[one.rows])
        return output


def is_ours(layer: Any) -> bool:
    """Return whether one of vLLM's attention layers maps resident chunks."""
    return isinstance(layer.impl, SpanAttention)


def register(sharing: bool) -> None:
    """Make vLLM use this backend for attention on CPUs, or its own again. Call this before the model is created."""
    backend = AttentionBackendEnum.CPU_ATTN
    if sharing:
        register_backend(backend, f"{__name__}.{SpanAttentionBackend.__name__}")
    else:
        backend.clear_override()
    selector._cached_get_attn_backend.cache_clear()


@functools.cache
def kernel_for(head_dim: int, block: int, group: int) -> PagedSpans | None:
    """Return the kernel that reads spans in place; None where it cannot be built."""
    try:
        return paged_spans.load(head_dim, block, group)
    except KernelUnavailable as error:
        logger.warning("shared chunks are gathered by torch, slowly: %s", error)
        return None


def attend_shared(query: torch.Tensor, cache: torch.Tensor, one: SharedRows, scale: float) -> torch.Tensor:
    """Return the attention ``[n, heads, head_dim]`` of a request's rows to its own tokens and its spans.

    One softmax over gathered keys in fp32: the slow, obvious computation.

    Args:
        query: ``[n, heads, head_dim]``, rotated at the rows' own positions.
        cache: ``[blocks, kv_heads, block, 2 * head_dim]`` in vLLM's layout for CPUs. The rows' own keys and values have
            been written.
    """
    n, heads, width = query.shape
    seen = [span for span in one.spans if span.row < one.index + n]
    tokens = one.index + n + sum(span.hi - span.lo for span in seen)
    tile = max(1, SCORES // (heads * tokens))
    parts = [(_read(cache, one.blocks, 0, one.index + n), None)]
    parts += [(_read(cache, span.blocks, span.lo, span.hi), span) for span in seen]
    out = torch.empty_like(query)
    for first in range(0, n, tile):
        rows = range(first, min(first + tile, n))
        queries = query[rows.start : rows.stop].transpose(0, 1)
        scores = [
            masked.masked_fill(hidden, float("-inf"))
            for masked, hidden in _scores(queries, parts, one.index + first, scale)
        ]
        weights = torch.cat(scores, -1).softmax(-1).split([one.shape[-1] for one in scores], -1)
        total = sum(weight @ values.float() for weight, ((_, values), _) in zip(weights, parts, strict=True))
        out[rows.start : rows.stop] = total.view(heads, len(rows), width).transpose(0, 1).to(query.dtype)
    return out


def _read(cache: torch.Tensor, blocks: np.ndarray, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[kv_heads, hi - lo, head_dim]`` of some blocks' tokens."""
    block = cache.shape[2]
    first, last = lo // block, -(-hi // block)
    keys, values = halves(cache[torch.from_numpy(blocks[first:last])], on_cpu=True)
    within = slice(lo - first * block, hi - first * block)
    return keys[:, within], values[:, within]


def _scores(
    queries: torch.Tensor, parts: Sequence[Any], index: int, scale: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, for each part, the scores ``[kv_heads, group * n, tokens]`` of ``queries [heads, n, head_dim]``, and the
    mask of hidden scores. ``index`` is the sequence index of the first query."""
    heads, n, width = queries.shape
    places = torch.arange(index, index + n)[:, None]
    for (keys, _), span in parts:
        kv_heads, tokens, _ = keys.shape
        turned = queries if span is None or span.turn is None else rotate(queries, span.turn)
        grouped = turned.float().reshape(kv_heads, -1, width)
        if span is None:
            hidden = torch.arange(tokens) > places
        else:
            hidden = (places < span.row).expand(n, tokens)
        yield grouped @ keys.float().transpose(1, 2) * scale, hidden.repeat(heads // kv_heads, 1)
