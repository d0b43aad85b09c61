"""Slow, obvious span attention: the oracle every other implementation is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpic.kernels.spans import SpanCall, rotate


def partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call in fp32 with explicit scores. Shapes as ``mpic.kernels.spans.Partial``."""
    group = q.shape[1] // k.shape[1]
    k32 = k.float().repeat_interleave(group, 1)
    v32 = v.float().repeat_interleave(group, 1)
    scores = q.float() @ k32.transpose(2, 3) * scale
    if causal:
        n = k.shape[2]
        scores = scores.masked_fill(
            torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), float("-inf")
        )
    lse = torch.logsumexp(scores, -1)
    return (torch.exp(scores - lse[..., None]) @ v32).to(q.dtype), lse


def attend(q: torch.Tensor, calls: Sequence[SpanCall], scale: float) -> torch.Tensor:
    """All calls at once: for every row gather its keys over all spans and take one softmax. Returns
    ``[rows, heads, head_dim]``. No log-sum-exp merging anywhere, so it checks that too."""
    heads, rows, dim = q.shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64, device=q.device)
    for row in range(rows):
        scores, values = [], []
        for call in calls:
            members = torch.arange(rows, device=q.device)[call.rows].tolist()
            if row not in members:
                continue
            group = heads // call.keys.shape[0]
            query = q[:, row : row + 1] if call.shift is None else rotate(q[:, row : row + 1], call.shift)
            end = members.index(row) + 1 if call.causal else call.keys.shape[1]
            k = call.keys[:, :end].double().repeat_interleave(group, 0)
            scores.append(query.double() @ k.transpose(1, 2) * scale)
            values.append(call.values[:, :end].double().repeat_interleave(group, 0))
        out[row] = (torch.softmax(torch.cat(scores, -1), -1) @ torch.cat(values, 1))[:, 0]
    return out.to(q.dtype)
