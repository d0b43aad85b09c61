"""The folder of a library: how it is recognised, that one process at a time has it, and whether it is still there.

A library marks its folder with ``mpic-library.json``, which holds a random id that the catalogue holds too. What a
folder without this file holds is somebody else's until the contrary is shown: ``enter`` makes a library only where none
of the names that a library uses is taken, takes over what is plainly a library of a version without markers, and
refuses everything else. Whoever has a library open holds locks on the folder itself, on its marker, and on the file
``lock`` that earlier versions lock. A folder cannot be removed while it holds anything, so removing a file from it lets
nobody else in; ``Home.check`` tells when the folder, its marker or its catalogue is not the one that was opened.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mpic.database import PATIENCE, translation
from mpic.durable import Files, write_durably
from mpic.errors import DatabaseDamaged, ForeignFolder, IntegrityError, LibraryGone, Unavailable
from mpic.library.names import CATALOG, LOCK, holds_ours

MARKER = "mpic-library.json"
BACKUP = "mpic-backup.json"
FORMAT = 1
TAKEN = ("files", "kv", "tmp", "quarantine", "index", "spool", CATALOG, f"{CATALOG}-wal")
"""Names that a library or an engine uses in its folder. Where one of them is taken, no library is made."""

UNFINISHED = re.compile(rf"\.{re.escape(MARKER)}\.[0-9a-f]{{12}}\.tmp")

TABLES = {"users", "files", "chunks"}
"""Tables that the catalogue has had since its first version."""

State = Literal["ready", "restoring"]


@dataclass(frozen=True)
class Marker:
    """What ``mpic-library.json`` says.

    Args:
        id: of the library; random, and in the catalogue as well.
        state: ``restoring`` while a backup is being copied into the folder.
        format: of the folder.
    """

    id: str
    state: State = "ready"
    format: int = FORMAT

    def write(self, files: Files, root: Path) -> None:
        """Make it durable. Raises StorageFull."""
        write_durably(files, root / MARKER, [memoryview(json.dumps(asdict(self)).encode() + b"\n")])

    @classmethod
    def read(cls, root: Path) -> Marker | None:
        """The marker of a folder; None when there is none, or none that can be read.

        Raises:
            IntegrityError: it was written by a newer version of this program.
        """
        try:
            values = json.loads((root / MARKER).read_bytes())
            marker = cls(str(values["id"]), values["state"], int(values["format"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if marker.format > FORMAT:
            raise IntegrityError(f"{root / MARKER} has format {marker.format}, this program knows {FORMAT}")
        return marker

    @classmethod
    def new(cls, state: State = "ready") -> Marker:
        return cls(secrets.token_hex(16), state)


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
        return self._take(create, inspect)

    def enter_damaged(self) -> Home:
        """``enter`` for a library whose catalogue may be missing or damaged, to make a new one.

        Raises:
            Unavailable: another process has it; there is no library.
        """
        return self._take(False, _inspect_damaged)

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

    def _take(self, create: bool, look: Callable[[Path, bool], Marker | None]) -> Home:
        if create:
            self._files.make_folder(self.root)
        elif not self.root.is_dir():
            raise Unavailable(f"there is no library in {self.root}; `mpic serve` makes one")
        try:
            self._lock(self.root, os.O_RDONLY | os.O_DIRECTORY)
            marker = look(self.root, create)
            self.fresh = marker is None
            self._lock(self.root / LOCK, os.O_RDWR | os.O_CREAT)
            marker = marker or Marker.new()
            if Marker.read(self.root) != marker:
                marker.write(self._files, self.root)
            self._lock(self.root / MARKER, os.O_RDWR)
            for name in os.listdir(self.root):
                if UNFINISHED.fullmatch(name):  # a marker that a crash has kept from its name
                    self._files.remove(self.root / name)
        except BaseException:
            self.close()
            raise
        self.id = marker.id
        return self

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


@dataclass(frozen=True)
class Catalogue:
    """What lies at a catalogue's path. ``id`` is None in catalogues of versions without markers."""

    state: Literal["none", "ours", "other", "damaged"]
    id: str | None = None
    why: str = ""


