"""Span attention on the CPU through torch's flash kernel, which returns the log-sum-exp.

Its pitfalls (checked on torch 2.13): zero-length keys kill the process, and a rectangular ``is_causal`` is top-left
aligned, so only square calls are causal here. Grouped-query heads are native, but folding a group's heads into the
query rows of an unmasked call reads every key once instead of once per head, and reading keys is what limits decoding.
"""

from __future__ import annotations

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as ``mpic.kernels.attention.Partial``."""
    batch, heads, rows, dim = q.shape
    kv_heads = k.shape[1]
    if causal or heads == kv_heads:
        return _flash(q, k, v, 0.0, causal, scale=scale)
    folded = q.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    out, lse = _flash(folded, k, v, 0.0, False, scale=scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
