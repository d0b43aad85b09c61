"""Reading a stream: cut anywhere, broken off, left early."""

import asyncio
import gc
import json
import socket
import threading

import httpx
import pytest
from threads_kit import started

import mpic
from mpic.client.inprocess import AsyncInProcess


def frame(text=None, **more):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "logprobs": None}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", **more}
    body["choices"] = [] if text is None else [choice]
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, data, size):
        self.pieces = [data[i : i + size] for i in range(0, len(data), size)]
        self.given = 0
        self.closed = False

    def __iter__(self):
        for piece in self.pieces:
            self.given += 1
            yield piece

    async def __aiter__(self):
        for piece in self:
            yield piece

    def close(self):
        self.closed = True

    async def aclose(self):
        self.closed = True


def over(body):
    return httpx.MockTransport(lambda request: httpx.Response(200, stream=body))


def open_stream(body):
    return mpic.MPIC(transport=over(body), max_retries=0).chat.completions.create("hi", stream=True)


def read(data, size, way):
    body = Body(data, size)
    if way == "sync":
        return "".join(open_stream(body).texts()), body

    async def main():
        async with mpic.AsyncMPIC(transport=over(body)) as client:
            stream = await client.chat.completions.create("hi", stream=True)
            return "".join([piece async for piece in stream.texts()])

    return asyncio.run(main()), body


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_pieces_may_be_cut_anywhere_and_hold_any_line_separator(way, size):
    said = ["one ", "zwei\u2028drei\x85", "\r四"]
    text, body = read(b"".join(map(frame, said)) + DONE, size, way)
    assert text == "".join(said) and body.closed


@pytest.mark.parametrize("way", ["sync", "async"])
def test_an_error_in_the_middle_is_raised(way):
    error = b"data: " + json.dumps(mpic.EngineStopped("gone").body()).encode() + b"\n\n"
    with pytest.raises(mpic.EngineStopped, match="gone"):
        read(frame("one") + error, 1000, way)


@pytest.mark.parametrize(("code", "status"), [("engine_stopped", 503), ("not_known_here", 500)])
def test_an_error_in_the_middle_has_the_status_of_its_kind_and_not_that_of_the_stream(code, status):
    body = {"error": {**mpic.EngineStopped("gone").body()["error"], "code": code}}
    with pytest.raises(mpic.MPICError, check=lambda error: (error.code, error.status) == (code, status)):
        read(b"data: " + json.dumps(body).encode() + b"\n\n", 1000, "sync")


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize(
    "rest", [b"", b"data: {not json}\n\n" + DONE, b"data: []\n\n" + DONE, b"data: \xff\n\n" + DONE]
)
def test_a_stream_that_breaks_off_is_not_a_short_answer(way, rest):
    with pytest.raises(mpic.BadResponse):
        read(frame("one") + rest, 1000, way)


def test_a_stream_that_is_left_is_closed():
    data = b"".join(frame(str(i)) for i in range(50)) + DONE
    with open_stream(body := Body(data, 50)) as stream:
        assert next(stream).text == "0"
    assert body.closed and body.given < 10
    with pytest.raises(StopIteration):
        next(stream)
    stream = open_stream(body := Body(data, 50))
    stream.close()
    assert body.closed
    for _ in open_stream(body := Body(data, 50)):
        break
    gc.collect()
    assert body.closed and body.given < 10


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def silent():
    """(url, left): a server that sends the first event of an answer and no more, and says when the client has left."""
    left = threading.Event()

    def answer():
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            event = frame("one")
            connection.sendall(HEAD + b"%x\r\n%s\r\n" % (len(event), event))
            try:
                while connection.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
            left.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", left


def test_a_stream_that_another_thread_reads_is_closed_and_its_reader_sees_the_end(silent):
    url, left = silent
    with mpic.MPIC(url, max_retries=0) as client:
        stream, read = client.chat.completions.create("hi", stream=True), []
        assert next(stream).text == "one"
        reader = started(lambda: read.append(next(stream, "the end")), daemon=True)
        while not stream._chunks.gi_running:
            reader.join(0.01)
        stream.close()
        assert left.wait(60)
        reader.join(60)
        assert read == ["the end"]


async def closed_under_its_reader(client):
    """Close a stream that another task reads; return what that task sees at last."""
    stream = await client.chat.completions.create("hi", stream=True)
    assert (await anext(stream)).text == "one"
    reader = asyncio.ensure_future(anext(stream, "the end"))
    await asyncio.sleep(0)
    await stream.close()
    return await asyncio.wait_for(reader, 60)


async def test_a_stream_that_another_task_reads_is_closed_and_its_reader_sees_the_end(silent):
    url, left = silent
    async with mpic.AsyncMPIC(url, max_retries=0) as client:
        assert await closed_under_its_reader(client) == "the end"
        assert await asyncio.to_thread(left.wait, 30)


async def test_an_async_stream_that_is_dropped_unread_leaves_the_server(silent):
    url, left = silent
    async with mpic.AsyncMPIC(url, max_retries=0) as client:
        await client.chat.completions.create("hi", stream=True)
        gc.collect()
        assert await asyncio.to_thread(left.wait, 30)


class Endless:
    """An application whose answer begins and does not end before the client has left."""

    left = False

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": frame("one"), "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = True


async def test_a_stream_in_process_that_another_task_reads_is_closed_and_its_reader_sees_the_end():
    app = Endless()
    async with mpic.AsyncMPIC("http://x", transport=AsyncInProcess(app), max_retries=0) as client:
        assert await closed_under_its_reader(client) == "the end" and app.left
