"""Rebuilds a lost or damaged catalogue from the files (``mpic library recover``): originals are described by their
sidecars, compiled chunks by their headers.

Data that was only in the catalogue is lost: the vectors of references (a server makes them again), and the record of
deleted files. A confirmed deletion has removed the sidecar, so no deleted file comes back.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from sqlite3 import Connection
from typing import Any, NamedTuple

from mpic.durable import FileSystem
from mpic.errors import BadRequest, CorruptFile
from mpic.library.catalog.database import Catalog, insert_row
from mpic.library.folder.layout import CATALOG, scan
from mpic.library.folder.lock import FolderLock, inspect_catalog
from mpic.library.folder.sidecars import COLUMNS, CONTENT, TABLES, Sidecar, read_sidecars
from mpic.library.limits import Limits
from mpic.library.store.disk import DiskStore

DAMAGED = "the original is damaged"
WITHOUT_HANDLE = "is without its handle, which another file of its owner has"
NEW = f"{CATALOG}.new"
SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Suffixes that SQLite appends to the name of a database for the files that belong to it."""


class Trouble(NamedTuple):
    """A file that was not fully recovered, and the consequence."""

    path: str
    what: str


@dataclass
class Recovery:
    """The outcome of a recovery.

    Args:
        counts: numbers of ``files``, ``references``, ``caches``, ``chunks`` and ``users`` that have rows now.
        troubles: files that could not be adopted, or not as their sidecars say.
        aside: new path of the old catalogue, if there was one.
    """

    counts: Counter[str] = field(default_factory=Counter)
    troubles: list[Trouble] = field(default_factory=list)
    aside: Path | None = None


def recover(
    root: Path,
    force: bool = False,
    filesystem: FileSystem | None = None,
    clock: Callable[[], float] = time.time,
    progress: Callable[[int], None] = lambda done: None,
) -> Recovery:
    """Make a new catalogue from the files and put the old one aside. Every original is read and verified.

    Args:
        force: make a new catalogue although the present one is in order.
        progress: called with the bytes of each original that was verified.

    Raises:
        Unavailable: another process has the library open, or there is no library.
        BadRequest: the catalogue is in order.
        StorageFull: the disk is full; nothing was changed.
        DatabaseBusy, DatabaseFailed: the new catalogue could not be written; nothing was changed.
        LinkedFolder: see ``scan``; nothing was changed.
    """
    root, filesystem = Path(root).absolute(), filesystem or FileSystem()
    folder = FolderLock(root, filesystem).acquire_damaged()
    try:
        if inspect_catalog(root / CATALOG).state == "ours" and not force:
            raise BadRequest(f"the catalogue in {root} is in order; there is nothing to recover")
        path = root / NEW
        _remove(path, filesystem)  # removes the files of an interrupted recovery
        try:
            with closing(Catalog(path, filesystem)) as catalog:
                recovery = _Rebuilding(root, catalog, filesystem, clock, progress).run()
                catalog.identify(folder.id)
                catalog.check()
                catalog.fold()  # only the file itself gets the catalogue's name
            recovery.aside = _swap(root, path, filesystem, clock())
        except BaseException:
            with suppress(OSError):
                _remove(path, filesystem)
            raise
    finally:
        folder.release()
    return recovery


def size_of(root: Path) -> int:
    """Return the approximate number of bytes that ``recover`` reports to ``progress``."""
    return sum((root / path).stat().st_size for path in scan(root, "files").originals)


