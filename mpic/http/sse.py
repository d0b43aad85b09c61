"""Server-sent events, and the detection of clients that have disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

NOT_KEPT = "private, no-store"
"""``Cache-Control`` of answers that depend on who asks: neither a proxy nor a browser keeps them."""
DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
"""A comment, which clients skip: proxies and browsers close connections that are silent for a minute."""


def event(body: dict[str, Any], name: str = "") -> bytes:
    """Return an event. JSON has no raw line breaks, so one ``data:`` line is enough."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(body) + b"\n\n"


class ClientDisconnected(Exception):
    """The client closed the connection before its answer was complete."""


async def while_connected(
    request: Request, work: Awaitable[T], end: Callable[[], object] = lambda: None
) -> T:
    """Return the result of ``work``. Raise ClientDisconnected as soon as the client closes the connection.

    The request's body must have been read, so that nothing but the disconnect can still arrive.

    Args:
        end: called when the work has ended or must end, before it is waited for.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        end()
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(request: Request) -> None:
    """Wait until the client has closed the connection; the body of its request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends events as they are produced. ``close`` is called when the response ends, for whatever reason."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": NOT_KEPT})
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()
