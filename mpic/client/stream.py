"""Streamed chat completions."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import suppress
from types import TracebackType

import httpx

from mpic.api.completion import ChatCompletionChunk, Usage
from mpic.client.errors import BadResponse, from_body, from_transport


class _EventReader:
    """Reads server-sent events.

    Attributes:
        usage: the usage in the last event that had one.
        closed: True once the caller has closed the stream, perhaps while another thread or task was reading: the events
            then just end.
    """

    def __init__(self, response: httpx.Response, keep_usage: bool) -> None:
        self.response = response
        self.keep_usage = keep_usage
        self.usage: Usage | None = None
        self.done = self.closed = False

    def read(self, line: bytes) -> ChatCompletionChunk | None:
        """Return the chunk in a line, or None if the line has none for the caller."""
        if not line.startswith(b"data:"):
            return None
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return None
        try:
            event = json.loads(data.decode())
            if "error" in event:
                raise from_body(event["error"], None)
            chunk = ChatCompletionChunk.model_validate(event)
        except (ValueError, KeyError, TypeError) as exc:
            shown = data[:200].decode(errors="replace")
            raise BadResponse(f"not an event of a chat completion: {shown}") from exc
        self.usage = chunk.usage or self.usage
        return chunk if chunk.choices or self.keep_usage else None

    def finish(self) -> None:
        """Raise BadResponse unless the stream was complete or the caller has closed it."""
        if not self.done and not self.closed:
            raise BadResponse("the stream broke off before its end")

    def fail(self, exc: httpx.RequestError) -> None:
        """Raise the error for an exception of httpx, unless the caller has closed the stream."""
        if not self.closed:
            raise from_transport(exc, self.response.url) from exc


class Stream:
    """The chunks of an answer, as they arrive.

    Leaving the ``with`` block, ``close()``, or dropping the stream ends the connection, and with it the server's work.

    Attributes:
        usage: the usage of the answer, reuse included; None until the stream has ended.
    """

    def __init__(self, response: httpx.Response, keep_usage: bool = False) -> None:
        self._events = _EventReader(response, keep_usage)
        self._chunks = _read(self._events)

    @property
    def usage(self) -> Usage | None:
        return self._events.usage

    def __iter__(self) -> Iterator[ChatCompletionChunk]:
        return self

    def __next__(self) -> ChatCompletionChunk:
        return next(self._chunks)

    def texts(self) -> Iterator[str]:
        """Yield the text of the first answer, piece by piece."""
        return (chunk.text for chunk in self if chunk.text)

    def close(self) -> None:
        """End the stream; another thread may be reading it."""
        self._events.closed = True
        try:
            self._chunks.close()
        except ValueError:  # another thread is inside the generator, which ends with the connection
            _hang_up(self._events.response)
        self._events.response.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._events.response.close()


class AsyncStream:
    """Like ``Stream``, but used with ``async for``. To end it early, leave the ``async with`` block or ``await
    close()``."""

    def __init__(self, response: httpx.Response, keep_usage: bool = False) -> None:
        self._events = _EventReader(response, keep_usage)
        self._chunks = _aread(self._events)

    @property
    def usage(self) -> Usage | None:
        return self._events.usage

    def __aiter__(self) -> AsyncIterator[ChatCompletionChunk]:
        return self

    async def __anext__(self) -> ChatCompletionChunk:
        return await anext(self._chunks)

    async def texts(self) -> AsyncIterator[str]:
        """Yield the text of the first answer, piece by piece."""
        async for chunk in self:
            if chunk.text:
                yield chunk.text

    async def close(self) -> None:
        """End the stream; another task may be reading it."""
        self._events.closed = True
        await self._events.response.aclose()
        with suppress(RuntimeError):  # another task is in the generator, which ends with the connection
            await self._chunks.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if self._events.response.is_closed:
            return
        with suppress(RuntimeError):  # no loop is running any more, so nothing can be awaited
            asyncio.get_running_loop().create_task(self.close())


def _read(events: _EventReader) -> Generator[ChatCompletionChunk, None, None]:
    lines = _LineSplitter()
    try:
        for data in events.response.iter_bytes():
            for line in lines.feed(data):
                if (chunk := events.read(line)) is not None:
                    yield chunk
        events.finish()
    except httpx.RequestError as exc:
        events.fail(exc)
    finally:
        events.response.close()


async def _aread(events: _EventReader) -> AsyncGenerator[ChatCompletionChunk, None]:
    lines = _LineSplitter()
    try:
        async for data in events.response.aiter_bytes():
            for line in lines.feed(data):
                if (chunk := events.read(line)) is not None:
                    yield chunk
        events.finish()
    except httpx.RequestError as exc:
        events.fail(exc)
    finally:
        await events.response.aclose()


def _hang_up(response: httpx.Response) -> None:
    """End the connection of a response. Closing its socket would not wake a thread that is reading."""
    network = response.extensions.get("network_stream")
    connection = network.get_extra_info("socket") if network is not None else None
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _LineSplitter:
    """Splits bytes at line feeds only; httpx also splits at U+2028 and the like, which JSON may hold as they are."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
