"""Single rows read equal spans that are evenly spaced in the pool in one call."""

from __future__ import annotations

import torch

from mpic.engine.native.runner import evenly_spaced
from mpic.kv.chunk import KVShape
from mpic.kv.pool import Extent, Pool


def test_pieces_of_one_kind_are_cut_where_the_distance_changes():
    extents = [Extent(start, 2, 32) for start in (0, 2, 4, 10, 16, 30)]
    other = Extent(6, 4, 64)
    spans = {(e, 4, 32, 1): [(0, 0)] for e in extents[::-1]} | {(other, 4, 32, 1): [(0, 0)]}
    runs = [[piece[0].start for piece in run] for run in evenly_spaced(spans)]
    assert sorted(runs) == [[0, 2, 4], [6], [10, 16], [30]]


def test_pieces_with_other_bounds_or_readers_are_other_kinds():
    a, b, c, d = (Extent(2 * i, 2, 32) for i in range(4))
    spans = {
        (a, 0, 32, 1): [(0, 0)],
        (b, 4, 32, 1): [(0, 0)],
        (c, 0, 32, 1): [(0, 0), (1, 7)],
        (d, 0, 32, 1): [(0, 9)],
    }
    assert sorted(len(run) for run in evenly_spaced(spans)) == [1, 1, 2]


def test_a_stack_is_the_extents_own_memory():
    pool = Pool(KVShape(2, 3, 4), 20, 4, torch.float32)
    extents = [pool.alloc(7) for _ in range(4)]
    pool.arena.copy_(torch.randn(pool.arena.shape))
    for chosen in (extents[1:2], extents[::2], extents):
        stacked = pool.stack(chosen, 2, 6)
        assert stacked.shape == (2, 2, len(chosen), 3, 4, 4)
        for i, extent in enumerate(chosen):
            view = pool.view(extent)[:, :, :, 2:6]
            assert torch.equal(stacked[:, :, i], view)
            assert stacked[:, :, i].data_ptr() == view.data_ptr()
