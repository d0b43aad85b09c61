"""The bytes of tokens in log-probabilities, and how answers with them are written."""

import threading

import pytest
from api_shapes import assert_shape
from server_helpers import byte_tokenizer
from starlette.responses import JSONResponse
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mpic.api.completion import Logprobs
from mpic.engine.base import Delta, TokenLogprob
from mpic.http import body
from mpic.server.completions import CompletionWriter


def fallback_tokenizer():
    """SentencePiece's way: bytes of characters that are not in the vocabulary are tokens of their own."""
    names = ["<0xC3>", "<0xA9>", "a", "\ufffd"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def written(tokenizer, ids):
    delta = Delta("", (), tuple(TokenLogprob(id, -0.5, ()) for id in ids))
    [choice] = CompletionWriter("id", "model", 1, tokenizer, logprobs=True).chunk(delta)["choices"]
    assert_shape(Logprobs, choice["logprobs"])
    return choice["logprobs"]["content"]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, fallback_tokenizer])
def test_logprobs_have_the_bytes_of_tokens_that_are_part_of_a_character(tokenizer):
    tokens = tokenizer()
    ids = tokens.encode("aé", add_special_tokens=False)
    shown = written(tokens, ids)
    assert [one["token"] for one in shown] == ["a", "\ufffd", "\ufffd"]
    assert b"".join(bytes(one["bytes"]) for one in shown).decode() == "aé"


def test_logprobs_are_numbers_that_json_has():
    odd = (float("nan"), float("-inf"), -1e300)
    delta = Delta("a", (65,), tuple(TokenLogprob(65, one, ((65, one),)) for one in odd))
    [choice] = CompletionWriter("id", "model", 1, byte_tokenizer(), logprobs=True).chunk(delta)["choices"]
    content = choice["logprobs"]["content"]
    assert [(one["logprob"], one["top_logprobs"][0]["logprob"]) for one in content] == [
        (-9999.0, -9999.0)
    ] * 3


def test_logprobs_have_null_bytes_for_unknown_tokens():
    assert written(fallback_tokenizer(), [3])[0]["bytes"] is None


def test_a_token_is_decoded_once_for_an_answer():
    tokens = byte_tokenizer()
    ids, decoded = tokens.encode("banana", add_special_tokens=False), []
    decode = tokens.decode
    tokens.decode = lambda ids, **options: decoded.extend(ids) or decode(ids, **options)
    assert [one["token"] for one in written(tokens, ids)] == list("banana")
    assert sorted(decoded) == sorted(set(ids))


async def test_an_answer_with_logprobs_is_written_on_a_thread_and_in_small_parts(server, monkeypatch):
    """Or long ones would hold up every other request, on the event loop itself or by the interpreter's lock."""
    threads, sizes = set(), []
    tokenizer, encode = server.app.state.mpic.template.tokenizer, body.COMPACT.encode
    decode = tokenizer.decode
    server.engine.answer = " ".join(["word"] * 200)

    def decoding(ids, **options):
        threads.add(threading.get_ident())
        return decode(ids, **options)

    def encoding(value):
        threads.add(threading.get_ident())
        sizes.append(len(encode(value)))
        return encode(value)

    monkeypatch.setattr(tokenizer, "decode", decoding)
    monkeypatch.setattr(body.COMPACT, "encode", encoding)
    answer = await server.ask(logprobs=True, top_logprobs=20, n=2, temperature=1.0)
    assert threads and threading.get_ident() not in threads
    assert max(sizes) < 2000 < sum(sizes)
    for choice in answer.json()["choices"]:
        assert_shape(Logprobs, choice["logprobs"])
        assert len(choice["logprobs"]["content"]) == 200
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 20


def test_json_written_in_parts_is_that_of_other_responses():
    value = {"a": [{"é": None}, [], {}, (1, 2.5), True], "b": {"c": {"d": {"e": {"f": {"g": ["h", '"']}}}}}}
    assert body.write(value).encode() == JSONResponse(value).body
    with pytest.raises(ValueError):
        body.write([float("nan")])
