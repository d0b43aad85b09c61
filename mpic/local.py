"""A server inside the caller's process, for ``MPIC.local()``.

This module depends on both client and server. The client imports it by name when it is needed, so that the SDK depends
on neither the server nor torch.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from mpic.client.inprocess import AsyncInProcess, InProcess, Lifespan
from mpic.client.loading import StageCallback
from mpic.config import load_config
from mpic.server.run import build

Folder = str | os.PathLike[str] | None


class Local:
    """The application, with a temporary folder if the caller has named none.

    Raises:
        ConfigError: a setting is unknown or wrong.
        ModelRefused: the model cannot be run correctly.
    """

    def __init__(
        self, model: str | None, data_dir: Folder, settings: Mapping[str, Any], on_stage: StageCallback
    ) -> None:
        # It is also removed when the interpreter ends, because notebooks seldom close their clients.
        self._own = (
            tempfile.TemporaryDirectory(prefix="mpic-", ignore_cleanup_errors=True)
            if data_dir is None
            else None
        )
        flags = {**settings, "model": model, "data_dir": self._own.name if self._own else str(data_dir)}
        try:
            self.app = build(load_config(None, flags), on_stage)
            on_stage("ready")
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the temporary folder."""
        if self._own is not None:
            self._own.cleanup()


def local_transport(
    model: str | None, data_dir: Folder, settings: Mapping[str, Any], on_stage: StageCallback
) -> InProcess:
    """Return a transport to a server that runs in this process and ends with the transport; ``on_stage`` is called
    with each stage that begins."""
    local = Local(model, data_dir, settings, on_stage)
    return InProcess(local.app, local.remove)


class AsyncLocal(httpx.AsyncBaseTransport):
    """A transport to a server in the running loop, which its first request starts: the model is loaded on a thread, so
    that the loop is not blocked.

    A request that is cancelled meanwhile does not end the start: the next request, or closing, waits for it.
    """

    def __init__(
        self, model: str | None, data_dir: Folder, settings: Mapping[str, Any], on_stage: StageCallback
    ) -> None:
        self._arguments = (model, data_dir, settings, on_stage)
        self._starting: asyncio.Task[_Started] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._starting is None or _failed(self._starting):
            self._starting = asyncio.create_task(self._start())
        started = await asyncio.shield(self._starting)
        return await started.transport.handle_async_request(request)

    async def _start(self) -> _Started:
        local = await asyncio.to_thread(Local, *self._arguments)
        lifespan = Lifespan(local.app)
        try:
            await lifespan.start()
        except BaseException:
            await asyncio.to_thread(local.remove)
            raise
        return _Started(local, lifespan, AsyncInProcess(local.app))

    async def aclose(self) -> None:
        if self._closing is None and self._starting is not None:
            self._closing = asyncio.create_task(self._stop(self._starting))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _stop(self, starting: asyncio.Task[_Started]) -> None:
        await asyncio.wait([starting])
        if _failed(starting):  # its request has got the error, and nothing is left to stop
            return
        started = starting.result()
        try:
            await started.lifespan.stop()
        finally:
            await asyncio.to_thread(started.local.remove)


async_local_transport = AsyncLocal
"""See ``local_transport``."""


@dataclass(frozen=True)
class _Started:
    local: Local
    lifespan: Lifespan
    transport: AsyncInProcess


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
