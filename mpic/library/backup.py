"""Copies of a whole library, made beside a running server; ``restore.py`` makes a library of one again.

A backup is a folder of ``mpic-backup.json``, a snapshot of the catalogue, the originals and sidecars that the snapshot
lists, the key store, and on request the compiled chunks. Its marker says ``incomplete`` until everything else in it is
durable, so a backup that was interrupted is recognised. Files of a library are never changed in place, so where the
backup lies on the same file system they are hard links: no bytes are copied, and deleting one side leaves the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mpic.database import PATIENCE, translated
from mpic.durable import Files, storage_error, write_durably
from mpic.errors import BadRequest, DatabaseBusy, Unavailable
from mpic.library.catalog import NAME, Catalog
from mpic.library.folder import BACKUP, Marker
from mpic.library.names import CATALOG, sidecar_of
from mpic.library.sidecars import Sidecars

KEYS = "keys.sqlite"
FORMAT = 1
ROUNDS = 20
PIECE = 8 << 20
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Manifest:
    """What ``mpic-backup.json`` says: whose backup it is, of when, and whether all of it is there."""

    library: str
    created_at: float
    state: Literal["incomplete", "complete"] = "incomplete"
    counts: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, files: Files, folder: Path) -> None:
        write_durably(files, folder / BACKUP, [memoryview(json.dumps(asdict(self)).encode() + b"\n")])

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises BadRequest: the folder is no backup of this program, or an incomplete one."""
        try:
            manifest = cls(**json.loads((folder / BACKUP).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise BadRequest(f"{folder} is not a backup: it has no {BACKUP} that can be read") from error
        if manifest.format != FORMAT:
            raise BadRequest(f"{folder} is a backup of another version of this program")
        if manifest.state != "complete":
            raise BadRequest(f"{folder} is an incomplete backup: making it was interrupted")
        return manifest


@dataclass
class Copied:
    """What was copied: how many ``files``, ``references``, ``caches``, ``chunks`` and ``keys``, how many files were
    ``linked`` and how many ``copied``; and the paths of originals that were ``lost`` or ``damaged`` before."""

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def backup(
    root: Path,
    target: Path,
    chunks: bool = False,
    link: bool = True,
    clock: Callable[[], float] = time.time,
    progress: Progress = lambda done: None,
) -> Copied:
    """Copy a library, also while a server has it open.

    Args:
        target: a new or an empty folder.
        chunks: copy compiled chunks too; without them they are compiled again.
        link: make hard links where that can be; False copies every byte, and verifies it.
        progress: called with the bytes of the originals that were just dealt with.

    Raises:
        BadRequest: something is in the target.
        Unavailable: there is no library, or it was written by an older version.
        StorageFull: the disk is full; what was begun is left, marked as incomplete.
    """
    root, target = Path(root).absolute(), Path(target).absolute()
    marker = Marker.read(root)
    if marker is None or marker.state != "ready":
        raise Unavailable(
            f"there is no library in {root}; start the server once to mark one of an earlier version"
        )
    if target.is_dir() and any(target.iterdir()):
        raise BadRequest(f"{target} is not empty")
    files = Files()
    try:
        files.make_folder(target)
        manifest = Manifest(marker.id, clock())
        manifest.write(files, target)
        with closing(Catalog(root / CATALOG, files, look=True)) as live:
            work = _Backup(root, target, files, live, link, progress)
            work.originals()
            work.chunks(chunks)
        work.keys()
        work.finish()
    except OSError as error:
        raise storage_error(error, target / CATALOG) from error
    Manifest(marker.id, manifest.created_at, "complete", dict(work.done.counts)).write(files, target)
    return work.done


class _Backup:
    def __init__(
        self, root: Path, target: Path, files: Files, live: Catalog, link: bool, progress: Progress
    ) -> None:
        self._root, self._target, self._files = root, target, files
        self._live, self._link, self._progress = live, link, progress
        self._folders: set[Path] = set()
        self.done = Copied()

    def originals(self) -> None:
        """The snapshot, and every original it lists. What is deleted between the snapshot and its copy makes another
        snapshot necessary; what has been copied stays, so each round has less to do."""
        here: set[str] = set()
        for _ in range(ROUNDS):
            snapshot(self._root / CATALOG, self._target / CATALOG)
            wanted = self._wanted()
            gone = [
                path for path, row in wanted.items() if path not in here and not self._original(path, row)
            ]
            here |= wanted.keys() - set(gone)
            self.done.lost = [path for path in gone if self._still_listed(path)]
            if len(self.done.lost) == len(gone):
                break
        else:
            raise DatabaseBusy("files are deleted faster than they can be copied; try again")
        for path in sorted(here - wanted.keys()):  # deleted meanwhile
            self._files.remove(self._target / path)
            self._files.remove(sidecar_of(self._target / path))
        self._sidecars()

    def _wanted(self) -> dict[str, sqlite3.Row]:
        sql = "SELECT path, bytes, sha256 FROM {}"
        with self._snapshot() as db:
            rows = [row for table in ("files", "refs") for row in db.execute(sql.format(table))]
            for table in ("files", "refs", "caches"):
                self.done.counts[table] = db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        return {row["path"]: row for row in rows}

    def _still_listed(self, path: str) -> bool:
        """Whether the catalogue lists an original now that is not there: then it is lost, and was not deleted."""
        sql = "SELECT 1 FROM files WHERE path = ?1 UNION ALL SELECT 1 FROM refs WHERE path = ?1"
        return self._live.one(sql, path) is not None

    def _original(self, path: str, row: Mapping[str, Any]) -> bool:
        """False when it is not there."""
        digest = self._take(path)
        if digest is None:
            return False
        if digest not in ("", row["sha256"]):
            self.done.damaged.append(path)
        self._progress(row["bytes"])
        return True

    def _sidecars(self) -> None:
        """Those that are there; a restored library writes the others."""
        with closing(Catalog(self._target / CATALOG, look=True)) as catalog:
            paths = [path for path, _ in Sidecars(self._root, self._files).expected(catalog)]
        for path in paths:
            self._take(str(path.relative_to(self._root)))

    def chunks(self, wanted: bool) -> None:
        """Compiled chunks; those that are not copied, because nobody wants them or because they have just been evicted,
        are not listed either."""
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

    def finish(self) -> None:
        """Everything is durable before the marker says that the backup is complete."""
        for name in (CATALOG, KEYS):
            if (self._target / name).exists():
                sync_file(self._target / name)
        for folder in sorted(self._folders | {self._target}):
            self._files.sync_folder(folder)

    def _take(self, path: str) -> str | None:
        """Link or copy a file: its SHA-256 (empty for a link), or None when it is not there."""
        source, target = self._root / path, self._target / path
        self._files.make_folder(target.parent)
        self._folders.add(target.parent)
        with suppress(FileNotFoundError):
            target.unlink()
        try:
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
    """Bytes of the originals that the catalogue of a library or of a backup lists."""
    uri = f"{(Path(folder) / CATALOG).absolute().as_uri()}?mode=ro"
    sql = "SELECT (SELECT COALESCE(SUM(bytes), 0) FROM files) + (SELECT COALESCE(SUM(bytes), 0) FROM refs)"
    with translated(NAME), closing(sqlite3.connect(uri, uri=True, timeout=PATIENCE)) as db:
        return db.execute(sql).fetchone()[0]


def snapshot(source: Path, target: Path) -> None:
    """A copy of a database as it is at one moment, whoever writes to it. Raises the errors of ``translated``."""
    with suppress(FileNotFoundError):
        target.unlink()
    with translated(NAME if source.name == CATALOG else "the key store"):
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, timeout=PATIENCE)) as live,
            closing(sqlite3.connect(target)) as copy,
        ):
            live.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, which can be read without making others
    target.chmod(0o600)


def copy_file(source: Path, target: Path) -> str:
    """Copy a file durably (its folder is still to be synced); its SHA-256. Raises FileNotFoundError, StorageFull."""
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


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _linked(source: Path, target: Path) -> bool:
    """Make a hard link; False where that cannot be (another file system, one without links)."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True
