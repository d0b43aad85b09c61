"""A reference that fails for a while is indexed later, and until then nothing that was searchable is lost."""

from __future__ import annotations

import asyncio

import pytest
from library_tools import Clock
from retriever_tools import HashEmbedder, picture, titles, wait, wait_for_problem

from mpic.errors import CorruptFile, DatabaseBusy, DecoderBusy, EmbedderMismatch, OutOfMemory, StorageFull
from mpic.library import Change
from mpic.retriever import retries
from mpic.retriever.retries import Retries


def test_pauses_grow_up_to_a_bound_and_end_with_success():
    clock = Clock()
    waiting = Retries(clock)
    pauses = []
    for _ in range(9):
        waiting.failed(["a"])
        pauses.append(waiting.pause())
        assert waiting.take(9) == []
        clock.now += pauses[-1]
        assert waiting.take(9) == ["a"] and waiting.take(9) == [] and len(waiting) == 1
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 120, 120]
    waiting.forget(["a"])
    waiting.failed(["a", "b"])
    assert waiting.pause() == 1 and len(waiting) == 2
    clock.now += 1
    assert waiting.take(1) == ["a"] and waiting.take(1) == ["b"] and waiting.pause() is None


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.0)


def failing(times, error, work):
    """Return a function that raises for the first calls."""
    left = [error] * times

    def attempt(*arguments):
        if left:
            raise left.pop()
        return work(*arguments)

    return attempt


PASSING = [OutOfMemory("no memory"), DecoderBusy("busy"), PermissionError(13, "Permission denied")]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_a_reference_that_cannot_be_read_for_a_while_keeps_every_vector_and_is_indexed_later(
    open_shelf, at_once, error
):
    shelf = open_shelf()
    shelf.add(picture("red"), "red")
    shelf = open_shelf(HashEmbedder("w2"))
    references = shelf.library.references
    read, told = references.image, []

    def image(reference):
        told.append(shelf.library.catalog.one("SELECT COUNT(*) FROM vectors")[0])
        return read(reference)

    references.image = failing(3, error, image)
    shelf.retriever.reindex()
    assert wait(shelf) and told == [1]  # the vector of the other embedder was there all the time
    state = shelf.retriever.status()
    assert (state["missing"], state["failed"], state["unreadable"]) == (0, [], 3)
    assert state["mismatch"] == [] and titles(shelf, "x") == ["red"]
    shelf = open_shelf()
    assert titles(shelf, "x") == ["red"] and shelf.retriever.status()["missing"] == 0


def test_a_reference_whose_reading_keeps_failing_is_reported_and_does_not_stop_the_others(open_shelf):
    shelf = open_shelf()
    shelf.add(picture("red"), id="ref_red")
    shelf.library.references.image = failing(99, OutOfMemory("no memory"), None)
    asyncio.run(shelf.library.references.replace("ref_red", picture("blue")))
    assert not shelf.retriever.flush()
    assert [failed["code"] for failed in shelf.retriever.status()["failed"]] == ["out_of_memory"]
    shelf.add("a lamp", "lamp", flush=False)
    assert not shelf.retriever.flush() and titles(shelf, "a lamp") == ["lamp"]
    shelf.library.references.remove("ref_red")
    assert shelf.retriever.flush() and shelf.retriever.status()["failed"] == []


def test_a_reference_that_is_damaged_for_good_loses_its_vectors(open_shelf):
    shelf = open_shelf()
    shelf.add(picture("red"), id="ref_red")
    shelf.library.references.image = failing(1, CorruptFile("damaged"), None)
    shelf.retriever.indexer._changed(Change("replaced", shelf.library.references.get("ref_red")))
    assert shelf.retriever.flush() and shelf.retriever.status()["vectors"] == 0


@pytest.mark.parametrize("error", [DatabaseBusy("busy"), StorageFull("full"), RuntimeError("CUDA is unwell")])
def test_a_batch_that_fails_is_indexed_later(open_shelf, at_once, error):
    shelf = open_shelf()
    titles(shelf, "x")
    rows = shelf.retriever.indexer.opened().rows
    rows.put = failing(3, error, rows.put)
    shelf.add("a lamp", "lamp", flush=False)
    assert wait_for_problem(shelf, 3) and wait(shelf)
    assert titles(shelf, "a lamp") == ["lamp"] and shelf.retriever.status()["problem"] is None


def test_a_removal_that_fails_is_made_later(open_shelf, at_once):
    shelf = open_shelf()
    shelf.add("a lamp", id="ref_lamp")
    rows = shelf.retriever.indexer.opened().rows
    rows.remove = failing(3, DatabaseBusy("busy"), rows.remove)
    shelf.library.references.remove("ref_lamp")
    assert wait_for_problem(shelf, 3) and wait(shelf)
    assert shelf.retriever.status()["vectors"] == 0


def test_reindexing_goes_on_after_batches_that_fail(open_shelf, at_once):
    shelf = open_shelf()
    for i in range(130):
        shelf.add(f"fact {i} of word{i}", f"t{i}", flush=False)
    assert shelf.retriever.flush()
    shelf = open_shelf(HashEmbedder("w2"))
    shelf.retriever.status()
    rows = shelf.retriever.indexer.opened().rows
    put, calls = rows.put, []

    def every_other_fails(*arguments):
        calls.append(1)
        if len(calls) % 2:
            raise DatabaseBusy("busy")
        return put(*arguments)

    rows.put = every_other_fails
    shelf.retriever.reindex()
    assert wait(shelf) and len(calls) == 6
    state = shelf.retriever.status()
    assert (state["missing"], state["mismatch"], state["problem"]) == (0, [], None)
    assert titles(shelf, "fact 3 of word3", top_k=1) == ["t3"]


def test_exhausted_memory_is_not_held_against_a_reference(open_shelf, at_once):
    class Tight(HashEmbedder):
        tight = 3

        def texts(self, texts):
            if self.tight and texts != ["a"]:  # the probe fits
                self.tight -= 1
                raise RuntimeError("CUDA out of memory")
            return super().texts(texts)

    shelf = open_shelf(Tight())
    shelf.add("a lamp", "lamp", flush=False)
    assert wait(shelf) and titles(shelf, "a lamp") == ["lamp"]
    assert shelf.retriever.status()["failed"] == []


def test_vectors_of_another_embedder_stand_in_the_way_only_while_there_are_some(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp", id="ref_lamp")
    shelf.add(picture("red"), id="ref_red")
    shelf = open_shelf(HashEmbedder("w2"))
    with pytest.raises(EmbedderMismatch):
        titles(shelf, "x")
    shelf.library.references.remove("ref_lamp")
    assert shelf.retriever.flush() and len(shelf.retriever.status()["mismatch"]) == 1
    shelf.library.references.image = failing(1, CorruptFile("damaged"), None)
    shelf.retriever.indexer._changed(Change("replaced", shelf.library.references.get("ref_red")))
    assert shelf.retriever.flush() and shelf.retriever.status()["mismatch"] == []
    assert titles(shelf, "x") == []


def test_a_removal_is_enough_where_another_embedder_stood_in_the_way(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp", id="ref_lamp")
    shelf = open_shelf(HashEmbedder("w2"))
    with pytest.raises(EmbedderMismatch):
        titles(shelf, "x")
    shelf.library.references.remove("ref_lamp")
    assert shelf.retriever.flush() and titles(shelf, "x") == []