class _Rebuilding:
    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        filesystem: FileSystem,
        clock: Callable[[], float],
        progress: Callable[[int], None],
    ) -> None:
        self._root, self._catalog, self._filesystem = root, catalog, filesystem
        self._clock, self._progress = clock, progress
        self._found = scan(root, "files", "kv")
        self._done = Recovery()

    def run(self) -> Recovery:
        """Make the rows. Files wait for compilation, as after an upload; if the chunk is stored already, that takes no
        time."""
        found = self._found
        sidecars = read_sidecars(
            self._root,
            found.sidecars | found.caches | found.owners,
            lambda path, error: self._trouble(path, f"cannot be used ({error})"),
        )
        described = {original for path, sidecar in sidecars for original in sidecar.originals(path)}
        with self._catalog.write() as db:
            for path, sidecar in sidecars:
                self._adopt(db, path, sidecar)
        for path in sorted(found.originals - described):
            self._trouble(path, "has no sidecar that describes it; it stays, upload it again or delete it")
        store = DiskStore(self._root, self._catalog, Limits(), self._filesystem, self._clock)
        chunks = store.adopt(found.chunks, self._trouble)
        users = self._catalog.read("SELECT COUNT(*) FROM users")[0]
        self._done.counts.update(chunks=chunks, users=users[0])
        return self._done

    def _adopt(self, db: Connection, path: str, sidecar: Sidecar) -> None:
        """Make the rows that a sidecar describes, for the originals that are there, all or none."""
        originals = sidecar.originals(path)
        there = {name: one for name, one in originals.items() if name in self._found.originals}
        if originals and not there:
            return self._trouble(path, "describes an original that is gone; it is not adopted")
        if (
            sidecar.kind == "reference"
            and db.execute("SELECT 1 FROM refs WHERE id = ?", (sidecar.record["id"],)).fetchone()
        ):  # the newest version came first
            [original] = there
            self._catalog.add_tombstones(db, [original], self._clock())
            return self._trouble(
                original,
                "is an earlier version of a reference; the next start removes it, as a replacement does",
            )
        states = {name: self._state(name, one) for name, one in there.items()}
        db.execute("SAVEPOINT adoption")
        try:
            self._insert(db, path, sidecar, states)
        except sqlite3.IntegrityError as error:
            db.execute("ROLLBACK TO adoption")
            self._trouble(path, f"does not fit the others, is it there twice? It is not adopted ({error})")
        else:
            if sidecar.kind != "owner":
                self._done.counts[f"{sidecar.kind}s"] += 1
        finally:
            db.execute("RELEASE adoption")

    def _insert(self, db: Connection, path: str, sidecar: Sidecar, states: dict[str, dict[str, Any]]) -> None:
        """Make the rows of a sidecar and of its originals, whose columns of state are given by their paths."""
        record, kind = sidecar.record, sidecar.kind
        values = {name: record[name] for name in COLUMNS[kind]}
        for column in ("metadata", "split"):
            if column in values and (values[column] is not None or kind == "cache"):
                values[column] = json.dumps(values[column], sort_keys=True)
        if kind in ("file", "cache"):
            self._catalog.add_user(db, record["owner"], record["created_at"])
        if kind in ("file", "reference"):
            [(original, state)] = states.items()
            values |= state | {"path": original}
        if kind == "file":
            self._settle_handle(db, values)
        insert_row(db, TABLES[kind], values)
        for original, chunk in sidecar.originals(path).items() if kind == "cache" else ():
            if original in states:
                columns = {name: chunk[name] for name in ("id", "pinned", "kv_ttl", *CONTENT)} | states[
                    original
                ]
                columns |= {name: record[name] for name in ("owner", "created_at", "expires_at")}
                insert_row(db, "files", columns | {"path": original})
                span = (chunk["id"], record["id"], chunk["position"], chunk["start"], chunk["end"])
                db.execute("INSERT INTO cache_chunks VALUES (?, ?, ?, ?, ?)", span)

    def _settle_handle(self, db: Connection, values: dict[str, Any]) -> None:
        """Leave the handle to an earlier file of its owner that has it. One that has expired has lost its own."""
        if values["expires_at"] is not None and values["expires_at"] <= self._clock():
            values["handle"] = None
        sql = "SELECT 1 FROM files WHERE owner = ? AND handle = ? COLLATE NOCASE"
        if db.execute(sql, (values["owner"], values["handle"])).fetchone():
            values["handle"] = None
            self._trouble(values["id"], WITHOUT_HANDLE)

    def _state(self, original: str, record: dict[str, Any]) -> dict[str, Any]:
        """Read an original, and return the columns that say whether it is the one that was uploaded."""
        try:
            with (self._root / original).open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != record["sha256"]:
                    raise CorruptFile("is not what was uploaded")
        except (CorruptFile, OSError) as error:
            self._trouble(original, f"{error}; it is adopted as failed")
            return {"tokens": None, "state": "failed", "error": DAMAGED}
        finally:
            self._progress(record["bytes"])
        return {"tokens": None, "state": "compiling", "error": None}

    def _trouble(self, path: str, what: str) -> None:
        self._done.troubles.append(Trouble(path, what))


def _remove(path: Path, filesystem: FileSystem) -> None:
    for suffix in SUFFIXES:
        filesystem.remove(path.with_name(path.name + suffix))


def _swap(root: Path, new: Path, filesystem: FileSystem, now: float) -> Path | None:
    """Put the old catalogue aside and the new one in its place; return the new path of the old one. A crash in
    between leaves no catalogue, so that the next start refuses, as it did before. The old database is moved before its
    log, which must never meet another database."""
    old = root / CATALOG
    aside = root / f"{CATALOG}.damaged-{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}"
    moved = False
    for suffix in SUFFIXES:
        path = old.with_name(old.name + suffix)
        if os.path.lexists(path):
            moved = True
            filesystem.rename(path, aside.with_name(aside.name + suffix))
    filesystem.sync_folder(root)
    filesystem.rename(new, old)
    filesystem.sync_folder(root)
    return aside if moved else None
