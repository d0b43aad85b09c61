"""JSON is bounded before it is parsed, and otherwise equals the result of ``json.loads``."""

import json

import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpic import bounded_json
from mpic.bounded_json import Bounds, HalfPair, TooMuch, count, read

ODD = ('"', "\\", "\n", "\\u0041", "é", "中", "🙂", "data:", *"[{,}]", "\x01", "\ufeff", "x" * 30, '\\"')
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]
DAMAGE = [b'"', b"\\", b"[", b"}", b",", b"x", b"\xff", b"\x01", b""]
STRINGS = st.lists(st.sampled_from(ODD) | st.text(max_size=3), max_size=8).map("".join)
VALUES = st.recursive(
    STRINGS | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture(autouse=True, params=[(1, 1), (3, 4), (17, 10), (1 << 18, 1 << 8)], ids=str)
def sizes(request, monkeypatch):
    """Bytes of a slice, and of a string that may be a data URL."""
    monkeypatch.setattr(bounded_json, "SLICE", request.param[0])
    monkeypatch.setattr(bounded_json, "LONG", request.param[1])


@settings(max_examples=50, deadline=None)  # for each of the sizes
@given(VALUES, st.booleans(), st.sampled_from([None, 2]), st.sampled_from(ENCODINGS))
def test_the_value_is_that_of_json_loads(value, escaped, indent, encoding):
    body = json.dumps(value, ensure_ascii=escaped, indent=indent).encode(encoding)
    assert read(body, Bounds()) == read(bytearray(body), Bounds()) == json.loads(body) == value


@settings(max_examples=50, deadline=None)  # for each of the sizes
@given(VALUES, st.integers(0, 200), st.sampled_from(DAMAGE))
def test_what_json_loads_refuses_is_refused(value, at, damage):
    body = json.dumps(value, ensure_ascii=False).encode()
    body = body[:at] + damage + body[at + 1 :]
    try:
        expected = json.loads(body)
    except ValueError:
        with pytest.raises(ValueError):
            read(body, Bounds())
        return
    try:
        json.dumps(expected, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which json.loads lets pass
        with pytest.raises(ValueError):
            read(body, Bounds())
    else:
        assert read(body, Bounds()) == expected


@pytest.mark.parametrize(
    "body",
    [rb'"\ud83d"', rb'["a", {"\ude42": 1}]', rb'"' + rb"\ud83d\ude42" * 20 + rb'\ud83d"', b'"\xed\xa0\xbd"'],
)
def test_half_of_a_surrogate_pair_raises(body):
    with pytest.raises((HalfPair, UnicodeDecodeError)):
        read(body, Bounds())


@pytest.mark.parametrize(
    ("bounds", "fits", "beyond", "what"),
    [
        (Bounds(values=4), b"[1, [2]]", b"[1, [2, 3]]", "values"),
        (Bounds(values=3), b'{"a,[": "b,[{", "c": 1}', b'{"a": 1, "b": 2, "c": 3}', "values"),
        (Bounds(text=6), b'["abc", "def"]', b'["abc", "defg"]', "text"),
        (Bounds(text=6), b'{"a": "' + b"\\\\" + b'", "b": 1}', b'{"abc": "abcd"}', "text"),
        (Bounds(depth=3), b'[[["[[["]], []]', b"[[[[]]]]", "depth"),
        (Bounds(depth=2), b'{"a": ["]", "["]}', b'{"a": [[]]}', "depth"),
        (Bounds(), b"[" * 200 + b"]" * 200, b"[" * 201 + b"]" * 201, "depth"),
        (Bounds(), b'{"a":' * 200 + b"1" + b"}" * 200, b'{"a":' * 201 + b"1" + b"}" * 201, "depth"),
    ],
)
def test_bounds(bounds, fits, beyond, what):
    assert read(fits, bounds) == json.loads(fits)
    with pytest.raises(TooMuch, check=lambda error: error.what == what):
        read(beyond, bounds)


def test_data_urls_do_not_count_as_text():
    url = "data:image/png;base64," + "A" * 2_000
    assert read(json.dumps([url, url, "abc"]).encode(), Bounds(text=10)) == [url, url, "abc"]
    with pytest.raises(TooMuch):
        read(json.dumps([" " + url]).encode(), Bounds(text=1_000))


def test_white_space_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(bounded_json, "LOOSE", 1_000)
    assert read(b"[" + b" " * 900 + b"]", Bounds()) == []
    with pytest.raises(TooMuch, check=lambda error: error.what == "loose"):
        read(b"[" + b" " * 1_100 + b"]", Bounds())


@settings(max_examples=50, deadline=None)  # for each of the sizes
@given(VALUES)
def test_the_values_of_a_parsed_text_are_counted_as_the_bound_counts_them(value):
    body, values = json.dumps(value).encode(), count(value)
    assert read(body, Bounds(values=values)) == value
    with pytest.raises(TooMuch, check=lambda error: error.what == "values"):
        read(body, Bounds(values=values - 1))


def test_a_text_beyond_a_bound_is_never_parsed(monkeypatch):
    monkeypatch.setattr(pydantic_core, "from_json", None)
    for body in (
        b"[" + b"1," * 50_000 + b"1]",
        b"[" * 50_000,
        b'["' + b"x" * 50_000 + b'"]',
        b'{"a":' * 50_000,
    ):
        with pytest.raises(TooMuch):
            read(body, Bounds(values=10_000, text=10_000))


@pytest.mark.parametrize("sizes", [(1 << 18, 1 << 8)], indirect=True)
def test_a_short_text_is_scanned_only_if_what_is_in_its_strings_could_exceed_a_bound(monkeypatch, sizes):
    scanned, scan = [], bounded_json._Scan
    monkeypatch.setattr(bounded_json, "_Scan", lambda *args: scanned.append(1) or scan(*args))
    value = {"messages": [{"content": "a, b " * 2_000}]}
    assert read(json.dumps(value).encode(), Bounds(values=3_000, text=20_000)) == value and not scanned
    for bounds in (Bounds(values=1_000), Bounds(text=10_020), Bounds(depth=2)):
        scanned.clear()
        body = json.dumps(value if bounds.depth > 2 else ["[[["]).encode()
        assert read(body, bounds) == json.loads(body) and scanned, bounds
