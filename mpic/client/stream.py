"""Streamed answers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from types import TracebackType

import httpx

from mpic.client.errors import BadResponse, from_body, from_transport
from mpic.client.types import ChatCompletionChunk, Usage


class _Frames:
    """Reads the lines of a stream. ``usage`` is what its last frame says."""

    def __init__(self, response: httpx.Response, keep_usage: bool) -> None:
        self.response = response
        self.keep_usage = keep_usage
        self.usage: Usage | None = None
        self.done = False

    def read(self, line: str) -> ChatCompletionChunk | None:
        """The chunk of a line, if it has one for the reader."""
        if not line.startswith("data:"):
            return None
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return None
        try:
            frame = json.loads(data)
            if "error" in frame:
                raise from_body(frame["error"], None)
            chunk = ChatCompletionChunk.model_validate(frame)
        except (ValueError, KeyError, TypeError) as exc:
            raise BadResponse(f"not a frame of a chat completion: {data[:200]}") from exc
        self.usage = chunk.usage or self.usage
        return chunk if chunk.choices or self.keep_usage else None

    def finish(self) -> None:
        if not self.done:
            raise BadResponse("the stream broke off before its end")


class Stream:
    """The chunks of an answer as they come. Leaving the ``with`` block, ``close()``, or dropping the stream ends the
    connection, and with it the work of the server.

    Attributes:
        usage: what was reused and what it cost; there once the stream has ended.
    """

    def __init__(self, response: httpx.Response, keep_usage: bool = False) -> None:
        self._frames = _Frames(response, keep_usage)
        self._chunks = _read(self._frames)

    @property
    def usage(self) -> Usage | None:
        return self._frames.usage

    def __iter__(self) -> Iterator[ChatCompletionChunk]:
        return self

    def __next__(self) -> ChatCompletionChunk:
        return next(self._chunks)

    def texts(self) -> Iterator[str]:
        """Only the text of the first answer, piece by piece."""
        return (chunk.text for chunk in self if chunk.text)

    def close(self) -> None:
        self._chunks.close()
        self._frames.response.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._frames.response.close()


class AsyncStream:
    """As ``Stream``, with ``async for``. Leave the ``async with`` block or ``await close()`` to end it early."""

    def __init__(self, response: httpx.Response, keep_usage: bool = False) -> None:
        self._frames = _Frames(response, keep_usage)
        self._chunks = _aread(self._frames)

    @property
    def usage(self) -> Usage | None:
        return self._frames.usage

    def __aiter__(self) -> AsyncIterator[ChatCompletionChunk]:
        return self

    async def __anext__(self) -> ChatCompletionChunk:
        return await anext(self._chunks)

    async def texts(self) -> AsyncIterator[str]:
        """Only the text of the first answer, piece by piece."""
        async for chunk in self:
            if chunk.text:
                yield chunk.text

    async def close(self) -> None:
        await self._chunks.aclose()
        await self._frames.response.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _read(frames: _Frames) -> Generator[ChatCompletionChunk, None, None]:
    lines = _Lines()
    try:
        for data in frames.response.iter_bytes():
            for line in lines.feed(data):
                if (chunk := frames.read(line)) is not None:
                    yield chunk
        frames.finish()
    except httpx.TransportError as exc:
        raise from_transport(exc, frames.response.url) from exc
    finally:
        frames.response.close()


async def _aread(frames: _Frames) -> AsyncGenerator[ChatCompletionChunk, None]:
    lines = _Lines()
    try:
        async for data in frames.response.aiter_bytes():
            for line in lines.feed(data):
                if (chunk := frames.read(line)) is not None:
                    yield chunk
        frames.finish()
    except httpx.TransportError as exc:
        raise from_transport(exc, frames.response.url) from exc
    finally:
        await frames.response.aclose()


class _Lines:
    """Bytes to lines at line feeds only: httpx also splits at U+2028 and the like, which JSON may hold as they are."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode() for line in lines]
