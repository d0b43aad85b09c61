"""Columns of the tables that ``worklist.py`` and ``step.py`` fill on the host and the kernels read."""

from __future__ import annotations

from enum import IntEnum


class SegmentColumn(IntEnum):
    """Columns of ``segments``, int64.

    ``ROTATION`` is where the segment's rows of the rotation table stand in ``rotation_of``, or -1 when no query is
    rotated; ``ROTATION_STEP`` is 1 when each row of the tile has one of its own, 0 when all share one. Row r sees slots
    from ``floors[FLOORS + r]`` on, or all of them when ``FLOORS`` is ``NO_FLOORS``.
    """

    ORIGIN = 0
    VALUE = 1
    LAYER = 2
    HEAD = 3
    LO = 4
    HI = 5
    ROTATION = 6
    ROTATION_STEP = 7
    ROW_MIN = 8
    ROW_MAX = 9
    DIAGONAL = 10
    FIRST_ROW = 11
    FLOORS = 12


NO_FLOORS = -(2**31)
"""In ``SegmentColumn.FLOORS``, which may be negative."""


class ItemColumn(IntEnum):
    """Columns of ``items``, int32: where the item's rows begin in ``rows`` and how many there are, its segments
    ``[SEGMENT_LO, SEGMENT_HI)``, and its first partial result or -1."""

    ROW = 0
    ROWS = 1
    SEGMENT_LO = 2
    SEGMENT_HI = 3
    PARTIAL = 4


ITEM_WIDTH = 8
"""The other columns of an item are empty, so that any item begins at a multiple of 16 bytes."""


class TargetColumn(IntEnum):
    """Columns of ``targets``, int64: where a row's key goes in layer 0 and head 0, and the strides from key to value,
    from layer to layer, from head to head. A row whose ``VALUE`` is 0 is written nowhere (it fills up a batch)."""

    ORIGIN = 0
    VALUE = 1
    LAYER = 2
    HEAD = 3
