"""Texts that cannot fit are refused by their length, and texts that could fit are not."""

import json

import pytest
from chat_models import BUILD, byte_level, metaspace, processor, unigram, word_level
from hostile_texts import LONG, TEXTS, demo, prose, recorded, sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mpic.errors import ContextLengthExceeded
from mpic.prompt import ChatTemplate, build_prompt
from mpic.prompt.bounds import check_conversation, least_tokens, utf8_length
from mpic.prompt.guarded_tokenizer import GuardedTokenizer


def changed(**parts):
    """Return the demo's tokenizer with one part replaced."""
    tokenizer = Tokenizer.from_str(demo().backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def with_strip():
    tokenizer = changed()
    tokenizer.add_tokens([AddedToken("eats", lstrip=True)])
    return tokenizer


SPLIT = pre_tokenizers.Split("x", "removed")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
KNOWN = {
    "demo": demo,
    "byte level": lambda: byte_level(bos="<s>"),
    "metaspace": metaspace,
    "Llama 2": sentencepiece,
    "NFKC": lambda: changed(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "NFC": lambda: changed(normalizer=normalizers.NFC()),
}
UNKNOWN = {
    "drops white space": word_level,
    "one token for unknown text": unigram,
    "strips": lambda: changed(normalizer=normalizers.Strip()),
    "drops what does not match": lambda: changed(pre_tokenizer=pre_tokenizers.Sequence([SPLIT, BYTES])),
    "a token that eats white space": with_strip,
}
GUARDED = {kind: GuardedTokenizer(build()) for kind, build in KNOWN.items()}


@given(st.sampled_from(sorted(KNOWN)), TEXTS)
@settings(max_examples=300, deadline=None)
def test_no_text_has_fewer_tokens_than_its_lower_bound(kind, text):
    guard = GUARDED[kind]
    for most in (0, 10, 10**9):
        assert least_tokens([text], guard.sliced.longest, most) <= len(guard.encode(text))


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("text", LONG, ids=lambda text: repr(text[:6]))
def test_no_long_text_has_fewer_tokens_than_its_lower_bound(kind, text):
    guard = GUARDED[kind]
    text = text[:30_000]
    assert 0 < least_tokens([text], guard.sliced.longest, 0) <= len(guard.encode(text))


@pytest.mark.parametrize("kind", UNKNOWN)
def test_tokenizers_that_do_not_account_for_every_byte_have_no_bound(kind):
    assert GuardedTokenizer(UNKNOWN[kind]()).sliced.longest is None


@pytest.mark.parametrize("family", BUILD)
def test_the_longest_token_of_every_family(family):
    tokenizer = getattr(processor(family), "tokenizer", processor(family))
    longest = ChatTemplate(processor(family)).longest_token
    assert longest is None or longest <= max(len(piece.encode()) for piece in tokenizer.get_vocab())


@given(st.text(max_size=30))
def test_bytes_are_counted_as_they_would_be_written(text):
    assert utf8_length(text) == len(text.encode())


# ---- conversations


def user(content):
    return {"role": "user", "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    "messages",
    [
        [user("x")] * 101,
        [user(parts(*"x" * 60)), user(parts(*"x" * 60))],
        [user("x" * 1_001)],
        [user(parts("x" * 600, "x" * 600))],
        [user("é" * 501)],
        [{"role": "system", "content": "x" * 2_000}, user("x")],
        [{"role": "assistant", "content": "<think>short</think>" + "x" * 1_001}, user("x")],
    ],
)
def test_a_conversation_that_cannot_fit_is_refused(messages):
    with pytest.raises(ContextLengthExceeded) as caught:
        check_conversation(messages, 100, 10)
    assert caught.value.param == "messages" and caught.value.details["prompt_tokens"] >= 100


@pytest.mark.parametrize(
    "messages",
    [
        [user("x" * 990)],
        [user(" " * 5_000 + "x" + "\n" * 5_000)],  # a template may trim it
        [user("FILE#NAME " * 200)],  # each may become a single token
        # thoughts may be left out
        [{"role": "assistant", "content": "<think>" + "x" * 5_000 + "</think>answer"}, user("x")],
        [user("x")] * 99,
        [{"role": "assistant", "content": None, "tool_calls": []}, user("x")],
    ],
)
def test_a_conversation_that_may_fit_is_not(messages):
    check_conversation(messages, 100, 10)


def test_without_a_longest_token_only_messages_and_parts_are_counted():
    check_conversation([user("x" * 10**6)], 100, None)
    with pytest.raises(ContextLengthExceeded):
        check_conversation([user("x")] * 100, 100, None)


# ---- templates that know their context


def test_a_template_refuses_a_prompt_by_its_length_and_never_tokenizes_it(monkeypatch):
    template = ChatTemplate(demo(), image_token="<image>").within(2048)
    recorder = recorded(template.documents, monkeypatch)
    with pytest.raises(ContextLengthExceeded) as caught:
        build_prompt([user(prose(1_000_000))], template, None)
    assert "context is 2048" in caught.value.message and caught.value.param == "messages"
    with pytest.raises(ContextLengthExceeded):
        template.tokenize_document(prose(1_000_000))
    assert recorder.sizes == []


def test_a_prompt_must_leave_room_for_a_token_and_a_document_need_not():
    template = ChatTemplate(byte_level(), image_token=None)
    ids = template.tokenize_document(prose(300))
    assert template.within(len(ids)).tokenize_document(prose(300)) == ids
    with pytest.raises(ContextLengthExceeded):
        template.within(len(ids) - 1).tokenize_document(prose(300))
    [segment] = build_prompt([user(prose(300))], template, None).segments
    assert build_prompt([user(prose(300))], template.within(len(segment) + 1), None).segments == (segment,)
    with pytest.raises(ContextLengthExceeded):
        build_prompt([user(prose(300))], template.within(len(segment)), None)
    assert template.context is None


def test_the_demo_models_longest_token_is_what_its_vocabulary_says():
    state = json.loads(demo().backend_tokenizer.to_str())
    control = {token["content"] for token in state["added_tokens"]}
    pieces = state["model"]["vocab"].keys() - control
    assert GUARDED["demo"].sliced.longest == max(map(len, pieces))
