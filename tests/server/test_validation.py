"""Errors of requests name the field, in OpenAI's shape."""

import copy
import json
import re
import tracemalloc
import typing

import pydantic
import pytest
from server_helpers import invalid, png

from mpic.api import messages, requests, responses, texts
from mpic.api.openai_fields import BY_NAME
from mpic.errors import (
    DatabaseBusy,
    DatabaseFailed,
    EngineStopped,
    LibraryGone,
    OutOfMemory,
    StorageFull,
)
from mpic.http.errors import _FailureCounts, as_mpic_error, from_validation

HELLO = {"role": "user", "content": "hello"}
ASK = {"messages": [HELLO]}
OBFUSCATED = {"stream": True, "stream_options": {"include_obfuscation": True}}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": "hello"}, "bad_request", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "bad_request", "messages[0].role"),
        ({"messages": [{**HELLO, "mood": 1}]}, "unsupported_parameter", "messages[0].mood"),
        ({"temperature": 3}, "bad_request", "temperature"),
        ({"temperature": float("nan")}, "bad_request", "temperature"),
        ({"top_p": 0}, "bad_request", "top_p"),
        ({"max_tokens": 0}, "bad_request", "max_tokens"),
        ({"max_tokens": True}, "bad_request", "max_tokens"),
        ({"seed": 2**64}, "bad_request", "seed"),
        ({"n": 0}, "bad_request", "n"),
        ({"n": 17}, "bad_request", "n"),
        ({"stop": ["a"] * 65}, "bad_request", "stop"),
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
        ({"file": {"file_data": 5}}, "bad_request", ".file.file_data"),
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
CALL = {"id": "c", "type": "function", "index": 0}
CALL["function"] = {"name": "f", "arguments": "{}", "parsed_arguments": "x"}
CHAT = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
                {"type": "image_url", "image_url": {"url": "x", "detail": "low"}, **NAMED},
                {"type": "video_url", "video_url": {"url": "x"}, **NAMED},
                {"type": "image", "image": "x", "file_id": "x", "handle": "x", **NAMED},
                {
                    "type": "file",
                    "file": {"file_id": "x", "file_data": "x", "filename": "x"},
                    "file_id": "x",
                    "handle": "x",
                    **NAMED,
                },
                {"type": "document", "text": "x", **NAMED},
                {"type": "cache", "cache_id": "x", **NAMED},
                {"type": "refusal", "refusal": "x"},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL],
            "refusal": None,
            "annotations": [{"type": "x"}],
        }
        | {"audio": None, "function_call": None, "reasoning_content": "x", "reasoning": "x"},
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
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 0.5},
    "min_p": 0.5,
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "description": "x", "parameters": {"x": 1}, "strict": False},
        }
    ],
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"x": True},
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "description": "x", "schema": {"x": 1}, "strict": True},
    },
    "mpic": {
        "policy": "x",
        "press": "x",
        "trace": True,
        "top_k": 2,
        "ignore_eos": True,
        "handles": True,
        "retrieval": {"mode": "auto", "trigger": "confidence", "confidence": 0.5}
        | {"top_k": 2, "min_score": 0.5, "rounds": 2}
        | {"filter": {"str": 1, "b": ["x", 2], "c": {"gt": 1}}},
    },
} | {name: field.yes[0] if field.yes else None for name, field in BY_NAME.items() if field.inside is None}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
SEEN = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "x"},
    "transformations": {},
}
SAID = {"type": "text", "text": "x", "citations": [], **CACHED}
BLOCKS = [
    SAID,
    SEEN,
    {"type": "image", "source": {"type": "url", "url": "x"}},
    {"type": "image", "source": {"type": "file", "file_id": "x"}},
    {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "x"},
        "title": "x",
        "context": "x",
        "citations": {"enabled": False},
    },
    {"type": "document", "source": {"type": "content", "content": [SAID, SEEN]}},
    {"type": "search_result", "content": [SAID], "source": "x", "title": "x"},
]
MESSAGES = {
    "model": "x",
    "max_tokens": 2,
    "system": [SAID],
    "messages": [
        {"role": "user", "content": BLOCKS},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": "x", "data": "x"},
                {"type": "tool_use", "id": "x", "name": "f", "input": {}, "caller": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "x", "content": BLOCKS, "is_error": True}],
        },
    ],
    "tools": [
        {"name": "f", "input_schema": {"x": 1}, "type": "custom", "description": "x", "strict": True}
        | {"eager_input_streaming": True, "input_examples": [], "defer_loading": False, **CACHED}
        | {"allowed_callers": ["direct"]}
    ],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "output_config": {"format": {"type": "json_schema", "schema": {"x": 1}}, "effort": "low"},
    "thinking": {"type": "disabled", "display": "omitted"},
    "mcp_servers": [],
    "speed": "standard",
    "mpic": CHAT["mpic"],
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 2,
    "stop_sequences": ["x"],
    "metadata": {"user_id": "x"},
    "thread": {"type": "continue", "previous_message_id": "x"},
    "service_tier": "auto",
    "container": None,
    "diagnostics": None,
    "inference_geo": None,
    **CACHED,
}
CONTENT = [
    {"type": "input_text", "text": "x"},
    {"type": "output_text", "text": "x", "annotations": [{"x": 1}], "logprobs": [{"x": 1}]},
    {"type": "refusal", "refusal": "x"},
    {"type": "input_image", "image_url": "x", "file_id": "x", "detail": "low"},
    {
        "type": "input_file",
        "file_id": "x",
        "file_data": "x",
        "filename": "x",
        "detail": "low",
        "file_url": None,
    },
]
RESPONSES = {
    "input": [
        {"role": "user", "content": CONTENT, "id": "x", "status": "completed", "phase": "commentary"},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "x", "output": CONTENT, "name": "f"},
        {"type": "reasoning", "summary": [], "content": [], "encrypted_content": "x"},
        {"type": "item_reference", "id": "x"},
    ],
    "model": "x",
    "instructions": "x",
    "previous_response_id": "x",
    "store": True,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "max_output_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "tools": [
        {"type": "function", "name": "f", "description": "x", "parameters": {"x": 1}, "strict": True}
        | {"defer_loading": False}
    ],
    "tool_choice": {"type": "function", "name": "f"},
    "parallel_tool_calls": True,
    "max_tool_calls": 2,
    "text": {
        "format": {
            "type": "json_schema",
            "name": "x",
            "description": "x",
            "schema": {"x": 1},
            "strict": True,
        },
        "verbosity": None,
    },
    "reasoning": {"effort": "low", "summary": None, "generate_summary": None},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"x": "y"},
    "user": "x",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "service_tier": "auto",
    "truncation": "disabled",
    "background": False,
    "top_logprobs": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "context_management": [],
    "conversation": None,
    "moderation": None,
    "prompt": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "mpic": CHAT["mpic"],
}
COMPLETION = {
    name: CHAT[name]
    for name in (
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "seed",
        "stop",
        *requests.Penalized.model_fields,
    )
} | {
    "prompt": ["x", "y"],
    "stream": True,
    "stream_options": CHAT["stream_options"],
    "user": "x",
    "best_of": 2,
    "echo": False,
    "top_k": 2,
    "logprobs": 2,
    "suffix": "",
}
UPLOAD = {
    "filename": "x",
    "purpose": "user_data",
    "bytes": 2,
    "mime_type": "x",
    "expires_after": {"anchor": "created_at", "seconds": 3600},
    "handle": "x",
    "replace": True,
    "split": {"mode": "fixed", "tokens": 2, "overlap": 1},
    "press": "x",
    "ttl": 2,
    "kv_ttl": 2,
}
BODIES = {
    requests.ChatRequest: CHAT,
    # errors find a field by the identity of what holds it
    messages.MessagesRequest: json.loads(json.dumps(MESSAGES)),
    messages.CountRequest: json.loads(
        json.dumps({name: MESSAGES[name] for name in messages.CountRequest.model_fields if name in MESSAGES})
    ),
    responses.ResponsesRequest: json.loads(json.dumps(RESPONSES)),
    texts.CompletionRequest: COMPLETION,
    texts.TokenizeRequest: {
        name: CHAT[name] for name in ("messages", "tools", "chat_template_kwargs", "model")
    }
    | {"add_special_tokens": False, "return_token_strs": True}
    | {"add_generation_prompt": True, "continue_final_message": False},
    texts.DetokenizeRequest: {"tokens": [1, 2], "model": "x"},
    texts.EmbeddingRequest: {"input": ["x"], "model": "x", "encoding_format": "float"}
    | {"user": "x", "dimensions": 2},
    requests.CacheRequest: {
        "text": "x",
        "split": {"mode": "fixed", "tokens": 2, "overlap": 1},
        "name": "x",
        "ttl": 2,
    },
    requests.UploadCreate: UPLOAD,
    requests.UploadComplete: {"part_ids": ["x", "y"], "md5": "0" * 32},
    requests.CacheChange: {"ttl": 2, "kv_ttl": 2, "pinned": True},
    requests.FileChange: {"ttl": 2, "handle": "x", "kv_ttl": 2, "pinned": True},
    requests.ReferenceChange: {"ttl": 2, "pinned": True},
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
NULLS = ("messages", "system", "input")
"""Fields with parts of earlier answers, which clients send back with fields of their own that are null."""
INTERNAL = re.compile(
    r"None|True|False|Literal|Union|pydantic|\bdict|\bstr\b|\bint\b|instance|[Ii]nput|type=|Value error|<|validation"
    r"|unable|" + "|".join(rf"\b{name}\b" for name, kind in vars(requests).items() if isinstance(kind, type))
)
"""Words of Python's and of our own classes."""


def places(value, at=()):
    """Yield the paths of all values in a JSON value."""
    yield at
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    ):
        yield from places(inner, (*at, name))


