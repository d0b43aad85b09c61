"""The input and output of the two clients, as coroutines. Those of ``MPIC`` block and never suspend, so code written
once against this interface can be run to its end by ``finish``, or awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

T = TypeVar("T")


class SyncIO:
    """The input and output of ``MPIC``: it blocks."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    async def send(self, message: httpx.Request, stream: bool) -> httpx.Response:
        return self.http.send(message, stream=stream)

    async def read(self, response: httpx.Response) -> None:
        response.read()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def open(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of work that opens files."""
        return work(*args)

    async def close(self) -> None:
        self.http.close()


class AsyncIO:
    """The input and output of ``AsyncMPIC``: the event loop is never blocked."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def send(self, message: httpx.Request, stream: bool) -> httpx.Response:
        return await self.http.send(message, stream=stream)

    async def read(self, response: httpx.Response) -> None:
        await response.aread()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def open(self, work: Callable[..., T], *args: Any) -> T:
        """Run work that opens files on a thread and return its result."""
        return await asyncio.to_thread(work, *args)

    async def close(self) -> None:
        await self.http.aclose()


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a ``SyncIO`` to its end and return its result."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value
    work.close()
    raise RuntimeError("a call of the synchronous client was awaited")
