"""The folder of a library: what it is, and the lock on it, which one process at a time has.

A library marks its folder with ``mpic-library.json``, which holds a random id that the catalogue holds too. Files in a
folder without this marker are assumed not to belong to a library: a library is made there only if none of the names
that a library uses is taken. A marker that is lost is made again if the catalogue is clearly a library's.

The process holds locks on the folder itself, on its marker, and on the file ``lock`` that earlier versions lock. If the
marker or the file is removed, the lock on the folder still keeps other processes out. ``FolderLock.check`` tells when
the folder, its marker or its catalogue is not the one that was opened.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from mpic.database import PATIENCE, translation
from mpic.durable import FileSystem, read_small, storage_error, write_durably
from mpic.errors import (
    DatabaseDamaged,
    DatabaseFailed,
    ForeignFolder,
    IntegrityError,
    LibraryGone,
    LibraryInUse,
    StorageFull,
    Unavailable,
)
from mpic.file_status import status_of
from mpic.library.folder.layout import CATALOG, LOCK, holds_library_files

MARKER = "mpic-library.json"
BACKUP = "mpic-backup.json"
FORMAT = 1
PIECE = 1 << 20
TAKEN = ("files", "kv", "tmp", "quarantine", "index", "spool", CATALOG, f"{CATALOG}-wal")
"""Names that a library or an engine uses in its folder. If one of them is taken, no library is made."""

UNFINISHED = re.compile(rf"\.{re.escape(MARKER)}\.[0-9a-f]{{12}}\.tmp")

TABLES = {"users", "files", "chunks"}
"""Tables that the catalogue has had since its first version."""

MarkerState = Literal["ready", "restoring"]


@dataclass(frozen=True)
class Marker:
    """The content of ``mpic-library.json``.

    Args:
        id: random id of the library, which the catalogue holds as well.
        state: ``restoring`` while a backup is being copied into the folder.
        format: version of the folder's format.
    """

    id: str
    state: MarkerState = "ready"
    format: int = FORMAT

    def write(self, filesystem: FileSystem, root: Path) -> None:
        """Write the marker durably. Raise StorageFull: the disk is full."""
        write_durably(filesystem, root / MARKER, [memoryview(json.dumps(asdict(self)).encode() + b"\n")])

    @classmethod
    def read(cls, root: Path) -> Marker | None:
        """Read the marker of a folder; None if there is none, or none that can be read.

        Raises:
            IntegrityError: it was written by a newer version of this program.
        """
        try:
            values = json.loads(read_small(root / MARKER, PIECE))
            marker = cls(str(values["id"]), values["state"], int(values["format"]))
        except OSError as error:
            if error.errno == errno.EIO:
                raise DatabaseFailed(
                    f"{root / MARKER} cannot be read ({error.strerror}): check the disk"
                ) from error
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if marker.format > FORMAT:
            raise IntegrityError(f"{root / MARKER} has format {marker.format}, this program knows {FORMAT}")
        return marker

    @classmethod
    def new(cls, state: MarkerState = "ready") -> Marker:
        return cls(secrets.token_hex(16), state)


class CatalogState(NamedTuple):
    """The state of the file at a catalogue's path. ``id`` is None in catalogues of versions without markers."""

    state: Literal["none", "ours", "other", "damaged"]
    id: str | None = None
    why: str = ""


def inspect(root: Path, create: bool = True) -> Marker | None:
    """Return the marker that a folder has or should have, or None if a library can be made there. Change nothing.

    Raises:
        The errors of ``FolderLock.acquire``.
    """
    marker = Marker.read(root)
    if marker is None and (root / BACKUP).exists():
        raise ForeignFolder(
            f"{root} is a backup: give another folder, and fill it with `mpic library restore {root}`"
        )
    catalogue = inspect_catalog(root / CATALOG)
    if marker is not None and marker.state != "ready":
        raise IntegrityError(
            f"the restore into {root} was interrupted: empty the folder and run `mpic library restore` again"
        )
    if catalogue.state == "ours":
        if marker is not None and catalogue.id not in (None, marker.id):
            raise IntegrityError(
                f"the catalogue in {root} is another library's (its id is {catalogue.id}, the folder's {marker.id}): "
                f"move it, {CATALOG}-wal and {CATALOG}-shm away, then put the right one there or run "
                "`mpic library recover`"
            )
        return marker or (Marker(catalogue.id) if catalogue.id else Marker.new())
    ours = holds_library_files(root)
    if catalogue.state == "none" and not ours:
        if marker is not None:
            return marker  # a library is marked before its catalogue is made
        if not create:
            raise no_library(root)
        refuse_taken(root)
        return None
    if marker is None and not ours:
        refuse_taken(root)
    what = "missing or empty" if catalogue.state == "none" else f"damaged ({catalogue.why})"
    raise DatabaseDamaged(
        f"the catalogue of the library in {root} is {what}, and files that it should list are there. Nothing was "
        f"changed. Put a copy of {CATALOG} back, but move {CATALOG}, {CATALOG}-wal and {CATALOG}-shm away first, or "
        f"SQLite writes the old log into the copy. Or make a new one from the files: "
        f"mpic library recover --data-dir {root}"
    )


