"""Copies a library, also while a server runs; ``restore.py`` makes a library of the copy.

A backup is a folder with ``mpic-backup.json``, a snapshot of the catalogue, the originals and sidecars that the
snapshot lists, the key store, the savings ledger and, on request, the compiled chunks. The manifest says
``incomplete`` until everything else is durable, so that an interrupted backup is recognised. Files of a library are
never changed in place. If the backup lies on the same file system they are therefore hard links: no bytes are copied,
and deleting one side leaves the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from mpic.database import PATIENCE, translated
from mpic.durable import FileSystem, read_small, storage_error, write_durably
from mpic.errors import BadRequest, DatabaseBusy, DatabaseDamaged, DatabaseFailed, Unavailable
from mpic.file_status import is_own_file
from mpic.keys import any_keys, mark_keys
from mpic.library.catalog.database import NAME, Catalog
from mpic.library.folder.layout import CATALOG, CatalogRow, sidecar_of
from mpic.library.folder.lock import BACKUP, Marker
from mpic.library.folder.sidecars import Sidecars

KEYS = "keys.sqlite"
SAVINGS = "savings.sqlite"
NAMES = {CATALOG: NAME, KEYS: "the key store", SAVINGS: "the savings ledger"}
"""The names of a library's databases in messages."""
FORMAT = 1
ROUNDS = 20
PIECE = 8 << 20
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Manifest:
    """The content of ``mpic-backup.json``: the id of the library, the time, and whether the backup is complete."""

    library: str
    created_at: float
    state: Literal["incomplete", "complete"] = "incomplete"
    counts: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, filesystem: FileSystem, folder: Path) -> None:
        write_durably(filesystem, folder / BACKUP, [memoryview(json.dumps(asdict(self)).encode() + b"\n")])

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a backup.

        Raises:
            BadRequest: the folder is not a backup of this program, or is an incomplete one.
        """
        try:
            manifest = cls(**json.loads(read_small(folder / BACKUP, 1 << 20)))
            if not all(isinstance(count, int) for count in manifest.counts.values()):
                raise ValueError("its counts are not numbers")
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise BadRequest(f"{folder} is not a backup: it has no {BACKUP} that can be read") from error
        if manifest.format != FORMAT:
            raise BadRequest(f"{folder} is a backup of another version of this program")
        if manifest.state != "complete":
            raise BadRequest(f"{folder} is an incomplete backup, because it was interrupted")
        return manifest


@dataclass
class Copied:
    """The outcome of a backup or a restore.

    Args:
        counts: numbers of ``files``, ``refs``, ``caches``, ``chunks`` and ``keys`` in it, and of files that were
            ``linked`` and ``copied``.
        lost, damaged: paths of originals that were lost or damaged before.
        notes: sentences about what else is not in the copy.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def backup(
    root: Path,
    target: Path,
    chunks: bool = False,
    link: bool = True,
    progress: Progress = lambda done: None,
) -> Copied:
    """Copy a library, also while a server has it open.

    Args:
        target: a new or an empty folder.
        chunks: copy compiled chunks too; without them they are compiled again.
        link: make hard links where possible; False copies every byte and verifies it.
        progress: called with the bytes of each original that was linked or copied.

    Raises:
        BadRequest: the target is not empty.
        Unavailable: there is no library, or it was written by an older version.
        StorageFull: the disk is full; the incomplete backup is left, and marked as such.
        IntegrityError: the catalogue has rows that no library writes; the same is left.
        DatabaseBusy: another process keeps a database locked; the same is left.
        DatabaseFailed, DatabaseDamaged: the catalogue or the key store cannot be read, or a copy of a database cannot
            be written; the same is left.
    """
    root, target = Path(root).absolute(), Path(target).absolute()
    marker = Marker.read(root)
    if marker is None or marker.state != "ready":
        raise Unavailable(
            f"there is no library in {root}; start the server once to mark one of an earlier version"
        )
    if target.is_dir() and any(target.iterdir()):
        raise BadRequest(f"{target} is not empty")
    filesystem = FileSystem()
    try:
        filesystem.make_folder(target)
        manifest = Manifest(marker.id, time.time())
        manifest.write(filesystem, target)
        with closing(Catalog(root / CATALOG, filesystem, read_only=True)) as live:
            live.check_paths()  # files are copied from and to the paths in it
            work = _Backup(root, target, filesystem, live, link, progress)
            work.originals()
            work.chunks(chunks)
        work.keys()
        work.savings()
        if any_keys(root):
            mark_keys(target)
        work.finish()
    except OSError as error:
        raise storage_error(error, target / CATALOG) from error
    Manifest(marker.id, manifest.created_at, "complete", dict(work.done.counts)).write(filesystem, target)
    return work.done


