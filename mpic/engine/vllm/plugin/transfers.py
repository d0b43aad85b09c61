"""Cuts chunks into transfers to a GPU.

Torch uses the copy engine, in parallel with all other work, only between contiguous ranges of host and device memory.
It first gathers strided data on the host, in pageable memory, and the copy is then no longer asynchronous
(``copy_requires_temporaries`` in ATen's Copy.cu; CUDA's strided copies, which torch has tried instead, are a thousand
times slower for some shapes). And links seldom map all tokens of a chunk: mpic-K leaves out the first K, other policies
scattered tokens. The linked tokens then form separate ranges in ``[layers, 2, heads, n, head_dim]``, for each head.

So contiguous ranges are copied, unlinked tokens included, and the device picks the linked ones. Cost decides how many
unlinked tokens are copied: skipping a gap takes another copy for every head, and starting a copy takes as long as
transferring some hundred kilobytes. Smaller gaps are copied, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from mpic.engine.vllm.plugin.kv_import import PagedWrite


class TransferSizes(NamedTuple):
    """Bounds of transfers.

    Args:
        most: bytes of the largest transfer.
        least: minimum bytes of a transfer, if there are that many. Smaller transfers would begin earlier but cost more
            launches.
        gap: maximum bytes of a head that are copied unlinked rather than skipped.
    """

    most: int = 64 << 20
    least: int = 16 << 20
    gap: int = 256 << 10


class Transfer(NamedTuple):
    """A part of a write: some of this worker's layers and some of its tokens.

    Args:
        layers: numbers of the layers.
        picks: numbers of the tokens that it places among those of the write.
        span: tokens of the chunk from the first of them to the last.
        crossing: tokens of the chunk that are copied: ``span``, or all.
    """

    write: PagedWrite
    layers: range
    picks: range
    span: range
    crossing: range

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the copied tensor: ``[layers, 2, heads, crossing, head_dim]``."""
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
    """Return the picks that are tokens ``lo`` to ``hi`` of the chunk."""
    if isinstance(write.tokens, slice):
        return range(lo - write.tokens.start, hi - write.tokens.start)
    first, last = torch.searchsorted(write.tokens, torch.tensor([lo, hi])).tolist()
    return range(max(first, picks.start), min(last, picks.stop))
