"""Receiving an upload on an event loop, which is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from mpic.errors import TooLarge
from mpic.library.folder.originals import PIECE, Incoming, Originals
from mpic.library.records import AsyncReader

T = TypeVar("T")

ACCEPTING = ThreadPoolExecutor(24, "mpic-accept")
"""Threads on which uploads are checked and committed. Large files wait on them to be decoded, but only so many may wait
that threads are left for other uploads; everything else in the server has threads of its own."""


class Arriving:
    """An upload that arrives on an event loop, in pieces of any size. Its temporary file is made with the first byte,
    and threads write and hash it; ``PIECE`` bytes and the last piece are all of it that is in memory.

    Args:
        limit: maximum number of bytes.
        param: the field of the request that it is in; None: it is the whole body.
    """

    def __init__(self, originals: Originals, limit: int, param: str | None = "file") -> None:
        self._begin, self._param = partial(originals.incoming, limit), param
        self._incoming: Incoming | None = None
        self._waiting = bytearray()

    async def write(self, data: bytes) -> None:
        """Append data.

        Raises:
            TooLarge: the upload is larger than its limit.
            StorageFull, LibraryGone: it cannot be stored.
        """
        self._waiting += data
        if len(self._waiting) >= PIECE:
            await self.finish()

    async def finish(self) -> Incoming:
        """Write what is still in memory, and return the temporary file. Raise as ``write``."""
        from aiofiles.threadpool import wrap  # a GPU's bare machine does without it (tools/gpu_report.py)

        if self._incoming is None:
            self._incoming = await asyncio.to_thread(self._begin)
        if self._waiting:
            piece, self._waiting = self._waiting, bytearray()
            try:
                await wrap(self._incoming).write(piece)
            except TooLarge as error:
                error.param = self._param
                raise
        return self._incoming

    async def taken(self) -> Incoming:
        """Do the same as ``finish``, and leave the temporary file to the caller."""
        incoming = await self.finish()
        self._incoming = None
        return incoming

    def close(self) -> None:
        """Remove the temporary file, unless it was published. It is not awaited, so that no cancellation can prevent
        it. Safe to call twice."""
        if self._incoming is not None:
            asyncio.get_running_loop().run_in_executor(None, self._incoming.discard)


async def receive(
    originals: Originals, limit: int, source: bytes | AsyncReader | Arriving, accept: Callable[[Incoming], T]
) -> T:
    """Receive an upload and return the result of ``accept``. When the task is cancelled because the client has
    disconnected, the bytes that had arrived are removed.

    Args:
        limit: maximum number of bytes of the upload.
        source: one that is ``Arriving`` has arrived already.
        accept: checks the upload and commits it, on a thread of ``ACCEPTING``.

    Raises:
        TooLarge: the upload is larger than ``limit``.
        StorageFull, LibraryGone: it cannot be stored.
        MPICError: any error that ``accept`` raises.
    """
    arriving = source if isinstance(source, Arriving) else Arriving(originals, limit)
    try:
        if isinstance(source, bytes):
            await arriving.write(source)
        elif not isinstance(source, Arriving):
            while piece := await source.read(PIECE):
                await arriving.write(piece)
        incoming = await arriving.finish()
        return await asyncio.get_running_loop().run_in_executor(ACCEPTING, accept, incoming)
    finally:
        arriving.close()
