"""Keeping references indexed: over restarts, with another embedder, and when some cannot be embedded."""

from __future__ import annotations

import asyncio
import threading
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from retriever_tools import HashEmbedder, Held, picture, titles, wait, wait_for_problem

from mpic.errors import EmbedderMismatch, EmbedderUnavailable, EmbeddingFailed
from mpic.library import Change
from mpic.retriever import Embedder, Query, indexer


def test_a_restart_reads_the_index_file_and_a_damaged_or_stale_one_is_rebuilt_and_reported(
    open_shelf, caplog
):
    shelf = open_shelf()
    for i in range(5):
        shelf.add(f"fact {i} of word{i}", f"t{i}")
    shelf = open_shelf()
    assert titles(shelf, "word3", top_k=1) == ["t3"] and shelf.retriever.status()["index"] == "file"
    assert shelf.embedder.batches == [1]  # the query
    (path,) = (shelf.library.root / "index").glob("*.vectors")
    shelf.close()
    good = path.read_bytes()
    for bad in (b"", good[:40], good[:-3], good[:200] + b"X" + good[201:], b"\0" * len(good)):
        path.write_bytes(bad)
        shelf = open_shelf()
        assert titles(shelf, "word3", top_k=1) == ["t3"]
        assert shelf.retriever.status()["index"].startswith("rebuilt") and "rebuilt" in caplog.text
        shelf.retriever.check()
        shelf.close()
    path.write_bytes(good)
    shelf = open_shelf()
    shelf.add("one more", "more")
    shelf.close()
    path.write_bytes(good)
    shelf = open_shelf()
    assert titles(shelf, "one more", top_k=1) == ["more"] and "stale" in shelf.retriever.status()["index"]


def test_an_index_changes_its_kind_with_its_size_and_keeps_it_over_a_restart(open_shelf):
    shelf = open_shelf(approximate_from=20)
    shelf.add("a lamp", "lamp", id="ref_lamp")
    assert "flat" in shelf.retriever.status()["kind"]
    for i in range(20):
        shelf.add(f"fact {i} of word{i}", f"t{i}", flush=False, id=f"ref_{i}")
    assert shelf.retriever.flush() and "IVF" in shelf.retriever.status()["kind"]
    assert titles(shelf, "fact 3 of word3", top_k=1) == ["t3"] and titles(shelf, "a lamp", top_k=1) == [
        "lamp"
    ]
    shelf.retriever.check()
    shelf = open_shelf(approximate_from=20)
    assert titles(shelf, "fact 3 of word3", top_k=1) == ["t3"]
    state = shelf.retriever.status()
    assert state["index"] == "file" and "IVF" in state["kind"]
    for i in range(15):
        shelf.library.references.remove(f"ref_{i}")
    assert shelf.retriever.flush() and "flat" in shelf.retriever.status()["kind"]
    shelf.retriever.check()


def test_a_flat_index_file_of_an_earlier_version_opens_whatever_its_size(open_shelf):
    shelf = open_shelf()
    for i in range(20):
        shelf.add(f"fact {i} of word{i}", f"t{i}", flush=False)
    shelf.retriever.flush()
    shelf = open_shelf(approximate_from=10)
    assert titles(shelf, "fact 3 of word3", top_k=1) == ["t3"]
    state = shelf.retriever.status()
    assert "IVF" in state["kind"] and state["index_rebuilt"] == 0
    shelf = open_shelf(approximate_from=10)
    assert titles(shelf, "fact 3 of word3", top_k=1) == ["t3"] and shelf.retriever.status()["index"] == "file"


def test_an_index_file_that_cannot_be_read_is_only_a_cache_that_is_rebuilt(open_shelf, monkeypatch):
    shelf = open_shelf()
    shelf.add("a lamp", "lamp")
    shelf.close()
    monkeypatch.setattr(np, "fromfile", Mock(side_effect=PermissionError(13, "Permission denied")))
    shelf = open_shelf()
    assert titles(shelf, "a lamp") == ["lamp"]
    assert "Permission denied" in shelf.retriever.status()["index"]


