"""Long texts are tokenized in slices, which give exactly the tokens of the whole."""

import json
import threading

import pytest
from chat_models import byte_level, metaspace, unigram, word_level
from hostile_texts import LONG, SCRIPTS, TEXTS, Recorder, demo, prose, recorded, sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mpic import cancel
from mpic.errors import ContextLengthExceeded
from mpic.prompt import sliced_tokenizer
from mpic.prompt.bounds import Limit
from mpic.prompt.guarded_tokenizer import Cut, GuardedTokenizer, Trusted
from mpic.prompt.sliced_tokenizer import MOST, SPACE

NAMES = ("<image>", "<|end|>")


def looking(pattern: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer of words that a pattern finds, which may look around; None: of texts that are stripped."""
    state = json.loads(demo().backend_tokenizer.to_str())
    if pattern is None:
        state["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    else:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        state["pre_tokenizer"]["pretokenizers"][0] = split
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))


CUT = {  # tokenizers whose texts are cut at spaces
    "demo": demo,
    "byte level": lambda: byte_level(*NAMES, bos="<s>"),
    "Llama 2": sentencepiece,
    "Llama 2, not legacy": lambda: sentencepiece(legacy=False),
}
OTHERS = {
    "tokens of several words": lambda: metaspace(*NAMES),
    "unigram": lambda: unigram(*NAMES),
    "words": lambda: word_level(*NAMES),
    "looking behind": lambda: looking(r"(?<=a) b"),
    "looking for the ends": lambda: looking(r"^a|b$"),
    "stripped": lambda: looking(None),
}
GUARDED = {kind: GuardedTokenizer(build(), "<image>") for kind, build in {**CUT, **OTHERS}.items()}
every = pytest.mark.parametrize("kind", GUARDED)


@pytest.fixture
def slice_of(monkeypatch):
    return lambda size: monkeypatch.setattr(sliced_tokenizer, "SLICE", size)


def whole(kind, text):
    return GUARDED[kind]._twin.encode(text, add_special_tokens=False)


def same(kind, text):
    guard, encoding = GUARDED[kind], whole(kind, text)
    assert list(guard.encode(text)) == encoding.ids
    assert list(guard.sliced.spans(text)) == encoding.offsets


def test_which_tokenizers_get_their_texts_in_slices():
    """Only a vocabulary with tokens of several words joins words."""
    assert {kind for kind, guard in GUARDED.items() if guard.sliced.joins} == {"tokens of several words"}


@given(st.sampled_from(sorted(GUARDED)), TEXTS, st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_slices_give_the_tokens_and_places_of_the_whole(kind, text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_tokenizer, "SLICE", size)
        same(kind, text)


@given(
    st.sampled_from(sorted(GUARDED)),
    st.lists(st.tuples(st.integers(0, 2), TEXTS), max_size=6),
    st.integers(1, 40),
)
@settings(max_examples=300, deadline=None)
def test_slices_of_template_and_client_text_around_cuts_give_the_tokens_of_the_whole(kind, drawn, size):
    pieces = [
        Trusted(text) if what == 0 else Cut(image=len(text) % 2 == 0) if what == 1 else text
        for what, text in drawn
    ]
    guard = GUARDED[kind]
    expected = guard.encode_pieces(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_tokenizer, "SLICE", size)
        assert guard.encode_pieces(pieces) == expected
    spelt = "".join(guard._spelt(piece)[0] for piece in pieces)
    ids = [token for token in whole(kind, spelt).ids if token not in guard._cut_ids]
    joined = [token for run in expected for token in run]
    assert joined in (ids, [*guard.prefix, *ids])


@every
@pytest.mark.parametrize("text", [*LONG, prose(200_000)], ids=lambda text: f"{text[:6]!r} x {len(text)}")
def test_long_hostile_texts_give_the_tokens_of_the_whole(kind, text, slice_of):
    text = text[:MOST]
    slice_of(1_000)
    assert list(GUARDED[kind].encode(text)) == whole(kind, text).ids


@pytest.mark.parametrize("kind", ["demo", "byte level"])
@pytest.mark.parametrize("text", ["One\ntwo\n\n3\n", "1 2. 3 4, ", "漢字。かな、"], ids=repr)
def test_texts_without_a_space_between_letters_are_cut_where_it_changes_no_token(kind, text, monkeypatch):
    recorder = recorded(GUARDED[kind].sliced, monkeypatch)
    text *= 3 * MOST // len(text)
    same(kind, text)
    assert max(recorder.sizes) <= MOST


@every
@pytest.mark.parametrize("text", ["a", " ", "\n", "漢", "aZ9+/Q"], ids=repr)
def test_no_slice_is_longer_than_may_be_and_none_is_left_out(kind, text, monkeypatch):
    recorder = recorded(GUARDED[kind].sliced, monkeypatch)
    text *= 4 * MOST // len(text)
    spans = list(GUARDED[kind].sliced.spans(text))
    assert max(recorder.sizes) <= MOST < sum(recorder.sizes)
    if text.strip() and kind != "words":
        assert spans[0][0] == 0 and spans[-1][1] == len(text)


@pytest.mark.parametrize("kind", CUT)
def test_a_tokenizer_is_given_no_more_than_a_slice_and_lets_other_threads_run(kind, monkeypatch):
    guard = GUARDED[kind]
    recorder = recorded(guard.sliced, monkeypatch)
    text = prose(300_000)
    guard.encode(text)
    list(guard.sliced.spans(text))
    guard.encode_pieces([Trusted("USER: "), text, Cut(image=False), text])
    guard.sliced.counter()(text, 10**9)
    assert max(recorder.sizes) < sliced_tokenizer.SLICE + 100 and len(recorder.sizes) > 20


@every
def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(kind, monkeypatch):
    guard = GUARDED[kind]
    recorder = recorded(guard.sliced, monkeypatch)
    text, limit = prose(100_000), Limit(100, 101, "the prompt", "messages")
    for work in (
        lambda: guard.encode(text, limit),
        lambda: guard.encode_pieces([Trusted("USER: "), text], limit),
    ):
        with pytest.raises(ContextLengthExceeded) as caught:
            work()
        assert caught.value.param == "messages" and caught.value.details["context_length"] == 101
        assert caught.value.details["prompt_tokens"] > 100
    assert not recorder.sizes or guard.sliced.longest is None  # about these nothing can be known


@pytest.mark.parametrize("kind", CUT)
def test_a_text_that_may_fit_is_tokenized_until_it_does_not(kind, monkeypatch):
    guard = GUARDED[kind]
    recorder = recorded(guard.sliced, monkeypatch)
    text = prose(1_000_000)
    limit = Limit(len(text) // guard.sliced.longest + 1, 10**6)
    monkeypatch.setattr(sliced_tokenizer, "SLICE", 1_000)
    with pytest.raises(ContextLengthExceeded):
        guard.encode(text, limit)
    assert sum(recorder.sizes) < len(text)
    guard.encode(text[:1_000], limit)


def test_what_nobody_waits_for_is_not_tokenized_to_the_end(monkeypatch):
    guard = GUARDED["demo"]
    left = threading.Event()

    class Leaves(Recorder):
        def _note(self, texts):
            super()._note(texts)
            if len(self.sizes) == 3:
                left.set()

    for work in (
        guard.encode,
        lambda text: list(guard.sliced.spans(text)),
        lambda text: guard.encode_pieces([text]),
    ):
        left.clear()
        recorder = Leaves(GUARDED["demo"]._twin)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guard.sliced, "tokenizer", recorder)
            with cancel.until(left), pytest.raises(cancel.Cancelled):
                work(prose(1_000_000))
        assert len(recorder.sizes) == 3


def test_scripts_without_spaces_between_words_are_among_the_texts():
    assert any(SPACE.search(script) for script in SCRIPTS) and not SPACE.search(LONG[2])
