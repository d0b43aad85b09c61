"""Many spans of one chunk, attended to together.

Policies that choose tokens one by one (CacheBlend, A3, random ones) cut a chunk of some hundred tokens into dozens of
spans. A call for each of them turns the queries of all later rows and merges their results, for a few keys at a time.
From ``LEAST`` spans on, a chunk's kept slots are attended to as if they lay side by side: rows behind the chunk see all
of them in one call, and recomputed rows inside it see those that stand before them. Kernels for blocks over all their
spans read the slots from a list (``block_spans.py``); other implementations attend span by span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from mpic.kernels.attention import KVView, SpanCall
from mpic.kernels.span import Span

LEAST = 6
"""Fewest spans of a chunk that are gathered."""
_TILE = 64
"""Rows inside a chunk that are attended together: enough to be worth a call, few enough to see much the same."""


def calls_over(
    spans: Sequence[Span[KVView]], lo: int, hi: int, start: int, in_blocks: bool, gathers: bool
) -> Iterator[SpanCall]:
    """Yield the calls of a slice of rows over mapped spans, each of which the rows behind it see whole.

    Args:
        spans: in prompt order, so that the first rows which see them ascend.
        lo, hi: the own tokens that the rows are; the step's row of the first is ``start``.
        in_blocks: True in layers where blocks attend to themselves in both directions.
        gathers: True where many spans are attended to together.
    """
    end = start + hi - lo
    for _, of_chunk in groupby(spans, lambda span: (id(span.source), span.base)):
        seen = [
            (start + max(lo, first) - lo, span) for span in of_chunk if (first := span.first(in_blocks)) < hi
        ]
        if gathers and len(seen) >= LEAST:
            yield from _gathered(seen, end)
        else:
            yield from (SpanCall(slice(row, end), span) for row, span in seen)


def _gathered(seen: Sequence[tuple[int, Span[KVView]]], end: int) -> Iterator[SpanCall]:
    """Yield the calls of the step's rows up to ``end`` over a chunk's spans, each with the first row that sees it.

    The slots are listed from the last one to the first, so that a row inside the chunk sees a suffix of the list, as
    rows see a suffix of a span through a window (``SpanCall.visible``)."""
    spans, firsts = [span for _, span in seen], [row for row, _ in seen]
    source, device = spans[0].source, spans[0].source.data.device
    slots = np.concatenate([np.arange(span.hi - 1, span.lo - 1, -1) for span in reversed(spans)])
    kept = np.cumsum([span.tokens for span in spans])  # seen from each of the first rows on
    whole, listed = Span(source, 0, len(slots), spans[0].base), torch.from_numpy(slots).to(device)
    for lo in range(firsts[0], firsts[-1], _TILE):
        hi = min(lo + _TILE, firsts[-1])
        counts = kept[np.searchsorted(firsts, np.arange(lo, hi), side="right") - 1]
        visible = torch.from_numpy(counts[-1] - counts).to(device) if counts[0] < counts[-1] else None
        yield SpanCall(
            slice(lo, hi), whole._replace(lo=len(slots) - int(counts[-1])), visible=visible, slots=listed
        )
    yield SpanCall(slice(firsts[-1], end), whole, slots=listed)
