"""Single rows, grouped by the slots that they read. ``Singles`` attends through any implementation's ``Partial``, and
serves where no kernel of their own does (``stream.py`` on the CPU).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mpic.kernels import masked
from mpic.kernels.attention import (
    PLAIN,
    Extras,
    KVView,
    Partial,
    QueryRotation,
    Rotations,
    SpanCall,
    rotate,
)
from mpic.kernels.upload import upload


class SharedSpan(NamedTuple):
    """Slots ``[lo, hi)`` of a view and the single rows that read them.

    Args:
        readers: (number of the row among the single rows, base at which the row sees the slots).
        grows: True for a row's own tokens, which have one more slot in the row's next step.
    """

    view: KVView
    lo: int
    hi: int
    readers: list[tuple[int, int]]
    grows: bool = False


def share(calls: Sequence[SpanCall]) -> tuple[list[int], list[SharedSpan]]:
    """Group calls of single rows so that slots which several rows map are read once, each row with its own rotation.
    A row that maps slots twice reads them twice.

    Returns:
        The rows in order of appearance, and the groups.
    """
    rows: dict[int, int] = {}
    times: Counter[tuple[int, KVView, int, int]] = Counter()
    groups: dict[tuple[KVView, int, int, int], SharedSpan] = {}
    for call in calls:
        view, lo, hi, base, *_ = call.span
        number = rows.setdefault(call.rows.start, len(rows))
        times[number, view, lo, hi] += 1
        group = (view, lo, hi, times[number, view, lo, hi])
        groups.setdefault(group, SharedSpan(view, lo, hi, [], call.first)).readers.append((number, base))
    return list(rows), list(groups.values())


class Singles(NamedTuple):
    """See ``mpic.kernels.attention.SingleRows``. Every (row, span) pair is a *partial*; those of one span are adjacent,
    so that requests that share a chunk read its keys once.

    Args:
        rows: ``[R]`` int64, the step's single rows.
        source: ``[P]`` int64, the step row of each partial.
        others: ``[R, P]`` fp32, minus infinity where a partial is not the row's, else 0.
        rotation: ``cos, sin [P, rotary_dim / 2]`` of each partial, or None when no span is moved.
        shared: the spans, in the order of their partials.
        partial: the implementation.
        kv_heads: number of the layers' KV heads, which have q's size, if views have more or larger ones; else None.
    """

    rows: torch.Tensor
    source: torch.Tensor
    others: torch.Tensor
    rotation: QueryRotation | None
    shared: Sequence[SharedSpan]
    partial: Partial
    kv_heads: int | None = None

    @classmethod
    def of(
        cls, calls: Sequence[SpanCall], partial: Partial, rotations: Rotations, kv_heads: int | None = None
    ) -> Singles:
        """Build the tables of a step from the calls of its single rows."""
        rows, shared = share(calls)
        numbers, bases = map(np.array, zip(*(reader for span in shared for reader in span.readers)))
        others = np.where(np.arange(len(rows))[:, None] == numbers, 0, -np.inf).astype(np.float32)
        tables = {"rows": np.array(rows), "source": np.array(rows)[numbers], "others": others}
        on_device = upload(tables, shared[0].view.data.device)
        return cls(
            **on_device, rotation=rotations(bases.tolist()), shared=shared, partial=partial, kv_heads=kv_heads
        )

    def advance(self) -> Singles:
        """Return the same rows one step later, if each has one more own token and nothing else has changed. No table
        changes, so nothing is copied to the device."""
        return self._replace(shared=[span._replace(hi=span.hi + span.grows) for span in self.shared])

    def attend(self, q: torch.Tensor, layer: int, scale: float, extras: Extras = PLAIN) -> torch.Tensor:
        """See ``SingleRows.attend``. It makes one kernel call per span, and merges all results at once."""
        dim, queries = q.shape[2], q[:, self.source]
        if self.rotation is not None:
            queries = rotate(queries, self.rotation)
        outs, lses, end = [], [], 0
        for view, lo, hi, readers, _ in self.shared:
            keys, values = view.layers(lo, hi)[layer]
            if self.kv_heads is not None:
                keys, values = keys[: self.kv_heads, :, :dim], values[: self.kv_heads, :, :dim]
            start, end = end, end + len(readers)
            block = (queries[None, :, start:end], keys[None], values[None], False, scale)
            if extras.softcap is None:
                o, l = self.partial(*block)
            else:
                o, l = masked.partial(*block, softcap=extras.softcap)
            outs.append(o[0])
            lses.append(l[0])
        lse = torch.cat(lses, 1)[:, None] + self.others  # [heads, R, P]
        merged = (torch.softmax(lse, -1) @ torch.cat(outs, 1).float()).transpose(0, 1)
        if extras.sinks is not None:
            merged = (
                merged * torch.sigmoid(torch.logsumexp(lse, -1) - extras.sinks.float()[:, None]).T[..., None]
            )
        return merged
