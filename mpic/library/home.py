"""The folder of a library, held by one process.

Whoever has a library open holds locks on the folder itself, on its marker, and on the file ``lock`` that earlier
versions lock. A folder cannot be removed while it holds anything, so removing a file from it lets nobody else in;
``Home.check`` tells when the folder, its marker or its catalogue is not the one that was opened.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpic.durable import Files
from mpic.errors import LibraryGone, Unavailable
from mpic.library.folder import (
    MARKER,
    TAKEN,
    UNFINISHED,
    Marker,
    inspect,
    inspect_damaged,
    no_library,
    refuse_taken,
)
from mpic.library.names import CATALOG, LOCK


class Home:
    """A library's folder, held by this process until ``close``.

    Attributes:
        id: of the library.
        fresh: whether nothing was in it.
    """

    def __init__(self, root: Path, files: Files) -> None:
        self.root = root
        self.id, self.fresh = "", False
        self._files = files
        self._locks: list[int] = []
        self._known: dict[Path, tuple[int, int]] = {}

    def enter(self, create: bool = True) -> Home:
        """Take the folder, making it (and its marker) where it is new.

        Raises:
            Unavailable: another process has it; there is no library, and none is to be made.
            ForeignFolder: it is not a library's, and names that a library uses are taken.
            DatabaseDamaged: the catalogue is missing or damaged, and files of the library are there.
            IntegrityError: the catalogue is another library's; a newer version wrote the marker.
        """
        if create:
            self._files.make_folder(self.root)
        with self._taking():
            marker = inspect(self.root, create)
            self.fresh = marker is None
            self._mark(marker or Marker.new())
        return self

    def enter_damaged(self, change: bool = True) -> Home:
        """``enter`` for a library whose catalogue may be missing or damaged, to make a new one.

        Args:
            change: False takes the folder without leaving anything in it.

        Raises:
            Unavailable: another process has it; there is no library.
        """
        with self._taking():
            marker = inspect_damaged(self.root)
            self.id = marker.id
            if change:
                self._mark(marker)
        return self

    def enter_new(self, id: str) -> Home:
        """Take a new folder to restore a library into it. Until ``restored`` nobody can open it.

        Raises:
            Unavailable: another process has it.
            ForeignFolder: there is something in it.
        """
        self._files.make_folder(self.root)
        with self._taking():
            refuse_taken(self.root, (*TAKEN, MARKER, "keys.sqlite"))
            self._mark(Marker(id, "restoring"))
        return self

    def restored(self) -> None:
        """What was to be restored is durable: the folder is a library. Close it afterwards."""
        Marker(self.id).write(self._files, self.root)

    def settle(self) -> None:
        """Remember which files these are. The catalogue is there by now."""
        for path in (self.root, self.root / MARKER, self.root / CATALOG):
            self._known[path] = _identity(path)

    def check(self) -> None:
        """Whether the folder, its marker and its catalogue are still those that were opened. Three calls of ``stat``.

        Raises:
            LibraryGone: one of them was removed or replaced, or cannot be reached.
        """
        for path, known in self._known.items():
            try:
                gone = _identity(path) != known
            except OSError:
                gone = True
            if gone:
                what = "folder" if path == self.root else path.name
                raise LibraryGone(
                    f"the library's {what} was removed or replaced while the server runs: nothing is stored any more"
                )

    def gone(self) -> bool:
        """Whether ``check`` raises."""
        try:
            self.check()
        except LibraryGone:
            return True
        return False

    def close(self) -> None:
        """Let go of the folder. Safe to call twice."""
        while self._locks:
            os.close(self._locks.pop())

    @contextmanager
    def _taking(self) -> Iterator[None]:
        """The folder is locked; whatever fails inside the block lets go of it."""
        if not self.root.is_dir():
            raise no_library(self.root)
        try:
            self._lock(self.root, os.O_RDONLY | os.O_DIRECTORY)
            yield
        except BaseException:
            self.close()
            raise

    def _mark(self, marker: Marker) -> None:
        """Write the marker where it is not there as it should be, and lock what others may lock."""
        self._lock(self.root / LOCK, os.O_RDWR | os.O_CREAT)
        if Marker.read(self.root) != marker:
            marker.write(self._files, self.root)
        self._lock(self.root / MARKER, os.O_RDWR)
        for name in os.listdir(self.root):
            if UNFINISHED.fullmatch(name):  # a marker that a crash has kept from its name
                self._files.remove(self.root / name)
        self.id = marker.id

    def _lock(self, path: Path, flags: int) -> None:
        """Hold a file for this process; the operating system lets go of it when the process dies."""
        busy = Unavailable(f"another process has the library in {self.root} open")
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._locks.append(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise busy from error
        except OSError:  # a network file system may lock files, but no folders
            if path != self.root:
                raise
        if _identity(path) != (os.fstat(fd).st_dev, os.fstat(fd).st_ino):
            raise busy  # it was replaced between opening and locking


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
