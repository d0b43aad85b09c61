"""A disk that loses, tears and reorders what was not synced, in the manner of SQLite's own crash tests.

``Journal`` records every change that a library and its SQLite database make to the disk: the library's through a
``FileSystem``, SQLite's through a VFS of apsw that hands out files recorded in the same order. ``Journal.images`` then
says what a disk may hold when the power fails after each number of changes:

- for every file, its content at the last sync, and any part of the later writes, in any order and torn at sectors of
  512 bytes;
- for every folder, its names at the last sync, and any of the later creations, renames and removals.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import apsw

from mpic.durable import FileSystem

SECTOR = 512
MODES = ("dropped", "kept", "torn", "reordered")


class Journal:
    """Changes below ``root`` in the order they were made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changes: list[tuple] = []
        self._inodes: dict[str, int] = {}
        self._count = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self.changes)

    def name(self, path: str | Path) -> str:
        return os.path.relpath(path, self.root)

    def record(self, what: str, *values) -> None:
        with self._lock:
            self.changes.append((what, *values))

    def create(self, path: str | Path) -> int:
        with self._lock:
            self._count += 1
            self._inodes[self.name(path)] = self._count
            self.record("link", self.name(path), self._count)
            return self._count

    def inode(self, path: str | Path) -> int:
        return self._inodes[self.name(path)]

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            inode = self._inodes[self.name(target)] = self._inodes.pop(self.name(source))
            self.record("rename", self.name(source), self.name(target), inode)

    def remove(self, path: str | Path) -> None:
        with self._lock:
            if self._inodes.pop(self.name(path), None) is not None:
                self.record("unlink", self.name(path))

    def images(self, mode: str, seed: int = 0) -> Iterator[dict[str, bytes | None]]:
        """Yield a disk after a crash before the first change, and after each: content by path relative to the root;
        None for a folder.

        Args:
            mode: the unsynced changes that survive: none (``dropped``), all (``kept``), all but a part of the last
                write to each file (``torn``), or any of them (``reordered``, by ``seed``).
        """
        disk = _Disk()
        for number, change in enumerate([("nothing",), *self.changes]):
            disk.apply(change)
            yield disk.crash(mode, random.Random(f"{number} {seed}"))


@dataclass
class _Inode:
    content: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # None: cut off here

    def sync(self) -> None:
        for write in self.pending:
            _put(self.content, *write)
        self.pending = []

    def left(self, mode: str, rng: random.Random) -> bytes:
        """Return the content with the unsynced writes that survive a crash."""
        if mode == "dropped" or not self.pending:
            return bytes(self.content)
        content, last = self.content.copy(), len(self.pending) - 1
        for number, (at, data) in enumerate(self.pending):
            whole = mode == "kept" or (mode == "torn" and number < last)
            if whole or data is None:
                if whole or rng.random() < 0.5:
                    _put(content, at, data)
                continue
            first = at - at % SECTOR
            for sector in range(first, at + len(data), SECTOR):
                if rng.random() < 0.5:
                    lo, hi = max(sector, at), min(sector + SECTOR, at + len(data))
                    _put(content, lo, data[lo - at : hi - at])
        return bytes(content)


def _put(content: bytearray, at: int, data: bytes | None) -> None:
    if data is None:
        del content[at:]
        content.extend(bytes(at - len(content)))
        return
    content.extend(bytes(max(0, at + len(data) - len(content))))
    content[at : at + len(data)] = data


def _rename(names: dict[str, int | None], change: tuple) -> None:
    what, *values = change
    if what == "mkdir":
        names[values[0]] = None
    elif what == "link":
        names[values[0]] = values[1]
    elif what == "unlink":
        names.pop(values[0], None)
    else:
        names.pop(values[0], None)
        names[values[1]] = values[2]


class _Disk:
    def __init__(self) -> None:
        self.names: dict[str, int | None] = {}  # durable ones; None for a folder
        self.pending: dict[str, list[tuple]] = {}  # changes of names, by folder
        self.inodes: dict[int, _Inode] = {}

    def apply(self, change: tuple) -> None:
        what, *values = change
        if what in ("link", "unlink", "mkdir"):
            self._later(values[0], change)
            if what == "link":
                self.inodes[values[1]] = _Inode()
        elif what == "rename":
            source, target, inode = values
            if os.path.dirname(source) == os.path.dirname(target):
                self._later(target, change)
            else:
                self._later(target, ("link", target, inode))
                self._later(source, ("unlink", source))
        elif what == "write":
            self.inodes[values[0]].pending.append((values[1], values[2]))
        elif what == "truncate":
            self.inodes[values[0]].pending.append((values[1], None))
        elif what == "sync":
            self.inodes[values[0]].sync()
        elif what == "sync_folder":
            for pending in self.pending.pop(values[0], ()):
                _rename(self.names, pending)

    def crash(self, mode: str, rng: random.Random) -> dict[str, bytes | None]:
        names = dict(self.names)
        for folder in sorted(self.pending):
            for pending in self.pending[folder]:
                if mode in ("kept", "torn") or (mode == "reordered" and rng.random() < 0.5):
                    _rename(names, pending)
        contents = {
            inode: self.inodes[inode].left(mode, rng) for inode in names.values() if inode is not None
        }
        here = {}
        for name, inode in sorted(names.items()):
            parent = os.path.dirname(name)
            if parent == "" or parent in here:
                here[name] = contents.get(inode)
        return here

    def _later(self, name: str, change: tuple) -> None:
        self.pending.setdefault(os.path.dirname(name) or ".", []).append(change)


