"""Single rows through any implementation's ``Partial``: spans in batches, one merge for all of them.

The implementation of every device that has no kernel of its own for single rows (``stream.py`` is the CPU's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpic.kernels.spans import Partial, Shift, rotate


class Singles(NamedTuple):
    """See ``mpic.kernels.spans.SingleRows``. Every (row, span) pair is a *partial*.

    Partials that read the same span are adjacent, so requests that share a chunk read its keys once. Spans that are
    equally long and evenly spaced in memory (chunks of one size, compiled one after the other) are one batch.

    Args:
        rows: ``[R]`` int64, the step's single rows.
        source: ``[P]`` int64, the step row of each partial.
        shift: ``cos, sin [P, rotary_dim / 2]`` of each partial, or None when no span lies elsewhere.
        slots: ``[R, S]`` int64, the partials of each row, padded with any of its own.
        padding: ``[R, S, 1]`` fp32, minus infinity where a slot is padding, else 0; None when there is none.
        batches: (first partial, spans, partials of each span), in the order of ``spans``.
        spans: the batches' KV, ``[layers, 2, spans, kv_heads, n, head_dim]`` each.
        partial: the implementation.
    """

    rows: torch.Tensor
    source: torch.Tensor
    shift: Shift | None
    slots: torch.Tensor
    padding: torch.Tensor | None
    batches: tuple[tuple[int, int, int], ...]
    spans: tuple[torch.Tensor, ...]
    partial: Partial

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """One kernel call a batch of spans and a handful of operations for all merges: decoding with many chunks is
        bound by reading them, not by launching."""
        heads, _, dim = q.shape
        partials = self.source.shape[0]
        queries = q.expand(heads, partials, dim) if q.shape[1] == 1 else q[:, self.source]
        if self.shift is not None:
            queries = rotate(queries, self.shift)
        outs, lses = [], []
        for (start, batch, count), kv in zip(self.batches, self.spans, strict=True):
            keys, values = kv[layer]
            block = queries[:, start : start + batch * count].unflatten(1, (batch, count)).transpose(0, 1)
            o, l = self.partial(block, keys, values, False, scale)
            outs.append(o.transpose(1, 2).flatten(0, 1))
            lses.append(l.transpose(1, 2).flatten(0, 1))
        o, l = torch.cat(outs), torch.cat(lses)  # [P, heads, head_dim], [P, heads]
        if len(self.rows) == 1:  # all partials belong to it
            return (torch.softmax(l, 0)[..., None] * o).sum(0, keepdim=True).float()
        l = l[self.slots]  # [R, S, heads]
        if self.padding is not None:
            l = l + self.padding
        return (torch.softmax(l, 1)[..., None] * o[self.slots]).sum(1).float()


def padded(slots: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``Singles.slots`` and ``Singles.padding`` of rows with at least one partial each."""
    width = max(map(len, slots))
    full = torch.tensor([[*row, *[row[0]] * (width - len(row))] for row in slots], device=device)
    if all(len(row) == width for row in slots):
        return full, None
    beyond = torch.arange(width)[None] >= torch.tensor([len(row) for row in slots])[:, None]
    padding = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
    return full, padding[..., None].to(device)
