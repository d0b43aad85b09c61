"""Slow, obvious span attention: the oracle every other implementation is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpic.kernels.spans import Shift, SpanCall, rotate


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
    return attend_lse(q, calls, scale)[0]


def attend_lse(q: torch.Tensor, calls: Sequence[SpanCall], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``attend``, with the log-sum-exp ``[heads, rows]``. A row without calls gets zeros, minus infinity."""
    heads, rows, dim = q.shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64, device=q.device)
    lse = torch.full((heads, rows), float("-inf"), dtype=torch.float64, device=q.device)
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
        if scores:
            together = torch.cat(scores, -1)
            out[row] = (torch.softmax(together, -1) @ torch.cat(values, 1))[:, 0]
            lse[:, row] = torch.logsumexp(together, -1)[:, 0]
    return out.to(q.dtype), lse.float()


def scatter(k: torch.Tensor, v: torch.Tensor, slots: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Row i of ``k, v [kv_heads, rows, head_dim]`` to the i-th ``(key, value)`` slot, each ``[kv_heads, head_dim]``."""
    for row, (key, value) in enumerate(slots):
        key.copy_(k[:, row])
        value.copy_(v[:, row])


def deviation(
    k: torch.Tensor,
    v: torch.Tensor,
    cached: Sequence[tuple[torch.Tensor, torch.Tensor]],
    shifts: Sequence[Shift | None],
) -> torch.Tensor:
    """Row by row the sum over heads and dimensions of the squared differences of keys and of values; fresh keys are
    turned by the row's shift first. ``k, v [kv_heads, rows, head_dim]``, ``cached`` as ``scatter``'s slots; ``[rows]``
    fp32."""
    found = []
    for row, ((key, value), shift) in enumerate(zip(cached, shifts, strict=True)):
        fresh = k[:, row : row + 1].float()
        fresh = fresh if shift is None else rotate(fresh, shift)
        keys = (fresh[:, 0].double() - key.double()).square().sum()
        found.append(keys + (v[:, row].double() - value.double()).square().sum())
    return torch.stack(found).float()


def top_percent(deviations: torch.Tensor, percent: float) -> list[int]:
    """The ``percent`` of rows that deviate most, ascending; of equal ones the earlier."""
    order = sorted(range(len(deviations)), key=lambda i: (-float(deviations[i]), i))
    return sorted(order[: round(len(deviations) * percent / 100)])
