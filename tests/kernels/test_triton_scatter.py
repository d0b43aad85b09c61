"""Scatter in Triton: every row to its slot, and nothing else is written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton_kit import LAYERS, SMALL, World, rotary_of

from mpic.kernels.attention import SpanCall, Write
from mpic.kernels.triton.launch import Geometry
from mpic.kernels.triton.step import TritonStep

GENERATE = (Phase.explicit, Phase.generate)  # shrinking in the interpreter takes minutes
GEOMETRY = st.builds(
    lambda kv_heads, dim, part, interleaved: Geometry(kv_heads * 2, kv_heads, dim, dim // part, interleaved),
    st.sampled_from([1, 3]),
    st.sampled_from([16, 48, 80]),
    st.sampled_from([2, 4]),
    st.booleans(),
)
LENGTHS = st.lists(st.integers(1, 21), min_size=1, max_size=3)


@settings(max_examples=12, deadline=None, phases=GENERATE)
@given(geometry=GEOMETRY, lengths=LENGTHS, layer=st.integers(0, LAYERS - 1))
def test_scatter_writes_every_row_to_its_slot_and_nothing_else(geometry, lengths, layer):
    world = World(geometry)
    spans = [world.reserve(n, skip=3) for n in lengths]
    rows = sum(lengths)
    k, v = (world.random(rows, geometry.kv_heads, geometry.dim).transpose(0, 1) for _ in range(2))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    writes = [Write(slice(start, start + span.tokens), span) for start, span in zip(starts, spans)]
    untouched = world.arena.isnan().sum()
    calls = [SpanCall(slice(0, rows), spans[0])]
    rotation = rotary_of(geometry).rotation
    step = TritonStep(calls, rows, geometry, world.arena, rotation, writes, tiles=SMALL)
    step.scatter(layer, k, v)
    got = torch.cat([world.get(span)[layer] for span in spans], 2)
    assert torch.equal(got[0], k) and torch.equal(got[1], v)
    assert untouched - world.arena.isnan().sum() == 2 * rows * geometry.kv_heads * geometry.dim


def test_rows_and_slots_of_another_number_are_refused():
    world = World(Geometry(2, 1, 16, 8))
    write = Write(slice(0, 8), world.reserve(9))
    with pytest.raises(ValueError, match="8 rows into 9 slots"):
        TritonStep([], 8, world.geometry, world.arena, lambda base: None, [write], tiles=SMALL)
