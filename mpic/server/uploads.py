"""Uploads under way: the bytes that they take, by user."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from contextlib import suppress
from os import PathLike

from mpic.errors import TooManyBytes


class UploadsUnderWay:
    """Counts the bytes of uploads that are being received or checked, by user. They are in temporary files, so that
    nobody's quota holds them yet. It lives on the server's event loop.

    Args:
        most: bytes that one user's uploads may take together, unless they are one.
        folders: folders whose disks hold them; a user's uploads may take a quarter of what is free there.
    """

    def __init__(self, most: int, *folders: str | PathLike[str]) -> None:
        self._most, self._folders = most, folders
        self._bytes: Counter[str] = Counter()

    def room(self) -> int:
        """Returns the bytes that one user's uploads may take now. Raises OSError if that cannot be told."""
        room = self._most
        for folder in self._folders:
            with suppress(FileNotFoundError):  # it was removed: whoever writes to it says so
                room = min(room, shutil.disk_usage(folder).free // 4)
        return room

    def bytes_of(self, user: str) -> int:
        """Returns the bytes that a user's uploads take."""
        return self._bytes[user]

    def of(self, user: str) -> UploadBytes:
        """Returns the bytes of a new upload of a user, none so far."""
        return UploadBytes(self, user)

    def _add(self, user: str, size: int) -> None:
        self._bytes[user] += size
        if not self._bytes[user]:
            del self._bytes[user]


class UploadBytes:
    """The bytes that one upload takes until it ends.

    Attributes:
        bytes: how many have been counted.
    """

    def __init__(self, uploads: UploadsUnderWay, user: str) -> None:
        self._uploads, self._user = uploads, user
        self._room: int | None = None
        self.bytes = 0

    async def add(self, size: int) -> None:
        """Counts bytes that have arrived.

        Raises:
            TooManyBytes: the user's uploads under way take as much as they may, and this is not the only one.
            OSError: see ``UploadsUnderWay.room``.
        """
        if self._room is None:
            self._room = await asyncio.to_thread(self._uploads.room)
        held = self._uploads.bytes_of(self._user)
        if held > self.bytes and held + size > self._room:
            raise TooManyBytes(
                f"your uploads under way may take {self._room:,} bytes together; try again when some have ended",
                retry_after=2.0,
            )
        self.keep(size)

    def keep(self, size: int) -> None:
        """Counts bytes that are there already."""
        self._uploads._add(self._user, size)
        self.bytes += size

    def end(self) -> None:
        """Counts none of them any longer. Safe to call twice."""
        self._uploads._add(self._user, -self.bytes)
        self.bytes = 0
