"""References found by their words: beside vectors, over restarts, and whatever a query holds."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from retriever_tools import HashEmbedder, picture, titles, wait

from mpic.errors import DatabaseDamaged
from mpic.retriever import Query, vectors
from mpic.retriever.words import Words, query


class Blind(HashEmbedder):
    """Takes everything for the same, as a CLIP does where only what follows its context differs."""

    def texts(self, texts):
        return super().texts(["same"] * len(texts))

    def images(self, images):
        return self.texts(images)


def file_of(shelf):
    (path,) = (shelf.library.root / "index").glob("*.words")
    return path


def test_a_reference_is_found_by_words_that_its_vector_does_not_hold(open_shelf):
    shelf = open_shelf(Blind(), duplicates=2)
    for i in range(30):
        shelf.add(f"chapter{i} of the long report about costs {1000 + i}", f"part {i}", flush=False)
    shelf.add("appendix with the name Zanzibar", "appendix")
    [best, *_] = shelf.retriever.search(Query("find Zanzibar"), 3)
    assert best.reference.title == "appendix" and "words" in best.found_by and best.words > 0
    assert titles(shelf, "costs 1007", top_k=1) == ["part 7"]


def test_each_hit_says_which_lists_it_was_in_with_both_scores(open_shelf):
    shelf = open_shelf()
    shelf.add("the lamp is in the hall", "lamp")
    shelf.add("something else entirely", "other")
    lamp, other = shelf.retriever.search(Query("lamp"), 2)
    assert lamp.found_by == ("vector", "words") and 0 < lamp.score < 1 and lamp.words > 0
    assert other.found_by == ("vector",) and other.words is None
    [blue] = shelf.retriever.search(Query(images=(Image.new("RGB", (8, 8), "blue"),)), 1)
    assert blue.found_by == ("vector",)


def test_titles_and_descriptions_are_words_too_and_a_picture_without_them_keeps_its_place(open_shelf):
    shelf = open_shelf(Blind(), duplicates=2)
    shelf.add(picture("red"), "Harbour at dawn", description="seen from the lighthouse")
    for i in range(30):
        shelf.add(f"chapter{i} and so on", f"part {i}", flush=False)
    shelf.add("note about a lighthouse", "note")
    assert set(titles(shelf, "where lighthouse", top_k=2)) == {"Harbour at dawn", "note"}
    assert titles(shelf, "harbour", top_k=1) == ["Harbour at dawn"]


def test_a_picture_that_is_nearest_is_not_put_behind_texts_for_want_of_words(open_shelf):
    class Nearest(HashEmbedder):
        def images(self, images):
            return self.texts(["what shows a boat"] * len(images))

    shelf = open_shelf(Nearest())
    shelf.add(picture("red"), "IMG 0001")
    for i in range(5):
        shelf.add(f"a text {i} that shows a boat or what else", f"text {i}", flush=False)
    assert shelf.retriever.flush()
    assert titles(shelf, "what shows a boat", top_k=1) == ["IMG 0001"]


def test_filters_and_the_least_score_hold_for_words_too(open_shelf):
    shelf = open_shelf()
    for i in range(120):
        shelf.add("lamp " * (i % 3 + 1) + f"n{i}", f"t{i}", flush=False, metadata={"n": i})
    assert shelf.retriever.flush()
    assert titles(shelf, "lamp", top_k=3, filter={"n": {"gte": 118}}) == ["t119", "t118"]
    assert titles(shelf, "lamp n7", min_score=0.999) == []


@pytest.mark.parametrize(
    "text",
    ['"', 'a"b', "lamp AND", "NEAR(lamp boat)", "* lamp", "text: lamp", "-lamp", "{x}: y", "lamp\0boat", "\ud800 lamp",
     "'; DROP TABLE words; --", "((((", "^lamp + boat", "lamp* OR", "?1", " ".join(map(str, range(9999)))],
)  # fmt: skip
def test_nothing_in_a_query_is_an_operator_or_an_error(text, tmp_path):
    words = Words(tmp_path / "words")
    words.put([(1, "a lamp"), (2, "a boat")])
    assert [n.id for n in words.search(text, 5)] == [
        i for i, word in ((1, "lamp"), (2, "boat")) if f'"{word}"' in query(text)
    ] or "a" in text
    assert len(words.ids()) == 2
    words.close()


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("Die Größe der STRASSE", "größe"),
        ("Café au lait", "cafe\u0301"),
        ("हिन्दी में लिखा", "हिन्दी"),
        ("北京大学在海淀", "大学在哪里"),
        ("東京タワーは赤い", "タワー"),
        ("ประเทศไทย", "ไทย"),
        ("Ｆｕｌｌ width", "full"),
        ("Москва, город", "МОСКВА"),
        ("قلعة حلب", "حلب"),
    ],
)
def test_words_of_every_script_are_found(text, asked, tmp_path):
    words = Words(tmp_path / "words")
    words.put([(1, text), (2, "nothing of the kind 別の हि")])
    assert [n.id for n in words.search(asked, 5)] == [1]
    words.close()


def test_words_of_an_earlier_versions_library_are_added_without_embedding_anything_again(open_shelf):
    shelf = open_shelf(Blind(), duplicates=2)
    for i in range(70):
        shelf.add(f"chapter {i} costs {1000 + i}", f"part {i}", flush=False)
    shelf.add(picture("red"), "Harbour at dawn")
    path = file_of(shelf)
    shelf.close()
    path.unlink()
    shelf = open_shelf(Blind(), duplicates=2)
    shelf.retriever.indexer.opened()
    shelf.retriever.check()  # waits until all have been added
    assert shelf.embedder.batches == []
    words = shelf.retriever.indexer.opened().words
    assert all(len(words.search(asked, 5)) == 1 for asked in ("1000", "1050", "1069", "dawn"))
    assert shelf.retriever.status()["words"] == 71


def test_an_original_that_is_lost_does_not_keep_the_words_of_the_others_out(open_shelf):
    shelf = open_shelf(Blind(), duplicates=2)
    shelf.add("a lamp 1", "lamp").path.write_bytes(b"damaged")
    shelf.add("a boat 2", "boat")
    path = file_of(shelf)
    shelf.close()
    path.unlink()
    shelf = open_shelf(Blind(), duplicates=2)
    shelf.retriever.indexer.opened()
    shelf.retriever.check()
    assert titles(shelf, "number 2", top_k=1) == ["boat"] and wait(shelf)


def test_a_damaged_index_of_words_is_made_anew_at_a_start_and_told_of_in_between(open_shelf):
    shelf = open_shelf(Blind(), duplicates=2)
    shelf.add("a lamp 1", "lamp")
    path = file_of(shelf)
    shelf.close()
    path.write_bytes(b"not a database at all" * 500)
    shelf = open_shelf(Blind(), duplicates=2)
    shelf.retriever.indexer.opened()
    shelf.retriever.check()
    assert titles(shelf, "number 1", top_k=1) == ["lamp"]
    shelf.close()
    whole = path.read_bytes()
    words = Words(path)
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(DatabaseDamaged, match="delete"):
        words.search("lamp", 3)
    words.close()
    path.unlink()


def test_words_of_a_replaced_or_removed_reference_are_no_longer_found(open_shelf):
    shelf = open_shelf(Blind(), duplicates=2)
    shelf.add("first of all a lamp", "one", id="ref_one")
    shelf.replace("ref_one", "first of all a boat")
    words = shelf.retriever.indexer.opened().words
    assert words.search("lamp", 5) == [] and len(words.search("boat", 5)) == 1
    shelf.library.references.remove("ref_one")
    assert shelf.retriever.flush() and words.search("boat", 5) == []


def test_without_fts5_vectors_alone_find_references_and_the_start_says_so(open_shelf, monkeypatch, caplog):
    monkeypatch.setattr(vectors, "available", lambda: False)
    monkeypatch.setattr("mpic.retriever.retriever.available", lambda: False)
    shelf = open_shelf()
    assert "no FTS5" in caplog.text
    shelf.add("the lamp is in the hall", "lamp")
    [hit] = shelf.retriever.search(Query("the lamp"))
    assert hit.found_by == ("vector",) and shelf.retriever.status()["words"] is None


def test_ids_and_numbers_beyond_placeholders_may_be_asked_for(tmp_path):
    words = Words(tmp_path / "words")
    words.put((i, f"lamp {i}") for i in range(1000))
    assert {n.id for n in words.search("lamp", 9999, np.arange(40_000))} == set(range(1000))
    words.close()
