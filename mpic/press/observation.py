"""The attention of a chunk's last tokens, for presses that score by queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpic.press.press import LayerKV

if TYPE_CHECKING:
    import torch


def observed_attention(kv: LayerKV) -> torch.Tensor:
    """Return ``[heads, w, n]``: the attention of each of the last w tokens to every token of the chunk."""
    import torch  # imported here, because reading a configuration must not load torch

    heads, w, _ = kv.queries.shape
    n = kv.keys.shape[1]
    keys = kv.keys.repeat_interleave(heads // kv.keys.shape[0], 0)
    scores = kv.queries @ keys.transpose(1, 2) * kv.scale
    later = torch.ones(w, n, dtype=torch.bool, device=scores.device).triu(n - w + 1)
    return scores.masked_fill(later, float("-inf")).softmax(-1)


def by_key_head(scores: torch.Tensor, kv: LayerKV) -> torch.Tensor:
    """Return ``[kv_heads, n]``: the mean over the query heads that share a key head of ``scores [heads, n]``."""
    kv_heads, n = kv.keys.shape[:2]
    return scores.view(kv_heads, -1, n).mean(1)
