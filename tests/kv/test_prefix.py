"""The prefix cache: hits are verified, namespaces are apart, deletion purges, accounting holds."""

from __future__ import annotations

from unittest.mock import Mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpic.kv.chunk import KVShape
from mpic.kv.pool import Pool
from mpic.kv.prefix import PrefixCache, _common, own

A, B = ("exact", "anna"), ("linked", "anna", "mpic-4")


def make(pages: int = 64) -> tuple[Pool, PrefixCache]:
    pool = Pool(KVShape(1, 1, 1), pages, 4, torch.float32)
    return pool, PrefixCache(pool.free)


def remember(pool: Pool, cache: PrefixCache, namespace, items, chunks=frozenset()) -> None:
    """Insert items whose own tokens' KV is the token itself, so that a hit can be read back."""

    def take(n: int):
        tokens = [item for item in items if own(item)][n:]
        extent = pool.alloc(len(tokens))
        values = [t if isinstance(t, int) else t[1] for t in tokens]
        pool.view(extent)[0, :, 0, :, 0] = torch.tensor(values, dtype=torch.float32)
        return extent

    cache.insert(namespace, items, frozenset(chunks), take)


def read(pool: Pool, path) -> list[int]:
    out = []
    for node in path:
        if node.own_tokens:
            part = pool.view(node.shared.extent)[0, 0, 0, node.lo : node.lo + node.own_tokens, 0]
            out += part.int().tolist()
    return out


def test_a_hit_may_end_at_any_token_and_returns_that_prefixs_kv():
    pool, cache = make()
    remember(pool, cache, A, [1, 2, 3, 4, 5, 6])
    path = cache.match(A, [1, 2, 3, 9], 10)
    assert read(pool, path) == [1, 2, 3]
    cache.unpin(path)
    assert read(pool, cache.match(A, [1, 2, 3, 4, 5, 6], 4)) == [1, 2, 3, 4]


def test_the_exact_and_the_linked_namespace_never_meet():
    pool, cache = make()
    remember(pool, cache, A, [1, 2, 3])
    assert cache.match(B, [1, 2, 3], 10) == []
    assert cache.match(("exact", "ben"), [1, 2, 3], 10) == []


def test_a_mapped_span_is_part_of_the_identity_but_has_no_tokens_of_its_own():
    pool, cache = make()
    items = [1, ("span", "chunk-a", 4, 9), 2, 3]
    remember(pool, cache, B, items)
    assert read(pool, cache.match(B, items, 10)) == [1, 2, 3]
    other = cache.match(B, [1, ("span", "chunk-b", 4, 9), 2, 3], 10)
    assert read(pool, other) == [1]


def test_image_tokens_are_told_apart_by_content():
    pool, cache = make()
    remember(pool, cache, A, [1, ("image-a", 0), ("image-a", 1), 2])
    assert read(pool, cache.match(A, [1, ("image-b", 0), ("image-b", 1), 2], 10)) == [1]


def test_deleting_a_chunk_purges_all_that_was_computed_over_it_at_once_and_frees_it_at_unpin():
    pool, cache = make()
    remember(pool, cache, B, [1, ("span", "k", 0, 9), 2], {("anna", "digest")})
    remember(pool, cache, B, [7, 8])
    pinned = cache.match(B, [1, ("span", "k", 0, 9), 2], 10)
    before = pool.free_pages
    cache.purge(("ben", "digest"))
    assert cache.match(B, [1, ("span", "k", 0, 9), 2], 10) != []
    cache.unpin(pinned)
    cache.purge(("anna", "digest"))
    assert cache.match(B, [1, ("span", "k", 0, 9), 2], 10) == []
    assert pool.free_pages == before
    cache.check()
    cache.unpin(pinned)
    assert pool.free_pages == before + 1
    assert read(pool, cache.match(B, [7, 8], 10)) == [7, 8]
    cache.check()


def test_a_split_keeps_both_halves_until_both_are_evicted():
    pool, cache = make()
    remember(pool, cache, A, [1, 2, 3, 4])
    cache.unpin(cache.match(A, [1, 2], 10))
    free = pool.free_pages
    leaf = next(cache.evictable())
    cache.evict(leaf)
    assert pool.free_pages == free
    cache.evict(next(cache.evictable()))
    assert pool.free_pages == free + 1
    assert list(cache.nodes()) == []


def test_a_match_ends_before_more_own_tokens_than_its_limit_and_spans_do_not_count():
    pool, cache = make()
    items = [1, ("span", "k", 0, 9), 2, ("span", "k", 9, 12), 3, 4]
    remember(pool, cache, B, items)
    for limit in (3, 2, 1, 4, 9):
        path = cache.match(B, items, limit)
        assert read(pool, path) == [1, 2, 3, 4][:limit]
        cache.unpin(path)
        cache.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_the_common_beginning_ends_at_the_first_difference(a, b):
    found = _common(tuple(a), tuple(b))
    assert a[:found] == b[:found]
    assert found == min(len(a), len(b)) or a[found] != b[found]


def test_a_long_known_prompt_is_not_walked_item_by_item(monkeypatch):
    pool, cache = make(512)
    remember(pool, cache, A, list(range(1_000)))
    monkeypatch.setattr("mpic.kv.prefix.own", Mock(side_effect=AssertionError))
    cache.unpin(cache.match(A, list(range(1_000)), 999))


items = st.lists(st.one_of(st.integers(0, 2), st.just(("span", "k", 0, 9))), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(items, st.booleans()), max_size=25))
def test_matches_are_always_the_longest_remembered_prefix(history):
    pool, cache = make(256)
    known: set[tuple] = set()
    for sequence, insert in history:
        if insert:
            remember(pool, cache, A, sequence)
            known |= {tuple(sequence[:n]) for n in range(1, len(sequence) + 1)}
        path = cache.match(A, sequence, 100)
        longest = max((n for n in range(len(sequence) + 1) if tuple(sequence[:n]) in known), default=0)
        assert read(pool, path) == [item for item in sequence[:longest] if own(item)]
        cache.unpin(path)
        cache.check()
    cache.clear()
    assert pool.free_pages == pool.pages
