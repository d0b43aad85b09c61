"""Server-sent events, and noticing that nobody listens any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def frame(body: dict[str, Any]) -> bytes:
    """One event. JSON has no raw line breaks, so one ``data:`` line is enough."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, or ClientGone as soon as the client closes the connection.

    The request's body must have been read, so that all that can still arrive is the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(request: Request) -> None:
    """Wait until the client has closed the connection; its request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends frames as they come. ``close`` is called when the response ends, however it ends."""

    def __init__(self, frames: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(frames, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()
