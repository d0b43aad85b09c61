"""Searches over a real library: hits, filters and refusals."""

from __future__ import annotations

import sqlite3

import pytest
from PIL import Image
from retriever_tools import picture, titles

from mpic.errors import BadRequest, EmptyQuery
from mpic.retriever import Query


def test_references_are_found_by_text_and_by_image_best_first(open_shelf):
    shelf = open_shelf()
    shelf.add("the lamp is in the hall", "lamp")
    shelf.add("the boat is red", "boat")
    shelf.add(picture("red"), "red picture")
    shelf.add(picture("blue"), "blue picture")
    assert titles(shelf, "where is the lamp")[0] == "lamp"
    hits = shelf.retriever.search(Query("the lamp is in the hall"), top_k=2)
    assert hits[0].score == pytest.approx(1, abs=1e-5) and hits[0].score > hits[1].score and len(hits) == 2
    assert titles(shelf, images=(Image.new("RGB", (8, 8), "blue"),), top_k=1) == ["blue picture"]
    both = titles(shelf, "the boat is red", images=(Image.new("RGB", (8, 8), "red"),), top_k=2)
    assert set(both) == {"boat", "red picture"}


def test_a_replaced_reference_is_found_by_its_new_content_and_a_removed_one_not_at_all(open_shelf):
    shelf = open_shelf()
    id = shelf.add("the lamp is here", "one").id
    shelf.add("something else entirely", "two")
    shelf.replace(id, "a boat on a lake")
    assert shelf.retriever.search(Query("a boat on a lake"), 1)[0].score > 0.99
    assert shelf.retriever.search(Query("the lamp is here"), 1)[0].score < 0.9
    shelf.library.references.remove(id)
    assert titles(shelf, "a boat on a lake") == ["two"]  # at once, before the index has heard of it
    assert shelf.retriever.flush() and shelf.retriever.status()["vectors"] == 1


def test_an_empty_library_gives_nothing(open_shelf):
    assert titles(open_shelf(), "anything") == []


def test_an_empty_query_is_refused(open_shelf):
    for text in ("", "  \n"):
        with pytest.raises(EmptyQuery):
            open_shelf().retriever.search(Query(text))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 101}, "top_k"),
        ({"min_score": 1.5}, "min_score"),
        ({"filter": {"a": {"like": "x"}}}, "filter.a.like"),
        *(({"filter": {"a": bad}}, "filter.a") for bad in (None, {}, float("nan"), "\ud800")),
        ({"filter": {"a\ud800": 1}}, "filter"),
        ({"filter": {f"k{i}": 1 for i in range(2000)}}, "filter"),
    ],
)
def test_impossible_bounds_and_filters_are_refused(options, param, open_shelf):
    with pytest.raises(BadRequest, check=lambda error: error.param == param):
        open_shelf().retriever.search(Query("x"), **options)


def test_filters_by_kind_title_and_metadata(open_shelf):
    shelf = open_shelf()
    shelf.add("a b c", "x", metadata={"year": 2019, "place": "Oslo", "open": True})
    shelf.add("a b d", "y", metadata={"year": 2024, "place": "Rome", "odd key.$": 1})
    shelf.add(picture("red"), "z", metadata={"year": 2024})

    def found(**filter):
        return sorted(titles(shelf, "a b", filter=filter))

    assert found(kind="image") == ["z"] and found(kind="text") == ["x", "y"]
    assert found(year=2024) == ["y", "z"] and found(year={"gte": 2000, "lt": 2024}) == ["x"]
    assert found(place=["Oslo", "Rome"]) == ["x", "y"] and found(place={"ne": "Oslo"}) == ["y"]
    assert found(open=True) == ["x"] and found(title="y", year=2024) == ["y"] and found(nowhere=1) == []
    assert titles(shelf, "a b", filter={"odd key.$": 1}) == ["y"]


def test_filters_know_keys_that_json_escapes_and_numbers_too_large_for_the_catalogue(open_shelf):
    shelf = open_shelf()
    metadata = {"größe": 1, "a\\b": 2, 'q"q': 3, "日本😀": 4, "a\nb": 5}
    shelf.add("a b", "x", metadata=metadata)
    for key, value in metadata.items():
        assert titles(shelf, "a b", filter={key: value}) == ["x"]
        assert titles(shelf, "a b", filter={key: value + 1}) == []
    assert titles(shelf, "a b", filter={"größe": 2**70}) == []
    assert titles(shelf, "a b", filter={"größe": {"lt": 2**70}}) == ["x"]


def test_a_filter_may_have_more_values_than_sqlite_takes_placeholders(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp", "lamp", metadata={"year": 1999, "size": 0.1, "on": True, "name": "ü\U0001f600"})
    shelf.add("a boat", "boat", metadata={"year": 50_000})
    titles(shelf, "x", filter={"year": 1})
    for connection in shelf.library.catalog._idle:  # builds of SQLite differ in their bound
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)
    many = list(range(2_000))
    assert titles(shelf, "x", filter={"year": many}) == ["lamp"]
    assert titles(shelf, "x", filter={"title": ["lamp", *map(str, many)]}) == ["lamp"]
    for key, value in (("size", 0.1), ("on", True), ("name", "ü\U0001f600")):
        assert (
            titles(shelf, "x", filter={key: [value]}) == titles(shelf, "x", filter={key: value}) == ["lamp"]
        )
    assert titles(shelf, "x", filter={"year": []}) == []


def test_text_is_neither_less_nor_greater_than_a_number(open_shelf):
    shelf = open_shelf()
    shelf.add("a b", "text", metadata={"year": "1999"})
    shelf.add("a c", "number", metadata={"year": 2020})
    assert titles(shelf, "a", filter={"year": {"gte": 2000}}) == ["number"]
    assert titles(shelf, "a", filter={"year": {"lt": "2"}}) == ["text"]


def test_near_duplicates_and_equal_content_are_collapsed_and_the_next_best_moves_up(open_shelf):
    shelf = open_shelf()
    for i in range(25):
        shelf.add("a lamp" + " " * i, f"lamp {i}", flush=False)
    shelf.add("a lamp near a boat", "boat")
    assert titles(shelf, "a lamp", top_k=2)[1] == "boat" and len(titles(shelf, "a lamp", top_k=9)) == 2
    shelf = open_shelf(duplicates=2.0)
    assert len(titles(shelf, "a lamp", top_k=9)) == 9


def test_min_score_leaves_out_what_is_less_similar(open_shelf):
    shelf = open_shelf()
    shelf.add("a lamp", "lamp")
    shelf.add("quite different words", "other")
    assert titles(shelf, "a lamp", min_score=0.9) == ["lamp"]
