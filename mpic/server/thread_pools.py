"""Threads for work whose duration depends on the client.

Routes that answer at once (look-ups of one thing) share the threads of the web framework. Work that a client can make
long, such as parsing a large body, tokenizing or decoding, runs on threads of its own. Their number is bounded, in all
and for each user, so that no user waits for the long work of another.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar
from weakref import WeakValueDictionary

from anyio import CancelScope
from starlette.requests import Request

from mpic.cancel import Cancelled, until
from mpic.errors import Unavailable
from mpic.http.sse import ClientDisconnected, while_connected
from mpic.imaging.budget import on_behalf_of

T = TypeVar("T")
PROMPTS_PER_USER = 4
MANY = max(8, os.cpu_count() or 1)


class ThreadPool:
    """Threads for one kind of work. It lives on the server's event loop.

    Args:
        threads: maximum number of tasks at a time.
        per_user: maximum number of tasks of one user at a time. Further tasks wait for their turn, in order.
    """

    def __init__(self, threads: int, per_user: int) -> None:
        # anyio's threads would take a task through several turns of the event loop before it begins
        self._threads = ThreadPoolExecutor(threads, "mpic-request")
        self._free = asyncio.Semaphore(threads)  # a task that waits must not begin once its client has left
        self._per_user = per_user
        self._seats: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, request: Request, work: Callable[..., T], *args: object) -> T:
        """Return the result of ``work(*args)``. If the client disconnects first, the work ends at its next
        ``checkpoint``.

        Args:
            request: its body must have been read, so that nothing but the disconnect can still arrive.

        Raises:
            ClientDisconnected: the client closed the connection. The work has ended, or was never begun.
        """
        signal = threading.Event()
        working = self.call(request.state.user.id, _until_signalled, signal, work, args)
        try:
            return await while_connected(request, working, signal.set)
        except Cancelled:
            raise ClientDisconnected from None

    async def call(self, user: str, work: Callable[..., T], *args: object) -> T:
        """Return the result of ``work(*args)``, which runs to its end even if the client disconnects or the caller is
        cancelled. A cancelled caller waits for that end, because the thread is busy until then."""
        seat = self._seats.setdefault(user, asyncio.Semaphore(self._per_user))
        async with seat, self._free:
            loop = asyncio.get_running_loop()
            return await _until_done(
                loop.run_in_executor(self._threads, copy_context().run, _for, user, work, args)
            )


class ThreadPools:
    """The pools: one for each kind of work.

    Attributes:
        parsing: large bodies; the largest takes a second.
        prompts: building prompts, and searching.
        long_prompts: building prompts of very many parts, which is all Python: side by side they would be no quicker,
            and together they would hold up the engine's thread.
        splitting: cutting long texts and storing the pieces, which takes many seconds.
        listings: pages of listings, which are all Python, too.
        background: tokenizing uploads, for which no client waits.
    """

    def __init__(self) -> None:
        self.parsing = ThreadPool(4, 2)
        self.prompts = ThreadPool(MANY, PROMPTS_PER_USER)
        self.long_prompts = ThreadPool(2, 1)
        self.splitting = ThreadPool(2, 1)
        self.listings = ThreadPool(4, 2)
        self.background = ThreadPool(2, 1)


class DiskProbe:
    """One check for all who ask for it at the same time, on a thread of its own, for which nothing else waits.

    Args:
        check: raises an error if something is wrong.
        patience: seconds to wait for it, as a disk may not answer at all.
    """

    def __init__(self, check: Callable[[], None], patience: float = 5.0) -> None:
        self._check, self._patience = check, patience
        self._thread = ThreadPoolExecutor(1, "mpic-probe")
        self._running: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Return once the check has passed. Raise its error, or Unavailable when it takes too long."""
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().run_in_executor(self._thread, self._check)
        done, _ = await asyncio.wait([running := self._running], timeout=self._patience)
        if not done:
            raise Unavailable("the disk of the data folder does not answer")
        running.result()


def _for(user: str, work: Callable[..., T], args: tuple[object, ...]) -> T:
    with on_behalf_of(user):
        return work(*args)


async def _until_done(task: asyncio.Future[T]) -> T:
    """Wait for a task to end, even if the waiting task is cancelled meanwhile, and return its result."""
    cancelled: asyncio.CancelledError | None = None
    with CancelScope(shield=True):  # anyio would repeat a cancellation in every turn of the loop
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        with suppress(BaseException):  # asyncio logs errors that nobody has looked at
            task.result()
        raise cancelled
    return task.result()


def _until_signalled(signal: threading.Event, work: Callable[..., T], args: tuple[object, ...]) -> T:
    with until(signal):
        return work(*args)