def changed(body, at, value):
    """Return a copy of a body with another value at a place; ``...``: with none."""
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
        said = re.sub("must (match|be one of) .*", "", shown.message.removeprefix(shown.param or ""))
        assert not INTERNAL.search(said), shown.message
        return shown
    return None


def openai_place(at):
    """Return the place of the field of OpenAI's that a place belongs to, which is refused as a whole."""
    for end in range(1, len(at) + 1):
        field = BY_NAME.get(at[end - 1])
        if field is not None and field.inside == (at[end - 2] if end > 1 else None):
            return at[:end]
    return None


def is_type_of_item(at):
    """Return whether a place is the type of an item of a response; without one it is a message."""
    return at[0] == "input" and at[-1] == "type"


def test_the_bodies_have_every_field_of_every_model():
    for model, body in BODIES.items():
        assert refused(model, copy.deepcopy(body)) is None
        known, found = {model}, set()
        while known - found:
            for kind in known - found:
                found.add(kind)
                for field in kind.model_fields.values():
                    known |= set(models(field.annotation))
        names = {at[-1] for at in places(body) if at}
        missing = {f.alias or name for kind in known for name, f in kind.model_fields.items()} - names
        alternatives = {"chunks", "structured_outputs", "regex", "choice", "prompt"}
        assert missing <= alternatives, "which cannot stand beside text, response_format or messages"


