"""Tools are shown to the model by its own template, calls are found in its answer, and everything else is refused by
name."""

import copy
import json

import pytest
from api_shapes import assert_shape
from chat_models import processor
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletion as StockCompletion
from openai.types.chat import ChatCompletionChunk as StockChunk
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


DUMPS = ({}, {"exclude_none": True}, {"exclude_unset": True})
LISTED = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"


@pytest.fixture
async def hermes(tmp_path):
    """A server whose template is Qwen's."""
    template = ChatTemplate(processor("qwen3"))
    async with fake_server(tmp_path, template, FakeEngine(context=10_000, pool=10_000)) as server:
        yield server


TAKEN = [
    ("", {}),
    (', "arguments": null', {}),
    (', "arguments": ""', {}),
    (', "arguments": "null"', {}),
    (', "arguments": "{\\"x\\": 1}"', {"x": 1}),
    (', "parameters": {"x": 1}', {"x": 1}),
    (', "parameters": {"x": 1}, "arguments": {"y": 2}', {"y": 2}),
]
"""What follows the name in a call -> its arguments."""
WRONG = [
    '{"x": NaN}',
    '{"x": [1e999]}',
    '{"x": -Infinity}',
    "NaN",
    '"NaN"',
    "1",
    "[]",
    "true",
    '"text"',
    '"[1]"',
]
"""What is no object of JSON: the call stays text, as it was written."""


def read(pieces):
    """Return words and (name, arguments), for any division into pieces."""
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
        *((f'<tool_call>{{"name": "f"{rest}}}</tool_call>', "", [("f", found)]) for rest, found in TAKEN),
        *((f'<tool_call>{{"name": "f", "arguments": {wrong}}}</tool_call>',) * 2 + ([],) for wrong in WRONG),
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


WORDS = ["It rains.", "", f"Let me see. {CALL}", f"{CALL}\n{CALL}", CALL]


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
async def test_answers_are_accepted_back_as_they_came_and_as_the_stock_client_dumps_them(hermes, words):
    hermes.engine.answer = words
    question = {"role": "user", "content": "weather in Köln?"}
    for tools in ([], [WEATHER]):
        body = (await hermes.ask(messages=[question], tools=tools)).json()
        message = StockCompletion.construct(**body).choices[0].message
        state = ChatCompletionStreamState()
        for frame in events((await hermes.ask(messages=[question], tools=tools, stream=True)).text)[0]:
            state.handle_chunk(StockChunk.construct(**frame))
        streamed = state.get_final_completion().choices[0].message
        dumps = [one.model_dump(**how) for one in (message, streamed) for how in DUMPS]
        ours = ChatCompletion.model_validate(body).choices[0].message.model_dump()
        for sent in (body["choices"][0]["message"], ours, *dumps):
            results = [
                {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": "rain"}
                for call in sent.get("tool_calls") or ()
            ]
            messages = [question, sent, *results, {"role": "user", "content": "And now?"}]
            answer = await hermes.ask(messages=messages, tools=tools)
            assert answer.status_code == 200, (sent, answer.text)


async def test_the_result_of_a_tool_may_be_a_list_of_texts(hermes):
    asked = called("{}")
    for content in (
        [{"type": "text", "text": "rain"}],
        [{"type": "text", "text": t} for t in ("ra", "in")],
        [],
    ):
        answer = await hermes.ask(messages=[*asked[:-1], {**asked[-1], "content": content}])
        assert answer.status_code == 200, answer.text
        assert "'type'" not in shown(hermes)


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "1"}
HI = {"role": "user", "content": "Hi"}
NULLS = {"refusal": None, "audio": None, "function_call": None, "annotations": None, "tool_calls": None}


@pytest.mark.parametrize(
    "messages",
    [
        [{**HI, "name": "bob"}],
        [{"role": "system", "content": "Be kind.", "name": "rules"}, HI],
        [{"role": "developer", "content": "Be kind.", "name": "rules"}, HI],
        [HI, {"role": "assistant", "name": "helper", "content": "x"}, HI],
        [HI, {"role": "assistant", "tool_calls": [CALLED]}, {**RESULT, "name": "f"}],
        [HI, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, RESULT],
        [HI, {"role": "assistant", "content": "", "tool_calls": [{**CALLED, "index": 0}]}, RESULT],
        [HI, {"role": "assistant", "content": [], "tool_calls": [CALLED]}, RESULT],
        *(
            [{"role": role, "content": empty}, HI]
            for role in ("system", "developer")
            for empty in ("", " ", [])
        ),
        [{"role": "system", "content": [{"type": "text", "text": ""}]}, HI],
        [HI, {"role": "assistant", "content": None, **NULLS, "refusal": "No."}, HI],
        [HI, {"role": "assistant", "content": "x", **NULLS, "parsed": None}, HI],
        [HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HI],
        [HI, {"role": "assistant", "content": "x", "annotations": [], "tool_calls": []}, HI],
        [HI, {"role": "assistant"}, HI],
        [{**HI, **NULLS, "name": None, "tool_call_id": None}],
    ],
)
async def test_messages_that_openai_accepts(hermes, messages):
    answer = await hermes.ask(messages=messages)
    assert answer.status_code == 200, answer.text


