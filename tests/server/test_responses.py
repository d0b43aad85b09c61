"""OpenAI's ``/v1/responses``: the stock client and its own types, the translation, what is kept, and refusals by
field."""

import json

import openai
import pytest
from api_shapes import assert_shape
from chat_models import processor
from fake_engine import ANSWER, CHUNK_TOKENS, FakeEngine
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server_helpers import data_url, fake_server, png, refusal, refused_field

from mpic.api.responses import ResponseObject
from mpic.errors import ResponseNotFound
from mpic.prompt import ChatTemplate
from mpic.server import kept_responses
from mpic.server.kept_responses import KeptResponse, KeptResponses

WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
CALL = 'Let me look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
IMAGE = {"type": "input_image", "image_url": data_url(png()), "detail": "auto"}
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def hermes(tmp_path):
    """A server whose template is Qwen's, and a big context."""
    template = ChatTemplate(processor("qwen3"))
    async with fake_server(tmp_path, template, FakeEngine(context=10_000, pool=10_000)) as server:
        yield server


async def send(server, input="hello", headers=None, **fields):
    return await server.http.post("/v1/responses", json={"input": input, **fields}, headers=headers)


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def words(text):
    return {"type": "input_text", "text": text}


def prompt_of(server, number=-1):
    decode = server.app.state.mpic.template.tokenizer.decode
    segments = server.engine.requests[number].prompt.segments
    return "".join(decode(s.token_ids) if hasattr(s, "token_ids") else f"({s.chunk.kind})" for s in segments)


def frames(text):
    found = [frame.split("\n") for frame in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


async def test_an_answer_is_a_response_and_the_usage_is_in_its_words(server):
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "model": "fake", "max_output_tokens": 50}
    body = (await send(server, user(IMAGE, words("What?")), **fields)).json()
    assert_shape(ResponseObject, body)
    stock = Response.model_validate(body)
    assert (stock.output_text, stock.status, stock.metadata) == (ANSWER, "completed", {"a": "b"})
    usage = stock.usage
    details = usage.input_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (CHUNK_TOKENS - 16, 0)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert prompt_of(server) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n(image)What?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_an_answer_that_is_cut_off_is_incomplete(server):
    body = (await send(server, max_output_tokens=2)).json()
    assert_shape(ResponseObject, body)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    name, last = frames((await send(server, max_output_tokens=2, stream=True)).text)[-1]
    assert name == "response.incomplete" and last["response"]["output"][0]["status"] == "incomplete"


async def test_a_stream_has_the_events_of_openai_in_their_order(server):
    events = frames((await send(server, stream=True)).text)
    count = len(ANSWER.split(" "))
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * count,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    for i, (name, data) in enumerate(events):
        assert EVENT.validate_python(data).type == name == data["type"]
        assert data["sequence_number"] == i
    last = events[-1][1]["response"]
    assert_shape(ResponseObject, last)
    whole = (await send(server)).json()
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert set(last) == set(whole)


async def test_calls_are_items_whole_and_streamed_and_their_outputs_go_back(hermes):
    hermes.engine.answer = CALL
    body = (await send(hermes, "Weather?", tools=[WEATHER])).json()
    assert_shape(ResponseObject, body)
    [said, called] = body["output"]
    assert said["content"][0]["text"].strip() == "Let me look."
    assert (called["name"], json.loads(called["arguments"])) == ("get_weather", {"city": "Köln"})
    events = frames((await send(hermes, "Weather?", tools=[WEATHER], stream=True)).text)
    items = [data["item"]["type"] for name, data in events if name == "response.output_item.added"]
    assert items == ["message", "function_call"]
    [done] = [data for name, data in events if name == "response.function_call_arguments.done"]
    assert json.loads(done["arguments"]) == {"city": "Köln"} and EVENT.validate_python(done)
    output = {"type": "function_call_output", "call_id": called["call_id"], "output": "rain"}
    by_hand = await send(hermes, [*user(words("Weather?")), *body["output"], output], tools=[WEATHER])
    assert by_hand.status_code == 200, by_hand.text
    kept = await send(hermes, [output], previous_response_id=body["id"], tools=[WEATHER])
    assert kept.status_code == 200, kept.text
    references = [{"type": "item_reference", "id": item["id"]} for item in body["output"]]
    named = await send(hermes, [*user(words("Weather?")), *references, output], tools=[WEATHER])
    assert named.status_code == 200, named.text
    shown = prompt_of(hermes, -3)
    assert shown == prompt_of(hermes, -2) and "rain" in shown and shown.count("<tool_call>\n{") == 1
    assert prompt_of(hermes).count("<tool_call>\n{") == 1


