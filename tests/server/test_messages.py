"""Anthropic's ``/v1/messages``: the stock client and its own types, the translation, and refusals by field."""

import asyncio
import base64
import json
from dataclasses import replace

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from api_shapes import assert_shape
from chat_models import processor
from document_kit import pdf
from fake_engine import ANSWER, CHUNK_TOKENS, FakeEngine, FakeStream
from pydantic import TypeAdapter
from server_helpers import byte_tokenizer, fake_server, png, post_raw, wait_until

from mpic.api.messages import AnswerTurn, MessagesError
from mpic.config import Config
from mpic.prompt import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'Let me look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln"}}
EVENT = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
async def hermes(tmp_path):
    """A server whose template is Qwen's, and a big context."""
    template = ChatTemplate(processor("qwen3"))
    async with fake_server(tmp_path, template, FakeEngine(context=10_000, pool=10_000)) as server:
        yield server


SEEING = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture
async def seeing(tmp_path):
    """A server whose template takes images and prints tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SEEING
    template = ChatTemplate(tokenizer, image_token="<image>")
    async with fake_server(tmp_path, template, FakeEngine(context=10_000, pool=10_000)) as server:
        yield server


async def send(server, messages=HELLO, path="", **fields):
    fields = {"max_tokens": 100, **fields} if not path else fields
    return await server.http.post(f"/v1/messages{path}", json={"messages": messages, **fields})


def refusal(answer):
    body = answer.json()
    assert_shape(MessagesError, body)
    error = body["error"]
    return answer.status_code, error["type"], error["code"], error["param"]


def image(colour="red"):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(colour)).decode()}
    return {"type": "image", "source": source}


def document(text="A text about towers.", **fields):
    return {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": text},
        **fields,
    }


def texts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def prompt_of(server, template, number=-1):
    """The text of a prompt, with a mark where a chunk is linked."""
    segments = server.engine.requests[number].prompt.segments
    return "".join(
        template.tokenizer.decode(s.token_ids) if hasattr(s, "token_ids") else f"({s.chunk.kind})"
        for s in segments
    )


def frames(text):
    """Names and bodies of the events of a stream."""
    found = []
    for frame in text.strip().split("\n\n"):
        name, data = frame.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_an_answer_is_a_message_and_the_usage_is_in_its_words(server, template):
    body = (
        await send(
            server,
            [{"role": "user", "content": [image(), document(), {"type": "text", "text": "Which?"}]}],
            system="Be brief.",
            model="fake",
        )
    ).json()
    assert_shape(AnswerTurn, body)
    stock = Message.model_validate(body)
    assert (stock.content[0].text, stock.stop_reason, stock.stop_sequence) == (ANSWER, "end_turn", None)
    usage = body["usage"]
    read, created = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    whole = sum(usage["mpic"]["tokens"][name] for name in ("reused", "prefix_hit", "computed"))
    assert (read, created, usage["input_tokens"]) == (2 * (CHUNK_TOKENS - 16), 0, whole - read)
    shown = prompt_of(server, template)
    assert shown.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n(image)")
    assert "(text)" in shown and shown.endswith("Which?<|im_end|>\n<|im_start|>assistant\n")


async def test_what_a_request_compiles_is_written_to_the_cache_and_not_read_from_it(server, monkeypatch):
    usage = FakeStream._usage

    def compiled(self, completion):
        found = usage(self, completion)
        return replace(found, chunks=tuple(replace(chunk, tier="compiled") for chunk in found.chunks))

    monkeypatch.setattr(FakeStream, "_usage", compiled)
    usage = (await send(server, [{"role": "user", "content": [image(), *texts("?")]}])).json()["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (0, CHUNK_TOKENS - 16)
    assert usage["input_tokens"] == usage["mpic"]["tokens"]["computed"] - (CHUNK_TOKENS - 16)


async def test_turns_of_one_role_are_one_message_and_results_are_messages_of_their_own(hermes):
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "user", "content": texts("In Köln.")},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "secret", "signature": "s"},
                {"type": "text", "text": "Looking.", "citations": None},
                {**USE, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": "no such city",
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": texts("rain")},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
        },
    ]
    answer = await send(hermes, messages, tools=[WEATHER], system=texts("One.", "Two."))
    assert answer.status_code == 200, answer.text
    shown = prompt_of(hermes, hermes.app.state.mpic.template)
    assert "Weather?\nIn Köln.<|im_end|>" in shown and shown.count("<|im_start|>assistant") == 2
    assert "secret" not in shown and "One.\nTwo." in shown
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>' in shown
    assert shown.index("Error:\nno such city") < shown.index("rain") < shown.index("So?")


async def test_a_result_of_a_tool_may_have_images_and_documents(seeing):
    result = [*texts("A shot:"), image("blue"), document("What is on it.", title="LOG")]
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": result}]},
    ]
    answer = await send(seeing, turns, tools=[WEATHER])
    assert answer.status_code == 200, answer.text
    shown = prompt_of(seeing, seeing.app.state.mpic.template)
    assert (
        "<|im_start|>tool\nA shot:(image)" in shown and "(text)" in shown and "end of document LOG" in shown
    )
    bad = {"type": "image", "source": {**image()["source"], "data": "eA=="}}
    turns[-1]["content"][0]["content"] = [*texts("A shot:"), bad]
    answer = await send(seeing, turns, tools=[WEATHER])
    assert refusal(answer)[2:] == ("invalid_image", "messages[2].content[0].content[1].source.data")


async def test_calls_are_blocks_whole_and_streamed(hermes):
    hermes.engine.answer = CALL
    body = (await send(hermes, tools=[WEATHER])).json()
    assert_shape(AnswerTurn, body)
    [said, used] = body["content"]
    assert (said["text"].strip(), body["stop_reason"]) == ("Let me look.", "tool_use")
    assert used == {**USE, "id": used["id"]}
    events = frames((await send(hermes, tools=[WEATHER], stream=True)).text)
    blocks = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert blocks == ["text", "tool_use"]
    [written] = [d["delta"]["partial_json"] for _, d in events if d.get("delta", {}).get("partial_json")]
    assert json.loads(written) == USE["input"]


async def test_a_stream_has_the_events_of_anthropic_in_their_order(server):
    events = frames((await send(server, stream=True)).text)
    names = [name for name, _ in events]
    words = len(ANSWER.split(" "))
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * words,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    for name, data in events:
        assert EVENT.validate_python(data).type == name == data["type"]
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == words


async def test_an_error_in_the_middle_of_a_stream_is_an_event(server):
    server.engine.fail_at = 2
    name, data = frames((await send(server, stream=True)).text)[-1]
    assert_shape(MessagesError, data)
    assert (name, data["error"]["type"], data["error"]["code"]) == ("error", "api_error", "internal_error")


async def test_options_reach_the_engine(server):
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["one", "two"], "max_tokens": 9}
    await send(server, **fields, metadata={"user_id": "u"}, mpic={"policy": "mpic-8"})
    [request] = server.engine.requests
    found = request.sampling
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == (0.5, 0.9, 7, 9)
    assert found.stop == ("one", "two") and request.policy.name == "mpic-8"


async def test_uploads_are_named_by_id_and_handle(server, template):
    file = await server.uploaded(handle="PIC")
    blocks = [{"type": "image", "source": {"type": "file", "file_id": file["id"]}}, *texts("and IMAGE#PIC")]
    assert (await send(server, [{"role": "user", "content": blocks}])).status_code == 200
    chunks = server.engine.requests[0].prompt.chunks
    assert {chunk.file_id for chunk in chunks} == {file["id"]}


async def test_each_page_of_a_pdf_is_a_chunk(server):
    data = base64.b64encode(pdf(["One.", "Two."])).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    answer = await send(server, USER({"type": "document", "source": source}, *texts("?")))
    assert answer.status_code == 200, answer.text
    assert [chunk.kind for chunk in server.engine.requests[0].prompt.chunks] == ["text", "text"]


async def test_documents_of_every_source_are_chunks(server):
    inner = {"type": "content", "content": [{"type": "text", "text": "first"}, image("blue")]}
    found = {"type": "search_result", "source": "https://a", "title": "A", "content": texts("x", "y")}
    blocks = [
        document("one", title="ONE", context="As of May."),
        {"type": "document", "source": {"type": "content", "content": "two"}},
        {"type": "document", "source": inner},
        found,
        *texts("?"),
    ]
    answer = await send(server, [{"role": "user", "content": blocks}])
    assert answer.status_code == 200, answer.text
    chunks = server.engine.requests[0].prompt.chunks
    assert [chunk.kind for chunk in chunks] == ["text", "text", "text", "image", "text"]
    assert (chunks[0].label, chunks[-1].label) == ("ONE", "A")


# ---- threads


async def test_a_thread_keeps_system_prompt_tools_and_turns(hermes):
    hermes.engine.answer = CALL
    alice = hermes.key("alice")

    async def ask(thread, content, **fields):
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 100,
            "thread": thread,
            **fields,
        }
        return await hermes.http.post("/v1/messages", json=body, headers=alice)

    first = (await ask({"type": "create"}, "Weather?", system="Help.", tools=[WEATHER])).json()
    on = {"type": "continue", "previous_message_id": first["id"]}
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "rain"}
    hermes.engine.answer = "It rains."
    second = (await ask(on, [result])).json()
    whole = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    await hermes.http.post(
        "/v1/messages",
        json={"messages": whole, "max_tokens": 100, "system": "Help.", "tools": [WEATHER]},
        headers=alice,
    )
    template = hermes.app.state.mpic.template
    assert prompt_of(hermes, template, -2) == prompt_of(hermes, template)
    streamed = await ask({**on, "previous_message_id": second["id"]}, "And?", stream=True)
    id = frames(streamed.text)[0][1]["message"]["id"]
    assert prompt_of(hermes, template).endswith("And?<|im_end|>\n<|im_start|>assistant\n")
    assert (await ask({**on, "previous_message_id": id}, "Then?")).status_code == 200
    assert prompt_of(hermes, template).count("It rains.") == 2
    assert refusal(await ask(on, "a", system="Other."))[2:] == ("bad_request", "system")
    assert refusal(await ask(on, "a", tools=[WEATHER]))[2:] == ("bad_request", "tools")
    assert refusal(await ask(on, [document("")]))[2:] == ("bad_request", "messages[0].content[0].source.data")
    alice = hermes.key("bob")
    answer = await ask(on, "a")
    assert refusal(answer)[2:] == ("response_not_found", "thread.previous_message_id")
    assert answer.json()["error"]["details"]["error_code"] == "thread_not_found"
    shown = await hermes.http.get(f"/v1/responses/{first['id']}", headers=alice)
    assert shown.status_code == 404


# ---- counting


async def test_tokens_are_counted_as_an_answer_counts_them(server):
    messages = [{"role": "user", "content": [image(), document(), *texts("Which?")]}]
    counted = await send(server, messages, "/count_tokens", system="Be brief.")
    assert server.engine.requests == [] and len(server.engine.compiled) == 2
    usage = (await send(server, messages, system="Be brief.")).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_a_count_ends_when_its_client_leaves_and_its_images_are_still_compiled(tmp_path, template):
    engine = FakeEngine(hold_compiles=True)
    async with fake_server(tmp_path, template, engine) as server:
        body = json.dumps({"messages": [{"role": "user", "content": [image(), *texts("?")]}]}).encode()
        leaves, sent = asyncio.Event(), []
        path = "/v1/messages/count_tokens"
        asking = asyncio.create_task(post_raw(server.app, path, [body], sent, leaves))
        await wait_until(lambda: engine.pending)
        leaves.set()
        await asking
        assert sent[0]["status"] == 499 and not engine.pending[0].cancelled()


# ---- refusals

USER = lambda *blocks: [{"role": "user", "content": list(blocks)}]
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
BAD = {"type": "base64", "media_type": "image/png", "data": "eA=="}
REFUSED = [
    ({"max_tokens": None}, "max_tokens", "bad_request"),
    ({"nonsense": 1}, "nonsense", "unsupported_parameter"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.type", "unsupported_parameter"),
    ({"output_config": {"effort": "low"}}, "output_config.effort", "unsupported_parameter"),
    ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
    ({"container": "c"}, "container", "unsupported_parameter"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences[1]", "bad_request"),
    ({"temperature": 3}, "temperature", "bad_request"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "bad_request"),
    ({"tools": [WEATHER]}, "tools", "unsupported_parameter"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "bad_request"),
    ({"messages": []}, "messages", "empty_prompt"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty_prompt"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content", "empty_prompt"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "The"}]}, "messages[1]", "unsupported_parameter"),
    ({"messages": USER({"type": "nonsense"})}, "messages[0].content[0].type", "unsupported_modality"),
    ({"system": [{"type": "image", "source": BAD}]}, "system[0].type", "bad_request"),
    ({"messages": USER(USE)}, "messages[0].content[0].type", "bad_request"),
    ({"system": "s", "messages": USER(*texts("a"), {"type": "image", "source": BAD})},
     "messages[0].content[1].source.data", "invalid_image"),
    ({"messages": USER({"type": "image", "source": {**BAD, "media_type": "text/plain"}})},
     "messages[0].content[0].source.media_type", "bad_request"),
    ({"messages": USER(*texts("a"), {"type": "document", "source": {"type": "content", "content": [
        *texts("b"), {"type": "image", "source": BAD}]}})},
     "messages[0].content[1].source.content[1].source.data", "invalid_image"),
    ({"messages": USER({"type": "image", "source": {"type": "url", "url": "https://a/b.png"}})},
     "messages[0].content[0].source.url", "bad_request"),
    ({"messages": USER({"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}})},
     "messages[0].content[0].source.url", "unsupported_parameter"),
    ({"messages": USER({"type": "document", "source": PDF}, *texts("a"))},
     "messages[0].content[0].source.data", "invalid_document"),
    ({"messages": USER(document(""), *texts("a"))}, "messages[0].content[0].source.data", "bad_request"),
    ({"messages": USER(document(citations={"enabled": True}), *texts("a"))},
     "messages[0].content[0].citations.enabled", "unsupported_parameter"),
    ({"messages": USER(*texts("word " * 200))}, "messages", "context_length_exceeded"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field", "code"), REFUSED, ids=lambda value: str(value)[:40])
async def test_refusals_name_the_field_of_this_dialect(server, fields, field, code):
    assert refusal(await send(server, **fields)) == (400, "invalid_request_error", code, field)


async def test_an_unexpected_exception_has_the_shape_of_the_dialect(server, monkeypatch):
    monkeypatch.setattr(server.engine, "submit", None)
    assert refusal(await send(server)) == (500, "api_error", "internal_error", None)


async def test_a_refused_preflight_stays_as_it_is(tmp_path, template):
    config = replace(Config(), server=replace(Config().server, cors_origins="https://app.example.org"))
    async with fake_server(tmp_path, template, config=config) as server:
        asked = {"Origin": "https://other.example.org", "Access-Control-Request-Method": "POST"}
        answer = await server.http.options("/v1/messages", headers=asked)
        assert answer.status_code == 400 and "origin" in answer.text


async def test_a_revoked_key_ends_a_stream_in_the_words_of_its_dialect(server):
    keys = server.app.state.mpic.keys
    server.engine.pause, server.engine.answer = 0.02, " ".join(["word"] * 500)
    ended = {}
    for path, said in (
        ("messages", {"messages": HELLO, "max_tokens": 500}),
        ("responses", {"input": "hello"}),
    ):
        header = server.key("ann")
        body = {**said, "stream": True}
        asking = asyncio.create_task(server.http.post(f"/v1/{path}", json=body, headers=header))
        await wait_until(lambda: server.engine.held)
        for key in keys.listing():
            keys.revoke(key.prefix)
        name, ended[path] = frames((await asking).text)[-1]
        assert name == ("error" if path == "messages" else "response.failed")
    assert ended["messages"]["error"]["type"] == "authentication_error"
    assert ended["responses"]["response"]["error"]["code"] == "unauthorized"


async def test_errors_of_every_kind_have_the_shape_of_the_dialect(server):
    assert refusal(await send(server, model="other")) == (404, "not_found_error", "model_not_found", "model")
    missing = {"type": "image", "source": {"type": "file", "file_id": "file-none"}}
    answer = await send(server, USER(missing, *texts("a")))
    assert refusal(answer) == (
        404,
        "not_found_error",
        "file_not_found",
        "messages[0].content[0].source.file_id",
    )
    assert (await server.http.get("/v1/messages")).json()["error"]["code"] == "method_not_allowed"
    key = server.key()["Authorization"].removeprefix("Bearer ")
    assert refusal(await send(server))[:3] == (401, "authentication_error", "unauthorized")
    wrong = await server.http.post("/v1/messages", json={}, headers={"x-api-key": "no"})
    assert refusal(wrong)[:2] == (401, "authentication_error")
    fine = {"messages": HELLO, "max_tokens": 5}
    assert (await server.http.post("/v1/messages", json=fine, headers={"x-api-key": key})).status_code == 200
    limited = server.key("bob", requests_per_minute=1)
    await server.http.post("/v1/messages", json=fine, headers=limited)
    answer = await server.http.post("/v1/messages", json=fine, headers=limited)
    assert refusal(answer)[:3] == (429, "rate_limit_error", "rate_limited") and answer.headers["retry-after"]
    # other routes keep their own shape
    assert (await server.http.get("/v1/models")).json()["error"]["type"] == "invalid_request_error"


# ---- the stock client


@pytest.fixture
def client(keyed):
    url, keys = keyed
    secret, _ = keys.create("messages")
    with anthropic.Anthropic(base_url=url, api_key=secret, max_retries=0) as client:
        yield client


def test_the_stock_client_asks_streams_counts_and_stops(client):
    fields = {
        "model": "tiny",
        "max_tokens": 12,
        "messages": [{"role": "user", "content": [image(), *texts("?")]}],
    }
    whole = client.messages.create(**fields)
    text = whole.content[0].text
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == text
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 12)
    assert last.usage.cache_read_input_tokens > 0
    total = (
        last.usage.input_tokens + last.usage.cache_read_input_tokens + last.usage.cache_creation_input_tokens
    )
    counted = client.messages.count_tokens(model="tiny", messages=fields["messages"])
    assert counted.input_tokens == total
    part = text[len(text) // 2 :][:2]
    stopped = client.messages.create(**fields, stop_sequences=["never said", part])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", part)
    assert text.startswith(stopped.content[0].text) if stopped.content else text.startswith(part)


def test_the_stock_client_gets_its_own_errors(client):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=5, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="tiny", max_tokens=5, messages=[])
    with pytest.raises(anthropic.AuthenticationError):
        client.copy(api_key="wrong").messages.create(model="tiny", max_tokens=5, messages=HELLO)
