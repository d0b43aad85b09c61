"""Fields of OpenAI's that change nothing: one table lists the accepted values, and everything else follows it."""

import json

import pytest
from server_helpers import invalid

from mpic.api.openai_fields import OPENAI_FIELDS
from mpic.api.requests import ChatRequest

CASES = [(field, value) for field in OPENAI_FIELDS for value in (None, *field.yes)]
REFUSED = [(field, value) for field in OPENAI_FIELDS for value in field.no]
name = lambda case: case.name if hasattr(case, "name") else json.dumps(case)[:20]


def request(field, value):
    """A request with one of the fields, and the path of the field in it."""
    body = {"messages": [{"role": "user", "content": "hello"}]}
    if field.inside is None:
        return {**body, field.name: value}, field.name
    if field.inside == "stream_options":
        return {**body, "stream": True, "stream_options": {field.name: value}}, f"stream_options.{field.name}"
    needed = {"url": "file-1"} if field.inside == "image_url" else {"file_id": "file-1"}
    part = {"type": field.inside, field.inside: {**needed, field.name: value}}
    body["messages"][0]["content"] = [part, {"type": "text", "text": "hello"}]
    return body, f"messages[0].content[0].{field.inside}.{field.name}"


@pytest.mark.parametrize(("field", "value"), CASES, ids=name)
def test_values_that_change_nothing_are_taken(field, value):
    ChatRequest.model_validate(request(field, value)[0])


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=name)
def test_values_that_would_change_something_are_refused_by_name(field, value):
    body, path = request(field, value)
    error = invalid(body)
    assert (error.code, error.param, error.status) == ("unsupported_parameter", path, 400)
    assert f"{path} is not supported by this server: {field.why}" == error.message


@pytest.mark.parametrize("field", OPENAI_FIELDS, ids=name)
def test_every_field_has_examples_and_words(field):
    assert field.why and (field.yes or field.kind is None) and field.no
    assert bool(field.taken) == (field.kind is not None)


@pytest.mark.parametrize("unknown", ["nonsense", "top_k"])
def test_unknown_fields_are_refused_by_name(unknown):
    error = invalid({"messages": [{"role": "user", "content": "hello"}], unknown: 1})
    assert (error.code, error.param) == ("unsupported_parameter", unknown)


def test_every_parameter_of_the_stock_client_is_known():
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    theirs = set(CompletionCreateParamsBase.__annotations__)
    assert theirs - set(ChatRequest.model_fields) == set()


async def test_a_request_with_all_of_them_answers_as_without(server):
    fields = {field.name: field.yes[0] for field in OPENAI_FIELDS if field.yes and field.inside is None}
    plain, answer = await server.ask(), await server.ask(**fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain.json()["choices"]
