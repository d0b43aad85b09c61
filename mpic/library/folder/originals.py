"""The originals of uploads: they are written durably and read back verified."""

from __future__ import annotations

import hashlib
import io
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Lock

from mpic.durable import FULL, TEMPORARY, FileSystem, publish_all, read_all, storage_error, write_all
from mpic.errors import CorruptFile, DatabaseFailed, IntegrityError, StorageFailed, StorageFull, TooLarge
from mpic.imaging.image_header import SMALL_BYTES
from mpic.imaging.stored_file import PIECE, FileBytes, StoredFile, unreadable
from mpic.library.folder.layout import original_path, sidecar_of
from mpic.library.folder.sidecars import Sidecar

_SYNCING = ThreadPoolExecutor(8, "mpic-sync")
"""Threads of ``seal_all``; they are started when they are first needed."""


class Incoming(io.BufferedIOBase):
    """An upload that is being received: a temporary file that counts and hashes the bytes written to it, and limits
    their number. Calls may come from different threads, also through ``aiofiles``. Use it as a context manager, which
    removes the file at the end unless it was published.

    Attributes:
        bytes: number of bytes written so far.
        sha256: hash of the bytes written so far.
    """

    def __init__(self, filesystem: FileSystem, folder: Path, limit: int) -> None:
        self.bytes = 0
        self._hash = hashlib.sha256()
        self._filesystem = filesystem
        self._limit = limit
        # an abandoned request may call ``discard`` while its last write still runs on a thread
        self._lock = Lock()
        self._fd: int | None = None
        self._gone, self._sealed = True, False
        self.path = folder / f"{secrets.token_hex(12)}{TEMPORARY}"
        try:
            filesystem.make_folder(folder)
            self._fd = filesystem.create(self.path)
        except OSError as error:
            raise storage_error(error, self.path) from error
        self._gone = False

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes | bytearray) -> int:  # ty: ignore[incompatible-method-override] (only what the library writes)
        """Append all of the data, and return its length.

        Raises:
            TooLarge: the upload is larger than its limit.
            StorageFull: the disk is full.
        """
        with self._lock:
            self.bytes += len(data)
            if self.bytes > self._limit:
                raise too_large(self._limit)
            self._hash.update(data)
            try:
                write_all(self._filesystem, self._descriptor(), memoryview(data))
            except OSError as error:
                raise storage_error(error, self.path) from error
            return len(data)

    def open(self) -> OpenOriginal:
        """Open everything written so far, to be read back; the caller closes it.

        Raises:
            StorageFailed: the file has another size.
        """
        with self._lock:
            written = OpenOriginal(self._filesystem, self.path)
            if written.bytes != self.bytes:
                written.close()
                raise StorageFailed(f"{written.bytes} of {self.bytes} bytes of the upload are on the disk")
            return written

    def seal(self) -> None:
        """Make the written bytes durable, still under the temporary name. Nothing can be written afterwards. Safe to
        call twice.

        Raises:
            StorageFull: the disk is full.
        """
        with self._lock:
            if self._sealed:
                return
            try:
                self._filesystem.sync(self._descriptor())
            except OSError as error:
                raise storage_error(error, self.path) from error
            self._close()
            self._sealed = True

    def rest(self) -> None:
        """Close the file and keep it. Nothing can be written afterwards."""
        with self._lock:
            self._close()

    def pieces(self) -> Iterator[bytes]:
        """Yield everything written so far in pieces of ``PIECE``, read back from the file."""
        fd = self._filesystem.open(self.path)
        try:
            for start in range(0, self.bytes, PIECE):
                yield _read(self._filesystem, fd, start, min(PIECE, self.bytes - start))
        finally:
            self._filesystem.close(fd)

    def give_away(self) -> None:
        """Record that the temporary file gets another name, so that this object does not remove it."""
        with self._lock:
            self._gone = True

    def discard(self) -> None:
        """Close the file, and remove it unless it was published. Safe to call twice."""
        with self._lock:
            self._close()
            if not self._gone:
                self._gone = True
                self._filesystem.try_remove(self.path)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *exc: object) -> None:  # ty: ignore[incompatible-method-override] (io names its parameters)
        self.discard()

    def __del__(self) -> None:  # a task that is cancelled while the file is made never sees this object
        self.discard()

    def _descriptor(self) -> int:
        if self._fd is None:
            raise ValueError("the upload was closed")
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._filesystem.close(fd)


