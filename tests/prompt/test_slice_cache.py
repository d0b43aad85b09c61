"""A long text that a user sends again is not tokenized again, gives the same ids, and tells other users nothing."""

from __future__ import annotations

import threading

import pytest
from chat_models import byte_level
from hostile_texts import demo, prose, sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from threads_kit import in_threads

from mpic import cancel
from mpic.prompt import slice_cache
from mpic.prompt.guarded_tokenizer import Cut, GuardedTokenizer, Trusted
from mpic.prompt.slice_cache import LEAST, SliceCache

BUILD = {
    "demo": demo,
    "byte level": lambda: byte_level("<image>", "<|end|>", bos="<s>"),
    "Llama 2": sentencepiece,
}
GUARDED = {kind: GuardedTokenizer(build(), "<image>") for kind, build in BUILD.items()}
LONG = prose(3 * slice_cache.SLICE)


@pytest.fixture
def guard(monkeypatch):
    made = GuardedTokenizer(demo(), "<image>")
    made.calls = []
    plain = made.sliced._fast

    def counted(text):
        made.calls.append(text)
        return plain(text)

    monkeypatch.setattr(made.sliced, "_fast", counted)
    return made


def test_a_long_prompt_is_tokenized_once_and_gives_the_same_ids(guard):
    pieces = [Trusted("<image>"), LONG, Cut(True), LONG, Trusted("\n")]
    expected = guard.encode_pieces(pieces)
    first = guard.encode_pieces(pieces, owner="anna")
    guard.calls.clear()
    assert guard.encode_pieces(pieces, owner="anna") == first == expected
    assert sum(map(len, guard.calls)) < LEAST


def test_of_a_conversation_that_has_grown_only_the_end_is_tokenized(guard):
    guard.encode_pieces([LONG], owner="anna")
    guard.calls.clear()
    grown = [LONG, " and then it went on, and on"]
    found = guard.encode_pieces(grown, owner="anna")
    assert 0 < sum(map(len, guard.calls)) < 2 * slice_cache.SLICE < len(LONG)
    assert found == guard.encode_pieces(grown)


def test_what_one_user_has_sent_is_not_found_for_another_and_nothing_for_nobody(guard):
    guard.encode_pieces([LONG], owner="anna")
    guard.calls.clear()
    guard.encode_pieces([LONG], owner="berta")
    assert sum(map(len, guard.calls)) >= len(LONG) - 8
    guard.calls.clear()
    held = guard.sliced.known.held
    new = LONG.upper()
    guard.encode_pieces([LONG])
    guard.encode_pieces([new])
    assert sum(map(len, guard.calls)) >= len(LONG) + len(new) - 16
    assert held == guard.sliced.known.held > 0


def test_the_owner_and_the_text_cannot_be_shifted_into_each_other():
    cache = SliceCache()
    cache.keep("ab", "c", [1])
    assert cache.find("ab", "c") == [1]
    assert cache.find("a", "bc") is None and cache.find("", "abc") is None
    cache.keep("a", "\ud800", [2])  # half a surrogate pair, which JSON may hold
    assert cache.find("a", "\ud800") == [2]


@given(st.sampled_from(sorted(GUARDED)), st.text(max_size=200), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_remembered_slices_of_any_text_give_the_ids_of_the_whole(kind, text, size):
    guard = GUARDED[kind]
    expected = guard.encode_pieces([text, Cut(False), text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_cache, "SLICE", size)
        patch.setattr(slice_cache, "LEAST", 1)
        for _ in range(2):
            assert guard.encode_pieces([text, Cut(False), text], owner="anna") == expected


def test_it_holds_no_more_ids_than_it_may_and_forgets_the_longest_unused():
    cache = SliceCache(most_ids=10)
    for name in "abc":
        cache.keep("u", name, [ord(name)] * 4)
        cache.find("u", "a")
    assert cache.held == 8
    assert cache.find("u", "b") is None and cache.find("u", "a") and cache.find("u", "c")
    cache.keep("u", "a", [7] * 6)  # in place of what it had
    assert cache.held == 10 and cache.find("u", "a") == [7] * 6
    cache.keep("u", "too long", [1] * 11)
    assert cache.find("u", "too long") is None and cache.held == 10


def test_no_more_slices_are_held_than_may_be_however_short_they_are(monkeypatch):
    monkeypatch.setattr(slice_cache, "MOST_SLICES", 3)
    cache = SliceCache()
    for text in "abcd":
        cache.keep("u", text, [7])
    assert cache.held == 3 and cache.find("u", "a") is None and cache.find("u", "d") == [7]


def test_threads_share_it_and_the_count_stays_right():
    cache = SliceCache(most_ids=50)

    def work(seed):
        for i in range(400):
            name = str((i * seed) % 17)
            if (found := cache.find("u", name)) is not None:
                assert found == [int(name)] * 7
            cache.keep("u", name, [int(name)] * 7)

    in_threads(work, (1, 3, 5, 7))
    assert cache.held == sum(map(len, cache._ids.values())) <= 50


def test_a_caller_may_change_the_ids_it_gets():
    cache = SliceCache()
    cache.keep("u", "a", [1, 2])
    cache.find("u", "a").append(3)
    assert cache.find("u", "a") == [1, 2]


def test_a_known_prompt_can_still_be_cancelled(guard):
    guard.encode_pieces([LONG], owner="anna")
    left = threading.Event()
    left.set()
    with cancel.until(left), pytest.raises(cancel.Cancelled):
        guard.encode_pieces([LONG], owner="anna")
