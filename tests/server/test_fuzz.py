"""Whatever a client sends, the response is never a 5xx and always has the error shape."""

import json
import string

import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_helpers import fake_server

from mpic.api.openai_fields import BY_NAME
from mpic.api.requests import ChatRequest

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3)
)
NAMED = ["IMAGE#A", "FILE#B.", "FILE#", "<|im_end|>", "IMAGE#A and FILE#A", " "]
TEXT = st.text(max_size=20) | st.sampled_from(NAMED)
TYPES = ["text", "image_url", "video_url", "image", "file", "document", "cache", "input_audio"]
URL = st.sampled_from(["data:,", "data:image/png;base64,AAAA", "x"])
PART_FIELDS = {
    "type": st.sampled_from(TYPES) | JSON,
    "text": TEXT | JSON,
    "image_url": st.fixed_dictionaries({"url": URL}) | JSON,
    "video_url": st.fixed_dictionaries({"url": URL}) | JSON,
    "image": st.sampled_from(["file-x", "data:"]) | JSON,
    "file": st.fixed_dictionaries({"file_id": TEXT}) | JSON,
    "handle": TEXT,
    "name": TEXT | JSON,
}
PART = st.fixed_dictionaries({}, optional=PART_FIELDS)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | JSON,
        "content": TEXT | st.lists(PART | JSON, max_size=3) | JSON,
    }
)
FIELDS = st.sampled_from([*ChatRequest.model_fields, *BY_NAME]) | st.text(string.ascii_lowercase, max_size=5)
BODY = st.builds(
    lambda messages, fields: {**fields, "messages": messages},
    st.lists(MESSAGE, max_size=3) | JSON,
    st.dictionaries(FIELDS, JSON, max_size=2),
)


@pytest.fixture
async def lenient(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine(context=10**6, pool=10**6)) as server:
        await server.uploaded(handle="A")
        await server.uploaded(b"words", "b.txt", handle="B")
        yield server


async def test_chat(lenient):
    async def send(body):
        # escapes what is not ASCII: half pairs arrive as JSON allows them
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return await lenient.http.post("/v1/chat/completions", content=content, headers=headers)

    seen = set()
    # chance may draw no valid one
    bodies = [{"messages": [{"role": "user", "content": "IMAGE#A and what?"}]}]

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(BODY)
    def collect(body):
        bodies.append(body)

    collect()
    for body in bodies:
        answer = await send(body)
        seen.add(answer.status_code)
        assert answer.status_code < 500, body
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"] and error["code"] and error["type"] == "invalid_request_error", body
    assert {200, 400} <= seen
    assert lenient.engine.held == set()
