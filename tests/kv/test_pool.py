"""The page pool: extents are disjoint, fragmentation is resolved, and nothing is lost when extents move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpic.errors import IntegrityError
from mpic.kv.chunk import KVShape
from mpic.kv.pool import Pool

SHAPE = KVShape(2, 2, 4)


def make_pool(pages: int = 16, page_size: int = 4) -> Pool:
    return Pool(SHAPE, pages, page_size, torch.float32)


def test_an_extent_is_one_contiguous_block_of_the_arena():
    pool = make_pool()
    view = pool.view(pool.alloc(6))
    assert view.shape == (2, 2, 2, 6, 4)
    assert view.is_contiguous()


def test_a_full_pool_gives_none_and_disturbs_nothing():
    pool = make_pool(4)
    held = pool.alloc(12)
    pool.view(held)[:] = 7
    assert pool.alloc(8) is None
    assert (pool.view(held) == 7).all()
    assert pool.alloc(4) is not None
    pool.check()


def test_scattered_holes_are_joined_by_sliding_extents_down_with_their_content():
    pool = make_pool(8)
    extents = [pool.alloc(4) for _ in range(8)]
    for i, extent in enumerate(extents):
        pool.view(extent)[:] = i
    for i in (0, 2, 4, 6):
        pool.free(extents[i])
    assert pool.alloc(16) is not None  # four single-page holes make one of four
    assert pool.moves > 0
    for i in (1, 3, 5, 7):
        assert (pool.view(extents[i]) == i).all()
    pool.check()


def test_a_fixed_extent_is_never_moved():
    pool = make_pool(5)
    extents = [pool.alloc(4) for _ in range(5)]
    middle = extents[2]
    middle.fixed += 1
    for i in (0, 1, 3, 4):
        pool.free(extents[i])
    assert pool.alloc(12) is None  # two pages on either side
    assert middle.start == 2
    middle.fixed -= 1
    assert pool.alloc(12) is not None
    pool.check()


def test_freeing_twice_or_while_in_use_is_an_error():
    pool = make_pool()
    extent = pool.alloc(1)
    extent.fixed = 1
    with pytest.raises(IntegrityError):
        pool.free(extent)
    extent.fixed = 0
    pool.free(extent)
    with pytest.raises(IntegrityError):
        pool.free(extent)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30), st.integers(0, 30)), max_size=40))
def test_any_history_keeps_every_extents_content(history):
    pool = make_pool(24)
    live: list[tuple[object, int]] = []
    for step, (allocate, tokens, pick) in enumerate(history):
        if allocate:
            extent = pool.alloc(tokens)
            fits = pool.pages_for(tokens) <= pool.free_pages + (extent.pages if extent else 0)
            assert (extent is not None) == fits  # nothing is fixed, so fragmentation never refuses
            if extent is not None:
                pool.view(extent)[:] = step
                live.append((extent, step))
        elif live:
            pool.free(live.pop(pick % len(live))[0])
        pool.check()
        for extent, value in live:
            assert (pool.view(extent) == value).all()


def test_nothing_is_evicted_when_a_fixed_extent_would_prevent_the_hole():
    pool = make_pool(6)
    extents = [pool.alloc(4) for _ in range(6)]
    extents[2].fixed += 1
    evictable = {extents[i] for i in (0, 1, 4)}

    def reclaim(pages: int) -> bool:
        if not pool.fits(pages, evictable):
            return False
        while not pool.fits(pages):
            pool.free(evictable.pop())
        return True

    pool.reclaim = reclaim
    assert pool.alloc(12) is None and len(evictable) == 3  # two pages at most in one piece
    assert pool.alloc(8) is not None
    pool.check()


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), max_size=8),
    freed=st.sets(st.integers(0, 7)),
    fixed=st.sets(st.integers(0, 7)),
    pages=st.integers(1, 16),
)
def test_a_hole_can_be_had_exactly_when_it_is_said_to_fit(sizes, freed, fixed, pages):
    pool = make_pool(16)
    extents = [extent for size in sizes if (extent := pool.alloc(size * 4)) is not None]
    for i, extent in enumerate(extents):
        extent.fixed = int(i in fixed and i not in freed)
        if i in freed:
            pool.free(extent)
    fits = pool.fits(pages)
    assert (pool.alloc(pages * 4) is not None) == fits
    pool.check()