@dataclass
class _Backup:
    _root: Path
    _target: Path
    _filesystem: FileSystem
    _live: Catalog
    _link: bool
    _progress: Progress
    _folders: set[Path] = field(default_factory=set)
    done: Copied = field(default_factory=Copied)

    def originals(self) -> None:
        """Make a snapshot and copy every original that it lists. If one is deleted before it is copied, another
        snapshot is made; copied files stay, so each round has less to do."""
        copied: set[str] = set()
        for _ in range(ROUNDS):
            snapshot(self._root / CATALOG, self._target / CATALOG)
            wanted = self._wanted()
            gone = [
                path for path, row in wanted.items() if path not in copied and not self._original(path, row)
            ]
            copied |= wanted.keys() - set(gone)
            self.done.lost = [path for path in gone if self._still_listed(path)]
            if len(self.done.lost) == len(gone):
                break
        else:
            raise DatabaseBusy("files are deleted faster than they can be copied; try again")
        for path in sorted(copied - wanted.keys()):  # it was deleted meanwhile
            self._filesystem.remove(self._target / path)
            self._filesystem.remove(sidecar_of(self._target / path))
        self._sidecars()

    def _wanted(self) -> dict[str, sqlite3.Row]:
        sql = "SELECT path, bytes, sha256 FROM {}"
        with self._snapshot() as db:
            rows = [row for table in ("files", "refs") for row in db.execute(sql.format(table))]
            for table in ("files", "refs", "caches"):
                self.done.counts[table] = db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        return {row["path"]: row for row in rows}

    def _still_listed(self, path: str) -> bool:
        """Return whether the live catalogue lists an original that is not there, which means that it is lost and was
        not deleted."""
        sql = "SELECT 1 FROM files WHERE path = ?1 UNION ALL SELECT 1 FROM refs WHERE path = ?1"
        return self._live.one(sql, path) is not None

    def _original(self, path: str, row: CatalogRow) -> bool:
        """Copy an original; False if it is not there."""
        digest = self._take(path)
        if digest is None:
            return False
        if digest not in ("", row["sha256"]):
            self.done.damaged.append(path)
        self._progress(row["bytes"])
        return True

    def _sidecars(self) -> None:
        """Copy the sidecars that are there; a restored library writes the others."""
        with closing(Catalog(self._target / CATALOG, read_only=True)) as catalog:
            sidecars = Sidecars(self._root, self._filesystem)
            paths = [sidecars.path(kind, row) for kind, row in sidecars.described(catalog.read)]
        for path in paths:
            self._take(str(path.relative_to(self._root)))

    def chunks(self, wanted: bool) -> None:
        """Copy compiled chunks if requested. Chunks that are not copied, or that have just been evicted, are
        removed from the snapshot."""
        with self._snapshot() as db:
            rows = (
                db.execute("SELECT key, path FROM chunks WHERE state = 'ready'").fetchall() if wanted else []
            )
            kept = [row["key"] for row in rows if self._take(row["path"]) is not None]
            db.execute("BEGIN")
            db.execute(
                "DELETE FROM chunks WHERE key NOT IN (SELECT value FROM json_each(?))", (json.dumps(kept),)
            )
            db.execute("COMMIT")
        self.done.counts["chunks"] = len(kept)

    def keys(self) -> None:
        if (self._root / KEYS).is_file():
            snapshot(self._root / KEYS, self._target / KEYS)
            with closing(sqlite3.connect(self._target / KEYS)) as db:
                self.done.counts["keys"] = db.execute("SELECT COUNT(*) FROM keys").fetchone()[0]

    def savings(self) -> None:
        """Copy the savings ledger, if there is one. One that cannot be copied is noted and left out, because everything
        else works without it. This can be a sound one: what a killed server has half written is taken back by the next
        one that writes, and a reader cannot do that. One that is locked ends the backup."""
        if not (self._root / SAVINGS).is_file():
            return
        try:
            snapshot(self._root / SAVINGS, self._target / SAVINGS, every_page=True)
        except (DatabaseDamaged, DatabaseFailed) as error:
            self._filesystem.remove(self._target / SAVINGS)
            self.done.notes.append(
                f"{error.message}: the backup has no {SAVINGS}, which says what reuse has saved; all else is in it"
            )

    def finish(self) -> None:
        """Make everything durable, before the manifest says that the backup is complete."""
        for name in (CATALOG, KEYS, SAVINGS):
            if (self._target / name).exists():
                with (self._target / name).open("rb") as file:
                    os.fsync(file.fileno())
        for folder in sorted(self._folders | {self._target}):
            self._filesystem.sync_folder(folder)

    def _take(self, path: str) -> str | None:
        """Link or copy a file; return its SHA-256 (empty for a link), or None if it is not there: a pipe, a folder
        or a device is no file."""
        source, target = self._root / path, self._target / path
        self._filesystem.make_folder(target.parent)
        self._folders.add(target.parent)
        with suppress(FileNotFoundError):
            target.unlink()
        try:
            if not is_own_file(source):
                return None
            if self._link and _linked(source, target):
                self.done.counts["linked"] += 1
                return ""
            digest = copy_file(source, target)
        except FileNotFoundError:
            return None
        self.done.counts["copied"] += 1
        return digest

    def _snapshot(self) -> closing[sqlite3.Connection]:
        db = sqlite3.connect(self._target / CATALOG, isolation_level=None)
        db.row_factory = sqlite3.Row
        return closing(db)


