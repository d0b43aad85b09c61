"""The bytes of tokens in log-probabilities."""

import pytest
from server_helpers import byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mpic.engine.base import Delta, TokenLogprob
from mpic.server.answers import Answer
from mpic.server.replies import Logprobs


def fallback_tokenizer():
    """SentencePiece's way: bytes of characters that are not in the vocabulary are tokens of their own."""
    names = ["<0xC3>", "<0xA9>", "a", "\ufffd"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, fallback_tokenizer])
def test_logprobs_have_the_bytes_of_tokens_that_are_part_of_a_character(tokenizer):
    tokens = tokenizer()
    ids = tokens.encode("aé", add_special_tokens=False)
    delta = Delta("", (), tuple(TokenLogprob(id, -0.5, ()) for id in ids))
    [choice] = Answer("id", "model", 1, tokens).piece(delta, True)["choices"]
    shown = Logprobs.model_validate(choice["logprobs"]).content
    assert [one.token for one in shown] == ["a", "\ufffd", "\ufffd"]
    assert b"".join(bytes(one.bytes) for one in shown).decode() == "aé"


def test_logprobs_say_when_the_bytes_of_a_token_are_not_known():
    delta = Delta("", (), (TokenLogprob(3, -0.5, ()),))
    [choice] = Answer("id", "model", 1, fallback_tokenizer()).piece(delta, True)["choices"]
    assert Logprobs.model_validate(choice["logprobs"]).content[0].bytes is None
