"""The originals of uploads: how they come to the disk, and back from it intact."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import suppress
from pathlib import Path
from threading import Lock

from mpic.durable import TEMPORARY, Files, publish, read_all, storage_error, write_all
from mpic.errors import CorruptFile, TooLarge
from mpic.library.store.disk import owner_folder


class Incoming:
    """An upload on its way: a temporary file that counts, hashes and bounds what is written to it. Calls may come from
    different threads. Use it as a context manager: whatever was not published is removed at the end.

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
        self._fd: int | None = None
        self._gone = True
        self.path = folder / f"{secrets.token_hex(12)}{TEMPORARY}"
        try:
            files.make_folder(folder)
            self._fd = files.create(self.path)
        except OSError as error:
            raise storage_error(error, self.path) from error
        self._gone = False

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
            return _read(self._files, self.path)

    def publish(self, path: Path) -> None:
        """Make it durable under its final name. Raises StorageFull."""
        with self._lock:
            fd = self._descriptor()
            try:
                self._files.sync(fd)
            except OSError as error:
                raise storage_error(error, path) from error
            self._close()
            self._gone = True
            publish(self._files, self.path, path)

    def discard(self) -> None:
        """Close and remove what was not published. Safe to call twice."""
        with self._lock:
            self._close()
            if not self._gone:
                self._gone = True
                with suppress(OSError):
                    self._files.remove(self.path)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()

    def __del__(self) -> None:  # a task cancelled while the file was being made never sees this object
        self.discard()

    def _descriptor(self) -> int:
        if self._fd is None:
            raise ValueError("the upload was closed")
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)


class Originals:
    """Uploads as they came, in ``files/<hash of owner>/<id>`` below ``root``; those in progress in ``tmp``."""

    def __init__(self, root: Path, files: Files) -> None:
        self.root = root
        self._files = files

    def incoming(self, limit: int) -> Incoming:
        """A new upload of at most ``limit`` bytes. Raises StorageFull."""
        return Incoming(self._files, self.root / "tmp", limit)

    def path(self, owner: str, file_id: str) -> Path:
        return self.root / "files" / owner_folder(owner) / file_id

    def read(self, path: Path, sha256: str) -> bytes:
        """An original, verified. Raises CorruptFile, FileNotFoundError."""
        data = _read(self._files, path)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CorruptFile(f"the original of {path.name} is damaged")
        return data

    def remove(self, path: Path) -> None:
        """Remove a file that nothing refers to; one that cannot be removed is collected at the next start."""
        with suppress(OSError):
            self._files.remove(path)

    def reconcile(self, catalogued: set[str]) -> tuple[set[str], int]:
        """Compare with the catalogue, at start-up, and remove what is not in it.

        Args:
            catalogued: paths relative to the root.

        Returns:
            The catalogued paths that are not there, and how many files were removed.
        """
        here = {str(path.relative_to(self.root)) for path in self.root.glob("files/*/*")}
        garbage = [*self.root.glob("tmp/*"), *(self.root / path for path in here - catalogued)]
        for path in garbage:
            self.remove(path)
        return catalogued - here, len(garbage)


def _read(files: Files, path: Path) -> bytes:
    fd = files.open(path)
    try:
        data = bytearray(files.size(fd))
        done = read_all(files, fd, memoryview(data), 0)
    finally:
        files.close(fd)
    return bytes(data[:done])
