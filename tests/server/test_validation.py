"""Errors of requests name the field, in OpenAI's shape."""

import copy
import re
import typing

import pydantic
import pytest
from server_helpers import invalid

from mpic.api import requests
from mpic.api.openai_fields import BY_NAME
from mpic.http.errors import as_mpic_error, from_validation

HELLO = {"role": "user", "content": "hello"}
ASK = {"messages": [HELLO]}
OBFUSCATED = {"stream": True, "stream_options": {"include_obfuscation": True}}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": "hello"}, "bad_request", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "bad_request", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "bad_request", "messages[0].content"),
        ({"messages": [{**HELLO, "mood": 1}]}, "unsupported_parameter", "messages[0].mood"),
        ({"temperature": 3}, "bad_request", "temperature"),
        ({"temperature": float("nan")}, "bad_request", "temperature"),
        ({"top_p": 0}, "bad_request", "top_p"),
        ({"max_tokens": 0}, "bad_request", "max_tokens"),
        ({"max_tokens": True}, "bad_request", "max_tokens"),
        ({"seed": 2**64}, "bad_request", "seed"),
        ({"n": 0}, "bad_request", "n"),
        ({"n": 17}, "bad_request", "n"),
        ({"stop": ["a"] * 5}, "bad_request", "stop"),
        ({"stop": ["a", ""]}, "bad_request", "stop[1]"),
        ({"top_logprobs": 2}, "bad_request", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "bad_request", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "bad_request", "stream_options"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "bad_request", "max_tokens"),
        ({"mpic": {"polcy": "reuse"}}, "unsupported_parameter", "mpic.polcy"),
        ({"mpic": {"top_k": -1}}, "bad_request", "mpic.top_k"),
        ({"mpic": {"top_k": 2**31}}, "bad_request", "mpic.top_k"),
        ({"mpic": "reuse"}, "bad_request", "mpic"),
        ({"mpic": {"retrieval": {"filter": {"user": None}}}}, "bad_request", "mpic.retrieval.filter.user"),
        (OBFUSCATED, "unsupported_parameter", "stream_options.include_obfuscation"),
    ],
)
def test_bad_values(fields, code, param):
    error = invalid({**ASK, **fields})
    assert (error.code, error.param) == (code, param)
    assert error.status == 400


@pytest.mark.parametrize(
    ("part", "code", "param"),
    [
        ({"type": "input_audio", "input_audio": {}}, "unsupported_modality", ".type"),
        ({"text": "no type"}, "unsupported_modality", ".type"),
        ({"type": "text"}, "bad_request", ".text"),
        ({"video_url": {"url": "x", "fps": 2}}, "unsupported_parameter", ".video_url.fps"),
        ({"image_url": {"url": "x", "detail": "huge"}}, "unsupported_parameter", ".image_url.detail"),
        ({"file": {"file_data": "data:,eA=="}}, "unsupported_parameter", ".file.file_data"),
    ],
)
def test_bad_parts(part, code, param):
    if "type" not in part and "text" not in part:
        [part["type"]] = part
    error = invalid({"messages": [{"role": "user", "content": [part]}]})
    assert (error.code, error.param) == (code, f"messages[0].content[0]{param}")


def test_internal_errors_reveal_no_internals(caplog):
    error = as_mpic_error(RuntimeError("/secret/path"))
    assert error.body()["error"]["code"] == "internal_error"
    assert "/secret" not in str(error.body())
    assert "/secret/path" in caplog.text


# ---- every value of every body

NAMED = {"name": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "x"},
                {"type": "image_url", "image_url": {"url": "x", "detail": "low"}, **NAMED},
                {"type": "video_url", "video_url": {"url": "x"}, **NAMED},
                {"type": "image", "image": "x", "file_id": "x", "handle": "x", **NAMED},
                {
                    "type": "file",
                    "file": {"file_id": "x", "file_data": None},
                    "file_id": "x",
                    "handle": "x",
                    **NAMED,
                },
                {"type": "document", "text": "x", **NAMED},
                {"type": "cache", "cache_id": "x", **NAMED},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL],
            "refusal": None,
            "annotations": [{"type": "x"}],
        }
        | {"audio": None, "function_call": None},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "model": "x",
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 2,
    "seed": 2,
    "stop": ["x", "y"],
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "description": "x", "parameters": {"x": 1}, "strict": False},
        }
    ],
    "mpic": {
        "policy": "x",
        "press": "x",
        "trace": True,
        "top_k": 2,
        "ignore_eos": True,
        "retrieval": {"mode": "auto", "top_k": 2, "min_score": 0.5, "rounds": 2}
        | {"filter": {"str": 1, "b": ["x", 2], "c": {"gt": 1}}},
    },
} | {name: field.yes[0] if field.yes else None for name, field in BY_NAME.items() if field.inside is None}
BODIES = {
    requests.ChatRequest: CHAT,
    requests.CacheRequest: {
        "text": "x",
        "split": {"mode": "fixed", "tokens": 2, "overlap": 1},
        "name": "x",
        "ttl": 2,
    },
    requests.CacheChange: {"ttl": 2},
    requests.FileChange: {"ttl": 2, "handle": "x"},
    requests.ReferenceSearch: {
        "query": "x",
        "image": "x",
        "top_k": 2,
        "min_score": 0.5,
        "filter": {"a": "x"},
    },
}
"""A body of each model that has all of its fields."""
WRONG = (None, True, -5, 0.5, 10**30, "", "x", "x" * 3000, [], [[]], {}, {"type": "text"}, [1, "x", {}] * 50)
INTERNAL = re.compile(
    r"None|True|False|Literal|Union|pydantic|\bdict|\bstr\b|\bint\b|instance|[Ii]nput|type=|Value error|<|validation"
    r"|unable|" + "|".join(rf"\b{name}\b" for name, kind in vars(requests).items() if isinstance(kind, type))
)
"""Words of Python's and of our own classes."""


