"""Files that survive a crash: all durable writes go through this module.

Everything that must be durable is written through ``FileSystem``, the catalogue's database included, so that a
test can wrap it and drop, tear or reorder what was not synced. A file becomes visible in one way only: temporary name,
fsync file, rename, fsync folder.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import sqlite3
import stat
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from mpic.database import PATIENCE
from mpic.errors import StorageFull

TEMPORARY = ".tmp"
"""Suffix of files that are not finished; after a restart such files are garbage."""

NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR})
"""Errors of opening a name that is a loop of links, a socket, a device without a driver, or below a file."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
log = logging.getLogger(__name__)


class FileSystem:
    """The file system calls of the library. Subclass it to inject faults."""

    def __init__(self) -> None:
        self._folders = threading.Lock()

    def create(self, path: Path) -> int:
        """Create a file for writing, readable by its owner only; fail if it exists. Return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, data: memoryview) -> int:
        """Write data; return the number of bytes written, which may be fewer."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def open(self, path: Path) -> int:
        """Open a file for reading. Never waits: a pipe in its place would keep the thread until somebody writes to it;
        and follows no symbolic link, since no library writes one.

        Raises:
            FileNotFoundError: there is none, or what has its name is no regular file.
            OSError: it cannot be opened.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in NO_FILE:
                raise FileNotFoundError(errno.ENOENT, "is no regular file", str(path)) from error
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "is no regular file", str(path))
        return fd

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def names(self, path: Path, fd: int) -> bool:
        """Return whether this path is the name of an open file now; False also when that cannot be told."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(fd))
        except OSError:
            return False

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read straight into ``into`` without moving the file position; return the number of bytes, 0 at the end."""
        if hasattr(os, "preadv"):
            return os.preadv(fd, [into], offset)
        data = os.pread(fd, len(into), offset)
        into[: len(data)] = data
        return len(data)

    def lend(self, fd: int) -> int:
        """Return a descriptor by which another process can read an open file, for as long as that is not closed."""
        return fd

    def read_ahead(self, path: Path) -> None:
        """Ask the system to begin reading a whole file into its cache, and do not wait for it. A file that cannot
        be opened is left alone: reading it will report why."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):
            fd = self.open(path)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                self.close(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def try_remove(self, path: Path) -> bool:
        """Remove a file, if it is there; return False, and leave it to the next start, if that fails."""
        with suppress(OSError):
            self.remove(path)
            return True
        return False

    def make_folder(self, folder: Path) -> None:
        """Create a folder and its parents, private to the owner, and make their names durable."""
        with self._folders:
            missing = [f for f in (folder, *folder.parents) if not f.is_dir()]
            for new in reversed(missing):
                self.make_one_folder(new)
                self.sync_folder(new.parent)

    def make_one_folder(self, folder: Path) -> None:
        os.mkdir(folder, 0o700)

    def database(self, path: Path, create: bool = False) -> sqlite3.Connection:
        """Connect to an SQLite database, which makes its own files durable. No transaction begins by itself. Any
        thread may use the connection, one at a time.

        Args:
            create: make the database if it is missing, and let nobody else read it, whatever the folder allows.
                Otherwise a missing database is an error, so that a reader never creates an empty file where a database
                has just been removed.
        """
        if create:
            # Only a missing file is opened: closing one that is in use would end SQLite's locks. SQLite says what else
            # is wrong with it.
            with suppress(OSError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            _hide(path)
        uri = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=PATIENCE)

    def sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _hide(database: Path) -> None:
    """Let only the owner read a database's files."""
    for name in (database, f"{database}-wal", f"{database}-shm"):
        try:
            os.chmod(name, 0o600)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s cannot be hidden from other users: %s", name, error)


def write_all(files: FileSystem, fd: int, data: memoryview) -> None:
    """Write all bytes, with as many system calls as it takes."""
    while data:
        data = data[files.write(fd, data) :]


def read_all(files: FileSystem, fd: int, into: memoryview, offset: int) -> int:
    """Read until ``into`` is full or the file ends; return the number of bytes read."""
    done = 0
    while done < len(into):
        n = files.read(fd, into[done:], offset + done)
        if n == 0:
            break
        done += n
    return done


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a small file. Neither waits for a pipe that has its name nor reads a device without end.

    Args:
        most: bytes that it may have.

    Raises:
        FileNotFoundError: there is none, or what has its name is no regular file.
        ValueError: it is larger.
        OSError: it cannot be read.
    """
    with os.fdopen(FileSystem().open(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} is larger than {most} bytes")
    return content


def temporary_name(path: Path) -> Path:
    """Return a new temporary name beside ``path``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}{TEMPORARY}")


def publish(files: FileSystem, temporary: Path, path: Path) -> None:
    """Give a synced temporary file its final name, durably; see ``publish_all``."""
    publish_all(files, [(temporary, path)])


def publish_all(files: FileSystem, names: Sequence[tuple[Path, Path]]) -> None:
    """Give synced temporary files their final names, all in one folder, durably and in this order. On failure no new
    name is left behind; a file that was there before is unchanged unless its successor had taken its name."""
    folder, given = names[-1][1].parent, []
    try:
        files.make_folder(folder)
        for temporary, path in names:
            files.rename(temporary, path)
            given.append(path)
        files.sync_folder(folder)
    except BaseException as error:
        for leftover in (*(temporary for temporary, _ in names), *given):
            files.try_remove(leftover)
        raise storage_error(error, names[-1][1]) from error


def write_durably(files: FileSystem, path: Path, parts: Iterable[memoryview]) -> None:
    """Write ``parts`` to ``path`` so that after a crash the file is complete or not there.

    Raises:
        StorageFull: the disk is full; nothing is left behind, and a file that was there before is unchanged.
        OSError: any other failure of the file system.
    """
    files.make_folder(path.parent)
    temporary = temporary_name(path)
    try:
        fd = files.create(temporary)
        try:
            for part in parts:
                write_all(files, fd, part)
            files.sync(fd)
        finally:
            files.close(fd)
    except BaseException as error:
        files.try_remove(temporary)
        raise storage_error(error, path) from error
    publish(files, temporary, path)


def storage_error(error: BaseException, path: Path) -> BaseException:
    """Return StorageFull for an error of a full disk, and any other error as it is."""
    if isinstance(error, OSError) and error.errno in FULL:
        return StorageFull(f"the disk that holds {path.parent.name}/ is full; nothing was stored")
    return error
