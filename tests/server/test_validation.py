"""Errors of requests name the field, in OpenAI's shape."""

import pytest
from server_helpers import invalid

from mpic.http.errors import as_mpic_error

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
        ({"stop": [""]}, "bad_request", None),
        ({"top_logprobs": 2}, "bad_request", None),
        ({"logprobs": True, "top_logprobs": 21}, "bad_request", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "bad_request", None),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "bad_request", None),
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
        ({"type": "input_audio", "input_audio": {}}, "unsupported_modality", ""),
        ({"text": "no type"}, "unsupported_modality", ""),
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