def size_of(folder: Path) -> int:
    """Return the bytes of the originals that the catalogue of a library or of a backup lists."""
    uri = f"{(Path(folder) / CATALOG).absolute().as_uri()}?mode=ro"
    sql = """
        SELECT (SELECT COALESCE(SUM(bytes), 0) FROM files) + (SELECT COALESCE(SUM(bytes), 0) FROM refs)"""
    with translated(NAME), closing(sqlite3.connect(uri, uri=True, timeout=PATIENCE)) as db:
        return db.execute(sql).fetchone()[0]


def snapshot(source: Path, target: Path, every_page: bool = False) -> None:
    """Copy a consistent state of a database, even while it is being written to.

    Args:
        every_page: verify all of it first.

    Raises:
        The errors of ``translated``. With ``every_page``, a page that makes no sense is DatabaseDamaged, too.
    """
    name, uri = NAMES[source.name], f"{source.as_uri()}?mode=ro"
    with suppress(FileNotFoundError):
        target.unlink()
    with (
        translated(name),
        closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=PATIENCE)) as live,
    ):
        live.execute("BEGIN")
        # Takes the lock, or waits for it no longer than PATIENCE: Python's backup would wait for ever.
        live.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        if every_page:
            [(found,)] = live.execute("PRAGMA quick_check(1)").fetchall()
            if found != "ok":
                raise DatabaseDamaged(f"{name} is damaged ({' '.join(found.split())})")
        with translated(f"{name} or its copy"), closing(sqlite3.connect(target)) as copy:
            live.backup(copy)
            # a single file, which SQLite can read without creating others
            copy.execute("PRAGMA journal_mode = DELETE")
    target.chmod(0o600)


def copy_file(source: Path, target: Path) -> str:
    """Copy a file durably, except that its folder is still to be synced; return its SHA-256.

    Raises:
        OSError: it cannot be read or written.
    """
    digest = hashlib.sha256()
    with source.open("rb") as reader:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as writer:
            while piece := reader.read(PIECE):
                digest.update(piece)
                writer.write(piece)
            writer.flush()
            os.fsync(writer.fileno())
    shutil.copystat(source, target)
    return digest.hexdigest()


def _linked(source: Path, target: Path) -> bool:
    """Make a hard link; False if that is impossible (another file system, or one without links)."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True
