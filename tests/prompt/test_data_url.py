"""Data URLs are decoded slice by slice, as strictly as base64 is defined."""

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpic.errors import InvalidImage
from mpic.prompt import data_url
from mpic.prompt.data_url import decode_base64, decode_data_url


@pytest.fixture(autouse=True, params=[1, 2, 3, 5, 8, 1 << 20])
def slice_of(request, monkeypatch):
    monkeypatch.setattr(data_url, "SLICE", request.param)


@given(st.binary(max_size=60), st.lists(st.integers(0, 80), max_size=4))
def test_white_space_is_left_out(data, places):
    text = base64.b64encode(data).decode()
    for at in places:
        text = text[:at] + " \n"[at % 2] + text[at:]
    assert decode_base64(text) == data
    assert decode_data_url("data:image/png;base64," + text) == data


@given(st.text("QUJD=+/\n!é", max_size=12))
def test_what_is_not_base64_is_refused_however_it_is_sliced(text):
    letters = "".join(text.split())
    if re.fullmatch("(?:[A-Z+/]{4})*(?:[A-Z+/]{2}==|[A-Z+/]{3}=)?", letters):
        assert decode_base64(text) == base64.b64decode(letters)
    else:  # some versions of Python take more than this
        with pytest.raises(ValueError):
            decode_base64(text)


class Watched(str):
    """A text that notes how long the slices are that are taken from it."""

    def __getitem__(self, place):
        self.taken = [*getattr(self, "taken", ()), found := super().__getitem__(place)]
        return found


@pytest.mark.parametrize("start", ["=", "QQ=", "QQ==", "QUJDQUJD="])
def test_what_follows_the_padding_is_refused_after_a_few_slices(start, monkeypatch):
    monkeypatch.setattr(data_url, "SLICE", 8)
    text = Watched(start + "aa " * 10_000)
    with pytest.raises(ValueError):
        decode_base64(text)
    assert sum(map(len, text.taken)) <= 4 * 8


def test_white_space_may_follow_the_padding_and_part_it(monkeypatch):
    monkeypatch.setattr(data_url, "SLICE", 8)
    text = Watched("QUJDQQ=" + " \n" * 1_000 + "=" + " " * 1_000)
    assert decode_base64(text) == b"ABCA"
    assert max(map(len, text.taken)) <= 8


@pytest.mark.parametrize(
    "url", ["data:image/png,AAAA", "data:text/plain;base64,AAAA", "data:", "data:image/png;base64"]
)
def test_other_urls_are_refused(url):
    with pytest.raises(InvalidImage, match="data URL must read"):
        decode_data_url(url, "where")
