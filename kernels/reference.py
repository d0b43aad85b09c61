"""Slow, obvious span attention: the oracle every other implementation is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpic.kernels.attention import PLAIN, Extras, Rotation, SpanCall, rotate


def partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in fp32 with explicit scores; shapes as ``mpic.kernels.attention.Partial``."""
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


def attend(
    q: torch.Tensor,
    calls: Sequence[SpanCall],
    scale: float,
    rotation: Rotation,
    layer: int = 0,
    extras: Extras = PLAIN,
) -> torch.Tensor:
    """Gather each row's keys over all spans and take one softmax, so that merging by log-sum-exp is checked too.
    Return ``[rows, heads, head_dim]``."""
    return attend_lse(q, calls, scale, rotation, layer, extras)[0]


def attend_lse(
    q: torch.Tensor,
    calls: Sequence[SpanCall],
    scale: float,
    rotation: Rotation,
    layer: int = 0,
    extras: Extras = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like ``attend``, but also returns the log-sum-exp ``[heads, rows]``. A row without calls gets zeros and minus
    infinity."""
    heads, rows, dim = q.shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64, device=q.device)
    lse = torch.full((heads, rows), float("-inf"), dtype=torch.float64, device=q.device)
    for row in range(rows):
        scores, values = [], []
        for call in calls:
            members = torch.arange(rows, device=q.device)[call.rows].tolist()
            if row not in members:
                continue
            span, turn = call.span, rotation(call.span.base)
            k, v = (x.double() for x in span.source.layers(span.lo, span.hi)[layer])
            group = heads // k.shape[0]
            query = q[:, row : row + 1] if turn is None else rotate(q[:, row : row + 1], turn)
            end = members.index(row) + 1 if call.causal else span.tokens
            begin = 0 if call.visible is None else int(call.visible[members.index(row)])
            seen = k[:, begin:end].repeat_interleave(group, 0)
            product = query.double() @ seen.transpose(1, 2) * scale
            if extras.softcap is not None:
                product = extras.softcap * torch.tanh(product / extras.softcap)
            scores.append(product)
            values.append(v[:, begin:end].repeat_interleave(group, 0))
        if scores and extras.sinks is not None:  # the sink acts like a key whose value is zero
            scores.append(extras.sinks.double()[:, None, None])
            values.append(torch.zeros_like(values[0][:, :1]))
        if scores:
            together = torch.cat(scores, -1)
            out[row] = (torch.softmax(together, -1) @ torch.cat(values, 1))[:, 0]
            lse[:, row] = torch.logsumexp(together, -1)[:, 0]
    return out.to(q.dtype), lse.float()
