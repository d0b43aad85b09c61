"""A server inside the caller's process, for ``MPIC.local()``.

This module depends on both client and server. The client imports it by name when it is needed, so that the SDK depends
on neither the server nor torch.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import httpx

from mpic.client.inprocess import AsyncInProcess, InProcess, Lifespan
from mpic.client.loading import Told
from mpic.config import load_config
from mpic.server.run import build

Folder = str | os.PathLike[str] | None


class Local:
    """The application, with a temporary folder if the caller has named none.

    Raises:
        ConfigError: a setting is unknown or wrong.
        ModelRefused: the model cannot be run correctly.
    """

    def __init__(self, model: str | None, data_dir: Folder, settings: Mapping[str, Any], told: Told) -> None:
        # It is also removed when the interpreter ends, because notebooks seldom close their clients.
        self._own = (
            tempfile.TemporaryDirectory(prefix="mpic-", ignore_cleanup_errors=True)
            if data_dir is None
            else None
        )
        flags = {**settings, "model": model, "data_dir": self._own.name if self._own else str(data_dir)}
        try:
            self.app = build(load_config(None, flags), told)
            told("ready")
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Removes the temporary folder."""
        if self._own is not None:
            self._own.cleanup()


def local_transport(
    model: str | None, data_dir: Folder, settings: Mapping[str, Any], told: Told
) -> InProcess:
    """Returns a transport to a server that runs in this process and ends with the transport; ``told`` is called with
    each stage that begins."""
    local = Local(model, data_dir, settings, told)
    return InProcess(local.app, local.remove)


def async_local_transport(
    model: str | None, data_dir: Folder, settings: Mapping[str, Any], told: Told
) -> AsyncLocal:
    """Returns a transport to a server in the running loop, which its first request starts."""
    return AsyncLocal(model, data_dir, settings, told)


class AsyncLocal(httpx.AsyncBaseTransport):
    """Loads the model on a thread when the first request comes, so that the loop is not blocked."""

    def __init__(self, model: str | None, data_dir: Folder, settings: Mapping[str, Any], told: Told) -> None:
        self._arguments = (model, data_dir, settings, told)
        self._starting = asyncio.Lock()
        self._running: tuple[Local, Lifespan, AsyncInProcess] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async with self._starting:
            if self._running is None:
                self._running = await self._start()
        return await self._running[2].handle_async_request(request)

    async def _start(self) -> tuple[Local, Lifespan, AsyncInProcess]:
        local = await asyncio.to_thread(Local, *self._arguments)
        lifespan = Lifespan(local.app)
        await lifespan.start()
        return local, lifespan, AsyncInProcess(local.app)

    async def aclose(self) -> None:
        async with self._starting:
            if self._running is not None:
                local, lifespan, _ = self._running
                self._running = None
                await lifespan.stop()
                await asyncio.to_thread(local.remove)