def too_large(limit: int) -> TooLarge:
    return TooLarge(f"the upload is larger than {limit} bytes", param="file", limit=limit)


def seal_all(uploads: Sequence[Incoming]) -> None:
    """Seal several uploads at once. File systems write files that are synced at the same time together, so two files
    take hardly longer than one."""
    others = [_SYNCING.submit(one.seal) for one in uploads[1:]]
    try:
        uploads[0].seal()
    finally:
        wait(others)
    for one in others:
        one.result()


class OpenOriginal(io.BufferedIOBase):
    """An open original. It can be read to its end even if it is deleted meanwhile. Calls may come from different
    threads, also through ``aiofiles``.

    Attributes:
        bytes: its size.
    """

    def __init__(self, filesystem: FileSystem, path: Path) -> None:
        self._filesystem = filesystem
        # the descriptor must not be closed, and perhaps given to another file, while it is read
        self._lock = Lock()
        self._at = 0
        self._fd: int | None = filesystem.open(path)
        self.bytes = filesystem.size(self._fd)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes, at most ``size``, and none at the end.

        Raises:
            StorageFailed: the disk does not give them.
            ValueError: it was closed.
        """
        left = self.bytes - self._at
        data = self._read(left if not size or size < 0 else min(size, left), self._at)
        self._at += len(data)
        return data

    def content(self) -> FileBytes:
        """Return all of it, to be decoded: of a large file the open file itself, until this is closed.

        Raises:
            StorageFailed: it cannot be read.
        """
        with self._lock:
            file = StoredFile(self._filesystem.lend(self._descriptor()), self.bytes, self._read)
        return file[:] if self.bytes <= SMALL_BYTES else file

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to an offset from the start, where the next ``read`` begins."""
        if whence != os.SEEK_SET or not 0 <= offset <= self.bytes:
            raise ValueError(f"offset {offset} is not in a file of {self.bytes} bytes")
        self._at = offset
        return offset

    def close(self) -> None:
        """Close it. Safe to call twice."""
        with self._lock:
            if self._fd is not None:
                fd, self._fd = self._fd, None
                self._filesystem.close(fd)

    def __del__(self) -> None:  # a request that is cancelled before its response is sent never closes it
        if hasattr(self, "_fd"):
            self.close()

    def _read(self, size: int, offset: int) -> bytes:
        with self._lock:
            return _read(self._filesystem, self._descriptor(), offset, size)

    def _descriptor(self) -> int:
        if self._fd is None:
            raise ValueError("the original was closed")
        return self._fd