def places(value, at=()):
    """Yields the paths of all values in a JSON value."""
    yield at
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    ):
        yield from places(inner, (*at, name))


def changed(body, at, value):
    """Returns a copy of a body with another value at a place; ``...``: with none."""
    body = copy.deepcopy(body)
    inside = body
    for part in at[:-1]:
        inside = inside[part]
    inside[at[-1]] = copy.deepcopy(value)
    if value is ...:
        del inside[at[-1]]
    return body


def written(at):
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).removeprefix(".")


def refused(model, body):
    """The error of a body, None if it is valid."""
    try:
        model.model_validate(body)
    except pydantic.ValidationError as error:
        found = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        shown = from_validation(found, body, model is requests.ChatRequest)
        said = re.sub("must match .*", "", shown.message.removeprefix(shown.param or ""))
        assert not INTERNAL.search(said), shown.message
        return shown
    return None


def openai_place(at):
    """Returns the place of the field of OpenAI's that a place belongs to, which is refused as a whole."""
    for end in range(1, len(at) + 1):
        field = BY_NAME.get(at[end - 1])
        if field is not None and field.inside == (at[end - 2] if end > 1 else None):
            return at[:end]
    return None


def test_the_bodies_have_every_field_of_every_model():
    for model, body in BODIES.items():
        assert refused(model, body) is None
        known, found = {model}, set()
        while known - found:
            for kind in known - found:
                found.add(kind)
                for field in kind.model_fields.values():
                    known |= set(models(field.annotation))
        names = {at[-1] for at in places(body) if at}
        missing = {name for kind in known for name in kind.model_fields} - names
        assert missing <= {"chunks"}, "which cannot stand beside text"


def models(annotation):
    """Yields the models in a type."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models(inner)


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_a_wrong_value_is_named_by_its_exact_place(model):
    count = 0
    for at in places(BODIES[model]):
        for wrong in WRONG if at else ():
            error = refused(model, changed(BODIES[model], at, wrong))
            if error is None or error.param == written(openai_place(at) or at):
                count += error is not None
                continue
            # a container in place of something else is wrong in one of its members, or a member is missing
            where = error.param or ""
            inside = where.startswith((written(at) + ".", written(at) + "["))
            related = model.__name__ == "ChatRequest" and where in RELATED.get(at[-1], ())
            assert related or (inside and isinstance(wrong, dict | list)), (
                written(at),
                wrong,
                error.message,
            )
            count += 1
    assert count > 5


RELATED = {
    "role": ("messages[0].tool_call_id", "messages[1].tool_calls", "messages[2].tool_call_id"),
    "max_tokens": ("max_tokens",),
    "max_completion_tokens": ("max_tokens",),
    "stream": ("stream_options",),
    "logprobs": ("top_logprobs",),
    "tool_calls": ("messages[1].content",),
}
"""Fields that are wrong beside other values of a field."""


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_an_unknown_name_is_named_by_its_exact_place(model):
    """Also one that is the name of a type, or of a field elsewhere, with the value of a neighbour."""
    names = (
        "extra",
        "str",
        "image_url",
        "list[str]",
        "function",
        "messages",
        "detail",
        "[0]",
        "text",
        "content",
    )
    free = re.compile(r"(.*\.)?(parameters|filter|annotations|metadata|logit_bias|response_format)(\W.*)?")
    for at in places(BODIES[model]):
        inside = BODIES[model]
        for part in at:
            inside = inside[part]
        if not isinstance(inside, dict) or free.fullmatch(written(at)):
            continue
        for name in names:
            for value in ("x", 5, None, {"type": "text", "text": "x"}) if name not in inside else ():
                error = refused(model, changed(BODIES[model], (*at, name), value))
                if error is None:
                    assert name in ("content", "image_url"), "a field that is known there"
                else:
                    assert error.param == written((*at, name))
                    assert error.code == "unsupported_parameter" or name in ("text", "content")


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_what_is_missing_is_named_by_its_exact_place(model):
    for at in places(BODIES[model]):
        if at and isinstance(at[-1], str):
            error = refused(model, changed(BODIES[model], at, ...))
            if error is not None and error.param != written(at):
                assert error.param in RELATED.get(at[-1], ()) or at[-1] in ("tool_call_id", "text", "mode"), (
                    written(at)
                )
