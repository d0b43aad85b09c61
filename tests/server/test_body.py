"""JSON bodies: large ones are parsed off the event loop, and what is no text is the client's mistake."""

import json
import threading

import pytest

from mpic.server import body

ASK = {"messages": [{"role": "user", "content": "hello"}]}


async def post(server, content):
    return await server.http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"messages": "\xff"}', "UTF-8"),
        (b"[" * 200_000, "nested"),
        (b'{"messages": ', "not JSON"),
        (b"", "required"),
        (b"NaN", ""),
    ],
)
async def test_what_is_no_json_text_is_a_bad_request(server, content, says):
    answer = await post(server, content)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "bad_request") and says in error["message"], error


async def test_whole_pairs_and_escapes_are_text(server):
    content = json.dumps({"messages": [{"role": "user", "content": "🙂 \\ud800"}]}).encode()
    assert (await post(server, content)).status_code == 200


async def test_large_bodies_are_parsed_on_another_thread(server, monkeypatch):
    threads = []
    parse = body.parse
    monkeypatch.setattr(body, "parse", lambda *args: threads.append(threading.get_ident()) or parse(*args))
    for size in (10, 2 * body.LARGE):
        await server.ask("x" * size)
    small, large = threads
    assert small == threading.get_ident() != large
