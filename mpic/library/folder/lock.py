"""The lock on a library's folder: one process at a time has it.

The process holds locks on the folder itself, on its marker, and on the file ``lock`` that earlier versions lock. If the
marker or the file is removed, the lock on the folder still keeps other processes out. ``FolderLock.check`` tells when
the folder, its marker or its catalogue is not the one that was opened.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpic.durable import FULL, TEMPORARY, FileSystem, storage_error
from mpic.errors import DatabaseFailed, LibraryGone, LibraryInUse, StorageFull, Unavailable
from mpic.library.folder.inspection import (
    MARKER,
    UNFINISHED,
    Marker,
    inspect,
    inspect_damaged,
    no_library,
    refuse_filled,
)
from mpic.library.folder.layout import CATALOG, LOCK

PROBE = f"probe{TEMPORARY}"


class FolderLock:
    """A library's folder, locked by this process until ``release``.

    Attributes:
        id: id of the library.
        fresh: True if the folder was new.
    """

    def __init__(self, root: Path, filesystem: FileSystem) -> None:
        self.root = root
        self.id, self.fresh = "", False
        self._filesystem = filesystem
        self._locks: list[int] = []
        self._known: dict[Path, tuple[int, int]] = {}

    def acquire(self, create: bool = True) -> FolderLock:
        """Locks the folder. With ``create``, a new folder and its marker are made.

        Raises:
            LibraryInUse: another process has the folder.
            Unavailable: there is no library, and ``create`` is False.
            ForeignFolder: it is not a library's, and names that a library uses are taken.
            DatabaseDamaged: the catalogue is missing or damaged, and files of the library are there.
            IntegrityError: the catalogue is another library's, or a newer version wrote the marker.
        """
        if create:
            self._make()
        with self._taking():
            marker = inspect(self.root, create)
            self.fresh = marker is None
            self._mark(marker or Marker.new())
        return self

    def acquire_damaged(self, change: bool = True) -> FolderLock:
        """Locks the folder of a library whose catalogue may be missing or damaged, to make a new catalogue.

        Args:
            change: False leaves nothing in the folder, not even a marker.

        Raises:
            LibraryInUse: another process has it.
            Unavailable: there is no library.
        """
        with self._taking():
            marker = inspect_damaged(self.root)
            self.id = marker.id
            if change:
                self._mark(marker)
        return self

    def acquire_new(self, id: str) -> FolderLock:
        """Locks a new folder, to restore a library into it. That library cannot be opened until ``mark_restored``.

        Raises:
            LibraryInUse: another process has it.
            ForeignFolder: it is not empty.
        """
        self._make()
        with self._taking():
            refuse_filled(self.root)
            self._mark(Marker(id, "restoring"))
        return self

    def mark_restored(self) -> None:
        """Marks the folder as a library, once everything in it is durable. Release it afterwards."""
        Marker(self.id).write(self._filesystem, self.root)

    def remember(self) -> None:
        """Remembers the identity of the folder, its marker and its catalogue, which must exist by now."""
        for path in (self.root, self.root / MARKER, self.root / CATALOG):
            self._known[path] = _identity(path)

    def check(self) -> None:
        """Checks that the folder, its marker and its catalogue are those that were opened, by three calls of ``stat``.

        Raises:
            LibraryGone: the folder, the marker or the catalogue was removed or replaced, or cannot be reached.
        """
        for path, known in self._known.items():
            what = "folder" if path == self.root else path.name
            try:
                gone = _identity(path) != known
            except (FileNotFoundError, NotADirectoryError):
                gone = True
            except OSError as error:
                raise LibraryGone(
                    f"the library's {what} cannot be reached ({error.strerror}): nothing is stored until it can be"
                ) from error
            if gone:
                raise LibraryGone(
                    f"the library's {what} was removed or replaced while the server runs: nothing is stored any more"
                )

    def probe(self) -> None:
        """Writes a small file durably, reads it again and removes it, as uploads do.

        Raises:
            DatabaseFailed: the disk does not do it. A full one is no such failure: prompts are still answered.
        """
        disk, path, data = self._filesystem, self.root / PROBE, b"a probe of the disk"
        try:
            disk.remove(path)
            fd = disk.create(path)
            try:
                disk.write(fd, memoryview(data))
                disk.sync(fd)
            finally:
                disk.close(fd)
            fd = disk.open(path)
            try:
                disk.read(fd, memoryview(bytearray(len(data))), 0)
            finally:
                disk.close(fd)
        except OSError as error:
            if error.errno not in FULL:
                raise DatabaseFailed(
                    f"the disk of the data folder fails ({error.strerror}): check the disk and how it is mounted"
                ) from error
        finally:
            disk.try_remove(path)

    def gone(self) -> bool:
        """Returns whether ``check`` raises."""
        try:
            self.check()
        except LibraryGone:
            return True
        return False

    def release(self) -> None:
        """Releases the folder. Safe to call twice."""
        while self._locks:
            os.close(self._locks.pop())

    def _make(self) -> None:
        """Makes the folder if it is not there. Raises Unavailable, StorageFull: that is not possible."""
        try:
            self._filesystem.make_folder(self.root)
        except OSError as error:
            if isinstance(storage_error(error, self.root), StorageFull):
                raise storage_error(error, self.root) from error
            link = next(
                (path for path in (self.root, *self.root.parents) if path.is_symlink() and not path.exists()),
                None,
            )
            why = (
                error.strerror
                if link is None
                else f"{link} is a link to {os.readlink(link)}; is its disk mounted?"
            )
            raise Unavailable(f"the folder {self.root} cannot be made ({why})") from error

    @contextmanager
    def _taking(self) -> Iterator[None]:
        """Locks the folder; an error inside the block releases it."""
        if not self.root.is_dir():
            raise no_library(self.root)
        try:
            self._lock(self.root, os.O_RDONLY | os.O_DIRECTORY)
            yield
        except BaseException:
            self.release()
            raise

    def _mark(self, marker: Marker) -> None:
        """Writes the marker unless it is there already, and locks the files that other versions lock."""
        self._lock(self.root / LOCK, os.O_RDWR | os.O_CREAT)
        if Marker.read(self.root) != marker:
            marker.write(self._filesystem, self.root)
        self._lock(self.root / MARKER, os.O_RDWR)
        for name in os.listdir(self.root):
            if UNFINISHED.fullmatch(name):  # removes a marker that a crash left under its temporary name
                self._filesystem.remove(self.root / name)
        self.id = marker.id

    def _lock(self, path: Path, flags: int) -> None:
        """Locks a file for this process; the operating system releases it when the process dies."""
        busy = LibraryInUse(
            f"another process has the library in {self.root} open: stop it, or give another folder as --data-dir"
        )
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._locks.append(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise busy from error
        except OSError:  # a network file system may lock files, but not folders
            if path != self.root:
                raise
        if _identity(path) != (os.fstat(fd).st_dev, os.fstat(fd).st_ino):
            raise busy  # it was replaced between opening and locking


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