def inspect(root: Path, create: bool = True) -> Marker | None:
    """What a folder is: the marker it has or should have, or None where a library can be made. Changes nothing.

    Raises: as ``Home.enter``.
    """
    marker = Marker.read(root)
    if marker is None and (root / BACKUP).exists():
        raise ForeignFolder(
            f"{root} is a backup: give another folder, and fill it with `mpic library restore {root}`"
        )
    catalogue = look_at(root / CATALOG)
    if marker is not None and marker.state != "ready":
        raise IntegrityError(
            f"the restore into {root} was interrupted: empty the folder and run `mpic library restore` again"
        )
    if catalogue.state == "ours":
        if marker is not None and catalogue.id not in (None, marker.id):
            raise IntegrityError(
                f"the catalogue in {root} is another library's (its id is {catalogue.id}, the folder's {marker.id}): "
                "put the right one back, or move it away and run `mpic library recover`"
            )
        return marker or (Marker(catalogue.id) if catalogue.id else Marker.new())
    ours = holds_ours(root)
    if catalogue.state == "none" and not ours:
        if marker is not None:
            return marker  # a library is marked before its catalogue is made
        if not create:
            raise Unavailable(
                f"there is no library in {root}; `mpic serve` makes one, --data-dir names another folder"
            )
        _refuse_taken(root)
        return None
    if marker is None and not ours:
        _refuse_taken(root)
    what = "missing or empty" if catalogue.state == "none" else f"damaged ({catalogue.why})"
    raise DatabaseDamaged(
        f"the catalogue of the library in {root} is {what}, and files that it should list are there. Nothing was "
        f"changed. Put a copy of {CATALOG} back, or make a new one from the files: "
        f"mpic library recover --data-dir {root}"
    )


def _inspect_damaged(root: Path, create: bool) -> Marker:
    """``inspect`` for ``recover``: a library whatever its catalogue is."""
    marker, catalogue = Marker.read(root), look_at(root / CATALOG)
    if marker is None and not (catalogue.state == "ours" or holds_ours(root)):
        raise Unavailable(f"there is no library in {root}: neither a marker nor files of one")
    return marker or Marker(catalogue.id or Marker.new().id)


def _refuse_taken(root: Path) -> None:
    """Raises ForeignFolder: a name that a library uses is taken."""
    taken = [name for name in TAKEN if _taken(root / name)]
    if taken:
        raise ForeignFolder(
            f"{root} is not a library, and it holds {', '.join(taken)}, which a library would use. Nothing was "
            "changed. Give an empty or a new folder as --data-dir."
        )


def _taken(path: Path) -> bool:
    """Whether something is there that is not ours to use: not an empty folder, nor a new file system."""
    with suppress(NotADirectoryError, FileNotFoundError):
        return any(name != "lost+found" for name in os.listdir(path))
    return os.path.lexists(path)


def look_at(path: Path) -> Catalogue:
    """What lies at a catalogue's path. It is read whole, and not changed; where a crash has left a rollback journal,
    SQLite rolls it back, as with any next reader.

    Raises:
        DatabaseBusy, DatabaseFailed: it cannot be read just now.
    """
    if _size(path) == 0:
        return Catalogue("none")  # opening an empty one would make SQLite remove the log beside it
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
        return Catalogue("damaged", why=str(error))


def _inspect(path: Path, mode: str) -> Catalogue:
    """Raises sqlite3.DatabaseError."""
    with closing(sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=PATIENCE)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version == 0 and not tables:
            return Catalogue("none")
        if version == 0 or not tables >= TABLES:
            return Catalogue("other", why="it is not a catalogue of this program")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            return Catalogue("damaged", why=verdict.replace("\n", " ")[:200])
        row = db.execute("SELECT id FROM library").fetchone() if "library" in tables else None
        return Catalogue("ours", row[0] if row else None)


def _size(path: Path) -> int:
    """Bytes of a file; 0 where there is none, and more for anything that is no file."""
    if not os.path.lexists(path):
        return 0
    return path.stat().st_size if path.is_file() else -1


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
