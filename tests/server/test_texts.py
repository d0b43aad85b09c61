"""``/v1/completions``, ``/tokenize``, ``/detokenize`` and ``/v1/embeddings``, by the stock clients' own types."""

import base64

import numpy as np
import openai
import pytest
from api_shapes import assert_shape
from fake_engine import ANSWER
from openai.types import Completion
from server_helpers import data_url, events, fake_server, png, refused_field, with_bos

from mpic.api.texts import EmbeddingList, TextCompletion, TokenizedText
from mpic.config import Config, RetrievalConfig
from mpic.prompt import ChatTemplate

UNSUPPORTED = "unsupported_parameter"
TOOL = {"type": "function", "function": {"name": "f"}}
WORDS = len(ANSWER.split(" "))


def ids_of(request):
    [segment] = request.prompt.segments
    return list(segment.token_ids)


async def complete(server, prompt="hello", **fields):
    return await server.http.post("/v1/completions", json={"prompt": prompt, **fields})


async def test_a_text_is_the_whole_prompt_and_control_strings_in_it_count(server, template):
    answer = await complete(server, "<|im_start|>user\nIMAGE#A", max_tokens=None)
    body = answer.json()
    assert_shape(TextCompletion, body)
    assert Completion.model_validate(body).choices[0].text == ANSWER
    expected = template.tokenizer("<|im_start|>user\nIMAGE#A")["input_ids"]
    assert ids_of(server.engine.requests[0]) == expected
    assert template.tokenizer.convert_tokens_to_ids("<|im_start|>") == expected[0]
    assert body["usage"]["prompt_tokens"] == len(expected) and body["id"].startswith("cmpl-")


async def test_several_prompts_and_answers_are_numbered_and_counted_together(server):
    body = (await complete(server, ["one", "three"], n=2, temperature=1, max_tokens=3, seed=5)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 4
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3 + 5, 4 * 3)
    asked = [(len(ids_of(r)), r.sampling.seed) for r in server.engine.requests]
    assert asked == [(3, 5), (3, 6), (5, 5), (5, 6)]


async def test_token_ids_are_taken_as_they_are(server):
    assert (await complete(server, [65, 66])).status_code == 200
    assert (await complete(server, [[65, 66], [67]])).status_code == 200
    assert [ids_of(r) for r in server.engine.requests] == [[65, 66], [65, 66], [67]]
    assert refused_field(await complete(server, [65, 10_000])) == (400, "bad_request", "prompt[1]")


async def test_a_stream_has_text_completions_and_the_usage_last(server):
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": WORDS}
    frames, done = events((await complete(server, "hello", **fields)).text)
    assert done and all(frame["object"] == "text_completion" for frame in frames)
    assert "".join(c["text"] for frame in frames for c in frame["choices"]) == ANSWER
    for frame in frames:
        assert_shape(TextCompletion, frame)
    assert frames[-1]["choices"] == [] and frames[-1]["usage"]["completion_tokens"] == WORDS


async def test_echoed_answers_begin_with_their_own_prompts(server, template):
    ids = template.tokenizer.encode("two", add_special_tokens=False)
    whole = (await complete(server, ["one ", "three "], echo=True, n=2, best_of=2, temperature=1)).json()
    begins = ["one "] * 2 + ["three "] * 2
    assert [choice["text"] for choice in whole["choices"]] == [begin + ANSWER for begin in begins]
    frames, _ = events((await complete(server, [ids], echo=True, stream=True)).text)
    assert frames[0]["choices"][0]["text"] == "two"
    assert "".join(frame["choices"][0]["text"] for frame in frames) == "two" + ANSWER
    for frame in (whole, *frames):
        assert_shape(TextCompletion, frame)


@pytest.mark.parametrize("asked", [0, 2])
async def test_log_probabilities_have_the_older_form_whole_and_streamed(server, asked):
    body = (await complete(server, ["a", "b"], logprobs=asked, max_tokens=3)).json()
    assert_shape(TextCompletion, body)
    for choice in Completion.model_validate(body).choices:
        found = choice.logprobs
        assert len(found.tokens) == len(found.token_logprobs) == 3 and set(found.token_logprobs) == {-0.5}
        assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(3)]
        tops = [len({token, *map(chr, range(asked))} - {""}) for token in found.tokens]
        assert (
            all(token in top for token, top in zip(found.tokens, found.top_logprobs)) and max(tops) >= asked
        )
    streamed, _ = events((await complete(server, "a", logprobs=asked, max_tokens=3, stream=True)).text)
    parts = [frame["choices"][0]["logprobs"] for frame in streamed if frame["choices"][0]["logprobs"]]
    joined = {name: [one for part in parts for one in part[name]] for name in parts[0]}
    assert joined == body["choices"][0]["logprobs"]


