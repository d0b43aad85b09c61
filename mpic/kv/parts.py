"""Cutting a chunk's KV so that several threads can read it, each into a small buffer.

A *part* is a range of whole layers, or one layer that is larger than the memory. Different parts may be read at the
same time. A part is read in *pieces*, one after the other, because a layer's checksum runs over all of it; nothing is
held between two pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from mpic.kv.chunk import KVShape

PieceReader = Callable[[torch.Tensor], None]
"""Reads a piece into contiguous host memory of its shape. Raises CorruptFile when a layer that it completes is bad,
OSError when the file cannot be read now."""


class Piece(NamedTuple):
    """A box of ``[layers, parts, kv_heads, slots, head_dim]`` whose bytes are one run in a chunk's file.

    Args:
        layers: that it belongs to; several only when it has all of them.
        planes: ``[slots, head_dim]`` of one half and one head, counted from the first layer's first.
        slots: of each plane; all of them, or a part of a single plane.
        offset: bytes of the KV before it.
        last: its layers are complete with it.
    """

    layers: range
    planes: range
    slots: range
    offset: int
    last: bool

    def of(self, kv: torch.Tensor) -> torch.Tensor:
        """Return the piece ``[planes, slots, head_dim]`` of the whole KV, without a copy."""
        planes = kv[self.layers.start : self.layers.stop].view(-1, *kv.shape[3:])
        return planes[self.planes.start : self.planes.stop, self.slots.start : self.slots.stop]


class LayerRange(NamedTuple):
    """Layers that one reader takes, and their pieces in the order in which they must be read."""

    layers: range
    pieces: tuple[Piece, ...]


def cut(shape: KVShape, slots: int, itemsize: int, most: int, least: int) -> list[LayerRange]:
    """Cut a chunk's KV into parts, in the order of its layers.

    Args:
        slots: of the chunk.
        itemsize: bytes of an element.
        most: bytes of the largest piece.
        least: bytes that a piece has at least, where layers and ``most`` allow it.

    Raises:
        ValueError: not even one slot of one head fits ``most``.
    """
    row = shape.head_dim * itemsize
    plane, planes = slots * row, shape.parts * shape.kv_heads
    layer = plane * planes
    if layer > most:
        boxes = _boxes(slots, planes, row, most)
        return [_layer(number, layer, plane, row, boxes) for number in range(shape.layers)]
    group = max(1, min(most // layer, -(-least // layer)))
    parts = []
    for first in range(0, shape.layers, group):
        layers = range(first, min(first + group, shape.layers))
        whole = Piece(layers, range(len(layers) * planes), range(slots), first * layer, True)
        parts.append(LayerRange(layers, (whole,)))
    return parts


def _layer(number: int, layer: int, plane: int, row: int, boxes: list[tuple[range, range]]) -> LayerRange:
    """Return a layer as a part of its own, cut into boxes of planes and slots."""
    layers = range(number, number + 1)
    pieces = tuple(
        Piece(
            layers,
            planes,
            slots,
            number * layer + planes.start * plane + slots.start * row,
            i + 1 == len(boxes),
        )
        for i, (planes, slots) in enumerate(boxes)
    )
    return LayerRange(layers, pieces)


def _boxes(slots: int, planes: int, row: int, most: int) -> list[tuple[range, range]]:
    """Return planes and slots of every piece of one layer: whole planes, or parts of one that is too large."""
    if most < row:
        raise ValueError(f"a slot of one head takes {row} bytes, the memory for it has {most}")
    if (fitting := most // (slots * row)) > 0:
        bounds = range(0, planes, fitting)
        return [(range(first, min(first + fitting, planes)), range(slots)) for first in bounds]
    rows = most // row
    return [
        (range(one, one + 1), range(first, min(first + rows, slots)))
        for one in range(planes)
        for first in range(0, slots, rows)
    ]
