"""Attention patterns: the slots that the rows of a layer see, by their places in the prompt.

Rows attend causally, through a window where the layer has one. In some models the tokens of an image also see each
other in both directions (Gemma 3), or those of the whole prompt do (PaliGemma): such tokens are a *block*. A block's
rows are computed in one step, so a step consists of text pieces and whole blocks, each of which is one square of scores
plus the keys before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch

from mpic.kernels.attention import KVView, SpanCall
from mpic.kernels.span import Span
from mpic.kernels.windows import Stretch, Window, own_calls, seen


class Blocks(Enum):
    """The way in which the rows of a block see the later ones of it."""

    WINDOWED = "windowed"
    """All later ones, and earlier ones within the layer's window (Gemma 3)."""
    WHOLE = "whole"
    """All of the block, whatever the window (PaliGemma 2)."""


class Pattern(NamedTuple):
    """A pattern says which keys a layer's rows see: all before them or a window of those; in blocks, later ones too."""

    window: Window | None = None
    blocks: Blocks | None = None


class PatternRows(NamedTuple):
    """Rows ``[lo, hi)`` of a slice that attend to each other causally, or are (the rest of) one block."""

    lo: int
    hi: int
    is_block: bool


def pieces(rows: int, blocks: Sequence[tuple[int, int]]) -> Iterator[PatternRows]:
    """Yield a slice of rows cut at its blocks, which ascend and may reach beyond it."""
    done = 0
    for lo, hi in blocks:
        lo, hi = max(lo, 0), min(hi, rows)
        if lo >= hi:
            continue
        if done < lo:
            yield PatternRows(done, lo, False)
        yield PatternRows(lo, hi, True)
        done = hi
    if done < rows:
        yield PatternRows(done, rows, False)


def fresh_calls(
    pattern: Pattern,
    start: int,
    places: np.ndarray,
    fresh: Span[KVView],
    before: Sequence[Stretch] = (),
    blocks: Sequence[tuple[int, int]] = (),
) -> list[SpanCall]:
    """Return the calls of a slice of rows over their own slots and the keys before all of them.

    Args:
        start: the step's row that the slice begins with.
        places: ``[r]``, the rows' places in the prompt.
        fresh: the rows' own slots, one per row.
        before: the own tokens that were computed in earlier steps.
        blocks: the blocks of the rows, counted from the slice's first.
    """
    calls: list[SpanCall] = []
    for lo, hi, is_block in pieces(len(places), blocks if pattern.blocks else ()):
        own = fresh._replace(lo=fresh.lo + lo, hi=fresh.lo + hi)
        earlier = [*before, Stretch(fresh._replace(hi=fresh.lo + lo), places[:lo])] if lo else before
        if pattern.window is not None and not is_block:
            calls += own_calls(pattern.window, start + lo, places[lo:hi], own, earlier)
            continue
        rows = slice(start + lo, start + hi)
        if pattern.window is None:
            calls.append(SpanCall(rows, own, causal=not is_block, first=True))
            calls += (SpanCall(rows, stretch.span) for stretch in earlier)
            continue
        floors = pattern.window.floor(places[lo:hi])
        skipped = Stretch(own, places[lo:hi]).skipped(floors)
        cut = pattern.blocks is Blocks.WINDOWED and skipped[-1] > 0
        visible = torch.from_numpy(skipped).to(own.source.data.device) if cut else None
        calls.append(SpanCall(rows, own, first=True, visible=visible))
        device = own.source.data.device
        calls += filter(None, (seen(stretch, start + lo, floors, device) for stretch in earlier))
    return calls
