"""Uploads under way: the bytes that they take, by user, and files that come in parts (``/v1/uploads``)."""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from os import PathLike
from typing import Any

from aiofiles.threadpool import wrap

from mpic.api.requests import MOST_PARTS, UploadCreate
from mpic.api.resources import FileObject
from mpic.errors import (
    BadRequest,
    ChecksumMismatch,
    TooManyBytes,
    TooManyUploads,
    UploadEnded,
    UploadIncomplete,
    UploadNotFound,
    cut,
)
from mpic.library.folder.originals import Incoming
from mpic.library.intake.checks import new_id
from mpic.library.intake.receive import Arriving
from mpic.library.records import AsyncReader

AT_ONCE = 8
"""Uploads of the largest size that one user may have under way."""
MOST_UPLOADS = 32
"""Most uploads in parts that a user may have under way; as many that have ended are remembered."""
LIFE_SECONDS = 3600
"""Time for which an upload waits for its next part, and for which one that has ended is remembered."""


class UploadsUnderWay:
    """Counts the bytes of uploads that are being received or checked, by user. They are in temporary files, so that
    nobody's quota holds them yet. It lives on the server's event loop.

    Args:
        most: bytes that one user's uploads may take together, unless they are one.
        folders: folders whose disks hold them; a user's uploads may take a quarter of what is free there.
    """

    def __init__(self, most: int, *folders: str | PathLike[str]) -> None:
        self.most, self._folders = most, folders
        self._bytes: Counter[str] = Counter()

    def room(self) -> int:
        """Return the bytes that one user's uploads may take now. Raise OSError if that cannot be told."""
        room = self.most
        for folder in self._folders:
            with suppress(FileNotFoundError):  # it was removed: whoever writes to it says so
                room = min(room, shutil.disk_usage(folder).free // 4)
        return room

    def bytes_of(self, user: str) -> int:
        """Return the bytes that a user's uploads take."""
        return self._bytes[user]

    def of(self, user: str) -> UploadBytes:
        """Return the bytes of a new upload of a user, none so far."""
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
        """Count bytes that have arrived.

        Raises:
            TooManyBytes: the user's uploads under way take as much as they may, and this is not the only one.
            OSError: see ``UploadsUnderWay.room``.
        """
        if self._room is None:
            self._room = await asyncio.to_thread(self._uploads.room)
        held = self._uploads.bytes_of(self._user)
        if held > self.bytes and held + size > self._room:
            raise too_many_bytes(self._room)
        self.keep(size)

    def keep(self, size: int) -> None:
        """Count bytes for which there is room already."""
        self._uploads._add(self._user, size)
        self.bytes += size

    def end(self) -> None:
        """Count none of them any longer. Safe to call twice."""
        self._uploads._add(self._user, -self.bytes)
        self.bytes = 0


def too_many_bytes(room: int) -> TooManyBytes:
    return TooManyBytes(
        f"your uploads under way may take {room:,} bytes together; try again when some have ended",
        retry_after=2.0,
    )


@dataclass(frozen=True)
class ReceivedPart:
    """A part of an upload: a temporary file of the library, which is closed."""

    id: str
    created_at: float
    content: Incoming


@dataclass
class PartedUpload:
    """A file that comes in parts.

    Args:
        bytes: those that all parts are to have together.
        arguments: those of ``UploadLibrary.upload``, besides the content.
        held: the bytes of its parts.
        expires_at: when it is removed, or forgotten if it has ended.
        file: the result, once it is complete.
    """

    id: str
    user: str
    filename: str
    bytes: int
    purpose: str
    arguments: dict[str, Any]
    held: UploadBytes
    created_at: float
    expires_at: float
    status: str = "pending"
    parts: dict[str, ReceivedPart] = field(default_factory=dict)
    file: FileObject | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PartedUploads:
    """The uploads in parts of all users. Nothing of them outlives the server: a start removes the temporary files of
    an earlier one. It lives on the server's event loop.

    Args:
        clock: function that returns seconds since the epoch.
    """

    def __init__(self, under_way: UploadsUnderWay, clock: Callable[[], float]) -> None:
        self._under_way, self._clock = under_way, clock
        self._uploads: dict[str, PartedUpload] = {}

    def create(self, user: str, asked: UploadCreate, arguments: dict[str, Any]) -> PartedUpload:
        """Begin an upload.

        Raises:
            TooManyUploads: the user has too many.
            TooManyBytes: they would take too much together.
        """
        self.expire()
        own = [one for one in self._uploads.values() if one.user == user]
        pending = [one for one in own if one.status == "pending"]
        if len(pending) >= MOST_UPLOADS:
            raise TooManyUploads(
                f"you have {len(pending)} uploads in parts under way, the most there may be; complete or cancel some"
            )
        if sum(one.bytes for one in pending) + asked.bytes > self._under_way.most:
            raise too_many_bytes(self._under_way.most)
        ended = [one.id for one in own if one.status != "pending"]
        for id in ended[: max(0, len(ended) - MOST_UPLOADS)]:
            del self._uploads[id]
        now, id = self._clock(), new_id("upload_")
        kept = (asked.filename, asked.bytes, asked.purpose)  # nothing whose length nobody has checked
        held = self._under_way.of(user)
        upload = PartedUpload(id, user, *kept, arguments, held, now, now + LIFE_SECONDS)
        self._uploads[id] = upload
        return upload

    def get(self, user: str, id: str) -> PartedUpload:
        """Return an upload of a user. Raise UploadNotFound."""
        self.expire()
        found = self._uploads.get(id)
        if found is None or found.user != user:
            raise UploadNotFound(f"no upload {cut(id)!r}", param="upload_id", id=id)
        return found

    async def add_part(self, upload: PartedUpload, arriving: Arriving) -> ReceivedPart:
        """Keep a part that has arrived.

        Raises:
            UploadEnded: the upload takes no parts any more.
            TooManyUploads: it has too many.
            BadRequest, UploadIncomplete: the part is empty, or has more bytes than all parts together were to have.
        """
        content = await arriving.taken()
        try:
            await asyncio.to_thread(content.rest)
            _check_pending(upload)
            if len(upload.parts) >= MOST_PARTS:
                raise TooManyUploads(f"an upload has {MOST_PARTS:,} parts at most", param="data")
            if not content.bytes:
                raise BadRequest("a part has one byte at least", param="data")
            if content.bytes > upload.bytes:
                raise UploadIncomplete(
                    f"the part has {content.bytes:,} bytes, and the whole upload was to have {upload.bytes:,}",
                    param="data",
                )
        except BaseException:
            _discard([content])
            raise
        now = self._clock()
        part = ReceivedPart(new_id("part_"), now, content)
        upload.parts[part.id] = part
        upload.held.keep(content.bytes)
        upload.expires_at = now + LIFE_SECONDS
        return part

    async def complete(
        self,
        upload: PartedUpload,
        part_ids: Sequence[str],
        md5: str | None,
        store: Callable[[AsyncReader], Awaitable[FileObject]],
    ) -> None:
        """Join parts and store the file. If that fails, the upload is as it was. Again, it changes nothing.

        Args:
            md5: of the whole file, in hexadecimal; None is not checked.
            store: stores the joined bytes.

        Raises:
            UploadEnded: it was cancelled, or has expired.
            BadRequest: a part is not there, or is named twice.
            UploadIncomplete: the parts have not as many bytes as was said, or somebody has removed the file of one.
            ChecksumMismatch: they are other bytes.
            MPICError: any error of ``store``.
        """
        async with upload.lock:
            if upload.status == "completed":
                return
            _check_pending(upload, locked=True)
            rest = dict(upload.parts)
            parts = []
            for at, id in enumerate(part_ids):
                if id not in rest:
                    why = "is named twice" if id in upload.parts else "is no part of this upload"
                    raise BadRequest(f"{cut(id)!r} {why}", param=f"part_ids[{at}]")
                parts.append(rest.pop(id).content)
            if (found := sum(part.bytes for part in parts)) != upload.bytes:
                raise UploadIncomplete(
                    f"the parts have {found:,} bytes together, and the upload was to have {upload.bytes:,}",
                    param="part_ids",
                    bytes=found,
                )
            await asyncio.to_thread(_check_whole, parts)
            upload.held.keep(found)  # while it is there twice
            try:
                upload.file = await store(wrap(_Joined(parts, md5)))
            except BaseException:
                upload.held.keep(-found)
                raise
            self._end(upload, "completed")

    async def cancel(self, upload: PartedUpload) -> None:
        """End an upload and remove its parts. Again, it changes nothing.

        Raises:
            UploadEnded: it is complete, or has expired.
        """
        async with upload.lock:
            if upload.status != "cancelled":
                _check_pending(upload, locked=True)
                self._end(upload, "cancelled")

    def expire(self) -> None:
        """Remove the parts of uploads for which none has come for long, and forget those that ended long ago."""
        now = self._clock()
        for id, upload in list(self._uploads.items()):
            if upload.expires_at > now or upload.lock.locked():
                continue
            if upload.status == "pending":
                self._end(upload, "expired")
            else:
                del self._uploads[id]

    def close(self) -> None:
        """Remove the parts of all uploads."""
        for upload in self._uploads.values():
            for part in upload.parts.values():
                part.content.discard()
        self._uploads.clear()

    def _end(self, upload: PartedUpload, status: str) -> None:
        upload.status, upload.expires_at = status, self._clock() + LIFE_SECONDS
        _discard([part.content for part in upload.parts.values()])
        upload.parts.clear()
        upload.held.end()


def _check_pending(upload: PartedUpload, locked: bool = False) -> None:
    if upload.status != "pending" or upload.lock.locked() != locked:
        state = "being completed" if upload.status == "pending" else upload.status
        raise UploadEnded(f"the upload {upload.id} is {state}", param="upload_id")


def _check_whole(parts: Sequence[Incoming]) -> None:
    """Raise UploadIncomplete if the temporary file of a part was removed or changed."""
    for at, part in enumerate(parts):
        try:
            whole = part.path.stat().st_size == part.bytes
        except FileNotFoundError:
            whole = False
        if not whole:
            why = "the part was removed from the server's disk or changed there; send it again"
            raise UploadIncomplete(why, param=f"part_ids[{at}]")


def _discard(files: Sequence[Incoming]) -> None:
    """Remove temporary files on a thread; not awaited, so that no cancellation can prevent it."""
    asyncio.get_running_loop().run_in_executor(None, lambda: [file.discard() for file in files])


class _Joined(io.BufferedIOBase):
    """The bytes of several temporary files, one after the other."""

    def __init__(self, parts: Sequence[Incoming], md5: str | None) -> None:
        self._pieces = chain.from_iterable(part.pieces() for part in parts)
        self._md5, self._wanted = hashlib.md5(usedforsecurity=False), md5

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next piece, whatever the size, and none at the end.

        Raises:
            ChecksumMismatch: they were not the bytes that the client has sent.
        """
        piece = next(self._pieces, b"")
        if self._wanted is not None:
            self._md5.update(piece)
            if not piece and self._md5.hexdigest() != self._wanted.lower():
                raise ChecksumMismatch(
                    f"the parts together have the MD5 {self._md5.hexdigest()}, not {self._wanted}",
                    param="md5",
                )
        return piece
