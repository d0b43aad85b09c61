"""Answers in a given form, asked for in the words of other dialects: the engine gets what a chat would give it."""

import pytest
from chat_models import processor
from fake_engine import FakeEngine
from server_helpers import fake_server, refused_field

from mpic.prompt import ChatTemplate

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASKED = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50},
    RESPONSES: {"input": "hello"},
}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = {
    CHAT: [{"type": "function", "function": {**FUNCTION, "strict": True}}],
    MESSAGES: [{"name": "f", "input_schema": SCHEMA, "strict": True}],
    RESPONSES: [{"type": "function", **FUNCTION, "strict": True}],
}
FORMS = {
    "schema": {
        CHAT: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        RESPONSES: {
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
        },
    },
    "any tool": {
        CHAT: {"tools": TOOLS[CHAT], "tool_choice": "required"},
        MESSAGES: {"tools": TOOLS[MESSAGES], "tool_choice": {"type": "any"}},
        RESPONSES: {"tools": TOOLS[RESPONSES], "tool_choice": "required"},
    },
    "one tool": {
        CHAT: {"tools": TOOLS[CHAT], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        MESSAGES: {"tools": TOOLS[MESSAGES], "tool_choice": {"type": "tool", "name": "f"}},
        RESPONSES: {"tools": TOOLS[RESPONSES], "tool_choice": {"type": "function", "name": "f"}},
    },
    "strict tool": {path: {"tools": tools} for path, tools in TOOLS.items()},
}


@pytest.fixture
async def hermes(tmp_path):
    template = ChatTemplate(processor("qwen3"))
    async with fake_server(tmp_path, template, FakeEngine(context=10_000, pool=10_000)) as server:
        yield server


@pytest.mark.parametrize("form", FORMS)
async def test_a_form_is_the_same_in_every_dialect(hermes, form):
    for path, fields in FORMS[form].items():
        answer = await hermes.http.post(path, json={**ASKED[path], **fields})
        assert answer.status_code == 200, answer.text
    grammars = [request.grammar for request in hermes.engine.requests]
    assert grammars[0] is not None and grammars == grammars[:1] * 3


BAD = {"type": "object", "properties": {"a": {"$ref": "https://a/b"}}}
WRONG = [
    (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
        "output_config.format.schema",
    ),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
        "text.format.schema",
    ),
    (MESSAGES, {"tools": [{**TOOLS[MESSAGES][0], "input_schema": BAD}]}, "tools[0].input_schema"),
    (RESPONSES, {"tools": [{**TOOLS[RESPONSES][0], "parameters": BAD}]}, "tools[0].parameters"),
    (MESSAGES, {"tools": TOOLS[MESSAGES], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    (
        RESPONSES,
        {"tools": TOOLS[RESPONSES], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
    ),
]


@pytest.mark.parametrize(("path", "fields", "field"), WRONG, ids=lambda value: str(value)[:30])
async def test_a_wrong_form_is_named_in_the_words_of_the_dialect(hermes, path, fields, field):
    answer = await hermes.http.post(path, json={**ASKED[path], **fields})
    status, _, param = refused_field(answer)
    assert (status, param) == (400, field)
    assert not any(word in answer.text for word in ("response_format", "function.parameters"))
