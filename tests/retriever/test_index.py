"""The index against brute force: any order of changes, readers beside a writer, counts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpic.errors import IntegrityError
from mpic.retriever.index import VectorIndex, _remove

D = 8
IDS = st.sets(st.integers(0, 12), min_size=1)


def vectors(n: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def brute(known: dict[int, np.ndarray], query: np.ndarray, k: int) -> list[int]:
    scored = sorted(((float(v @ query), id) for id, v in known.items()), reverse=True)
    return [id for _, id in scored[:k]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["put", "remove"]), IDS), max_size=12))
def test_any_order_of_changes_finds_what_brute_force_finds(changes):
    index, known = VectorIndex(D), {}
    for step, (what, ids) in enumerate(changes):
        ids = sorted(ids)
        if what == "put":
            new = vectors(len(ids), step + 1)
            index.put(ids, new)
            known.update(zip(ids, new, strict=True))
        else:
            assert index.remove(ids) == len(known.keys() & set(ids))
            for id in ids:
                known.pop(id, None)
        assert len(index) == len(known) and index.ids() == set(known)
        query = vectors(1, 99)[0]
        neighbours = index.search(query, 5)
        assert [n.id for n in neighbours] == brute(known, query, 5)
        assert all(np.isclose(n.score, known[n.id] @ query, atol=1e-6) for n in neighbours)
    index.check()


def test_only_the_ids_that_are_asked_for_are_found():
    index, rows = VectorIndex(D), vectors(50)
    index.put(range(50), rows)
    among = np.array([3, 7, 31, 999])
    neighbours = index.search(rows[20], 10, among)
    assert {n.id for n in neighbours} == {3, 7, 31}
    assert index.search(rows[0], 3, np.array([], np.int64)) == []


def test_an_empty_index_finds_nothing_and_removes_nothing():
    index = VectorIndex(D)
    assert index.search(vectors(1)[0], 4) == [] and index.remove([1, 2]) == 0


def test_readers_see_whole_changes_while_a_writer_works():
    index, rows = VectorIndex(D), vectors(400)
    index.put(range(200), rows[:200])
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            ids = {n.id for n in index.search(rows[0], 400)}
            # ids 200..399 come and go together
            if len(ids & set(range(200, 400))) not in (0, 200):
                wrong.append(len(ids))

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read) for _ in range(2)]
        try:
            for _ in range(30):
                index.put(range(200, 400), rows[200:])
                assert index.remove(range(200, 400)) == 200
        finally:
            stop.set()
    for reader in readers:
        reader.result()
    assert not wrong
    index.check()


def clustered(n: int, dimension: int, seed: int = 0) -> np.ndarray:
    """Half of the vectors lie around one of 40 centres each, half anywhere."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((n, dimension)).astype(np.float32)
    rows[: n // 2] = 0.4 * rows[: n // 2] + np.random.default_rng(99).standard_normal((40, dimension))[
        random.integers(0, 40, n // 2)
    ].astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def large(n: int, dimension: int = 24) -> tuple[VectorIndex, np.ndarray]:
    """Return an index that is approximate from half as many vectors on."""
    rows = clustered(n, dimension)
    index = VectorIndex(dimension, n // 2, rows)
    index.put(range(n), rows)
    return index, rows


def test_a_large_index_is_ivf_and_its_neighbours_are_nearly_those_of_the_flat_one():
    index, rows = large(4000)
    flat = VectorIndex(24)
    flat.put(range(4000), rows)
    assert "IVF" in index.kind and "flat" in flat.kind
    queries = clustered(400, 24, seed=1)
    for some, least in ((queries[:200], 0.95), (queries, 0.7)):  # near others, and anywhere
        found = [len({n.id for n in index.search(q, 10)} & {n.id for n in flat.search(q, 10)}) for q in some]
        assert np.mean(found) / 10 >= least
    for q in queries[:5]:  # what a filter leaves is searched as a whole
        among = np.arange(0, 4000, 97)
        assert [n.id for n in index.search(q, 9, among)] == [n.id for n in flat.search(q, 9, among)]


def test_a_large_index_finds_as_many_as_are_asked_for_and_nothing_that_was_removed():
    index, rows = large(1000)
    assert len(index.search(rows[0], 990)) == 990
    assert index.remove(range(0, 500)) == 500 and len(index) == 500
    assert min(n.id for n in index.search(rows[3], 500)) == 500
    index.put([3], rows[3:4])
    assert index.search(rows[3], 1)[0].id == 3
    index.check()
    again = VectorIndex.deserialize(index.serialize(), 24, 500)
    assert again.kind == index.kind and again.ids() == index.ids()
    again.check()


def test_an_index_says_when_its_size_asks_for_another_kind():
    rows = clustered(400, 24)
    index = VectorIndex(24, 100)
    index.put(range(99), rows[:99])
    assert not index.outgrown
    index.put([99], rows[99:100])
    assert index.outgrown and "flat" in index.kind
    index = VectorIndex(24, 100, rows[:100])
    index.put(range(100), rows[:100])
    assert not index.outgrown
    index.remove(range(49))
    assert not index.outgrown  # it does not change to and fro
    index.remove([49, 50])
    assert index.outgrown
    index.put(range(400), rows)
    assert not index.outgrown
    index.put(range(400, 430), clustered(30, 24, 2))
    assert index.outgrown  # with more than twice the lists


def test_a_removal_that_faiss_ignores_is_noticed():
    index = VectorIndex(D)
    index.put([1, 2], vectors(2))
    index._shown.ids.add(77)
    with pytest.raises(IntegrityError):
        _remove(index._shown, [77])


def test_an_index_survives_writing_and_reading():
    index = VectorIndex(D)
    index.put([5, 9], vectors(2))
    again = VectorIndex.deserialize(index.serialize(), D)
    assert again.ids() == {5, 9}
    again.put([5], vectors(1, 3))
    again.check()
    with pytest.raises(ValueError, match="dimensions"):
        VectorIndex.deserialize(index.serialize(), D + 1)


def test_bad_shapes_and_repeated_ids_are_refused():
    index = VectorIndex(D)
    for ids, rows in (([1, 1], vectors(2)), ([1], vectors(2)), ([1], np.ones((1, D + 1)))):
        with pytest.raises(ValueError, match="ids"):
            index.put(ids, rows)
