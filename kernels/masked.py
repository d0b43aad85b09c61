"""Span attention with explicit scores in fp32, for the features that torch's kernels lack: windows and soft-capping.

It runs on every device. Windows are cut into tiles before (``windows.py``), so scores are few; without a window, rows
are taken in blocks whose scores fit a budget.
"""

from __future__ import annotations

import torch

_SCORES = 1 << 24
"""Most scores at a time (64 MB)."""


def partial(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    visible: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with explicit scores; shapes as ``mpic.kernels.attention.Partial``.

    Args:
        visible: ``[r]`` int64, the first slot that each row sees; every row sees at least one.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv 2408.00118, section 2).
    """
    batch, heads, rows, _ = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    group = heads // kv_heads
    k32, v32 = k.float(), v.float()
    out = torch.empty(batch, heads, rows, v.shape[3], dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    slot = torch.arange(slots, device=q.device)
    block = max(1, _SCORES // (batch * heads * slots))
    for lo in range(0, rows, block):
        hi = min(lo + block, rows)
        folded = q[:, :, lo:hi].float().reshape(batch, kv_heads, group * (hi - lo), -1)
        scores = (folded @ k32.transpose(2, 3)).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores = scores.view(batch, kv_heads, group, hi - lo, slots)
        if causal:
            scores.masked_fill_(slot > slot[lo:hi, None], float("-inf"))
        if visible is not None:
            scores.masked_fill_(slot < visible[lo:hi, None], float("-inf"))
        total = torch.logsumexp(scores, -1, keepdim=True)
        weights = (scores - total).exp_().view(batch, kv_heads, group * (hi - lo), slots)
        out[:, :, lo:hi] = (weights @ v32).view(batch, heads, hi - lo, -1)
        lse[:, :, lo:hi] = total.view(batch, heads, hi - lo)
    return out, lse