async def test_an_empty_system_message_is_left_out_and_a_refusal_stands_for_content(hermes):
    await hermes.ask(messages=[{"role": "system", "content": ""}, HI])
    prompt = shown(hermes)
    await hermes.ask(messages=[HI])
    assert shown(hermes) == prompt
    await hermes.ask(messages=[HI, {"role": "assistant", "refusal": "I will not."}, HI])
    assert "I will not." in shown(hermes)
    refusal = {"type": "refusal", "refusal": "Nor this."}
    await hermes.ask(messages=[HI, {"role": "assistant", "content": [refusal]}, HI])
    assert "Nor this." in shown(hermes)
    error = (await hermes.ask(messages=[{"role": "user", "content": [refusal]}])).json()["error"]
    assert (error["code"], error["param"]) == ("bad_request", "messages[0].content[0].type")


async def test_without_tools_or_with_choice_none_a_call_is_text(hermes):
    hermes.engine.answer = CALL
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = (await hermes.ask("weather?", **fields)).json()["choices"][0]
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
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
        {"role": "user", "content": "x", "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": "x", "tool_call_id": "1"},
    ],
)
async def test_inconsistent_messages_are_refused(server, message):
    answer = await server.ask(messages=[{"role": "user", "content": "x"}, message])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "bad_request", answer.text


@pytest.mark.parametrize(
    ("role", "code"), [("user", "empty_prompt"), ("system", "bad_request"), ("tool", "bad_request")]
)
async def test_a_message_without_content_is_refused_by_name(server, role, code):
    message = {"role": role, **({"tool_call_id": "1"} if role == "tool" else {})}
    for content in ({}, {"content": None}):
        error = (await server.ask(messages=[HI, {**message, **content}])).json()["error"]
        assert (error["code"], error["param"]) == (code, "messages[1].content")


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


@pytest.mark.parametrize("arguments", ["{}", "", "null"])
async def test_a_template_that_lists_arguments_is_given_an_object(tmp_path, arguments):
    listing = copy.copy(processor("qwen3"))
    listing.chat_template = listing.chat_template.replace("{{ c.function.arguments | tojson }}", LISTED)
    assert LISTED in listing.chat_template
    engine = FakeEngine(context=10_000, pool=10_000)
    async with fake_server(tmp_path, ChatTemplate(listing), engine) as server:
        answer = await server.ask(messages=called(arguments), max_tokens=2)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("arguments", ['{"x": "\\ud83d"}', "[" * 2_000, "5", "[]", '{"c":', '{"x": NaN}', 5])
async def test_an_earlier_call_whose_arguments_are_no_object_is_refused_by_name(hermes, arguments):
    error = (await hermes.ask(messages=called(arguments), max_tokens=2)).json()["error"]
    assert (error["code"], error["param"]) == ("bad_request", "messages[1].tool_calls[0].function.arguments")


async def test_with_parallel_tool_calls_off_an_answer_ends_after_its_first_call(hermes):
    hermes.engine.answer = CALL.removesuffix("</tool_call>")  # as an engine ends it at a stop string
    for asked, ends in ((False, ("!", "</tool_call>")), (True, ("!",)), (None, ("!",))):
        body = (await hermes.ask("x", tools=[WEATHER], stop="!", parallel_tool_calls=asked)).json()
        assert hermes.engine.requests[-1].sampling.stop == ends
        [choice] = body["choices"]
        assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    answer = await hermes.ask("x", stop="!", parallel_tool_calls=False)
    assert answer.status_code == 200 and hermes.engine.requests[-1].sampling.stop == ("!",)


@pytest.mark.parametrize("depth", [330, 500, 900])
async def test_nesting_too_deep_for_the_template_is_refused(hermes, depth):
    nested = '{"a":' * depth + "1" + "}" * depth
    tool = {"type": "function", "function": {"name": "f", "parameters": json.loads(nested)}}
    for body in ({"messages": called(nested)}, {"tools": [tool]}):
        answer = await hermes.ask(**body, max_tokens=2)
        assert answer.status_code in (200, 400), answer.text
