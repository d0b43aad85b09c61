"""Stop strings are found where they begin, held back while they may still appear, and cost the same time at any
length."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mpic.engine.detokenize import Detokenizer

STOPS = st.lists(st.text("ab", min_size=1, max_size=7), max_size=4).map(tuple)
SAID = st.lists(st.text("abc", max_size=4), max_size=14)


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
