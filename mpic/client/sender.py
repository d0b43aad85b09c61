"""Sends the requests of a client's resources, and repeats them where that may help."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import httpx

from mpic.client.endpoints import ApiRequest
from mpic.client.errors import ClientClosed, from_response, from_transport
from mpic.client.httpx_options import request_options, unsendable
from mpic.client.io import AsyncIO, SyncIO
from mpic.client.retry import Retry
from mpic.client.sources import BodyStream, Sources

T = TypeVar("T")
IO = TypeVar("IO", bound=SyncIO | AsyncIO)


class Sender(Generic[IO]):
    """The part of a client that its resources need."""

    def __init__(self, io: IO, retry: Retry, sources: Sources) -> None:
        self.io, self.sources = io, sources
        self.url = str(io.http.base_url).rstrip("/")
        self._retry = retry

    async def send(self, request: ApiRequest[T]) -> T:
        """Send a request and return its result."""
        return request.result(await self._response(request, stream=False))

    async def stream(self, request: ApiRequest[Any]) -> httpx.Response:
        """Send a request and return the response, whose body is not read yet."""
        return await self._response(request, stream=True)

    async def _response(self, request: ApiRequest[Any], stream: bool) -> httpx.Response:
        http = self.io.http
        retry = self._retry if request.can_resend else Retry(most=0)
        attempt = 0
        while True:
            if http.is_closed:  # it may be closed while a broken request waits to be sent again
                raise ClientClosed(f"this client of {self.url} was closed; make a new one")
            outcome: httpx.Response | httpx.RequestError
            try:
                with request_options(request) as options:
                    try:
                        message = http.build_request(request.method, request.path, **options)
                        if isinstance(body := options.get("content"), BodyStream):
                            message.stream = body  # otherwise httpx accepts it from ``MPIC`` only
                    except (ValueError, httpx.InvalidURL) as exc:
                        raise unsendable(request, exc) from exc
                    outcome = await self.io.send(message, stream)
                    if outcome.is_success:
                        return outcome
                    await self.io.read(outcome)
                    if request.accept(outcome):
                        return outcome
            except httpx.RequestError as exc:
                outcome = exc
            pause = retry.wait(attempt, request.repeatable, outcome)
            if pause is None:
                if isinstance(outcome, httpx.Response):
                    raise from_response(outcome)
                raise from_transport(outcome, http.base_url) from outcome
            await self.io.sleep(pause)
            attempt += 1


class Resource(Generic[IO]):
    """A resource of the API."""

    def __init__(self, sender: Sender[IO]) -> None:
        self.sender = sender
