"""The originals of uploads: how they come to the disk, and back from it intact."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Lock

from mpic.durable import TEMPORARY, Files, publish_all, read_all, storage_error, write_all
from mpic.errors import CorruptFile, TooLarge
from mpic.library.names import owner_folder, sidecar_of
from mpic.library.sidecars import Sidecar

_SYNCING = ThreadPoolExecutor(8, "mpic-sync")
"""Threads of ``seal_all``; none is started before it is needed."""


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
        self._gone, self._sealed = True, False
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

    def seal(self) -> None:
        """Make what was written durable, still under its temporary name; nothing can be written any more. Safe to call
        twice.

        Raises:
            StorageFull: the disk is full.
        """
        with self._lock:
            if self._sealed:
                return
            try:
                self._files.sync(self._descriptor())
            except OSError as error:
                raise storage_error(error, self.path) from error
            self._close()
            self._sealed = True

    def given_away(self) -> None:
        """The temporary file gets another name: it is not this object's to remove any more."""
        with self._lock:
            self._gone = True

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


def seal_all(uploads: Sequence[Incoming]) -> None:
    """Seal several at once: file systems write what is synced at the same time in one go, so two files take hardly
    longer than one."""
    others = [_SYNCING.submit(one.seal) for one in uploads[1:]]
    try:
        uploads[0].seal()
    finally:
        wait(others)
    for one in others:
        one.result()


class Originals:
    """Uploads as they came, in ``files/<hash of owner>/<id>`` below ``root``, each with its sidecar; those in progress
    in ``tmp``.

    Args:
        guard: raises when the library's folder is not there any more.
    """

    def __init__(self, root: Path, files: Files, guard: Callable[[], None] = lambda: None) -> None:
        self.root = root
        self._files = files
        self._guard = guard

    def incoming(self, limit: int) -> Incoming:
        """A new upload of at most ``limit`` bytes. Raises StorageFull, LibraryGone."""
        self._guard()
        return Incoming(self._files, self.root / "tmp", limit)

    def path(self, owner: str, file_id: str) -> Path:
        return self.root / "files" / owner_folder(owner) / file_id

    def publish(
        self, uploads: Sequence[tuple[Incoming, Path]], sidecar: Sidecar, path: Path | None = None
    ) -> None:
        """Make originals and the sidecar that describes them durable under their final names. When this raises, none of
        them is there. The sidecar of several is given its name only when they are durable under theirs, so that no
        crash leaves a part of what belongs together, described as if it were all.

        Args:
            uploads: all of one owner, and where each is to lie. Those that are not sealed yet are sealed here.
            path: where the sidecar is to lie; None: beside the only original.

        Raises:
            StorageFull, LibraryGone.
        """
        data = sidecar.encode()
        with self.incoming(len(data)) as words:
            words.write(data)
            seal_all([words, *(upload for upload, _ in uploads)])
            self._guard()
            for one in (*(upload for upload, _ in uploads), words):
                one.given_away()
            names = [(upload.path, target) for upload, target in uploads]
            described = (words.path, path or sidecar_of(uploads[0][1]))
            if len(uploads) == 1:
                publish_all(self._files, [*names, described])
                return
            try:
                publish_all(self._files, names)
                publish_all(self._files, [described])
            except BaseException:
                self.remove_files([words.path, *(target for _, target in uploads)])
                raise

    def read(self, path: Path, sha256: str) -> bytes:
        """An original, verified. Raises CorruptFile, FileNotFoundError, LibraryGone."""
        try:
            data = _read(self._files, path)
        except FileNotFoundError:
            self._guard()
            raise
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CorruptFile(f"the original of {path.name} is damaged")
        return data

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove originals that nothing refers to, and their sidecars, durably, so that nothing that was deleted comes
        back with a lost catalogue. What cannot be removed is removed at the next start."""
        self.remove_files(name for path in paths for name in (sidecar_of(path), path))

    def remove_files(self, paths: Iterable[Path]) -> None:
        """Remove files in this order, durably; see ``remove``."""
        folders = dict.fromkeys(path.parent for path in paths if self._unlink(path))
        for folder in folders:
            with suppress(OSError):
                self._files.sync_folder(folder)

    def _unlink(self, path: Path) -> bool:
        with suppress(OSError):
            self._files.remove(path)
            return True
        return False


def _read(files: Files, path: Path) -> bytes:
    fd = files.open(path)
    try:
        data = bytearray(files.size(fd))
        done = read_all(files, fd, memoryview(data), 0)
    finally:
        files.close(fd)
    return bytes(data[:done])
