"""Transports that call an ASGI application directly, without network and port.

They stream in both directions, and the application notices when a client disconnects. (httpx's own ASGI transport
collects the whole response first.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

T = TypeVar("T")
AHEAD = 16  # number of messages that an application may send ahead of the reader
ENDED = "the server in this process has ended"


class AsyncInProcess(httpx.AsyncBaseTransport):
    """A transport for ``AsyncMPIC`` that calls ``app`` in the running loop. The caller starts and shuts down the
    application (``Lifespan``)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        exchange = _Exchange(aiter(request.stream))
        exchange.task = asyncio.create_task(exchange.run(self._app, _scope(request)))
        try:
            status, headers = await exchange.started()
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=exchange)


def _scope(request: httpx.Request) -> dict[str, Any]:
    path = request.url.raw_path.partition(b"?")[0]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": path,
        "query_string": request.url.query,
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 0),
        "root_path": "",
        "state": {},
    }


class _Exchange(httpx.AsyncByteStream):
    """A request and its response, message by message."""

    task: asyncio.Task[None]

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._sent = False
        self._answered = False
        self._messages: asyncio.Queue[Message | BaseException | None] = asyncio.Queue(AHEAD)
        self._gone = asyncio.Event()

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception as exc:
            # after an answer with status 500, Starlette raises the error again for the log
            if not self._answered:
                await self._messages.put(exc)
        await self._messages.put(None)

    async def _send(self, message: Message) -> None:
        await self._messages.put(message)
        self._answered = message["type"] == "http.response.body" and not message.get("more_body")

    async def started(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        message = await self._messages.get()
        if message is None:
            raise httpx.RemoteProtocolError("the application ended without an answer")
        if isinstance(message, BaseException):
            raise message
        return message["status"], message["headers"]

    async def _receive(self) -> Message:
        if not self._sent:
            piece = await anext(self._body, None)
            self._sent = piece is None
            return {"type": "http.request", "body": piece or b"", "more_body": not self._sent}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            if message["type"] == "http.response.body":
                yield message.get("body", b"")

    async def aclose(self) -> None:
        """Tell the application that the client has disconnected, and wait until it ends."""
        self._gone.set()
        self._sent = True
        while not self.task.done():  # a full queue must not keep the application from ending
            while not self._messages.empty():
                self._messages.get_nowait()
            await asyncio.wait([self.task], timeout=0.01)
        while not self._messages.empty():
            self._messages.get_nowait()
        self._messages.put_nowait(None)  # another task may be reading, and must not wait for ever


class Lifespan:
    """Runs an application's start-up and shutdown in one task of the running loop, as anyio requires."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(started))
        await asyncio.wait([self._task, started], return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            failed, self._task = self._task, None
            await failed  # raises the error of the start-up

    async def stop(self) -> None:
        """Shut the application down, as soon as it has started."""
        self._stop.set()
        if self._task is not None:
            await self._task

    async def _hold(self, started: asyncio.Future[None]) -> None:
        async with self._app.router.lifespan_context(self._app):
            started.set_result(None)
            await self._stop.wait()


class InProcess(httpx.BaseTransport):
    """A transport for ``MPIC`` that runs a Starlette or FastAPI application in a loop on a thread of its own.

    The application is started and shut down with the transport. Requests may come from many threads.

    Args:
        app: the application.
        on_close: called when the application has ended, or could not start.
    """

    def __init__(self, app: Any, on_close: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mpic-in-process", daemon=True)
        self._thread.start()
        self._on_close = on_close
        self._inner = AsyncInProcess(app)
        self._lifespan = Lifespan(app)
        # schedule under the lock, so that no work reaches a loop that is about to stop
        self._ended, self._scheduling = False, threading.Lock()
        starting = asyncio.run_coroutine_threadsafe(self._lifespan.start(), self._loop)
        try:
            starting.result()
        except BaseException:  # also after Ctrl-C: the start-up goes on and the shutdown follows it
            self.close()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop and return its result. Raise httpx.ReadError if the application has ended."""
        with self._scheduling:
            if self._ended:
                work.close()
                raise httpx.ReadError(ENDED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise httpx.ReadError(ENDED) from None
        except BaseException:  # also after Ctrl-C: nobody needs the work any more
            future.cancel()
            raise

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        copy = httpx.Request(
            request.method, request.url, headers=request.headers, stream=_RequestBody(request.stream)
        )
        response = self._run(self._inner.handle_async_request(copy))
        return httpx.Response(
            response.status_code, headers=response.headers, stream=_ResponseBody(self._run, response.stream)
        )

    def close(self) -> None:
        """Shut the application down. Requests under way on other threads end with httpx.ReadError."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._lifespan.stop())
        finally:
            with self._scheduling:
                self._ended = True
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self._on_close is not None:
                self._on_close()


class _RequestBody(httpx.AsyncByteStream):
    """The body of a request, read on a worker thread."""

    def __init__(self, source: httpx.SyncByteStream) -> None:
        self._source = source

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = iter(self._source)
        following: Callable[[], bytes | None] = lambda: next(pieces, None)
        while (piece := await asyncio.to_thread(following)) is not None:
            yield piece


class _ResponseBody(httpx.SyncByteStream):
    """The body of a response, read by the thread that sent the request."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], source: Any) -> None:
        self._run = run
        self._source = source

    def __iter__(self) -> Iterator[bytes]:
        pieces = aiter(self._source)
        while (piece := self._run(_next(pieces))) is not None:
            yield piece

    def close(self) -> None:
        with suppress(httpx.ReadError):  # nothing is left to close
            self._run(self._source.aclose())


async def _cancel_others() -> None:
    """Cancel all other tasks of the loop, and wait until they have ended."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)
