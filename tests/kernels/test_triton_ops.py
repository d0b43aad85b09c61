"""Scatter, chunk load, deviation and selection in Triton against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton_kit import DEVICE, LAYERS, SMALL, World, shift_of

from mpic.kernels import reference
from mpic.kernels.triton import ops
from mpic.kernels.triton.step import Geometry, Prepared
from mpic.kernels.triton.tiles import Call

GENERATE = (Phase.explicit, Phase.generate)  # shrinking in the interpreter takes minutes
GEOMETRY = st.builds(
    lambda kv_heads, dim, part, interleaved: Geometry(kv_heads * 2, kv_heads, dim, dim // part, interleaved),
    st.sampled_from([1, 3]),
    st.sampled_from([16, 48, 80]),
    st.sampled_from([2, 4]),
    st.booleans(),
)
PAGE = st.sampled_from([0, 4, 16])
LENGTHS = st.lists(st.integers(1, 21), min_size=1, max_size=3)


def slots_of(world: World, pieces: list, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = torch.cat([world.get(kv)[layer] for kv in pieces], 2)
    return [(data[0, :, i], data[1, :, i]) for i in range(data.shape[2])]


@settings(max_examples=12, deadline=None, phases=GENERATE)
@given(geometry=GEOMETRY, page=PAGE, lengths=LENGTHS, layer=st.integers(0, LAYERS - 1))
def test_scatter_writes_every_row_to_its_slot_and_nothing_else(geometry, page, lengths, layer):
    world = World(geometry, page=page)
    places = [world.reserve(n, skip=3) for n in lengths]
    rows = sum(lengths)
    k, v = (world.random(rows, geometry.kv_heads, geometry.dim).transpose(0, 1) for _ in range(2))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    writes = [(end - n, end, kv) for end, n, kv in zip(ends, lengths, places)]
    untouched = world.arena.isnan().sum()
    prepared = Prepared(
        [Call(0, rows, places[0])], rows, geometry, world.arena, writes=writes, tiles=SMALL, page=page or 16
    )
    prepared.scatter(layer, k, v)
    expected = [(torch.empty_like(k[:, 0]), torch.empty_like(v[:, 0])) for _ in range(rows)]
    reference.scatter(k, v, expected)
    for (key, value), (key2, value2) in zip(slots_of(world, places, layer), expected):
        assert torch.equal(key, key2) and torch.equal(value, value2)
    assert untouched - world.arena.isnan().sum() == 2 * rows * geometry.kv_heads * geometry.dim


@settings(max_examples=12, deadline=None, phases=GENERATE)
@given(
    geometry=GEOMETRY,
    page=st.sampled_from([4, 16]),
    n=st.integers(1, 40),
    skip=st.integers(0, 5),
    layers=st.sampled_from([slice(None), slice(1, 2), slice(0, 1), slice(1, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_chunk_is_loaded_into_its_pages_layer_group_by_layer_group(geometry, page, n, skip, layers, dtype):
    world = World(geometry, dtype, page)
    where = world.reserve(n, skip)
    data = world.random(LAYERS, 2, geometry.kv_heads, n, geometry.dim)
    pages = torch.tensor(where.pages, device=DEVICE)
    ops.load_chunk(data, world.arena, pages, where, page, layers)
    got = world.get(where)
    assert torch.equal(got[layers], data[layers])
    loaded = len(range(*layers.indices(LAYERS))) * 2 * geometry.kv_heads * n * geometry.dim
    assert (~world.arena.isnan()).sum() == loaded


def test_a_chunk_of_another_length_is_refused():
    world = World(Geometry(2, 1, 16, 8), page=4)
    where = world.reserve(9)
    data = world.random(LAYERS, 2, 1, 8, 16)
    with pytest.raises(ValueError, match="8 tokens"):
        ops.load_chunk(data, world.arena, torch.tensor(where.pages, device=DEVICE), where, 4)


@settings(max_examples=12, deadline=None, phases=GENERATE)
@given(
    geometry=GEOMETRY,
    page=PAGE,
    lengths=LENGTHS,
    bases=st.lists(st.sampled_from([0, 5, 30_000]), min_size=3, max_size=3),
)
def test_deviation_equals_the_reference_with_fresh_keys_turned_back(geometry, page, lengths, bases):
    world = World(geometry, page=page)
    pieces = [world.place(n, skip=2)[0] for n in lengths]
    rows = sum(lengths)
    k, v = (world.random(rows, geometry.kv_heads, geometry.dim).transpose(0, 1) for _ in range(2))
    shifts = [shift_of(b, geometry.half, geometry.interleaved) if b else None for b in bases[: len(lengths)]]
    got = ops.deviation(k, v, world.arena, pieces, shifts, geometry, 1, page or 16)
    each = [shift for shift, n in zip(shifts, lengths) for _ in range(n)]
    expected = reference.deviation(k, v, slots_of(world, pieces, 1), each)
    assert (got / expected - 1).abs().max() < 1e-5


def test_a_token_that_is_what_was_cached_does_not_deviate():
    world = World(Geometry(2, 2, 32, 16))
    piece, data = world.place(10)
    got = ops.deviation(data[0, 0], data[0, 1], world.arena, [piece], [None], world.geometry)
    assert torch.equal(got, torch.zeros_like(got))


@given(
    values=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    percent=st.sampled_from([0, 1, 15, 50, 99, 100]),
)
def test_the_most_deviating_rows_are_chosen_ties_to_the_earlier(values, percent):
    deviations = torch.tensor(values, dtype=torch.float32, device=DEVICE)
    assert ops.top_percent(deviations, percent).tolist() == reference.top_percent(deviations, percent)