@pytest.mark.parametrize(
    ("fields", "field", "code"),
    [
        ({"echo": True, "logprobs": 0}, "echo", "bad_request"),
        ({"logprobs": 21}, "logprobs", "bad_request"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "bad_request"),
        ({"presence_penalty": 2.5}, "presence_penalty", "bad_request"),
        ({"logit_bias": {"99999": 1}}, "logit_bias.99999", "bad_request"),
        ({"nonsense": 1}, "nonsense", "unsupported_parameter"),
        ({"n": 2, "temperature": 0}, "n", "unsupported_parameter"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": []}, "prompt", "bad_request"),
        ({"prompt": "<image>"}, "prompt", "unsupported_modality"),
        ({"prompt": "word " * 200}, "prompt", "context_length_exceeded"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty_prompt"),
        ({"prompt": ["a", "<image>"]}, "prompt[1]", "unsupported_modality"),
        ({"prompt": ["a", "word " * 200]}, "prompt[1]", "context_length_exceeded"),
        ({"prompt": [[1], [5, 99_999]]}, "prompt[1][1]", "bad_request"),
        ({"prompt": ["a"] * 129}, "prompt", "bad_request"),
        ({"prompt": [[1]] * 129}, "prompt", "bad_request"),
        ({"stop": [""]}, "stop[0]", "bad_request"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "bad_request"),
        ({"max_tokens": 0}, "max_tokens", "bad_request"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(server, fields, field, code):
    assert refused_field(await complete(server, **{"prompt": "hello", **fields})) == (400, code, field)


async def test_another_model_is_refused(server):
    assert refused_field(await complete(server, model="other")) == (404, "model_not_found", "model")


async def test_values_that_change_nothing_are_taken(server):
    fields = {"echo": False, "best_of": 1, "suffix": "", "logit_bias": {}, "user": "a", "logprobs": None}
    answer = await complete(server, **fields, frequency_penalty=0, presence_penalty=0.0)
    assert answer.status_code == 200, answer.text


# ---- tokens


async def test_tokens_of_a_text_and_their_text(server, template):
    text = "<|im_start|>Grüße"
    body = (await server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert_shape(TokenizedText, body)
    assert body["tokens"] == template.tokenizer(text)["input_ids"]
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 512)
    assert body["token_strs"][0] == "<|im_start|>"
    back = await server.http.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": text}


async def test_tokens_of_a_conversation_are_those_that_the_engine_gets(server):
    messages = [
        {"role": "user", "content": [{"type": "document", "text": "A text."}, {"type": "text", "text": "Hi"}]}
    ]
    body = (await server.http.post("/tokenize", json={"messages": messages})).json()
    await server.ask(messages=messages)
    sent = []
    for segment in server.engine.requests[0].prompt.segments:
        sent += segment.token_ids if hasattr(segment, "token_ids") else segment.chunk.token_ids
    assert body["tokens"] == sent and body["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "field", "code"),
    [
        ("/tokenize", {}, "prompt", "bad_request"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "bad_request"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools", "bad_request"),
        ("/tokenize", {"messages": []}, "messages", "empty_prompt"),
        ("/tokenize", {"prompt": "word " * 200}, "prompt", "context_length_exceeded"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message", UNSUPPORTED),
        ("/detokenize", {"tokens": [1, 99_999]}, "tokens[1]", "bad_request"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "bad_request"),
    ],
)  # fmt: skip
async def test_refusals_of_tokens_name_the_field(server, path, body, field, code):
    assert refused_field(await server.http.post(path, json=body)) == (400, code, field)


async def test_an_image_has_no_tokens_of_text(server):
    image = {"type": "image_url", "image_url": {"url": data_url(png())}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]
    answer = await server.http.post("/tokenize", json={"messages": messages})
    assert refused_field(answer) == (400, "unsupported_modality", "messages")


@pytest.mark.parametrize(
    ("text", "added", "count"),
    [("ab", None, 3), ("ab", True, 3), ("ab", False, 2), ("<bos>ab", None, 3), ("<bos>ab", False, 3)],
)
async def test_a_tokenizer_begins_a_text_once(tmp_path, text, added, count):
    async with fake_server(tmp_path, ChatTemplate(with_bos(add_bos_token=True))) as server:
        answer = await server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": added})
        assert answer.json()["count"] == count


# ---- embeddings


async def test_vectors_are_those_of_the_embedder_of_references(server):
    texts = ["a red square", "a blue circle"]
    asked = {"input": texts, "model": "clip"}
    body = (await server.http.post("/v1/embeddings", json=asked)).json()
    assert_shape(EmbeddingList, body)
    expected = server.app.state.mpic.retriever.embedder.texts(texts)
    assert np.allclose([one["embedding"] for one in body["data"]], expected, atol=1e-6)
    packed = (await server.http.post("/v1/embeddings", json={**asked, "encoding_format": "base64"})).json()
    found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in packed["data"]]
    assert np.array_equal(found, expected)
    assert 0 < body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] < 32


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"model": "text-embedding-3-small"}, (404, "model_not_found", "model")),
        ({"input": ["a", " "]}, (400, "bad_request", "input[1]")),
        ({"input": [[320, 736]]}, (400, "bad_request", "input[0]")),
        ({"input": [["a"]]}, (400, "bad_request", "input[0]")),
        ({"input": "a red square " * 100}, (400, "context_length_exceeded", "input")),
        ({"input": ["a", "x" * 100_000]}, (400, "context_length_exceeded", "input[1]")),
        ({"dimensions": 8}, (400, "unsupported_parameter", "dimensions")),
    ],
)
async def test_refusals_of_embeddings_name_the_field(server, fields, refused):
    body = {"input": "a", "model": "clip", **fields}
    assert refused_field(await server.http.post("/v1/embeddings", json=body)) == refused


async def test_without_weights_there_are_no_embeddings(tmp_path, template):
    config = Config(retrieval=RetrievalConfig(embedder=str(tmp_path / "nowhere"), embedder_weights="none"))
    async with fake_server(tmp_path / "data", template, config=config) as server:
        answer = await server.http.post("/v1/embeddings", json={"input": "a", "model": "clip"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "embedder_unavailable")


# ---- the stock client


def test_the_stock_client_completes_and_embeds(keyed):
    url, keys = keyed
    secret, _ = keys.create("texts")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0) as client:
        whole = client.completions.create(model="tiny", prompt="hello", max_tokens=5)
        pieces = client.completions.create(model="tiny", prompt="hello", max_tokens=5, stream=True)
        assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
        assert whole.usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="hello", suffix="end")
        assert refused.value.param == "suffix"
        vectors = client.embeddings.create(model="clip", input=["a red square"]).data
        assert len(vectors[0].embedding) == 128
