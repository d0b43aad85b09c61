"""Windows: the slots of a span that a row sees, by their places in the prompt.

In a layer with a window, a row sees only the tokens from a *floor* on, and the floor rises with the row's own place. So
of any stretch of the prompt in order (own tokens, a chunk's span) a row sees a suffix. Stretches are cut to what their
rows see before a kernel reads them: slots outside the window are never read, and a row that stands alone needs no mask
at all. Places are counted in tokens, as transformers' masks count them, not in rotary positions (which advance
differently inside images).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mpic.kernels.attention import KVView, SpanCall
from mpic.kernels.span import Span


class Window(NamedTuple):
    """The last ``size`` tokens, the row itself included; or, ``chunked``, the tokens since the last multiple of
    ``size``."""

    size: int
    chunked: bool = False

    def floor(self, places: np.ndarray) -> np.ndarray:
        """Return the first place that each row sees, for rows at ``places [r]`` of the prompt."""
        if self.chunked:
            return places // self.size * self.size
        return np.maximum(places - self.size + 1, 0)

    @property
    def tile(self) -> int:
        """Rows that are attended together: enough to be worth a call, few enough to see much the same."""
        return min(512, max(64, self.size))


class Stretch(NamedTuple):
    """A span and the places in the prompt of its slots, ascending: ``[tokens]``, or the first where they count up."""

    span: Span[KVView]
    places: np.ndarray | int

    def skipped(self, floors: np.ndarray) -> np.ndarray:
        """Return for each floor how many of the first slots stand before it."""
        if isinstance(self.places, int):
            return np.clip(floors - self.places, 0, self.span.tokens)
        return np.searchsorted(self.places, floors)


def seen(stretch: Stretch, start: int, floors: np.ndarray, device: torch.device) -> SpanCall | None:
    """Return the call of rows ``[start, start + len(floors))``, all of which come after the stretch, or None when they
    see nothing of it. ``floors`` ascend, so the rows that see nothing are the last ones."""
    skipped = stretch.skipped(floors)
    rows = int(np.searchsorted(skipped, stretch.span.tokens))
    if rows == 0:
        return None
    least = int(skipped[0])
    span = stretch.span._replace(lo=stretch.span.lo + least)
    visible = None
    if skipped[rows - 1] > least:
        visible = torch.from_numpy(skipped[:rows] - least).to(device)
    return SpanCall(slice(start, start + rows), span, visible=visible)


def own_calls(
    window: Window, start: int, places: np.ndarray, fresh: Span[KVView], before: Sequence[Stretch]
) -> list[SpanCall]:
    """Return the calls of a block of rows over their own slots and the keys before all of them.

    Args:
        start: the step's row that the block begins with.
        places: ``[r]``, the rows' places in the prompt.
        fresh: the rows' own slots, one per row.
        before: the own tokens computed in earlier steps; all rows come after them.
    """
    device = fresh.source.data.device
    floors, calls = window.floor(places), []
    for lo in range(0, len(places), window.tile):
        hi = min(lo + window.tile, len(places))
        square = fresh._replace(lo=fresh.lo + lo, hi=fresh.lo + hi)
        skipped = Stretch(square, places[lo:hi]).skipped(floors[lo:hi])
        visible = torch.from_numpy(skipped).to(device) if skipped[-1] else None
        calls.append(SpanCall(slice(start + lo, start + hi), square, True, True, visible))
        earlier = [*before, Stretch(fresh._replace(hi=fresh.lo + lo), places[:lo])] if lo else before
        calls += filter(None, (seen(stretch, start + lo, floors[lo:hi], device) for stretch in earlier))
    return calls


def span_calls(window: Window, start: int, places: np.ndarray, stretch: Stretch) -> list[SpanCall]:
    """Return the calls of rows ``start`` and on, at ``places``, over a mapped stretch that stands before them."""
    device = stretch.span.source.data.device
    floors = window.floor(places)
    tiles = range(0, len(places), window.tile)
    calls = (seen(stretch, start + lo, floors[lo : lo + window.tile], device) for lo in tiles)
    return list(filter(None, calls))