async def test_every_route_that_takes_json_has_its_body_among_them(server):
    taken = {
        kind
        for route in server.app.routes
        for field in getattr(getattr(route, "dependant", None), "body_params", ())
        for kind in models(field.field_info.annotation)
    }
    assert len(taken) > 5 and taken == set(BODIES)


def models(annotation):
    """Yield the models in a type."""
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
            whole = openai_place(at) if model in (requests.ChatRequest, texts.CompletionRequest) else None
            if error is None or error.param == written(whole or at):
                count += error is not None
                continue
            # a container in place of something else is wrong in one of its members, or a member is missing
            where = error.param or ""
            inside = where.startswith((written(at) + ".", written(at) + "["))
            beside = model in (requests.ChatRequest, texts.TokenizeRequest, texts.CompletionRequest)
            related = beside and where in RELATED.get(at[-1], ())
            related = related or (wrong is None and is_type_of_item(at))
            assert related or (inside and isinstance(wrong, dict | list)), (
                written(at),
                wrong,
                error.message,
            )
            count += 1
    assert count > 5


RELATED = {
    "role": ("messages[0].tool_call_id", "messages[1].tool_calls", "messages[2].tool_call_id"),
    "n": ("best_of",),
    "max_tokens": ("max_tokens",),
    "max_completion_tokens": ("max_tokens",),
    "stream": ("stream_options",),
    "logprobs": ("top_logprobs",),
    "tools": ("tool_choice.function.name",),
    "name": ("tool_choice.function.name",),
    "type": ("response_format.json_schema",),
    "tool_calls": ("messages[1].content",),
    "messages": ("prompt",),
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
    free = re.compile(
        r"(.*\.)?(parameters|filter|annotations|metadata|logit_bias|schema|chat_template_kwargs"
        r"|prediction|prompt_cache_options|input_schema|logprobs|caller|transformations|(?<=\]\.)input)(\W.*)?"
    )
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
                    # a field that is known there, or one of a client's own in an earlier answer, which is null
                    assert name in ("content", "image_url") or (value is None and at[0] in NULLS)
                else:
                    assert error.param == written((*at, name))
                    assert error.code == "unsupported_parameter" or name in ("text", "content")


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_what_is_missing_is_named_by_its_exact_place(model):
    for at in places(BODIES[model]):
        if at and isinstance(at[-1], str):
            error = refused(model, changed(BODIES[model], at, ...))
            if error is not None and error.param != written(at):
                related = is_type_of_item(at) or error.param in RELATED.get(at[-1], ())
                assert related or at[-1] in ("tool_call_id", "text", "mode"), written(at)


# ---- everything else of a request

CHATS, FILES, CACHES, REFERENCES = "/v1/chat/completions", "/v1/files", "/v1/caches", "/v1/references"
BROKEN = "data:image/png;base64,AAAA"
PARTS = {
    ".image_url.url": [
        {"type": "image_url", "image_url": {"url": url}}
        for url in (
            "file-nope",
            BROKEN,
            "http://x",
            "data:image/png;base64,@@",
            "data:text/plain;base64,AAAA",
        )
    ],
    ".video_url.url": [{"type": "video_url", "video_url": {"url": url}} for url in ("file-nope", "http://x")],
    ".image": [{"type": "image", "image": url} for url in ("file-nope", BROKEN, "http://x")],
    ".file_id": [{"type": kind, "file_id": "file-nope"} for kind in ("image", "file")],
    ".file.file_id": [{"type": "file", "file": {"file_id": "file-nope"}}],
    ".handle": [{"type": kind, "handle": "NOPE"} for kind in ("image", "file")],
    "": [{"type": kind} for kind in ("image", "file")],
    ".text": [{"type": "document", "text": text} for text in ("", " ", "a\0b")],
    ".cache_id": [{"type": "cache", "cache_id": id} for id in ("cache-nope", "group-nope", "x")],
    ".name": [{"type": "image", "image": BROKEN, "name": ""}],
}
"""Content parts by the place in them that is wrong."""
ELSEWHERE = [
    ("GET", f"{FILES}?after=file-nope", {}, "after"),
    ("GET", f"{CACHES}?after=x", {}, "after"),
    ("GET", f"{REFERENCES}?after=x", {}, "after"),
    ("GET", f"{FILES}/x", {}, "file_id"),
    ("GET", f"{CACHES}/cache-x", {}, "cache_id"),
    ("GET", f"{REFERENCES}/x", {}, "reference_id"),
    ("DELETE", f"{FILES}/x", {}, "file_id"),
    *(
        ("GET", f"{path}?limit={value}", {}, "limit")
        for path in (FILES, CACHES, REFERENCES)
        for value in "0x"
    ),
    *(("GET", f"{path}?order=x", {}, "order") for path in (FILES, CACHES, REFERENCES)),
    ("GET", f"{REFERENCES}?kind=x", {}, "kind"),
    ("GET", "/v1/savings?scope=x", {}, "scope"),
    ("GET", "/v1/savings?days=0", {}, "days"),
    *(
        ("POST", path, {"content": content, "headers": {"Content-Type": "application/json"}}, None)
        for path in (CHATS, CACHES, f"{REFERENCES}/search")
        for content in ("", "null", "[]", "1", '"x"', "{", "\0")
    ),
    ("PATCH", f"{FILES}/x", {}, None),
    ("PATCH", f"{CACHES}/x", {}, None),
    ("POST", CHATS, {"content": "{}"}, "Content-Type"),
    ("POST", FILES, {}, "file"),
    ("POST", FILES, {"json": {}}, "file"),
    ("POST", FILES, {"files": {"file": (None, "a text")}}, "file"),
    ("POST", FILES, {"files": {"picture": ("a.png", png())}}, "picture"),
    ("POST", FILES, {"files": {"file": ("a.png", b"")}}, "file"),
    ("POST", FILES, {"files": {"file": ("a.png", png()[:40])}}, "file"),
    *(
        ("POST", FILES, {"data": {name: value}, "files": {"file": ("a.png", png())}}, name)
        for name, value in [
            ("ttl", "x"),
            ("ttl", "0"),
            ("ttl", "9" * 14),
            ("replace", "x"),
            ("replace", "true"),
            ("handle", "a b"),
            ("split", "x"),
            ("split", '{"mode": 5}'),
            ("press", "x"),
            ("purpose", "x"),
            ("x", "1"),
            ("expires_after[anchor]", "x"),
        ]
    ),
    ("POST", CACHES, {"json": {"chunks": ["a", " "]}}, "chunks[1]"),
    ("POST", f"{REFERENCES}/search", {"json": {"image": BROKEN}}, "image"),
    ("POST", f"{REFERENCES}/search", {"json": {"query": "x", "filter": {"a": {"b": 1}}}}, "filter.a.b"),
    *(
        ("POST", REFERENCES, {"data": {name: value}, "files": {"file": ("a.png", png())}}, name)
        for name, value in [("metadata", "x"), ("metadata", "[]"), ("id", "x"), ("description", "x" * 5000)]
    ),
]
"""Method, path, options and parameter of requests that are wrong outside of a body's fields, or beyond their types."""


def check_words(error):
    """Check that a message has no words of Python's."""
    assert error["message"], error
    assert not INTERNAL.search(re.sub("must match .*", "", error["message"])), error


@pytest.mark.parametrize("place", PARTS)
async def test_a_content_part_is_refused_by_the_place_in_it(server, place):
    for part in PARTS[place]:
        error = (await server.ask([{"type": "text", "text": "x"}, part])).json()["error"]
        assert error["param"] == f"messages[0].content[1]{place}", error
        check_words(error)


@pytest.mark.parametrize(("method", "path", "options", "param"), ELSEWHERE)
async def test_the_rest_of_a_request_is_refused_by_its_place(server, method, path, options, param):
    answer = await server.http.request(method, path, **options)
    assert 400 <= answer.status_code < 500
    error = answer.json()["error"]
    assert error["param"] == param, error
    check_words(error)


async def test_a_filter_of_a_chat_is_refused_by_its_place_in_the_chat(server):
    answer = await server.ask(mpic={"retrieval": {"mode": "always", "filter": {"a": {"b": 1}}}})
    assert answer.json()["error"]["param"] == "mpic.retrieval.filter.a.b"


# ---- what an answer repeats

LONG = "ab\u2028\U0001f600<" * 50_000
REPEATS = {
    "a name": lambda: ("POST", CHATS, {"json": {**ASK, LONG: 1}}),
    "a name within": lambda: ("POST", CHATS, {"json": {"messages": [{**HELLO, LONG: 1}]}}),
    "names within each other": lambda: (
        "POST",
        CHATS,
        {"json": {**ASK, "mpic": {"retrieval": {"mode": "always", "filter": {LONG: {LONG: [1]}}}}}},
    ),
    "a value": lambda: ("POST", CHATS, {"json": {**ASK, "model": LONG}}),
    "a role": lambda: ("POST", CHATS, {"json": {"messages": [{"role": LONG, "content": "x"}]}}),
    "a policy": lambda: ("POST", CHATS, {"json": {**ASK, "mpic": {"policy": LONG}}}),
    "a press": lambda: ("POST", CHATS, {"json": {**ASK, "mpic": {"press": LONG}}}),
    "a type": lambda: (
        "POST",
        CHATS,
        {"json": {"messages": [{"role": "user", "content": [{"type": LONG}]}]}},
    ),
    "an id": lambda: (
        "POST",
        CHATS,
        {"json": {"messages": [{"role": "user", "content": [{"type": "image", "file_id": LONG}]}]}},
    ),
    "a handle": lambda: (
        "POST",
        CHATS,
        {"json": {"messages": [{"role": "user", "content": [{"type": "image", "handle": LONG}]}]}},
    ),
    "a cache": lambda: (
        "POST",
        CHATS,
        {"json": {"messages": [{"role": "user", "content": [{"type": "cache", "cache_id": LONG}]}]}},
    ),
    "a mention": lambda: (
        "POST",
        CHATS,
        {"json": {"messages": [{"role": "user", "content": "IMAGE#" + "A" * 300_000}]}},
    ),
    "a URL": lambda: (
        "POST",
        CHATS,
        {
            "json": {
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": LONG}}]}]
            }
        },
    ),
    "a tool": lambda: (
        "POST",
        CHATS,
        {"json": {**ASK, "tools": [{"type": "function", "function": {"name": LONG}}]}},
    ),
    "broken JSON": lambda: (
        "POST",
        CHATS,
        {"content": '{"' + LONG, "headers": {"Content-Type": "application/json"}},
    ),
    "a split": lambda: ("POST", CACHES, {"json": {"text": "x", "split": {"mode": LONG}}}),
    "a filter": lambda: (
        "POST",
        f"{REFERENCES}/search",
        {"json": {"query": "x", "filter": {LONG: {LONG: 1}}}},
    ),
    "a path": lambda: ("GET", f"/v1/{LONG[:9000]}", {}),
    "an id in a path": lambda: ("GET", f"{FILES}/{LONG[:9000]}", {}),
    "an id in a query": lambda: ("GET", FILES, {"params": {"after": LONG[:9000]}}),
    "an unknown path of the page": lambda: ("GET", f"/ui/{LONG[:9000]}", {}),
    "a host": lambda: ("GET", FILES, {"headers": {"host": "x" * 30_000}}),
    "an origin": lambda: ("GET", FILES, {"headers": {"origin": "x" * 30_000}}),
    "a charset": lambda: (
        "POST",
        FILES,
        {
            "content": b"x",
            "headers": {"Content-Type": "multipart/form-data; boundary=x; charset=" + "x" * 30_000},
        },
    ),
    **{
        f"the {name} of a form": lambda name=name: (
            "POST",
            FILES,
            {"data": {name: LONG[:100_000]}, "files": {"file": ("a.png", png())}},
        )
        for name in ("handle", "purpose", "press", "split", "ttl", "replace", "expires_after[anchor]")
    },
    "a name of a form": lambda: (
        "POST",
        FILES,
        {"data": {"x" * 60_000: "x"}, "files": {"file": ("a.png", png())}},
    ),
    "the name of a file": lambda: ("POST", FILES, {"files": {"file": ("x" * 60_000 + ".txt", b"a\0b")}}),
    **{
        f"the {name} of a reference": lambda name=name: (
            "POST",
            REFERENCES,
            {"data": {name: LONG[:100_000]}, "files": {"file": ("a.png", png())}},
        )
        for name in ("id", "metadata", "title", "description")
    },
    "a name in metadata": lambda: (
        "POST",
        REFERENCES,
        {"data": {"metadata": json.dumps({LONG[:60_000]: 1})}, "files": {"file": ("a.png", png())}},
    ),
}


@pytest.mark.parametrize("what", REPEATS)
async def test_an_error_repeats_little_of_a_long_request(server, caplog, what):
    method, path, options = REPEATS[what]()
    answer = await server.http.request(method, path, **options)
    assert 400 <= answer.status_code < 500
    said = answer.json()["error"]
    assert len(answer.content) < 4000, said["message"][:300]
    assert sum(map(len, answer.headers.values())) < 4000
    assert all(len(record.getMessage()) < 4000 for record in caplog.records)
    shown = (await server.http.get("/metrics")).text
    assert max(map(len, shown.splitlines())) < 1000


async def test_a_long_name_takes_no_more_memory_than_to_parse_it(server):
    """Above the body, which the client holds here too: the text, and the parts of it that errors are about."""
    size = 8_000_000
    body = json.dumps({"text": "x", "y" * size: 1}).encode()
    options = {"content": body, "headers": {"Content-Type": "application/json"}}
    await server.http.post(CACHES, **options)
    tracemalloc.start()
    try:
        answer = await server.http.post(CACHES, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.json()["error"]["code"] == "unsupported_parameter" and len(answer.content) < 1000
    assert peak < 4 * size


# ---- the log


@pytest.fixture
def failures(monkeypatch):
    """The time, in seconds, by which failures are counted afresh."""
    now = [0.0]
    monkeypatch.setattr("mpic.http.errors._failures", _FailureCounts(lambda: now[0]))
    return now


async def test_a_flood_of_failures_takes_few_lines_and_one_traceback(server, monkeypatch, caplog, failures):
    def fail(*args, **options):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(server.library.files, "page", fail)
    for _ in range(300):
        assert (await server.http.get(FILES)).status_code == 500
    lines = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 9 and [record.exc_info is not None for record in lines] == [True] + [False] * 8
    assert "128 times since the last such line, 256 in all" in lines[-1].getMessage()
    failures[0] += 60.0
    assert (await server.http.get(FILES)).status_code == 500
    assert "45 times since the last such line, 301 in all" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    "error", [StorageFull, OutOfMemory, EngineStopped, DatabaseBusy, DatabaseFailed, LibraryGone]
)
def test_an_expected_refusal_is_logged_in_a_line_without_a_traceback(caplog, failures, error):
    for _ in range(100):
        as_mpic_error(error("not now"))
    assert [record.exc_info for record in caplog.records] == [None] * 7
    assert caplog.records[0].getMessage() == f"{error.code}: not now"


def test_each_kind_of_failure_has_a_traceback_of_its_own(caplog, failures):
    for kind in (ValueError, KeyError, ValueError):
        as_mpic_error(kind("x"))
    assert [record.exc_info is not None for record in caplog.records] == [True, True, False]
