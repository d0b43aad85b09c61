"""Chat completions over HTTP: whole, streamed, broken off."""

import asyncio
import json
import threading
from contextvars import copy_context

import pytest
from api_shapes import assert_shape
from fake_engine import ANSWER, CHUNK_TOKENS
from server_helpers import data_url, events, fake_server, png, post_raw, refusal, said, wait_until

from mpic.api.completion import ChatCompletion, ChatCompletionChunk
from mpic.cancel import checkpoint
from mpic.config import Config, EngineConfig
from mpic.errors import CompileFailed
from mpic.server.routers import chat

DATA_URL = data_url(png())


# ---- answers


async def test_a_whole_answer(server):
    await server.uploaded(handle="EIFFEL")
    answer = await server.ask("What is in IMAGE#EIFFEL?", mpic={"policy": "mpic-16"})
    body = answer.json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake"
    message = {"role": "assistant", "content": ANSWER, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    assert body["choices"] == [choice]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": CHUNK_TOKENS - 16}
    ours = usage["mpic"]
    assert ours["policy"] == "mpic-16"
    assert (ours["tokens"]["reused"], ours["tokens"]["recomputed"]) == (CHUNK_TOKENS - 16, 16)
    assert set(ours["ms"]) == {"queue", "load", "link", "ttft", "total"}
    [chunk] = ours["chunks"]
    expected = {"tokens": CHUNK_TOKENS, "reused": CHUNK_TOKENS - 16, "recomputed": 16, "press": None}
    expected |= {"label": "EIFFEL", "tier": "device", "reason": "policy", "ms": 0.5, "bytes": 0}
    assert chunk.pop("key") and chunk == expected
    assert "trace" not in ours
    assert server.engine.held == set()


async def test_a_file_deleted_while_its_request_is_prepared_is_not_asked_about(server, monkeypatch):
    file = await server.uploaded(b"a secret", "s.txt", handle="SECRET")
    real = chat.prepare

    def prepare(body, state, user, handles):
        prepared = real(body, state, user, handles)
        state.library.files.delete(user, file["id"])
        return prepared

    monkeypatch.setattr(chat, "prepare", prepare)
    assert refusal(await server.ask("What is in FILE#SECRET?")) == (404, "file_not_found")
    assert not server.engine.requests


async def test_trace_shows_every_token(server):
    image = await server.uploaded(handle="A")
    await server.uploaded(b"a document", "d.txt", handle="D")
    body = (await server.ask("IMAGE#A and FILE#D", mpic={"trace": True})).json()
    assert_shape(ChatCompletion, body)
    trace = body["usage"]["mpic"]["trace"]
    assert trace["tokens"] == body["usage"]["prompt_tokens"] == trace["spans"][-1]["end"]
    assert [s["kind"] for s in trace["spans"]] == ["text", "image", "text", "document", "text"]
    assert (trace["spans"][1]["label"], trace["spans"][1]["file_id"]) == ("A", image["id"])
    assert trace["times"] == {"queue_ms": 0.0, "load_ms": 0.0, "link_ms": 0.0, "first_token_ms": 1.25}


async def test_every_way_to_refer_to_content(server):
    image = await server.uploaded(handle="PIC")
    document = await server.uploaded(b"words", "w.txt")
    content = [
        {"type": "text", "text": "IMAGE#PIC"},
        {"type": "image_url", "image_url": {"url": DATA_URL.replace("png", "jpeg")}},
        {"type": "image_url", "image_url": {"url": image["id"], "detail": "auto"}},
        {"type": "file", "file": {"file_id": document["id"]}, "name": "W"},
        {"type": "document", "text": "inline words"},
    ]
    answer = await server.ask(content)
    assert answer.status_code == 200, answer.text
    chunks = server.engine.requests[0].prompt.chunks
    assert [c.kind for c in chunks] == ["image", "image", "image", "text", "text"]
    assert [c.file_id for c in chunks] == [image["id"], None, image["id"], document["id"], None]
    assert {c.owner for c in chunks} == {"local"}
    assert chunks[0].key == chunks[1].key == chunks[2].key


async def test_sampling_options_reach_the_engine(server):
    options = {"temperature": 0.7, "top_p": 0.9, "seed": 11, "stop": "x", "logprobs": True, "top_logprobs": 2}
    await server.ask(max_completion_tokens=3, **options, mpic={"top_k": 4, "ignore_eos": True})
    sampling = server.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (3, 0.7, 0.9, 11)
    assert (sampling.stop, sampling.logprobs, sampling.top_k, sampling.ignore_eos) == (("x",), 2, 4, True)


async def test_answers_are_greedy_by_default(server):
    await server.ask()
    sampling = server.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.logprobs) == (0.0, 1.0, None)


async def test_logprobs_and_length(server):
    body = (await server.ask(max_tokens=2, logprobs=True, top_logprobs=1)).json()
    assert_shape(ChatCompletion, body)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == 2
    first = choice["logprobs"]["content"][0]
    assert first["logprob"] == -0.5 and bytes(first["bytes"]).decode() == first["token"]
    assert len(first["top_logprobs"]) == 1


async def test_the_default_policy_is_configured(tmp_path, template):
    config = Config(engine=EngineConfig(policy="legolink-16"))
    async with fake_server(tmp_path, template, config=config) as server:
        await server.ask()
        await server.ask(mpic={"policy": "full"})
        assert [r.policy.name for r in server.engine.requests] == ["legolink-16", "full"]


