"""Single rows, grouped by the slots that they read, and attended through any implementation's ``Partial``.

``Singles`` serves every device that has no kernel of its own for single rows (``stream.py`` is the CPU's).
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
    """See ``mpic.kernels.attention.SingleRows``. Every (row, span) pair is a *partial*.

    Partials that read the same span are adjacent, so requests that share a chunk read its keys once. Spans that are
    equally long and evenly spaced in memory (chunks of one size, compiled one after the other) are one batch.

    Args:
        rows: ``[R]`` int64, the step's single rows.
        source: ``[P]`` int64, the step row of each partial.
        rotation: ``cos, sin [P, rotary_dim / 2]`` of each partial, or None when no span is moved.
        of_row: ``[R, S]`` int64, the partials of each row, padded with any of its own.
        padding: ``[R, S, 1]`` fp32, minus infinity where ``of_row`` is padded, else 0; None if there is no padding.
        batches: (first partial, spans, partials of each span), in the order of ``spans``.
        spans: the batches' KV, ``[layers, 2, spans, kv_heads, n, head_dim]`` each.
        partial: the implementation.
        series: the spans of each batch.
        kv_heads: number of the layers' KV heads, which have q's size, if views have more or larger ones; else None.
    """

    rows: torch.Tensor
    source: torch.Tensor
    rotation: QueryRotation | None
    of_row: torch.Tensor
    padding: torch.Tensor | None
    batches: tuple[tuple[int, int, int], ...]
    spans: tuple[torch.Tensor, ...]
    partial: Partial
    series: tuple[list[SharedSpan], ...]
    kv_heads: int | None = None

    @classmethod
    def of(
        cls, calls: Sequence[SpanCall], partial: Partial, rotations: Rotations, kv_heads: int | None = None
    ) -> Singles:
        """Build the tables of a step from the calls of its single rows."""
        rows, shared = share(calls)
        batches, stacks = [], []
        partials: list[tuple[int, int]] = []
        of_row: list[list[int]] = [[] for _ in rows]
        series = evenly_spaced(shared)
        for one in series:
            stacks.append(stack(one))
            batches.append((len(partials), len(one), len(one[0].readers)))
            for span in one:
                for number, base in span.readers:
                    of_row[number].append(len(partials))
                    partials.append((number, base))
        table, padding = padded(of_row)
        source = np.array([rows[number] for number, _ in partials])
        tables = {"rows": np.array(rows), "source": source, "of_row": table}
        if padding is not None:
            tables["padding"] = padding
        on_device = upload(tables, stacks[0].device)
        return cls(
            on_device["rows"],
            on_device["source"],
            rotations([base for _, base in partials]),
            on_device["of_row"],
            on_device.get("padding"),
            tuple(batches),
            tuple(stacks),
            partial,
            tuple(series),
            kv_heads,
        )

    def advance(self) -> Singles:
        """Return the same rows one step later, if each has one more own token and nothing else has changed. No table
        changes, so nothing is copied to the device."""
        series = tuple(
            [span._replace(hi=span.hi + 1) for span in one] if one[0].grows else one for one in self.series
        )
        spans = tuple(
            stack(one) if one[0].grows else old for one, old in zip(series, self.spans, strict=True)
        )
        return self._replace(series=series, spans=spans)

    def attend(self, q: torch.Tensor, layer: int, scale: float, extras: Extras = PLAIN) -> torch.Tensor:
        """See ``SingleRows.attend``. It makes one kernel call per batch of spans and a handful of operations for all
        merges, so that decoding with many chunks is bound by reading them, not by launching."""
        heads, _, dim = q.shape
        partials = self.source.shape[0]
        queries = q.expand(heads, partials, dim) if q.shape[1] == 1 else q[:, self.source]
        if self.rotation is not None:
            queries = rotate(queries, self.rotation)
        outs, lses = [], []
        for (start, batch, count), kv in zip(self.batches, self.spans, strict=True):
            keys, values = kv[layer]
            if self.kv_heads is not None:
                keys, values = keys[:, : self.kv_heads, :, :dim], values[:, : self.kv_heads, :, :dim]
            block = queries[:, start : start + batch * count].unflatten(1, (batch, count)).transpose(0, 1)
            if extras.softcap is None:
                o, l = self.partial(block, keys, values, False, scale)
            else:
                o, l = masked.partial(block, keys, values, False, scale, softcap=extras.softcap)
            outs.append(o.transpose(1, 2).flatten(0, 1))
            lses.append(l.transpose(1, 2).flatten(0, 1))
        o, l = torch.cat(outs), torch.cat(lses)  # [P, heads, head_dim], [P, heads]
        if len(self.rows) > 1:
            o, l = o[self.of_row], l[self.of_row]  # [R, S, heads, head_dim], [R, S, heads]
            if self.padding is not None:
                l = l + self.padding
        else:  # all partials belong to it
            o, l = o[None], l[None]
        merged = (torch.softmax(l, 1)[..., None] * o).sum(1).float()
        if extras.sinks is not None:
            merged *= torch.sigmoid(torch.logsumexp(l, 1) - extras.sinks.float())[..., None]
        return merged


def evenly_spaced(shared: Sequence[SharedSpan]) -> list[list[SharedSpan]]:
    """Group equal ranges of equal views that have the same number of readers and are evenly spaced in one tensor's
    memory. Any two such ranges are evenly spaced."""
    kinds: dict[tuple[object, ...], list[SharedSpan]] = {}
    for span in sorted(shared, key=lambda span: span.view.data.storage_offset()):
        data = span.view.data
        memory = (data.untyped_storage()._cdata, data.stride())
        kinds.setdefault((*memory, span.lo, span.hi, len(span.readers), span.grows), []).append(span)
    series: list[list[SharedSpan]] = []
    for spans in kinds.values():
        series.append([])
        for span in spans:
            one = series[-1]
            if len(one) > 1 and _distance(one[-1], span) != _distance(one[0], one[1]):
                series.append([span])
            else:
                one.append(span)
    return series


def _distance(a: SharedSpan, b: SharedSpan) -> int:
    return int(b.view.data.storage_offset() - a.view.data.storage_offset())


def stack(spans: Sequence[SharedSpan]) -> torch.Tensor:
    """Return the slots of evenly spaced spans as one tensor over their memory, ``[layers, 2, spans, kv_heads, n,
    head_dim]``."""
    first, data = spans[0], spans[0].view.data
    layers, parts, heads, _, dim = data.shape
    to_layer, to_part, to_head, to_slot, one = data.stride()
    to_value = to_part if parts == 2 else 0  # else the values are the keys
    gap = _distance(spans[0], spans[1]) if len(spans) > 1 else 0
    return data.as_strided(
        (layers, 2, len(spans), heads, first.hi - first.lo, dim),
        (to_layer, to_value, gap, to_head, to_slot, one),
        data.storage_offset() + first.lo * to_slot,
    )


def padded(of_row: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return ``Singles.of_row`` and ``Singles.padding`` of rows with at least one partial each."""
    width = max(map(len, of_row))
    full = np.array([[*row, *[row[0]] * (width - len(row))] for row in of_row])
    if all(len(row) == width for row in of_row):
        return full, None
    beyond = np.arange(width)[None] >= np.array([len(row) for row in of_row])[:, None]
    return full, np.where(beyond, -np.inf, 0).astype(np.float32)[..., None]
