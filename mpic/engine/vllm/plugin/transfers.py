"""Cutting chunks into transfers to a GPU.

Torch copies host memory to a device by the copy engine, beside everything else, only from one contiguous range to
another. Anything strided it first gathers on the host, into pageable memory, and then nothing is asynchronous any more
(``copy_requires_temporaries`` in ATen's Copy.cu; CUDA's strided copies, which torch has tried instead, are a thousand
times slower for some shapes). And the linked tokens of a chunk are seldom all of its tokens: mpic-K leaves out
the first K, other policies some here and there. They lie apart in ``[layers, 2, heads, n, head_dim]``, once for each
head.

So contiguous ranges cross, with tokens among them that nobody linked, and the device picks the linked ones. How many
such tokens may cross is bounded by what they cost: skipping them takes another copy for every head, and the host starts
one in the time in which some hundred kilobytes cross. Where fewer bytes than that lie between, they cross too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from mpic.engine.vllm.plugin.kv_import import PagedWrite


class TransferSizes(NamedTuple):
    """Bounds of transfers.

    Args:
        most: bytes of the largest.
        least: bytes that one has at least where there are so many. Smaller ones would begin earlier and cost more
            launches.
        gap: bytes of a head that cross without being linked rather than being skipped.
    """

    most: int = 64 << 20
    least: int = 16 << 20
    gap: int = 256 << 10


class Transfer(NamedTuple):
    """A part of a write: some of this worker's layers and some of its tokens.

    Args:
        layers: by number.
        picks: numbers of the tokens that it places among those of the write.
        span: tokens of the chunk from the first of them to the last.
        crossing: tokens of the chunk that cross: ``span``, or all.
    """

    write: PagedWrite
    layers: range
    picks: range
    span: range
    crossing: range

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what crosses: ``[layers, 2, heads, crossing, head_dim]``."""
        two, heads, _, width = self.write.kv[0].shape
        return len(self.layers), two, heads, len(self.crossing), width


def transfers(writes: Sequence[PagedWrite], sizes: TransferSizes) -> list[Transfer]:
    """Cut writes into transfers, those of the first layers first.

    Raises:
        ValueError: one token in one layer is larger than a transfer may be.
    """
    found = []
    for write in writes:
        if write.token_bytes > sizes.most:
            raise ValueError(f"a token takes {write.token_bytes} bytes, a transfer has {sizes.most} at most")
        for picks, span, crossing in _pieces(write, sizes):
            layer = len(crossing) * write.token_bytes
            group = max(1, min(sizes.most // layer, -(-sizes.least // layer)))
            for first in range(0, len(write.kv), group):
                layers = range(first, min(first + group, len(write.kv)))
                found.append(Transfer(write, layers, picks, span, crossing))
    return sorted(found, key=lambda transfer: transfer.layers.start)


def _pieces(write: PagedWrite, sizes: TransferSizes) -> Iterator[tuple[range, range, range]]:
    """Yield picks, span and crossing (``Transfer``) of the parts that a write has in every layer: as few as possible
    without crossing large gaps, and none larger than a transfer."""
    _, heads, n, _ = write.kv[0].shape
    gap = sizes.gap // (write.token_bytes // (2 * heads))  # in tokens
    most = sizes.most // write.token_bytes
    for picks, span in _runs(write, gap):
        if n <= most and n - len(span) <= gap and write.whole:
            yield picks, span, range(n)
            continue
        for first in range(span.start, span.stop, most):
            part = _between(write, picks, first, min(first + most, span.stop))
            if part:
                tight = _span(write, part)
                yield part, tight, tight


def _runs(write: PagedWrite, gap: int) -> Iterator[tuple[range, range]]:
    """Yield picks and their span, cut where more than ``gap`` tokens lie between two neighbours."""
    cuts: list[int] = []
    if not isinstance(write.tokens, slice):
        cuts = (torch.nonzero(write.tokens.diff() > gap + 1)[:, 0] + 1).tolist()
    for first, last in zip([0, *cuts], [*cuts, write.count], strict=True):
        yield range(first, last), _span(write, range(first, last))


def _span(write: PagedWrite, picks: range) -> range:
    if isinstance(write.tokens, slice):
        return range(write.tokens.start + picks.start, write.tokens.start + picks.stop)
    return range(int(write.tokens[picks.start]), int(write.tokens[picks.stop - 1]) + 1)


def _between(write: PagedWrite, picks: range, lo: int, hi: int) -> range:
    """Return those of some picks that are tokens from ``lo`` to ``hi`` of the chunk."""
    if isinstance(write.tokens, slice):
        return range(lo - write.tokens.start, hi - write.tokens.start)
    first, last = torch.searchsorted(write.tokens, torch.tensor([lo, hi])).tolist()
    return range(max(first, picks.start), min(last, picks.stop))