def no_library(root: Path) -> Unavailable:
    return Unavailable(
        f"there is no library in {root}; `mpic serve` makes one, --data-dir names another folder"
    )


def refuse_taken(root: Path) -> None:
    """Refuse a folder in which one of the names that a library uses is taken.

    Raises:
        ForeignFolder: one of the names is taken.
    """
    taken = [name for name in TAKEN if _taken(root / name)]
    if taken:
        raise ForeignFolder(
            f"{root} is not a library, and it holds {', '.join(taken)}, which a library would use. Nothing was "
            "changed. Give an empty or a new folder as --data-dir."
        )


def refuse_filled(root: Path) -> None:
    """Refuse a folder in which there is anything but empty folders, which may be mounted file systems. Another
    program's file could be overwritten there, and SQLite would write a log that lies beside a database into it.

    Raises:
        ForeignFolder: there is something else.
    """
    found = sorted(name for name in os.listdir(root) if name != "lost+found" and _taken(root / name))
    if found:
        names = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        raise ForeignFolder(
            f"{root} is not empty: it holds {names}. Nothing was changed. Give an empty or a new folder as --data-dir."
        )


def _taken(path: Path) -> bool:
    """Return whether something is there, other than an empty folder or a new file system."""
    with suppress(NotADirectoryError, FileNotFoundError):
        return any(name != "lost+found" for name in os.listdir(path))
    return os.path.lexists(path)


def inspect_catalog(path: Path) -> CatalogState:
    """Tell the state of the file at a catalogue's path. It is not changed, except that SQLite rolls back a
    journal that a crash has left, as for any reader.

    Raises:
        DatabaseBusy, DatabaseFailed: it cannot be read now.
    """
    if os.path.lexists(path) and not path.is_file():
        # SQLite would wait for whoever writes to a pipe
        return CatalogState("damaged", why="it is not a file")
    found = _state(path)
    if found.state == "damaged":  # SQLite says the same of a page that the disk does not give
        try:
            with path.open("rb") as stream:
                while stream.read(PIECE):
                    pass
        except OSError as error:
            raise DatabaseFailed(
                f"the catalogue cannot be read ({error.strerror}): look at the disk that holds {path}. "
                "Nothing was changed"
            ) from error
    return found


