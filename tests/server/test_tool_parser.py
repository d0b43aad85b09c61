"""Tools are shown to the model by its own template, calls are found in its answer, and everything else is refused by
name."""

import json

import pytest
from api_shapes import assert_shape
from chat_models import processor
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from server_helpers import events, fake_server

from mpic.api.completion import ChatCompletion, ChatCompletionChunk
from mpic.prompt import ChatTemplate
from mpic.server.tool_parser import ParsedToolCall, ToolCallParser

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
async def hermes(tmp_path):
    """A server whose template is Qwen's."""
    template = ChatTemplate(processor("qwen3"))
    async with fake_server(tmp_path, template, FakeEngine(context=10_000, pool=10_000)) as server:
        yield server


def read(pieces):
    """Returns words and (name, arguments), for any division into pieces."""
    reader = ToolCallParser()
    found = [item for piece in pieces for item in reader.push(piece)] + reader.finish()
    words = "".join(item for item in found if isinstance(item, str))
    return words, [(c.name, json.loads(c.arguments)) for c in found if isinstance(c, ParsedToolCall)]


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        ("just words < > <tool", "just words < > <tool", []),
        (CALL, "", [("get_weather", {"city": "Köln"})]),
        (f"Let me see. {CALL}\n{CALL}\n", "Let me see. ", [("get_weather", {"city": "Köln"})] * 2),
        ('<tool_call>{"name": "now"}', "", [("now", {})]),
        ("<tool_call>not JSON</tool_call>!", "<tool_call>not JSON</tool_call>!", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("<tool_call>{", "<tool_call>{", []),
    ],
)
@given(data=st.data())
def test_calls_are_found_however_the_answer_is_cut(text, words, calls, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == (words, calls)


def shown(server):
    """The beginning of the prompt of the last request."""
    [first, *_] = server.engine.requests[-1].prompt.segments
    return server.app.state.mpic.template.tokenizer.decode(first.token_ids)


async def test_a_call_is_answered_and_the_conversation_goes_on(hermes):
    hermes.engine.answer = f"Let me see. {CALL}"
    body = (await hermes.ask("weather in Köln?", tools=[WEATHER])).json()
    assert_shape(ChatCompletion, body)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see. "
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    assert "get_weather" in shown(hermes) and "Weather of a city" in shown(hermes)

    hermes.engine.answer = "It rains."
    messages = [
        {"role": "user", "content": "weather in Köln?"},
        choice["message"],  # as it came
        {"role": "tool", "tool_call_id": call["id"], "content": "rain, 9 degrees"},
    ]
    answer = await hermes.ask(messages=messages, tools=[WEATHER])
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "It rains."
    assert "rain, 9 degrees" in shown(hermes) and "Köln" in shown(hermes)


async def test_calls_in_a_stream(hermes):
    hermes.engine.answer = f"Look: {CALL}\n{CALL}"
    answer = await hermes.ask("weather?", tools=[WEATHER], stream=True)
    frames, _ = events(answer.text)
    for frame in frames:
        assert_shape(ChatCompletionChunk, frame)
    deltas = [frame["choices"][0]["delta"] for frame in frames]
    assert "".join(d.get("content", "") for d in deltas) == "Look: "
    calls = [call for d in deltas for call in d.get("tool_calls", ())]
    assert [c["index"] for c in calls] == [0, 1] and len({c["id"] for c in calls}) == 2
    assert frames[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_without_tools_or_with_choice_none_a_call_is_text(hermes):
    hermes.engine.answer = CALL
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = (await hermes.ask("weather?", **fields)).json()["choices"][0]
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [WEATHER], "mpic": {"retrieval": {"mode": "always"}}}, "tools"),
    ],
)
async def test_unsupported_tool_options_are_refused_by_name(hermes, fields, param):
    error = (await hermes.ask("x", **fields)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


async def test_a_model_whose_template_prints_no_tools_refuses_them(server):
    error = (await server.ask("x", tools=[WEATHER])).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")


@pytest.mark.parametrize(("family", "form"), [("qwen3", "hermes"), ("llama3.1", None), ("plain", None)])
def test_the_form_of_calls_is_found_in_the_template(family, form):
    assert ChatTemplate(processor(family)).calls == form


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "x", "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": "x", "tool_call_id": "1"},
    ],
)
async def test_inconsistent_messages_are_refused(server, message):
    answer = await server.ask(messages=[{"role": "user", "content": "x"}, message])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "bad_request", answer.text


@pytest.mark.parametrize("argument", ['"\\ud83d"', "[" * 100_000])
def test_a_call_with_half_a_surrogate_pair_stays_text(argument):
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": {argument}}}}}</tool_call>'
    assert read([text]) == (text, [])


def called(arguments):
    """A conversation in which a tool was called."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]


@pytest.mark.parametrize("arguments", ['{"x": "\\ud83d"}', "[" * 2_000])
async def test_an_earlier_call_with_such_arguments_is_shown_as_it_was_written(hermes, arguments):
    answer = await hermes.ask(messages=called(arguments), max_tokens=2)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("depth", [330, 500, 900])
async def test_nesting_too_deep_for_the_template_is_refused(hermes, depth):
    nested = '{"a":' * depth + "1" + "}" * depth
    tool = {"type": "function", "function": {"name": "f", "parameters": json.loads(nested)}}
    for body in ({"messages": called(nested)}, {"tools": [tool]}):
        answer = await hermes.ask(**body, max_tokens=2)
        assert answer.status_code in (200, 400), answer.text