class Originals:
    """The unchanged uploads, in ``files/<hash of owner>/<id>`` below ``root``, each with its sidecar. Uploads that are
    being received are in ``tmp``.

    Args:
        guard: raises LibraryGone when the library's folder is not there any more.
    """

    def __init__(self, root: Path, filesystem: FileSystem, guard: Callable[[], None]) -> None:
        self.root = root
        self._filesystem = filesystem
        self._guard = guard

    def incoming(self, limit: int) -> Incoming:
        """Begin a new upload of at most ``limit`` bytes.

        Raises:
            StorageFull: the disk is full.
            LibraryGone: the library's folder is not there any more.
        """
        self._guard()
        return Incoming(self._filesystem, self.root / "tmp", limit)

    def probe(self) -> None:
        """Write a small upload durably, read it again and remove it.

        Raises:
            DatabaseFailed: the disk does not do it. A full one is no such failure: prompts are still answered.
        """
        try:
            with suppress(StorageFull), self.incoming(PIECE) as upload:
                upload.write(b"a probe of the disk")
                upload.seal()
                list(upload.pieces())
        except (OSError, StorageFailed) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in FULL:
                why = cause.strerror if isinstance(cause, OSError) else error
                raise DatabaseFailed(
                    f"the disk of the data folder fails ({why}): check the disk and how it is mounted"
                ) from error

    def path(self, owner: str, file_id: str) -> Path:
        """Return the path of an original."""
        return self.root / original_path(owner, file_id)

    def publish(
        self, uploads: Sequence[tuple[Incoming, Path]], sidecar: Sidecar, path: Path | None = None
    ) -> None:
        """Make originals and the sidecar that describes them durable under their final names. When this raises, none
        of them is there. The sidecar of several originals gets its name only when all of them are durable under
        theirs, so that no crash leaves a part of a cache that is described as if it were the whole.

        Args:
            uploads: uploads of one owner, each with its final path. Those that are not sealed yet are sealed here.
            path: path of the sidecar; None: beside the only original.

        Raises:
            StorageFull, LibraryGone: see ``incoming``.
        """
        data = sidecar.encode()
        with self.incoming(len(data)) as description:
            description.write(data)
            seal_all([description, *(upload for upload, _ in uploads)])
            self._guard()
            for one in (*(upload for upload, _ in uploads), description):
                one.give_away()
            names = [(upload.path, target) for upload, target in uploads]
            described = (description.path, path or sidecar_of(uploads[0][1]))
            if len(uploads) == 1:
                publish_all(self._filesystem, [*names, described])
                return
            try:
                publish_all(self._filesystem, names)
                publish_all(self._filesystem, [described])
            except BaseException:
                self.remove_files([description.path, *(target for _, target in uploads)])
                raise

    def read(self, path: Path, sha256: str) -> bytes:
        """Return all of an original. Raise as ``open``."""
        with self.open(path, sha256) as original:
            return original.content()[:]

    def open(self, path: Path, sha256: str) -> OpenOriginal:
        """Open an original and verify it, a piece at a time.

        Raises:
            CorruptFile: its bytes differ from those that were uploaded.
            StorageFailed: the disk does not give them.
            FileNotFoundError: it is not there.
            LibraryGone: the library's folder is not there any more.
        """
        try:
            original = OpenOriginal(self._filesystem, path)
        except FileNotFoundError:
            self._guard()
            raise
        found = hashlib.sha256()
        while piece := original.read(PIECE):
            found.update(piece)
        original.seek(0)
        if found.hexdigest() != sha256:
            original.close()
            raise CorruptFile(f"the original of {path.name} is damaged")
        return original

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove originals that nothing refers to, and their sidecars, durably, so that a recovery brings back nothing
        that was deleted. A file that cannot be removed is removed at the next start."""
        self.remove_files(name for path in paths for name in (sidecar_of(path), path))

    def remove_files(self, paths: Iterable[Path]) -> None:
        """Remove files in this order, durably; see ``remove``."""
        folders = dict.fromkeys(path.parent for path in paths if self._filesystem.try_remove(path))
        for folder in folders:
            with suppress(OSError):
                self._filesystem.sync_folder(folder)

    def check(self, paths: Callable[[], Iterable[str]], what: str) -> None:
        """Check that originals are there.

        Args:
            paths: function that returns the paths of the originals, relative to the root. It is asked again about those
                that are not there, because a server beside this process may have deleted them meanwhile.
            what: the word for the originals in the error message.

        Raises:
            IntegrityError: some originals are missing.
        """
        gone = {path for path in paths() if not (self.root / path).is_file()}
        gone = sorted(gone.intersection(paths())) if gone else []
        if gone:
            raise IntegrityError(f"{len(gone)} {what} are not there, the first is {gone[0]}")


def _read(filesystem: FileSystem, fd: int, start: int, size: int) -> bytes:
    """Return the bytes that are there. Raise StorageFailed if the disk does not give them."""
    data = memoryview(bytearray(size))
    try:
        return bytes(data[: read_all(filesystem, fd, data, start)])
    except OSError as error:
        raise unreadable(error) from error
