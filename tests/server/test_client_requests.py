"""Requests as other stock clients send them, at the level of HTTP: fields that providers take."""

import pytest
from chat_models import processor
from fake_engine import ANSWER, FakeEngine
from server_helpers import fake_server

from mpic.prompt import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["child", "adult"]}}, "required": ["kind"]}
TOOL = {"name": "Person", "description": "A person.", "input_schema": SCHEMA}


@pytest.fixture
async def hermes(tmp_path):
    """A server whose template is Qwen's."""
    template = ChatTemplate(processor("qwen3"))
    async with fake_server(tmp_path, template, FakeEngine(context=10_000, pool=10_000)) as server:
        yield server


def last_prompt(server):
    decode = server.app.state.mpic.template.tokenizer.decode
    return "".join(decode(segment.token_ids) for segment in server.engine.requests[-1].prompt.segments)


@pytest.mark.parametrize(
    "fields",
    [
        {"verbosity": "medium", "prompt_cache_retention": "24h", "store": False},
        {"service_tier": "flex", "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
        {"prediction": {"type": "content", "content": "The tower"}},
    ],
    ids=["openai_agents_model_settings", "openai_options", "openai_predicted_outputs"],
)
async def test_hints_of_openai_clients_change_no_chat(server, fields):
    answer = await server.ask(**fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER


async def test_hints_of_vercel_and_openai_agents_change_no_response(server):
    fields = {"truncation": "auto", "text": {"verbosity": "medium"}, "prompt_cache_retention": "24h"}
    fields |= {"service_tier": "priority", "prompt_cache_options": {}}
    answer = await server.http.post("/v1/responses", json={"input": "hello", **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["content"][0]["text"] == ANSWER


async def test_pydantic_ai_counts_the_tokens_of_a_response_before_it_asks(server):
    counted = await server.http.post(
        "/v1/responses/input_tokens", json={"input": "hello", "instructions": "Go."}
    )
    answer = await server.http.post("/v1/responses", json={"input": "hello", "instructions": "Go."})
    wanted = {"object": "response.input_tokens", "input_tokens": answer.json()["usage"]["input_tokens"]}
    assert counted.json() == wanted
    refused = await server.http.post("/v1/responses/input_tokens", json={"input": "hello", "model": "other"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


async def test_langgraph_asks_anthropic_for_structured_output_behind_its_agents_last_answer(hermes):
    hermes.engine.answer = '<tool_call>\n{"name": "Person", "arguments": {"kind": "adult"}}\n</tool_call>'
    said = {"role": "assistant", "content": "It rains."}
    asked = {"max_tokens": 50, "messages": [*HELLO, said], "tools": [TOOL]}
    answer = await hermes.http.post(
        "/v1/messages", json={**asked, "tool_choice": {"type": "tool", "name": "Person"}}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["input"] == {"kind": "adult"}
    assert "It rains.<|im_end|>\n<|im_start|>assistant\n" in last_prompt(hermes)
    refused = await hermes.http.post("/v1/messages", json={**asked, "tool_choice": {"type": "auto"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[1]")


async def test_hints_of_anthropic_clients_change_no_message(hermes):
    fields = {"thinking": {"type": "adaptive"}, "mcp_servers": []}
    tools = [{**TOOL, "allowed_callers": ["direct"]}]
    asked = {"max_tokens": 50, "messages": HELLO, "tools": tools}
    answer = await hermes.http.post("/v1/messages", json={**asked, **fields})
    assert answer.status_code == 200, answer.text
    for field, value in {
        "mcp_servers": [{"type": "url", "name": "a", "url": "https://a"}],
        "tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}],
    }.items():
        refused = await hermes.http.post("/v1/messages", json={**asked, field: value})
        assert refused.json()["error"]["code"] == "unsupported_parameter", field
        assert refused.json()["error"]["param"].startswith(field)


async def test_openai_clients_send_refusals_back_as_parts(hermes):
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "I must not."}]
    answer = await hermes.ask(messages=[*HELLO, {"role": "assistant", "content": parts}, *HELLO])
    assert answer.status_code == 200, answer.text
    assert "Well." in last_prompt(hermes) and "I must not." in last_prompt(hermes)
    refused = await hermes.ask(messages=[{"role": "user", "content": parts}])
    assert refused.json()["error"]["param"] == "messages[0].content[1].type"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_open_webui_and_pydantic_ai_send_thoughts_back_in_a_field(hermes, name):
    answer = await hermes.ask(messages=[*HELLO, {"role": "assistant", "content": "", name: "I wonder."}])
    assert answer.status_code == 200, answer.text
    assert "<think>\nI wonder.\n</think>" in last_prompt(hermes)


async def test_langchain_embeds_a_thousand_texts_at_once_and_names_the_dimensions(server):
    body = {"model": "clip", "input": ["a"] * 1000, "dimensions": 128, "encoding_format": "base64"}
    answer = await server.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == 1000