def _state(path: Path) -> CatalogState:
    if _size(path) == 0:
        return CatalogState("none")  # opening an empty one would make SQLite remove the log beside it
    log = path.with_name(f"{path.name}-wal")
    try:
        if _size(log) == 0 and _size(path.with_name(f"{path.name}-journal")) == 0:
            return _inspect(path, "mode=ro&immutable=1")  # otherwise SQLite would make a log
        try:
            return _inspect(path, "mode=ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
                raise
            return _inspect(path, "mode=rw")
    except sqlite3.DatabaseError as error:
        ours = translation(error, "the catalogue")
        if ours is not None and not isinstance(ours, DatabaseDamaged):
            raise ours from error
        return CatalogState("damaged", why=str(error))


def _inspect(path: Path, mode: str) -> CatalogState:
    """Tell the state of a database. Raise sqlite3.DatabaseError."""
    with closing(sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=PATIENCE)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version == 0 and not tables:
            return CatalogState("none")
        if version == 0 or not tables >= TABLES:
            return CatalogState("other", why="it is not a catalogue of this program")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            return CatalogState("damaged", why=verdict.replace("\n", " ")[:200])
        row = db.execute("SELECT id FROM library").fetchone() if "library" in tables else None
        return CatalogState("ours", row[0] if row else None)


def _size(path: Path) -> int:
    """Return the bytes of a file, 0 if there is none, and -1 for anything that is not a file."""
    if not os.path.lexists(path):
        return 0
    return path.stat().st_size if path.is_file() else -1


class FolderLock:
    """A library's folder, locked by this process until ``release``.

    Attributes:
        id: id of the library.
    """

    def __init__(self, root: Path, filesystem: FileSystem) -> None:
        self.root = root
        self.id = ""
        self._filesystem = filesystem
        self._locks: list[int] = []
        self._known: dict[Path, tuple[int, int]] = {}

    def acquire(self, create: bool = True) -> FolderLock:
        """Lock the folder. With ``create``, a new folder and its marker are made.

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
            self._mark(inspect(self.root, create) or Marker.new())
        return self

    def acquire_damaged(self) -> FolderLock:
        """Lock the folder of a library whose catalogue may be missing or damaged, to make a new catalogue.

        Raises:
            LibraryInUse: another process has it.
            Unavailable: there is no library.
        """
        with self._taking():
            marker, catalogue = Marker.read(self.root), inspect_catalog(self.root / CATALOG)
            if marker is None and not (catalogue.state == "ours" or holds_library_files(self.root)):
                raise no_library(self.root)
            self._mark(marker or Marker(catalogue.id or Marker.new().id))
        return self

    def acquire_new(self, id: str) -> FolderLock:
        """Lock a new folder, to restore a library into it. That library cannot be opened until ``mark_restored``.

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
        """Mark the folder as a library, once everything in it is durable. Release it afterwards."""
        Marker(self.id).write(self._filesystem, self.root)

    def remember(self) -> None:
        """Remember the identity of the folder, its marker and its catalogue, which must exist by now."""
        for path in (self.root, self.root / MARKER, self.root / CATALOG):
            self._known[path] = _identity(path)

    def check(self) -> None:
        """Check that the folder, its marker and its catalogue are those that were opened, by three calls of ``stat``.

        Raises:
            LibraryGone: the folder, the marker or the catalogue was removed or replaced, or cannot be reached.
        """
        for path, known in self._known.items():
            what = "folder" if path == self.root else path.name
            try:
                found = status_of(path)
            except OSError as error:
                raise LibraryGone(
                    f"the library's {what} cannot be reached ({error.strerror}): nothing is stored until it can be"
                ) from error
            if found is None or (found.st_dev, found.st_ino) != known:
                raise LibraryGone(
                    f"the library's {what} was removed or replaced while the server runs: nothing is stored any more"
                )

    def gone(self) -> bool:
        """Return whether ``check`` raises."""
        try:
            self.check()
        except LibraryGone:
            return True
        return False

    def release(self) -> None:
        """Release the folder. Safe to call twice."""
        while self._locks:
            os.close(self._locks.pop())

    def _make(self) -> None:
        """Make the folder if it is not there. Raise Unavailable, StorageFull: that is not possible."""
        try:
            self._filesystem.make_folder(self.root)
        except OSError as error:
            if isinstance(storage_error(error, self.root), StorageFull):
                raise storage_error(error, self.root) from error
            raise Unavailable(f"the folder {self.root} cannot be made ({error.strerror})") from error

    @contextmanager
    def _taking(self) -> Iterator[None]:
        """Lock the folder; an error inside the block releases it."""
        if not self.root.is_dir():
            raise no_library(self.root)
        try:
            self._lock(self.root, os.O_RDONLY | os.O_DIRECTORY)
            yield
        except BaseException:
            self.release()
            raise

    def _mark(self, marker: Marker) -> None:
        """Write the marker unless it is there already, and lock the files that other versions lock."""
        self._lock(self.root / LOCK, os.O_RDWR | os.O_CREAT)
        if Marker.read(self.root) != marker:
            marker.write(self._filesystem, self.root)
        self._lock(self.root / MARKER, os.O_RDWR)
        for name in os.listdir(self.root):
            if UNFINISHED.fullmatch(name):  # removes a marker that a crash left under its temporary name
                self._filesystem.remove(self.root / name)
        self.id = marker.id

    def _lock(self, path: Path, flags: int) -> None:
        """Lock a file for this process; the operating system releases it when the process dies."""
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
