"""Threads for work whose length a client chooses.

Routes that answer at once (listings, look-ups) share the threads of the web framework. What a client can make long,
such as parsing a large body, tokenizing or decoding, runs on threads of its own, only so many at a time, and only so
many for one user, so that nobody waits for somebody else's long work.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.requests import Request

from mpic.cancel import Cancelled, until
from mpic.server.sse import ClientGone, disconnected

T = TypeVar("T")
SEVERAL = max(8, os.cpu_count() or 1)


class Workers:
    """Threads for one kind of work. Lives on the server's event loop.

    Args:
        threads: most pieces of work at a time.
        each: most of one user. More wait for their turn, in order.
    """

    def __init__(self, threads: int, each: int) -> None:
        self._limiter = CapacityLimiter(threads)
        self._each = each
        self._seats: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, request: Request, work: Callable[..., T], *args: object) -> T:
        """The result of ``work(*args)``, unless the client leaves first: then it ends at its next ``checkpoint``.

        Args:
            request: its body must have been read, so that all that can still arrive is the disconnect.

        Raises:
            ClientGone: the client closed the connection. The work has ended, or has not begun.
        """
        signal = threading.Event()
        task = asyncio.ensure_future(self.call(request.state.user.id, _ending, signal, work, args))
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        except Cancelled:
            raise ClientGone from None
        finally:
            signal.set()
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def call(self, user: str, work: Callable[..., T], *args: object) -> T:
        """The result of ``work(*args)``, which runs to its end whatever the client does."""
        seat = self._seats.setdefault(user, asyncio.Semaphore(self._each))
        async with seat:
            return await anyio.to_thread.run_sync(partial(work, *args), limiter=self._limiter)


class Rooms:
    """The kinds of work there are.

    Attributes:
        bodies: parsing large bodies, a second for the largest.
        prompts: building prompts, and searching.
        books: cutting long texts and storing the pieces, many seconds.
        background: tokenizing uploads, which nobody waits for.
    """

    def __init__(self) -> None:
        self.bodies = Workers(4, 2)
        self.prompts = Workers(SEVERAL, SEVERAL // 2)
        self.books = Workers(2, 1)
        self.background = Workers(2, 1)


def _ending(signal: threading.Event, work: Callable[..., T], args: tuple[object, ...]) -> T:
    with until(signal):
        return work(*args)
