"""JSON bodies: large ones are parsed off the event loop, and bodies that are not text are the client's mistake."""

import json
import threading

import pytest
from server_helpers import fake_server, refusal

from mpic.config import Config, ServerConfig
from mpic.server import json_routes


def post(server, content, path="/v1/chat/completions", method="POST"):
    return server.http.request(method, path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\xbd"}]}', "UTF-8"),
        (b'{"messages": "\xff"}', "UTF-8"),
        (b"\xff", ""),
        (b"[" * 200_000, "nested"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
        (b'{"messages": ', "not JSON"),
        (b"{", "not JSON"),
        (b"", "required"),
        (b"null", "required"),
        (b"NaN", ""),
        (b'{"messages": NaN}', ""),
        (b"[1]", ""),
        (b'"x"', ""),
    ],
)
async def test_a_body_that_is_not_a_request_is_a_bad_request(server, content, says):
    answer = await post(server, content)
    error = answer.json()["error"]
    assert refusal(answer) == (400, "bad_request") and says in error["message"], error
    assert error["type"] == "invalid_request_error"


async def test_whole_surrogate_pairs_and_escapes_are_text(server):
    content = json.dumps({"messages": [{"role": "user", "content": "🙂 \\ud800"}]}).encode()
    assert (await post(server, content)).status_code == 200


async def test_large_bodies_are_parsed_on_another_thread(server, monkeypatch):
    threads, parse = [], json_routes.parse
    noted = lambda *args: threads.append(threading.get_ident()) or parse(*args)
    monkeypatch.setattr(json_routes, "parse", noted)
    for text in (
        "x" * 10,
        "x" * 2 * json_routes.SMALL,
        "x" * 2 * json_routes.MEDIUM,
        ", " * json_routes.SMALL,
    ):
        await server.ask(text)
    small, medium, large, many = (thread == threading.get_ident() for thread in threads)
    assert small and medium and not large and not many


@pytest.mark.parametrize("value", [b"1,", b"[],", b"{},", b'"a1000":null,', b'"a1" : null,'])
def test_a_body_that_holds_more_than_text_is_parsed_at_once_only_if_it_is_small(value):
    quick = [size for size in range(50, 40000, 50) if json_routes.is_quick(b"[" + value * size)]
    assert len(value) * max(quick) < json_routes.SMALL


# ---- bounds


def chat(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()


def messages(n):
    return json.dumps({"messages": [{"role": "user", "content": "x"}] * n}).encode()


def data_url(size):
    return json.dumps({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}})


@pytest.mark.parametrize(
    "content",
    [
        messages(100_000),
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * 20_000}}}]),
        chat(stop="x" * 3_000_000),
        b'{"messages":[' + b"{}," * 1_000_000 + b"{}]}",
        b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}",
    ],
)
async def test_a_chat_larger_than_the_context_is_never_parsed(server, content, monkeypatch):
    monkeypatch.setattr(json, "loads", None)
    answer = await post(server, content)
    monkeypatch.undo()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert error["details"]["context_length"] == server.engine.info.context_length


@pytest.mark.parametrize(
    ("content", "times", "tokens"),
    [("x", 600, 600), ([{"type": "text", "text": "a"}] * 1_500, 1, 1500), ("x" * 600, 1, 600)],
)
async def test_what_cannot_fit_is_refused_before_a_prompt_is_built(
    server, content, times, tokens, monkeypatch
):
    monkeypatch.setattr("mpic.server.routers.chat.build_prompt", None)
    answer = await server.ask(messages=[{"role": "user", "content": content}] * times)
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded", error
    assert f"at least {tokens} tokens" in error["message"]


async def test_the_arguments_of_all_calls_hold_no_more_values_than_a_body_may(tmp_path, template):
    arguments = json.dumps({"a": [[]] * 60})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
    ]
    async with fake_server(
        tmp_path, template, config=Config(server=ServerConfig(max_body_values=200))
    ) as server:
        error = (await server.ask(messages=messages)).json()["error"]
    assert error["message"] == "the arguments of all tool calls together have more than 200 values"
    assert (error["code"], error["param"]) == ("bad_request", "messages[1].tool_calls[1].function.arguments")


async def test_images_inside_a_request_do_not_count_as_text(server):
    content = f'{{"messages": [{{"role": "user", "content": [{data_url(5_000_000)}]}}]}}'.encode()
    assert (await post(server, content)).json()["error"]["code"] == "invalid_image"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/caches"),
        ("POST", "/v1/references/search"),
        ("PATCH", "/v1/files/file-x"),
        ("PATCH", "/v1/caches/group-x"),
    ],
)
async def test_other_bodies_with_too_many_values_are_never_parsed(server, method, path, monkeypatch):
    monkeypatch.setattr(json, "loads", None)
    answer = await post(server, b'{"a": [' + b"0," * 100_000 + b"0]}", path, method)
    monkeypatch.undo()
    assert refusal(answer) == (413, "too_large")


async def test_only_the_first_error_of_a_list_is_reported_and_found_on_a_thread(server, monkeypatch):
    seen, tell = [], json_routes.errors.from_validation
    noted = lambda *args: seen.append((threading.get_ident(), len(args[0]))) or tell(*args)
    monkeypatch.setattr(json_routes.errors, "from_validation", noted)
    content = b'{"messages": [' + b"10," * 5_000 + b'1], "stop": [' + b"10," * 3_000 + b"1]}"
    assert (await post(server, content)).status_code == 400
    [(thread, errors)] = seen
    assert thread != threading.get_ident() and errors <= 4


async def test_a_body_in_pieces_is_assembled(server):
    async def pieces():
        for letter in chat(temperature=0.5):
            yield bytes([letter])

    assert (await post(server, pieces())).status_code == 200