# ---- streams


async def test_a_stream_equals_the_whole_answer(server):
    whole = (await server.ask()).json()
    answer = await server.ask(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames, done = events(answer.text)
    assert done
    assert said(frames) == whole["choices"][0]["message"]["content"]
    assert frames[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [f["choices"][0]["finish_reason"] for f in frames][-1] == "stop"
    assert len({f["id"] for f in frames}) == 1
    assert all(f["object"] == "chat.completion.chunk" and "usage" not in f for f in frames)
    assert server.engine.held == set()


async def test_a_stream_with_usage(server):
    whole = (await server.ask()).json()
    frames, done = events((await server.ask(stream=True, stream_options={"include_usage": True})).text)
    assert done and frames[-1]["choices"] == []
    for chunk in frames:
        assert_shape(ChatCompletionChunk, chunk)
    assert frames[-1]["usage"] == whole["usage"]
    assert all(f["usage"] is None for f in frames[:-1])


async def test_a_stream_with_logprobs(server):
    frames, _ = events((await server.ask(stream=True, logprobs=True)).text)
    shown = [f["choices"][0]["logprobs"] for f in frames if f["choices"][0]["logprobs"]]
    assert len(shown) == len(ANSWER.split(" "))


async def test_an_error_in_a_stream_is_an_event(server):
    server.engine.fail_at = 2
    answer = await server.ask(stream=True)
    assert answer.status_code == 200
    frames, done = events(answer.text)
    assert not done and frames[-1]["error"]["code"] == "internal_error"
    assert "inside of the engine" not in answer.text
    assert server.engine.held == set()
    server.engine.failure = CompileFailed("the chunk could not be compiled")
    frames, _ = events((await server.ask(stream=True)).text)
    assert frames[-1]["error"]["code"] == "compile_failed"


async def test_a_stream_that_waits_long_for_its_first_token_begins_with_comments(server, monkeypatch):
    usual = (await server.ask(stream=True)).text
    monkeypatch.setattr(chat, "PATIENCE", 0.05)
    server.engine.pause = 0.3
    answer = await server.ask(stream=True)
    waited = answer.text.rpartition(": waiting\n\n")
    assert answer.text.startswith(": waiting\n\n") and ": waiting" not in usual
    assert said(events(waited[2])[0]) == said(events(usual)[0])
    assert server.engine.held == set()


async def test_a_failure_before_the_first_token_is_an_ordinary_error(server):
    server.engine.fail_at, server.engine.failure = 0, CompileFailed("no")
    for stream in (True, False):
        assert refusal(await server.ask(stream=stream)) == (500, "compile_failed")
    server.engine.failure = RuntimeError("the inside of the engine")
    answer = await server.ask()
    assert refusal(answer) == (500, "internal_error") and "inside" not in answer.text
    assert server.engine.held == set()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_pages(server, stream):
    """The test works below HTTP: after the first bytes (or none) the client disconnects."""
    engine, sent, leaves = server.engine, [], asyncio.Event()
    engine.pause, engine.answer = 0.02, " ".join(["word"] * 10_000)
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": stream}).encode()
    call = asyncio.ensure_future(post_raw(server.app, "/v1/chat/completions", [body], sent, leaves))
    await wait_until(lambda: engine.held and (len(sent) >= 2 or not stream))
    assert len(engine.held) == 1 and bool(sent) == stream
    leaves.set()
    await asyncio.wait_for(call, 60)
    assert engine.held == set()
    assert b"[DONE]" not in b"".join(m.get("body", b"") for m in sent)


@pytest.mark.parametrize("when, submitted", [("prepared", 0), ("submitted", 1)])
async def test_a_client_that_leaves_while_its_request_is_made_leaves_no_answer_behind(
    server, monkeypatch, when, submitted
):
    owner, name = {"prepared": (chat, "prepare"), "submitted": (server.engine, "submit")}[when]
    real, begun, goes_on = getattr(owner, name), threading.Event(), threading.Event()

    def slow(*args):
        made = real(*args)
        begun.set()
        assert goes_on.wait(60)
        return made

    monkeypatch.setattr(owner, name, slow)
    leaves = asyncio.Event()
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
    call = asyncio.ensure_future(post_raw(server.app, "/v1/chat/completions", [body], [], leaves))
    await wait_until(begun.is_set)
    leaves.set()
    await asyncio.sleep(0.05)
    assert not call.done()
    goes_on.set()
    await asyncio.wait_for(call, 60)
    assert len(server.engine.requests) == submitted
    assert server.engine.held == set()


async def test_what_an_engine_begins_with_a_request_is_not_cancelled_when_the_request_has_been_made(
    server, monkeypatch
):
    submit, contexts = server.engine.submit, []

    def begun(request):
        contexts.append(copy_context())
        return submit(request)

    monkeypatch.setattr(server.engine, "submit", begun)
    assert (await server.ask()).status_code == 200
    contexts[0].run(checkpoint)


async def test_the_event_loop_is_not_blocked_by_an_answer(server):
    server.engine.pause, server.engine.answer = 0.02, " ".join(["word"] * 10_000)
    slow = asyncio.ensure_future(server.ask(max_tokens=10_000))
    await wait_until(lambda: server.engine.held)
    assert (await server.http.get("/health")).status_code == 200
    assert not slow.done()
    server.engine.pause = 0.0
    assert (await slow).status_code == 200
