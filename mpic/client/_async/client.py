"""The client of the REST API."""

from __future__ import annotations

import asyncio
import os
from importlib import import_module
from typing import Any, Self, TypeVar

import httpx

from mpic.api import html
from mpic.client import endpoints, types
from mpic.client._async.resources import Caches, Chat, Files, Models, References
from mpic.client.endpoints import ApiRequest
from mpic.client.errors import ClientClosed, from_response, from_transport
from mpic.client.httpx_options import client_options, request_options
from mpic.client.loading import StageCallback, teller
from mpic.client.retry import Retry
from mpic.client.sources import Sources

T = TypeVar("T")


class AsyncMPIC:
    """A client of one server. Close it, or use it with ``async with``. It may be shared by tasks of one event loop.

    Every failure is an ``mpic.MPICError``: the server's own error, or one of ``mpic.client.errors``.

    Args:
        base_url: address of the server, with or without ``http://`` and ``/v1``. None reads MPIC_URL from the
            environment; the default is http://127.0.0.1:8000.
        api_key: None reads MPIC_API_KEY from the environment.
        timeout: seconds for each step of a request (connect, read, write), or an httpx.Timeout; None: 10 s to connect,
            600 s to read and to write.
        max_retries: number of times that a refused or broken request is sent again (default 2), or a ``Retry``.
        transport: replaces the network, e.g. ``AsyncInProcess(app)``.
        local_files: True if a string may be the path of a file on this machine, which is then sent. With False, uploads
            are bytes or binary files, images are data URLs, and no file is opened: for programs that pass on text of
            other people.
    """

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
        self._http = httpx.AsyncClient(**client_options(base_url, api_key, timeout), transport=transport)
        self.url = str(self._http.base_url).rstrip("/")
        self._retry = max_retries if isinstance(max_retries, Retry) else Retry(max_retries)
        self._local = False
        self.sources = Sources(local_files)
        self.chat = Chat(self)
        self.files = Files(self)
        self.caches = Caches(self)
        self.references = References(self)
        self.models = Models(self)

    @classmethod
    def local(
        cls,
        model: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        progress: StageCallback | bool | None = None,
        **settings: Any,
    ) -> Self:
        """Starts a server inside this process, without a port; it ends with the client. For notebooks and tests.

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
        transport = import_module("mpic.local").async_local_transport(model, data_dir, settings, on_stage)
        client = cls("http://127.0.0.1", "", transport=transport, max_retries=0)
        client._local = True
        return client

    async def health(self) -> types.Health:
        """Returns whether the server is ready, and the model and settings it runs with."""
        return await self.send(endpoints.health())

    async def savings(self, days: int = 30, scope: str = "mine") -> types.Savings:
        """Returns the prompt tokens that reuse has saved, by day, and how often each file was reused.

        Args:
            days: number of days, today included.
            scope: ``mine``, or ``all`` for every user and the references (admins).
        """
        return await self.send(endpoints.savings(days, scope))

    async def metrics(self) -> str:
        """Returns all metrics of the server, in Prometheus' text format."""
        return await self.send(endpoints.metrics())

    async def send(self, request: ApiRequest[T]) -> T:
        """Sends any request of ``mpic.client.endpoints`` and returns its result."""
        return request.result(await self._exchange(request, stream=False))

    async def stream(self, request: ApiRequest[Any]) -> httpx.Response:
        """Sends a request and returns the response, whose body is not read yet."""
        return await self._exchange(request, stream=True)

    async def _exchange(self, request: ApiRequest[Any], stream: bool) -> httpx.Response:
        if self._http.is_closed:
            raise ClientClosed(f"this client of {self.url} was closed; make a new one")
        retry = self._retry if request.can_resend else Retry(most=0)
        attempt = 0
        while True:
            outcome: httpx.Response | httpx.RequestError
            try:
                with request_options(request) as options:
                    message = self._http.build_request(request.method, request.path, **options)
                    outcome = await self._http.send(message, stream=stream)
                    if outcome.is_success:
                        return outcome
                    await outcome.aread()
                    if request.accept(outcome):
                        return outcome
            except httpx.RequestError as exc:
                outcome = exc
            pause = retry.wait(attempt, request.repeatable, outcome)
            if pause is None:
                if isinstance(outcome, httpx.Response):
                    raise from_response(outcome)
                raise from_transport(outcome, self._http.base_url) from outcome
            await asyncio.sleep(pause)
            attempt += 1

    async def close(self) -> None:
        """Closes all connections and, after ``local``, the server. Safe to call twice."""
        await self._http.aclose()

    def __repr__(self) -> str:
        closed = ", closed" if self._http.is_closed else ""
        return f"{type(self).__name__}({self.url!r}{closed})"

    def _repr_html_(self) -> str:
        """Shows the client in a notebook, with links to the web page and the documentation of its server."""
        if self._local or self._http.is_closed:
            return html.paragraph(repr(self))
        pages = html.link(f"{self.url}/ui", "web page"), html.link(f"{self.url}/docs", "API")
        return f"{html.paragraph(repr(self))}<div>{' · '.join(pages)}</div>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
