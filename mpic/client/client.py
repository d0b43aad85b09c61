"""The clients of the REST API."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, ClassVar, Self, TypeVar

import httpx

from mpic.client import endpoints, types
from mpic.client.calls import call
from mpic.client.endpoints import ApiRequest
from mpic.client.httpx_options import client_options, http_client
from mpic.client.io import AsyncIO, SyncIO, finish
from mpic.client.loading import StageCallback, teller
from mpic.client.resources import (
    AsyncCompletions,
    Caches,
    Chat,
    Completions,
    Files,
    Models,
    References,
    UploadsInParts,
)
from mpic.client.retry import Retry
from mpic.client.sender import IO, Resource, Sender
from mpic.client.sources import Sources

T = TypeVar("T")


class Client(Resource[IO]):
    """The resources and methods that the blocking and the async client share.

    Args:
        io: how requests are sent.
        max_retries: number of times that a refused or broken request is sent again, or a ``Retry``.
        local_files: True if a string may be the path of a file on this machine.
    """

    _transport: ClassVar[str]
    """The function of ``mpic.local`` that starts a server for ``local``."""

    def __init__(self, io: IO, max_retries: int | Retry, local_files: bool) -> None:
        retry = max_retries if isinstance(max_retries, Retry) else Retry(max_retries)
        super().__init__(Sender(io, retry, Sources(local_files)))
        self.url = self.sender.url
        self.files = Files(self.sender)
        self.uploads = UploadsInParts(self.sender)
        self.caches = Caches(self.sender)
        self.references = References(self.sender)
        self.models = Models(self.sender)

    @classmethod
    def local(
        cls,
        model: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        progress: StageCallback | bool | None = None,
        **settings: Any,
    ) -> Self:
        """Start a server inside this process, without a port; it ends with the client. For notebooks and tests.

        Args:
            model: folder or hub id; None: the bundled demo model.
            data_dir: folder for uploads and compiled chunks; None: a temporary folder, removed with the client.
            progress: called with the name of each stage as it begins (importing, loading the model, ...). True writes
                the stages to stderr, False shows nothing, and None (the default) writes them in a terminal and in a
                notebook.
            **settings: any other key of the configuration file, e.g. ``policy="reuse"``, ``pool_bytes=1 << 30``.
        """
        on_stage = teller(progress)
        on_stage("importing torch and the server")
        # imported by name, because the SDK does not depend on the server
        start = getattr(import_module("mpic.local"), cls._transport)
        transport = start(model, data_dir, settings, on_stage)
        made: Any = cls  # whose subclasses take these arguments
        return made("http://127.0.0.1", "", transport=transport, max_retries=0)

    @call
    async def health(self) -> types.Health:
        """Return whether the server is ready, and the model and settings it runs with."""
        return await self.sender.send(endpoints.health())

    @call
    async def savings(self, days: int = 30, scope: str = "mine") -> types.Savings:
        """Return the prompt tokens that reuse has saved, by day, and how often each file was reused.

        Args:
            days: number of days, today included.
            scope: ``mine``, or ``all`` for every user and the references (admins).
        """
        return await self.sender.send(endpoints.get(types.Savings, "savings", days=days, scope=scope))

    @call
    async def metrics(self) -> str:
        """Return all metrics of the server, in Prometheus' text format."""
        return await self.sender.send(endpoints.metrics())

    @call
    async def stream(self, request: ApiRequest[Any]) -> httpx.Response:
        """Send a request and return the response, whose body is not read yet."""
        return await self.sender.stream(request)

    @call
    async def close(self) -> None:
        """Close all connections and, after ``local``, the server. Safe to call twice."""
        await self.sender.io.close()

    @property
    def _closed(self) -> bool:
        return self.sender.io.http.is_closed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}{', closed' if self._closed else ''})"


class MPIC(Client[SyncIO]):
    """A client of one server. Close it, or use it with ``with``. It may be shared by threads.

    Every failure is an ``mpic.MPICError``: the server's own error, or one of ``mpic.client.errors``.

    Args:
        base_url: address of the server, with or without ``http://`` and ``/v1``. None reads MPIC_URL from the
            environment; the default is http://127.0.0.1:8000.
        api_key: None reads MPIC_API_KEY from the environment.
        timeout: seconds for each step of a request (connect, read, write), or an httpx.Timeout; None: 10 s to connect,
            600 s to read and to write.
        max_retries: number of times that a refused or broken request is sent again (default 2), or a ``Retry``.
        transport: replaces the network, e.g. ``InProcess(app)``.
        local_files: True if a string may be the path of a file on this machine, which is then sent. With False, uploads
            are bytes or binary files, images are data URLs, and no file is opened: for programs that pass on text of
            other people.
    """

    _transport = "local_transport"

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int | Retry = 2,
        transport: httpx.BaseTransport | None = None,
        local_files: bool = True,
    ) -> None:
        http = http_client(httpx.Client, **client_options(base_url, api_key, timeout), transport=transport)
        super().__init__(SyncIO(http), max_retries, local_files)
        self.chat = Chat(Completions(self.sender))

    def send(self, request: ApiRequest[T]) -> T:
        """Send any request of ``mpic.client.endpoints`` and return its result."""
        return finish(self.sender.send(request))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncMPIC(Client[AsyncIO]):
    """Like ``MPIC``, but its methods are awaited. Close it, or use it with ``async with``. It may be shared by tasks of
    one event loop."""

    _transport = "async_local_transport"

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int | Retry = 2,
        transport: httpx.AsyncBaseTransport | None = None,
        local_files: bool = True,
    ) -> None:
        http = http_client(
            httpx.AsyncClient, **client_options(base_url, api_key, timeout), transport=transport
        )
        super().__init__(AsyncIO(http), max_retries, local_files)
        self.chat = Chat(AsyncCompletions(self.sender))

    async def send(self, request: ApiRequest[T]) -> T:
        """Send any request of ``mpic.client.endpoints`` and return its result."""
        return await self.sender.send(request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
