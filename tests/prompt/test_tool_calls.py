"""The arguments of tool calls: their bounds, and that a request for which nobody waits any more ends between them."""

import json
from threading import Event

import pytest

from mpic.cancel import Cancelled, until
from mpic.errors import BadRequest
from mpic.prompt.messages import parse_messages
from mpic.prompt.placeholders import Placeholders
from mpic.prompt.tool_calls import ToolCallReader

EMPTY = {"a": [[]] * 1_000}  # 2,002 values


def call(arguments):
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def answer(*arguments):
    return {"role": "assistant", "tool_calls": [call(one) for one in arguments]}


def parsed(messages, **options):
    return [
        [one["function"]["arguments"] for one in message.fields["tool_calls"]]
        for message in parse_messages(messages, None, **options)
    ]


def test_the_calls_of_all_messages_share_one_bound():
    text = json.dumps(EMPTY)
    messages = [answer(text, text), answer(text)]
    assert parsed(messages, values=3 * 2_002) == [[EMPTY, EMPTY], [EMPTY]]
    with pytest.raises(BadRequest, match="all tool calls together have more than 6,005 values") as caught:
        parsed(messages, values=3 * 2_002 - 1)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_many_calls_are_refused_without_a_bound_of_the_caller():
    text = json.dumps({"a": [[]] * 60_000})
    with pytest.raises(BadRequest) as caught:
        parsed([answer(*[text] * 10)])
    assert caught.value.param == "messages[0].tool_calls[2].function.arguments"


@pytest.mark.parametrize("none", ["", " \n", "null", " null ", None, {}, "{}"])
def test_a_call_without_arguments_has_none(none):
    assert parsed([answer(none, '{"a": 1}')]) == [[{}, {"a": 1}]]


def test_a_call_that_names_no_arguments_has_none():
    calls = [{"id": "c", "type": "function", "function": {"name": "f"}}]
    assert parsed([{"role": "assistant", "tool_calls": calls}]) == [[{}]]


TEXTS = ["[1, 2", "[1]", "[]", '"a"', "a", "5", "-0.5", "true", '{"a": "\\ud800"}', '{"c":', "\ud800"]
NUMBERS = ['{"a": NaN}', '{"a": [-Infinity]}', '{"a": {"b": 1e999}}', "NaN"]


@pytest.mark.parametrize(
    "wrong",
    [*NUMBERS, *TEXTS, "[" * 2_000, '{"a":' * 2_000 + "1" + "}" * 2_000, 5, 0.5, True, [], ["a"]],
    ids=lambda wrong: repr(wrong)[:20],
)
def test_arguments_that_are_no_object_are_refused_by_name(wrong):
    messages = [{"role": "user", "content": "x"}, answer("{}", wrong)]
    with pytest.raises(BadRequest) as caught:
        parse_messages(messages, None)
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"


def test_a_request_that_nobody_waits_for_ends_between_two_calls():
    gone = Event()

    class Leaving(dict):
        def get(self, *args):
            gone.set()
            return super().get(*args)

    first = Leaving(call("{}"))
    with until(gone), pytest.raises(Cancelled):
        ToolCallReader(100).read([first, call("{}")], "tool_calls")


def test_a_request_that_nobody_waits_for_ends_between_two_values_of_a_call():
    gone = Event()
    with until(gone), pytest.raises(Cancelled):
        Placeholders().tree([["a"], ["b"]], lambda text: gone.set())
