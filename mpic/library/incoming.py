"""An upload on its way to the disk."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import suppress
from pathlib import Path
from threading import Lock

from mpic.durable import TEMPORARY, Files, publish, read_all, storage_error, write_all
from mpic.errors import TooLarge


class Incoming:
    """A temporary file that counts, hashes and bounds what is written to it. Calls may come from different threads.

    Use it as a context manager: whatever was not published is removed at the end.

    Attributes:
        bytes: written so far.
        sha256: of what was written.
    """

    def __init__(self, files: Files, folder: Path, limit: int) -> None:
        self.bytes = 0
        self._hash = hashlib.sha256()
        self._files = files
        self._limit = limit
        self._lock = Lock()  # an abandoned request may discard while its last write still runs on a thread
        files.make_folder(folder)
        self.path = folder / f"{secrets.token_hex(12)}{TEMPORARY}"
        try:
            self._fd: int | None = files.create(self.path)
        except OSError as error:
            raise storage_error(error, self.path) from error

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Append.

        Raises:
            TooLarge: the upload is larger than its limit.
            StorageFull: the disk is full.
        """
        with self._lock:
            self.bytes += len(data)
            if self.bytes > self._limit:
                raise TooLarge(
                    f"the upload is larger than {self._limit} bytes", param="file", limit=self._limit
                )
            self._hash.update(data)
            try:
                write_all(self._files, self._descriptor(), memoryview(data))
            except OSError as error:
                raise storage_error(error, self.path) from error

    def content(self) -> bytes:
        """Everything written so far, read back from the file."""
        with self._lock:
            data = bytearray(self.bytes)
            fd = self._files.open(self.path)
            try:
                read_all(self._files, fd, memoryview(data), 0)
            finally:
                self._files.close(fd)
            return bytes(data)

    def publish(self, path: Path) -> None:
        """Make it durable under its final name. Raises StorageFull."""
        with self._lock:
            fd = self._descriptor()
            try:
                self._files.sync(fd)
            except OSError as error:
                raise storage_error(error, path) from error
            self._close()
            publish(self._files, self.path, path)

    def discard(self) -> None:
        """Close and remove what was not published. Safe to call twice."""
        with self._lock:
            self._close()
            with suppress(OSError):
                self._files.remove(self.path)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()

    def _descriptor(self) -> int:
        if self._fd is None:
            raise ValueError("the upload was closed")
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)
