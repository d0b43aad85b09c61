"""Receiving an upload on an event loop, which is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mpic.library.folder.originals import Incoming, Originals
from mpic.library.records import AsyncReader

T = TypeVar("T")
PIECE = 1 << 20
"""Bytes read from a client at a time."""

ACCEPTING = ThreadPoolExecutor(24, "mpic-accept")
"""Threads on which uploads are checked and committed. Large files wait on them to be decoded, but only so many may wait
that threads are left for other uploads; everything else in the server has threads of its own."""


async def receive(
    originals: Originals, limit: int, source: bytes | AsyncReader, accept: Callable[[Incoming], T]
) -> T:
    """Receives an upload and returns the result of ``accept``. When the task is cancelled because the client has
    disconnected, the bytes that had arrived are removed.

    Args:
        limit: maximum number of bytes of the upload.
        accept: checks the upload and commits it, on a thread of ``ACCEPTING``.

    Raises:
        TooLarge: the upload is larger than ``limit``.
        StorageFull, LibraryGone: it cannot be stored.
        MPICError: any error that ``accept`` raises.
    """
    incoming = await asyncio.to_thread(originals.incoming, limit)
    try:
        if isinstance(source, bytes):
            await asyncio.to_thread(incoming.write, source)
        else:
            while piece := await source.read(PIECE):
                await asyncio.to_thread(incoming.write, piece)
        return await asyncio.get_running_loop().run_in_executor(ACCEPTING, accept, incoming)
    finally:  # not awaited, so that cancellation cannot prevent it
        asyncio.get_running_loop().run_in_executor(None, incoming.discard)
