"""The synchronous client."""

from __future__ import annotations

import os
import time
from typing import Any, TypeVar

import httpx

from mpic.client import base, calls, types
from mpic.client.base import DEFAULT_URL
from mpic.client.calls import Call
from mpic.client.errors import from_response, from_transport
from mpic.client.nouns import Caches, Chat, Files, Models, References
from mpic.client.retry import Retry
from mpic.client.sources import Sources

T = TypeVar("T")


class MPIC:
    """Talks to one server. Close it, or use it as a context manager. May be shared by threads.

    Every failure is an ``mpic.MPICError``: the server's own error, or one of ``mpic.client.errors``.

    Args:
        base_url: where the server listens, with or without ``/v1``.
        api_key: None reads MPIC_API_KEY from the environment.
        timeout: seconds for each step of a request (connect, read, write), or an httpx.Timeout.
        max_retries: how often a refused or broken request is sent again; an int, or a ``Retry``.
        transport: in place of the network, e.g. ``InProcess(app)``.
        local_files: whether a text may name a file of this machine that is sent. With False uploads are bytes or
            binary files, images are data URLs, and nothing is opened: for a program that passes on others' words.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int | Retry = 2,
        transport: httpx.BaseTransport | None = None,
        local_files: bool = True,
    ) -> None:
        self._http = httpx.Client(**base.settings(base_url, api_key, timeout), transport=transport)
        self._retry = max_retries if isinstance(max_retries, Retry) else Retry(max_retries)
        self.sources = Sources(local_files)
        self.chat = Chat(self)
        self.files = Files(self)
        self.caches = Caches(self)
        self.references = References(self)
        self.models = Models(self)

    @classmethod
    def local(
        cls, model: str | None = None, data_dir: str | os.PathLike[str] | None = None, **settings: Any
    ) -> MPIC:
        """A server inside this process, without a port; it ends with the client. For notebooks and tests.

        Args:
            model: folder or hub id; None: the bundled demo model.
            data_dir: where uploads and compiled chunks are kept; None: nowhere, they go with the client.
            **settings: any other key of the configuration file, e.g. ``policy="reuse"``, ``pool_bytes=1 << 30``.
        """
        from mpic.client.local import local_transport

        return cls(
            "http://127.0.0.1", "", transport=local_transport(model, data_dir, settings), max_retries=0
        )

    def health(self) -> types.Health:
        """Whether it answers and what runs; also when it is not ready."""
        return self.send(calls.health())

    def metrics(self) -> str:
        """Everything the server counts, in Prometheus' text format."""
        return self.send(calls.metrics())

    def send(self, call: Call[T]) -> T:
        """The answer to any call of ``mpic.client.calls``."""
        response = self._exchange(call, stream=False)
        return call.result(response)

    def stream(self, call: Call[Any]) -> httpx.Response:
        """The answer to a call, not read yet."""
        return self._exchange(call, stream=True)

    def _exchange(self, call: Call[Any], stream: bool) -> httpx.Response:
        retry, attempt = base.may_repeat(call, self._retry), 0
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                with base.request_options(call) as options:
                    request = self._http.build_request(call.method, call.path, **options)
                    outcome = self._http.send(request, stream=stream)
                    if stream and outcome.is_error:
                        outcome.read()
            except httpx.TransportError as exc:
                outcome = exc
            if isinstance(outcome, httpx.Response) and (
                outcome.is_success or outcome.status_code in call.accept
            ):
                return outcome
            pause = retry.wait(attempt, call.repeatable, outcome)
            if pause is None:
                if isinstance(outcome, httpx.Response):
                    raise from_response(outcome)
                raise from_transport(outcome, self._http.base_url) from outcome
            time.sleep(pause)
            attempt += 1

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> MPIC:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