def test_an_index_file_without_a_vector_of_the_catalogue_is_rebuilt(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp", "lamp")
    shelf.add("a boat", "boat")
    opened = shelf.retriever.indexer.opened()
    opened.index.remove(opened.rows.ids() - {min(opened.rows.ids())})
    shelf = open_shelf()
    assert titles(shelf, "a boat", top_k=1) == ["boat"]
    assert "does not have the vectors" in shelf.retriever.status()["index"]


@pytest.mark.parametrize("rebuilds", [True, False])
def test_a_vector_that_did_not_reach_the_index_is_found_nevertheless(open_shelf, monkeypatch, rebuilds):
    """Its row has been committed; without the rebuild, the index would be saved without it as up to date."""
    shelf = open_shelf()
    shelf.add("a boat", "boat", id="ref_a")
    opened = shelf.retriever.indexer.opened()
    monkeypatch.setattr(opened.index, "put", Mock(side_effect=MemoryError()))
    if not rebuilds:
        monkeypatch.setattr(opened.rows, "load", Mock(side_effect=MemoryError()))
    asyncio.run(shelf.library.references.replace("ref_a", b"a lamp", title="lamp"))
    assert shelf.retriever.flush() is rebuilds
    if rebuilds:
        assert titles(shelf, "a lamp") == ["lamp"]
        shelf.retriever.check()
    shelf = open_shelf()
    assert titles(shelf, "a lamp") == ["lamp"]
    assert shelf.retriever.search(Query("a lamp"))[0].score > 0.99


def test_references_added_before_a_crash_are_embedded_at_the_next_start(open_shelf):
    shelf = open_shelf()
    shelf.embedder.failure = RuntimeError("no memory")
    shelf.add("a lamp", "lamp", flush=False)
    shelf.retriever.flush()
    assert shelf.retriever.status()["problem"] == "no memory" and shelf.retriever.status()["missing"] == 1
    shelf = open_shelf()
    titles(shelf, "x")
    assert wait(shelf) and titles(shelf, "a lamp") == ["lamp"]


def test_another_embedder_is_refused_until_reindexed_and_reindexing_resumes(open_shelf):
    shelf = open_shelf()
    for i in range(150):
        shelf.add(f"fact {i} of word{i}", f"t{i}", flush=False)
    assert shelf.retriever.flush()
    other = HashEmbedder("w2")
    shelf = open_shelf(other)
    with pytest.raises(EmbedderMismatch, match="reindex"):
        titles(shelf, "word3")
    assert shelf.retriever.status()["missing"] == 150
    embed = other.texts

    def break_after_one(texts):
        if other.batches:
            raise RuntimeError("killed")
        return embed(texts)

    other.texts = break_after_one
    shelf.retriever.reindex()
    assert wait_for_problem(shelf) and shelf.retriever.status()["missing"] == 150 - 64
    assert shelf.retriever.status()["reindexing"]
    with pytest.raises(EmbedderMismatch):
        titles(shelf, "word3")
    again = HashEmbedder("w2")
    shelf = open_shelf(again)
    shelf.retriever.reindex()
    assert wait(shelf)
    assert sum(again.batches) == 150 - 64 and shelf.retriever.status()["missing"] == 0
    assert titles(shelf, "fact 3 of word3", top_k=1) == ["t3"]
    shelf = open_shelf()  # the first one's vectors are still there
    assert titles(shelf, "fact 3 of word3", top_k=1) == ["t3"]


def test_a_reference_that_cannot_be_read_does_not_keep_another_embedder_from_serving(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp", "lamp")
    shelf.add("a boat", "boat").path.write_bytes(b"damaged")
    shelf = open_shelf(HashEmbedder("w2"))
    shelf.retriever.reindex()
    assert wait(shelf) and titles(shelf, "a lamp") == ["lamp"]
    shelf = open_shelf(HashEmbedder("w2"))
    assert titles(shelf, "a lamp") == ["lamp"]


class Picky(HashEmbedder):
    """An embedder that cannot embed red pictures and texts that contain the word, alone or in a batch."""

    def images(self, images):
        if any(image.getpixel((0, 0)) == (255, 0, 0) for image in images):
            raise ValueError("a bad image")
        return super().images(images)

    def texts(self, texts):
        vectors = super().texts(texts)
        vectors[["nothing" in text for text in texts]] = np.nan
        return vectors


def test_references_that_cannot_be_embedded_are_reported_and_do_not_stop_the_others(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp", id="ref_lamp")
    shelf.add(picture("red"), id="ref_red")
    shelf = open_shelf(Picky("w2"))
    shelf.retriever.reindex()
    assert wait(shelf)
    held = Held(shelf.embedder)
    shelf.add("a boat", flush=False)
    held.reached()
    for colour in ("green", "blue", "yellow"):
        shelf.add(picture(colour), colour, flush=False, id=f"ref_{colour}")
    shelf.add("nothing to see", flush=False, id="ref_nothing")
    shelf.add(picture("#ff0000") + b"red again", flush=False, id="ref_again")
    held.release()  # all of these are the next batch
    assert shelf.retriever.flush()
    state = shelf.retriever.status()
    told = {failed["id"]: (failed["code"], failed["message"]) for failed in state["failed"]}
    assert told == {
        "ref_red": ("embedding_failed", "ValueError: a bad image"),
        "ref_again": ("embedding_failed", "ValueError: a bad image"),
        "ref_nothing": ("embedding_failed", "its vector is not finite"),
    }
    assert (state["vectors"], state["missing"], state["problem"], state["mismatch"]) == (5, 3, None, [])
    assert titles(shelf, images=(Image.new("RGB", (8, 8), "blue"),), top_k=1) == ["blue"]
    shelf.library.references.remove("ref_red")
    asyncio.run(shelf.library.references.replace("ref_again", picture("pink")))
    assert shelf.retriever.flush()
    assert [failed["id"] for failed in shelf.retriever.status()["failed"]] == ["ref_nothing"]
    with pytest.raises(EmbeddingFailed):
        titles(shelf, "nothing")


class Alive:
    """Counts decoded images of one size that are alive at a time."""

    def __init__(self, size):
        self.size, self.now, self.most = size, 0, 0

    def made(self, image):
        if image.size == self.size:
            self.now += 1
            self.most = max(self.most, self.now)
            weakref.finalize(image, self._gone)
        return image

    def _gone(self):
        self.now -= 1


def test_one_image_of_a_query_is_decoded_at_a_time(open_shelf):
    shelf, alive = open_shelf(), Alive((30, 20))
    shelf.add(picture("red"), "red")
    load = lambda: alive.made(Image.new("RGB", (30, 20), "red"))
    assert titles(shelf, images=(load,) * 5) == ["red"]
    assert (alive.now, alive.most) == (0, 1)


def test_large_references_are_decoded_one_at_a_time_and_small_ones_embedded_together(open_shelf, monkeypatch):
    monkeypatch.setattr(indexer, "BATCH_PIXELS", 30 * 16 * 16)
    colours = ("red", "green", "blue", "yellow", "pink", "gray", "white", "black")
    shelf = open_shelf()
    for i, colour in enumerate(colours):
        shelf.add(picture(colour), colour)
        shelf.add(picture(colour, (100, 80 + i)), f"large {colour}")
    large, small = Alive((100, 80)), Alive((16, 16))
    shelf = open_shelf(HashEmbedder("w2"))
    real = shelf.library.references.image

    def image(reference):
        image = real(reference)
        return large.made(image.crop((0, 0, 100, 80))) if image.width == 100 else small.made(image)

    shelf.library.references.image = image
    shelf.retriever.reindex()
    assert wait(shelf) and shelf.retriever.status()["missing"] == 0
    assert (large.now, large.most, small.now) == (0, 1, 0)
    assert small.most < 9 and len(shelf.embedder.batches) < 16


def test_a_replaced_reference_is_not_found_by_its_old_content_even_if_embedding_fails(open_shelf):
    shelf = open_shelf(Picky())
    shelf.add("a lamp", "lamp", id="ref_a")
    held = Held(shelf.embedder, "images")
    asyncio.run(shelf.library.references.replace("ref_a", picture("red")))
    held.reached()
    assert titles(shelf, "a lamp") == []
    held.release()
    assert shelf.retriever.flush() and titles(shelf, "a lamp") == []
    assert shelf.retriever.status()["vectors"] == 0


def test_an_embedder_that_fails_completely_is_reported_without_blaming_references(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp")
    other = HashEmbedder("w2")
    other.failure = RuntimeError("no memory")
    shelf = open_shelf(other)
    shelf.retriever.reindex()
    assert wait_for_problem(shelf)
    state = shelf.retriever.status()
    assert (state["problem"], state["failed"], len(state["mismatch"])) == ("no memory", [], 1)
    shelf = open_shelf()
    assert titles(shelf, "a lamp") == ["a title"]  # the first one's vector is still there


def test_a_change_reported_late_does_not_hide_the_present_state(open_shelf):
    shelf = open_shelf()
    reference = shelf.add("a lamp", "lamp")
    shelf.retriever.indexer._changed(Change("removed", reference))
    assert shelf.retriever.flush() and titles(shelf, "a lamp") == ["lamp"]


def test_an_id_used_again_is_not_found_by_the_earlier_content(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp", "lamp", id="ref_a")
    shelf.retriever.close()
    shelf.library.references.remove("ref_a")
    asyncio.run(shelf.library.references.add(b"some boat", "x", title="boat", id="ref_a"))
    shelf = open_shelf()
    titles(shelf, "x")
    assert wait(shelf) and shelf.retriever.search(Query("some boat"))[0].score > 0.99


def test_references_added_during_reindexing_are_searchable_before_it_ends(open_shelf):
    shelf = open_shelf()
    for i in range(130):
        shelf.add(f"w{i}", flush=False)
    shelf.retriever.flush()
    other = HashEmbedder("w2")
    held = Held(other)
    shelf = open_shelf(other)
    shelf.retriever.reindex()
    held.reached()
    shelf.add("a lamp", flush=False)
    held.release(2)  # the batch that runs, and the new one; what is left of the old waits
    assert shelf.retriever.flush(50) and shelf.retriever.status()["reindexing"]
    held.release()
    assert wait(shelf) and shelf.retriever.status()["missing"] == 0


def test_missing_weights_are_reported_and_the_library_works(open_shelf, tmp_path):
    for embedder in (Embedder("ViT-B-32"), Embedder(str(tmp_path)), Embedder("no-such-model", "none")):
        shelf = open_shelf(embedder)
        shelf.add("a lamp", f"lamp {embedder.model[-4:]}", flush=False)
        shelf.retriever.flush()
        with pytest.raises(EmbedderUnavailable, match="embedder"):
            titles(shelf, "a lamp")
    shelf = open_shelf()
    titles(shelf, "x")
    assert wait(shelf) and len(titles(shelf, "a lamp")) == 1  # three times the same content


def test_a_reference_removed_while_it_waits_is_not_indexed(open_shelf):
    shelf = open_shelf()
    held = Held(shelf.embedder)
    id = shelf.add("a lamp", flush=False).id
    held.reached()
    shelf.library.references.remove(id)
    held.release()
    assert shelf.retriever.flush() and shelf.retriever.status()["vectors"] == 0


def test_an_id_used_again_while_it_is_embedded_does_not_get_the_old_vector(open_shelf):
    shelf = open_shelf()
    held, told = Held(shelf.embedder), []
    shelf.add("a lamp", flush=False, id="ref_a")
    held.reached()
    shelf.library.references.remove("ref_a")
    again = shelf.add("some boat", flush=False, id="ref_a")
    assert again.version == 1  # nothing was left of the one before
    rows = shelf.retriever.indexer.opened().rows
    put = rows.put
    rows.put = lambda *args: told.append(put(*args)) or told[-1]
    held.release()
    assert shelf.retriever.flush() and [len(stored) for stored in told] == [0, 1]
    assert shelf.retriever.search(Query("some boat"))[0].score > 0.99


def test_vectors_are_unit_and_batched(open_shelf):
    shelf = open_shelf()
    for i in range(20):
        shelf.add(f"w{i}", flush=False)
    shelf.retriever.flush()
    assert sum(shelf.embedder.batches) == 20
    ids, vectors = shelf.retriever.indexer.opened().rows.load()
    assert len(ids) == 20 and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_a_new_version_is_not_found_by_the_score_of_the_old_one_before_the_index_has_it(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp", id="ref_a")
    index = shelf.retriever.indexer.opened().index
    put, entered, gate = index.put, threading.Event(), threading.Event()

    def held(*arguments):
        entered.set()
        assert gate.wait(60)
        return put(*arguments)

    index.put = held
    asyncio.run(shelf.library.references.replace("ref_a", b"some boat"))
    assert entered.wait(60)
    found = titles(shelf, "a lamp")  # the catalogue has the new vector, the index the old one
    gate.set()
    assert found == [] and shelf.retriever.flush()
    assert shelf.retriever.search(Query("some boat"))[0].score > 0.99
    shelf.retriever.check()


def test_a_search_that_comes_while_the_retriever_closes_is_dropped_without_an_error(open_shelf):
    shelf = open_shelf()
    retriever = shelf.retriever
    submit = retriever._guessing.submit

    def closed_meanwhile(*arguments):
        closing = threading.Thread(target=retriever.close)
        closing.start()
        closing.join(0.5)
        try:
            return submit(*arguments)
        finally:
            ends.append(closing)

    ends, done = [], threading.Event()
    retriever._guessing.submit = closed_meanwhile
    retriever.soon(done.set)
    ends[0].join(60)
    assert retriever._guesses == 0
    retriever.soon(done.set)  # after the end
    assert retriever._guesses == 0 and len(ends) == 1
