"""The stock ``openai`` client's own structured output, on a running server whose model has random weights: what comes
back has its form because it cannot have another."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Literal

import openai
import pytest
from chat_models import QWEN3
from pydantic import BaseModel, Field
from server_helpers import save_tiny_llava
from threads_kit import in_threads

from mpic_lab.demo import running_server


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Stop(BaseModel):
    line: Annotated[int, Field(ge=1, le=99)]
    platform: Literal["a", "b"] | None


class Journey(BaseModel):
    """A journey; every value of it has an end."""

    colour: Colour
    night: bool
    stops: Annotated[list[Stop], Field(min_length=1, max_length=2)]


class GetWeather(BaseModel):
    """Weather of a city."""

    city: Literal["Köln", "Porto"]
    days: Annotated[int, Field(ge=1, le=7)]


class Now(BaseModel):
    """The time."""


ASKED = [{"role": "user", "content": "hello"}]
TOOLS = [openai.pydantic_function_tool(GetWeather), openai.pydantic_function_tool(Now)]
HOT = {"model": "tiny", "messages": ASKED, "temperature": 1.0, "max_tokens": 300}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = save_tiny_llava(tmp_path_factory.mktemp("model") / "tiny")
    (folder / "chat_template.jinja").write_text(QWEN3)
    with running_server(tmp_path_factory.mktemp("data"), str(folder)) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            yield client


def test_parse_returns_the_pydantic_model(client):
    whole = client.chat.completions.parse(**HOT, seed=1, response_format=Journey)
    [choice] = whole.choices
    assert isinstance(choice.message.parsed, Journey) and choice.finish_reason == "stop"
    assert Journey.model_validate_json(choice.message.content) == choice.message.parsed
    with client.chat.completions.stream(**HOT, seed=1, response_format=Journey) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
    assert "content.delta" in kinds


def test_several_answers_and_log_probabilities_have_the_form(client):
    found = client.chat.completions.parse(**HOT, seed=3, n=4, logprobs=True, response_format=Journey)
    assert [type(choice.message.parsed) for choice in found.choices] == [Journey] * 4
    for choice in found.choices:
        assert "".join(one.token for one in choice.logprobs.content) == choice.message.content


def test_requests_of_different_forms_run_together(client):
    def ask(i):
        asks = client.chat.completions
        if i % 3 == 2:
            return asks.create(**{**HOT, "max_tokens": 8}, seed=i).choices[0]
        called = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        return asks.parse(**HOT, seed=i, **(called if i % 3 else {"response_format": Journey})).choices[0]

    for i, choice in enumerate(in_threads(ask, range(9))):
        if i % 3 == 0:
            assert isinstance(choice.message.parsed, Journey)
        elif i % 3 == 1:
            [call] = choice.message.tool_calls
            assert isinstance(call.function.parsed_arguments, GetWeather | Now)
        else:
            assert choice.finish_reason in ("length", "stop")


@pytest.mark.parametrize("name", ["GetWeather", "Now"])
def test_a_named_tool_is_called_whole_and_in_a_stream(client, name):
    choice = {"type": "function", "function": {"name": name}}
    options = {**HOT, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5}
    [answer] = client.chat.completions.parse(**options).choices
    [call] = answer.message.tool_calls
    assert call.function.name == name and type(call.function.parsed_arguments).__name__ == name
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    with client.chat.completions.stream(**options) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


def test_an_answer_that_max_tokens_cuts_says_so(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**HOT, "max_tokens": 5}, response_format=Journey)


def test_a_choice_a_regular_expression_and_any_object(client):
    ask = client.chat.completions.create
    for i in range(4):
        one = ask(**HOT, seed=i, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
        assert one.choices[0].message.content in ("yes", "no")
    date = ask(**HOT, extra_body={"structured_outputs": {"regex": "20[0-9]{2}-W[0-5][0-9]"}})
    assert len(date.choices[0].message.content) == len("2026-W01")
    text = ask(**HOT, response_format={"type": "json_object"}).choices[0]
    assert text.message.content.startswith("{")
    assert text.finish_reason == "length" or isinstance(json.loads(text.message.content), dict)


def test_what_cannot_be_followed_is_an_error_of_the_client_by_its_field(client):
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**HOT, tools=[*TOOLS, tool])
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "tools[2].function.parameters")
    assert '"not"' in refused.value.message
    for stream in (True, False):  # its first token opens too much
        with pytest.raises(openai.BadRequestError) as refused:
            wide = {f"p{i}": {"type": "null"} for i in range(2500)}
            named = {"name": "wide", "schema": {"type": "object", "properties": wide}}
            answer = client.chat.completions.create(
                **HOT, response_format={"type": "json_schema", "json_schema": named}, stream=stream
            )
            list(answer)
        assert refused.value.code == "grammar_too_complex"
    assert client.chat.completions.create(**{**HOT, "max_tokens": 2}).choices