def write_image(image: dict[str, bytes | None], root: Path) -> None:
    """Write an image as real files."""
    root.mkdir(exist_ok=True)
    for name, content in image.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


class RecordingFiles(FileSystem):
    """The real disk, with every change recorded."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal
        self._open: dict[int, list[int]] = {}  # descriptor -> inode, position
        self._vfs = RecordingVFS(journal)

    def create(self, path):
        fd = super().create(path)
        self._open[fd] = [self.journal.create(path), 0]
        return fd

    def write(self, fd, data):
        done = super().write(fd, data[: max(2048, len(data) // 2)])  # short writes happen
        inode, at = self._open[fd]
        self.journal.record("write", inode, at, bytes(data[:done]))
        self._open[fd][1] += done
        return done

    def sync(self, fd):
        self.journal.record("sync", self._open[fd][0])

    def close(self, fd):
        self._open.pop(fd, None)
        super().close(fd)

    def rename(self, source, target):
        super().rename(source, target)
        self.journal.rename(source, target)

    def remove(self, path):
        super().remove(path)
        self.journal.remove(path)

    def make_one_folder(self, folder):
        super().make_one_folder(folder)
        if folder != self.journal.root:
            self.journal.record("mkdir", self.journal.name(folder))

    def sync_folder(self, folder):
        if folder == self.journal.root or self.journal.root in folder.parents:
            self.journal.record("sync_folder", self.journal.name(folder))

    def database(self, path, create=False):
        return Connection(apsw.Connection(str(path), vfs=self._vfs.name))


class RecordingVFS(apsw.VFS):
    """SQLite's Unix file layer, with every change recorded. Shared memory of the WAL is not recorded, because nothing
    in it must survive."""

    def __init__(self, journal: Journal) -> None:
        self.name, self.journal = f"recording-{id(journal)}", journal
        super().__init__(self.name, "unix")

    def xOpen(self, name, flags):
        return RecordingFile(self.journal, name, flags)

    def xDelete(self, name, sync_folder):
        super().xDelete(name, sync_folder)
        self.journal.remove(name)
        if sync_folder:
            self.journal.record("sync_folder", self.journal.name(os.path.dirname(name)))


class RecordingFile(apsw.VFSFile):
    def __init__(self, journal, name, flags):
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        assert path, "a temporary file of SQLite is not recorded"
        self.journal, self.folder = journal, os.path.dirname(path)
        is_log = flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL)
        # SQLite syncs the folder together with the first sync of a journal or log it may have created
        self.sync_folder = bool(is_log and flags[0] & apsw.SQLITE_OPEN_CREATE)
        new = not os.path.exists(path)
        super().__init__("unix", name, flags)
        self.inode = journal.create(path) if new else journal.inode(path)

    def xWrite(self, data, offset):
        super().xWrite(data, offset)
        self.journal.record("write", self.inode, offset, bytes(data))

    def xTruncate(self, size):
        super().xTruncate(size)
        self.journal.record("truncate", self.inode, size)

    def xSync(self, flags):
        self.journal.record("sync", self.inode)
        if self.sync_folder:
            self.sync_folder = False
            self.journal.record("sync_folder", self.journal.name(self.folder))


class Connection:
    """The part of ``sqlite3.Connection`` that the catalogue uses, over apsw."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self.row_factory = None
        db.set_busy_timeout(30_000)
        db.execute("PRAGMA wal_autocheckpoint = 10")  # often, so that crashes fall into it

    def execute(self, sql, values=()):
        return Cursor(self._db.execute(sql, values), self._db)

    def executemany(self, sql, rows):
        return Cursor(self._db.executemany(sql, rows), self._db)

    @property
    def in_transaction(self):
        return self._db.in_transaction

    def close(self):
        self._db.close()


class Cursor:
    def __init__(self, cursor: apsw.Cursor, db: apsw.Connection) -> None:
        self._cursor = cursor
        self.rowcount = db.changes()

    def __iter__(self):
        for values in self._cursor:
            yield Row(values, [column[0] for column in self._cursor.description])

    def fetchone(self):
        return next(iter(self), None)

    def fetchall(self):
        return list(self)


class Row(tuple):
    """Values by position and by name, as ``sqlite3.Row``."""

    def __new__(cls, values, names):
        row = super().__new__(cls, values)
        row._names = names
        return row

    def keys(self):
        return self._names

    def __getitem__(self, at):
        return tuple.__getitem__(self, self._names.index(at) if isinstance(at, str) else at)
