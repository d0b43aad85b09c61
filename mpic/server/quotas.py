"""How much may be kept with a key: its ``bytes`` and ``files``. (The user's own quota is the library's.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from starlette.concurrency import run_in_threadpool

from mpic.errors import StorageQuotaExceeded

if TYPE_CHECKING:
    from mpic.library.catalog import Catalog
    from mpic.server.auth import User


class Quotas:
    """Counts what a user has before more is taken in. Lives on the server's event loop."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def admit(self, user: User, size: int, files: int = 1) -> AsyncIterator[None]:
        """Inside the block there is room for ``files`` more originals of ``size`` bytes together, and nobody else of
        this user takes it.

        Raises:
            StorageQuotaExceeded: there is not.
        """
        limits = user.limits
        if limits.bytes is None and limits.files is None:
            yield
            return
        lock = self._locks.setdefault(user.id, asyncio.Lock())
        async with lock:
            have_files, have_bytes = await run_in_threadpool(self._used, user.id)
            if limits.files is not None and have_files + files > limits.files:
                raise StorageQuotaExceeded(
                    f"you have {have_files} of {limits.files} files; delete some first", limit=limits.files
                )
            if limits.bytes is not None and have_bytes + size > limits.bytes:
                raise StorageQuotaExceeded(
                    f"{size} more bytes would be {have_bytes + size} of {limits.bytes}; delete something first",
                    limit=limits.bytes,
                )
            yield

    def _used(self, user: str) -> tuple[int, int]:
        row = self._catalog.one("SELECT count, bytes FROM usage WHERE owner = ? AND tier = 'original'", user)
        return (row["count"], row["bytes"]) if row else (0, 0)
