"""Stop strings are found where they begin, held back while they may still appear, and cost the same time at any
length."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from mpic.engine.base import TokenLogprob
from mpic.engine.detokenize import FIRST_TOKENS, Detokenizer, DoubtDetokenizer, LineDetokenizer, detokenize

STOPS = st.lists(st.text("ab", min_size=1, max_size=7), max_size=4).map(tuple)
SAID = st.lists(st.text("abc", max_size=4), max_size=14)


ENDS = "</s>"


class Words:
    """A tokenizer whose tokens are the words of a list."""

    def __init__(self, words):
        self.words = words

    def decode(self, ids, **options):
        return "".join(self.words[i] for i in ids)


def plainly(stops, words):
    """Return the text after each word, and whether a stop string is complete, by trying every length."""
    held, out = "", []
    for word in words:
        text = held + word
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return [*out, text[: min(found)]], True
        keep = max(
            (n for stop in stops for n in range(1, len(stop) + 1) if text.endswith(stop[:n])), default=0
        )
        held = text[len(text) - keep :]
        out.append(text[: len(text) - keep])
    return out, False


@settings(max_examples=500)
@given(STOPS, SAID)
def test_text_is_held_back_and_stopped_as_by_trying_every_length(stops, words):
    detokenizer = Detokenizer(Words(words), stops)
    out = []
    for i in range(len(words)):
        out.append(detokenizer.push(i))
        if detokenizer.stopped:
            break
    assert (out, detokenizer.stopped) == plainly(stops, words)
    if detokenizer.stopped:
        said = "".join(words)[len("".join(out)) :]
        assert detokenizer.stop in stops and said.startswith(detokenizer.stop)
    else:
        assert "".join(out) + detokenizer.finish() == "".join(words)


def test_a_stop_string_that_fits_the_whole_answer_costs_no_more_with_every_token(monkeypatch):
    compared = 0

    class Letter(str):
        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str(self) == str(other)

        __hash__ = str.__hash__

    class Letters(str):
        """A stop string that counts the comparisons of its letters."""

        def __getitem__(self, at):
            assert isinstance(at, int), "a prefix is copied"
            return Letter(super().__getitem__(at))

    words = ["a"] * 4_000
    detokenizer = Detokenizer(Words(words), ())
    detokenizer._watches = [type(watch)(Letters("a" * 5_000)) for watch in Detokenizer(None, ("a",))._watches]
    for i in range(len(words)):
        assert detokenizer.push(i) == ""
    assert 4_000 <= compared < 40_000  # every length of every prefix would be 8 million
    assert detokenizer.finish() == "a" * 4_000


def read(detokenizer, words, logprobs=None):
    """Read an answer; the word ``ENDS`` ends it. Return its text, the call, and how many words were read until then."""
    text = ""
    for i, word in enumerate(words):
        logprob = TokenLogprob(i, logprobs[i], ()) if logprobs else None
        out, call, over = detokenize(detokenizer, i, word == ENDS, logprob)
        text += out
        if call is not None or over:
            return text + ("" if call is not None else detokenizer.finish()), call, i + 1
    return text + detokenizer.finish(), None, len(words)


def cuts(text):
    """Every way to cut a text into two or three words."""
    n = len(text)
    return [(text[:i], text[i:j], text[j:]) for i in range(n + 1) for j in range(i, n + 1)]


def test_a_line_at_the_start_is_a_call_however_it_is_cut_into_tokens():
    for begin in ("SEARCH: red lamp", " \n search: red lamp", "Search:red lamp"):
        for words in cuts(begin + "\nmore"):
            text, call, _ = read(LineDetokenizer(Words(words), (), "SEARCH:"), words)
            assert text == "" and call.startswith(begin + "\n")
        for words in cuts(begin):
            words = (*words, ENDS)
            text, call, count = read(LineDetokenizer(Words(words), ("never",), "SEARCH:"), words)
            assert (text, call, count) == ("", begin + ENDS, 4)


def test_any_other_text_is_shown_and_a_line_that_is_not_complete_is_not():
    for said in ("SEAR", "SEARCH", "A SEARCH: x\n", "SEA of\nSEARCH: x\n", "", "searching\n"):
        for words in cuts(said):
            for ended in (words, (*words, ENDS)):
                text, call, _ = read(LineDetokenizer(Words(ended), (), "SEARCH:"), ended)
                assert (text, call) == (said, None)
    words = ("SEARCH:", " the la")
    assert read(LineDetokenizer(Words(words), (), "SEARCH:"), words)[:2] == ("", None)


def test_a_stop_string_ends_a_line_that_asks_and_an_answer_that_does_not():
    for words, stop, expected in (
        (("SEARCH:", " lamp", "STOP", "x"), "STOP", ("", "SEARCH: lampSTOP", 3)),
        (("SEARCH: lamp", "\n", "x"), "\n", ("", "SEARCH: lamp\n", 2)),
        (("S", "o", "STOP", "x"), "STOP", ("So", None, 3)),
        (("SEA", "STOP", "x"), "STOP", ("SEA", None, 2)),
    ):
        assert read(LineDetokenizer(Words(words), (stop,), "SEARCH:"), words) == expected


def test_a_line_without_an_end_is_a_call_at_some_length():
    words = ("SEARCH:", *["word "] * 500)
    text, call, count = read(LineDetokenizer(Words(words), (), "SEARCH:"), words)
    assert text == "" and call and count < 100


def test_after_one_search_the_answer_may_ask_again_by_a_line_but_not_by_doubt():
    words = ("SEARCH: a\n", "SEARCH: b\n", "So.")
    line = LineDetokenizer(Words(words), (), "SEARCH:")
    calls = [detokenize(line, i, False).call for i in range(3)]
    assert calls == ["SEARCH: a\n", "SEARCH: b\n", None] and line.finish() == ""
    words = tuple("abcdefghij")
    doubt = DoubtDetokenizer(Words(words), (), 0.5)
    seen = [detokenize(doubt, i, False, TokenLogprob(i, -9.0, ())) for i in range(10)]
    assert [i for i, one in enumerate(seen) if one.call is not None] == [FIRST_TOKENS - 1]
    assert "".join(one.text for one in seen) == "efghij"


@given(st.lists(st.floats(-4, 0), min_size=1, max_size=8), st.booleans(), st.floats(0.05, 1))
def test_the_first_tokens_are_a_call_where_their_mean_probability_is_below_the_bound(logprobs, ended, least):
    words = [f"w{i} " for i in range(len(logprobs))]
    if ended:
        words[-1] = ENDS
    text, call, _ = read(DoubtDetokenizer(Words(words), (), least), words, logprobs)
    first = logprobs[:FIRST_TOKENS]
    known = ended or len(first) == FIRST_TOKENS
    doubted = known and sum(first) / len(first) < math.log(least)
    assert (call is not None) == doubted
    assert text == ("" if doubted else "".join(words).removesuffix(ENDS))
