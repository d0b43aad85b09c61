"""A chunk's KV in parts: every byte once, no piece too large, and each where it belongs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpic.kv.chunk import KVShape
from mpic.kv.parts import cut

shapes = st.builds(KVShape, st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.sampled_from((1, 2)))


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes, slots=st.integers(1, 9), rows=st.integers(1, 60), least=st.sampled_from([1, 100, 10_000])
)
def test_pieces_cover_the_kv_once_in_order_and_none_is_too_large(shape, slots, rows, least):
    """Numbers stand in for bytes: what a piece shows of the KV is the run of memory that it names."""
    most = rows * shape.head_dim * 4
    kv = torch.arange(shape.per_token * slots, dtype=torch.int32)
    whole = kv.view(shape.extent(slots))
    end, layers = 0, []
    for part in cut(shape, slots, 4, most, least):
        layers += part.layers
        assert [piece.last for piece in part.pieces] == [False] * (len(part.pieces) - 1) + [True]
        for piece in part.pieces:
            seen = piece.of(whole)
            assert piece.layers == part.layers and seen.nbytes <= most and piece.offset == end
            assert torch.equal(seen.reshape(-1), kv[end // 4 : end // 4 + seen.numel()])
            end += seen.nbytes
    assert end == kv.nbytes and layers == list(range(shape.layers))


def test_small_layers_are_read_together_up_to_the_least_size():
    shape = KVShape(7, 1, 4)  # 96 bytes a layer of 3 slots
    assert [len(part.layers) for part in cut(shape, 3, 4, 1000, 250)] == [3, 3, 1]
    assert [len(part.layers) for part in cut(shape, 3, 4, 200, 250)] == [2, 2, 2, 1]


def test_a_piece_of_a_strided_target_is_a_view_of_it():
    """A chunk behind sink slots."""
    extent = torch.zeros(3, 2, 2, 9, 4)
    target = extent[:, :, :, 4:]
    for part in cut(KVShape(3, 2, 4), 5, 4, 32, 1):
        for piece in part.pieces:
            piece.of(target).add_(1)
    assert bool((target == 1).all()) and not bool(extent[:, :, :, :4].any())


def test_memory_that_holds_no_single_slot_is_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        cut(KVShape(1, 1, 4), 5, 4, 15, 1)