async def test_a_request_goes_on_from_a_response_without_its_instructions(server):
    first = (await send(server, user(IMAGE, words("What?")), instructions="Be brief.")).json()
    second = (
        await send(server, "And now?", previous_response_id=first["id"], instructions="Be long.")
    ).json()
    expected = (
        f"<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\n(image)What?<|im_end|>\n<|im_start|>assistant\n"
        f"{ANSWER}<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_of(server) == expected and second["previous_response_id"] == first["id"]
    streamed = frames((await send(server, "On?", previous_response_id=second["id"], stream=True)).text)[-1][1]
    assert prompt_of(server).count(ANSWER) == 2
    shown = await server.http.get(f"/v1/responses/{streamed['response']['id']}")
    assert shown.json() == streamed["response"]


async def test_a_wrong_message_is_named_in_the_request_and_not_in_what_came_before(server):
    first = (await send(server, instructions="Be brief.")).json()
    wrong = [{"role": "user", "content": [{"type": "input_file", "file_id": "file-none"}, words("?")]}]
    for fields in ({}, {"instructions": "Be long."}):
        answer = await send(server, wrong, previous_response_id=first["id"], **fields)
        assert refused_field(answer) == (404, "file_not_found", "input[0].content[0].file_id")
    file = await server.uploaded(b"words", "w.txt")
    linked = [{"role": "user", "content": [{"type": "input_file", "file_id": file["id"]}, words("?")]}]
    second = (await send(server, linked)).json()
    await server.http.delete(f"/v1/files/{file['id']}")
    answer = await send(server, "And?", previous_response_id=second["id"])
    assert refused_field(answer) == (404, "file_not_found", "previous_response_id")


async def test_responses_are_kept_for_their_user_and_not_with_store_false(server):
    alice, bob = server.key("alice"), server.key("bob")
    mine = (await send(server, headers=alice)).json()
    path = f"/v1/responses/{mine['id']}"
    assert refusal(await server.http.get(path, headers=bob)) == (404, "response_not_found")
    answer = await send(server, headers=bob, previous_response_id=mine["id"])
    assert refused_field(answer) == (404, "response_not_found", "previous_response_id")
    assert refusal(await server.http.delete(path, headers=bob)) == (404, "response_not_found")
    assert (await server.http.delete(path, headers=alice)).json()["deleted"] is True
    assert refusal(await server.http.get(path, headers=alice)) == (404, "response_not_found")
    passing = (await send(server, headers=alice, store=False)).json()
    gone = await server.http.get(f"/v1/responses/{passing['id']}", headers=alice)
    assert refusal(gone) == (404, "response_not_found") and passing["store"] is False


async def test_an_error_in_the_middle_of_a_stream_is_a_failed_response(server):
    server.engine.fail_at = 2
    name, data = frames((await send(server, stream=True)).text)[-1]
    assert (name, data["response"]["status"]) == ("response.failed", "failed")
    assert data["response"]["error"]["code"] == "internal_error"


# ---- what is kept


def kept(id, size=0):
    return KeptResponse({"id": id}, (), size)


def test_a_response_is_forgotten_an_hour_after_its_last_use():
    now = [0.0]
    responses = KeptResponses(lambda: now[0])
    responses.keep("a", kept("one"))
    responses.keep("b", kept("two"))
    now[0] = kept_responses.LIFE_SECONDS - 1
    assert responses.get("a", "one").body == {"id": "one"}
    now[0] = kept_responses.LIFE_SECONDS
    assert responses.get("a", "one")
    with pytest.raises(ResponseNotFound):
        responses.get("b", "two")
    assert "b" not in responses._users and "b" not in responses._bytes


def test_the_oldest_make_room_of_one_user_and_of_all(monkeypatch):
    monkeypatch.setattr(kept_responses, "USER_BYTES", 100)
    monkeypatch.setattr(kept_responses, "ALL_BYTES", 150)
    monkeypatch.setattr(kept_responses, "OVERHEAD", 0)
    times = iter(range(100))
    responses = KeptResponses(lambda: next(times))
    found = lambda: {user: list(ids) for user, ids in responses._users.items()}
    for id in ("one", "two", "three"):
        responses.keep("a", kept(id, 40))
    assert found() == {"a": ["two", "three"]}
    responses.get("a", "two")
    responses.keep("b", kept("four", 90))
    assert found() == {"a": ["two"], "b": ["four"]}
    responses.keep("b", kept("five", 101))
    assert found() == {"a": ["two"]} and responses._bytes == {"a": 40}


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
async def test_log_probabilities_stand_in_the_text_whole_and_streamed(server, fields):
    body = (await send(server, **fields)).json()
    assert_shape(ResponseObject, body)
    found = body["output"][0]["content"][0]["logprobs"]
    assert [one["logprob"] for one in found] == [-0.5] * len(ANSWER.split(" "))
    assert {len(one["top_logprobs"]) for one in found} == {fields.get("top_logprobs", 0)}
    events = frames((await send(server, **fields, stream=True)).text)
    parts = [event["logprobs"] for name, event in events if name == "response.output_text.delta"]
    assert [one for part in parts for one in part] == found
    assert events[-1][1]["response"]["output"][0]["content"][0]["logprobs"] == found


# ---- refusals

REFUSED = [
    ({"nonsense": 1}, "nonsense", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "unsupported_parameter"),
    ({"include": ["all"]}, "include[0]", "unsupported_parameter"),
    ({"frequency_penalty": 3}, "frequency_penalty", "bad_request"),
    ({"text": {"verbosity": "silent"}}, "text.verbosity", "bad_request"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "bad_request"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [WEATHER]}, "tools", "unsupported_parameter"),
    ({"input": []}, "input", "empty_prompt"),
    ({"input": ""}, "input", "empty_prompt"),
    ({"input": None}, "input", "empty_prompt"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "unsupported_modality"),
    ({"input": [{"role": "user"}]}, "input[0].content", "bad_request"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content", "empty_prompt"),
    ({"input": user({**IMAGE, "image_url": "https://a/b.png"})}, "input[0].content[0].image_url", "bad_request"),
    ({"input": user({"type": "input_image"})}, "input[0].content[0]", "bad_request"),
    ({"input": user({"type": "input_file", "file_url": "https://a"})},
     "input[0].content[0].file_url", "unsupported_parameter"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
     "input[0].arguments", "bad_request"),
    ({"input": "word " * 200}, "input", "context_length_exceeded"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field", "code"), REFUSED, ids=lambda value: str(value)[:40])
async def test_refusals_name_the_field_of_this_dialect(server, fields, field, code):
    assert refused_field(await send(server, **fields)) == (400, code, field)


async def test_a_response_that_is_not_kept_is_named_by_the_place_in_the_path(server):
    for method in ("GET", "DELETE"):
        answer = await server.http.request(method, "/v1/responses/none")
        assert refused_field(answer) == (404, "response_not_found", "response_id")


async def test_values_that_change_nothing_are_taken(server):
    fields = {
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "user": "u",
        "max_tool_calls": 3,
    }
    fields |= {"service_tier": "auto", "reasoning": {"effort": None}, "text": {"format": {"type": "text"}}}
    answer = await send(
        server, **fields, parallel_tool_calls=True, tool_choice="auto", tools=[], background=False
    )
    assert answer.status_code == 200, answer.text


# ---- the stock client


def test_the_stock_client_asks_streams_and_goes_on(keyed):
    url, keys = keyed
    secret, _ = keys.create("responses")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0) as client:
        asked = {"model": "tiny", "input": user(IMAGE, words("What?")), "max_output_tokens": 8}
        whole = client.responses.create(**asked)
        *events, end = client.responses.create(**asked, stream=True)
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        last = end.response
        assert "".join(texts) == whole.output_text == last.output_text and whole.output_text
        assert last.usage.input_tokens_details.cached_tokens > 0
        further = client.responses.create(
            model="tiny", input="And?", previous_response_id=whole.id, max_output_tokens=4
        )
        assert further.usage.input_tokens > whole.usage.input_tokens
        assert client.responses.retrieve(whole.id).output_text == whole.output_text
        client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="tiny", input="hello", background=True)
        assert refused.value.param == "background"
