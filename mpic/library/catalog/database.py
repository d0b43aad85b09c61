"""The catalogue: one SQLite database (WAL, ``synchronous=FULL``) of the library's contents.

There is one writer at a time, behind a lock; readers have connections of their own. A file is durable before its row is
committed, so a row is always right. A row that is deleted leaves a *tombstone*, the path of its file in the table
``deleted``, in the same transaction. A file without a row that has a tombstone was left by a crash in the middle of a
deletion and may be removed; any other may be the only copy of an upload.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from sqlite3 import Connection, Row
from typing import Any

from mpic.database import PATIENCE, translated
from mpic.durable import FileSystem
from mpic.errors import DatabaseBusy, IntegrityError, Unavailable
from mpic.file_status import status_of
from mpic.kv.chunk import ChunkKey
from mpic.library.catalog.migrations import MIGRATIONS
from mpic.library.folder.layout import CACHE_SIDECAR, SIDECAR, CatalogRow, path_of_row
from mpic.library.records import File, Reference

IDLE_READERS = 8
"""Connections kept for the next reader; after a burst of readers the others are closed."""

OWED = "remote/"
"""The beginning of the tombstones that stand for contents of a remote store and not for files."""

NAMED_BY = {"files": "id, owner", "refs": "id", "retired_refs": "id", "chunks": "key, owner, model"}
"""Tables whose rows describe files, and the columns that name the file."""

NAME = "the catalogue"
ADVICE = "check the disk first; if it is sound, stop the server and run `mpic library recover`"


class Catalog:
    """Connections to the database. The SQL about its rows is in ``file_rows``, ``reference_rows`` and
    ``store.chunk_rows``.

    Args:
        read_only: only read, while another process may have the library open; nothing is migrated or written.
        guard: called before and after every transaction, and whenever a connection is made; it raises when the database
            at ``path`` is not the one that was opened.

    Raises:
        IntegrityError: the database was written by a newer version of this program.
        Unavailable: with ``read_only``, the database is not there or was written by an older version.
        DatabaseDamaged, DatabaseBusy, DatabaseFailed: the database cannot be used.
    """

    def __init__(
        self,
        path: Path,
        filesystem: FileSystem | None = None,
        read_only: bool = False,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.read_only = read_only
        self._filesystem = filesystem or FileSystem()
        self._guard = guard
        if read_only and not path.is_file():
            raise Unavailable(f"there is no library in {path.parent}")
        self._lock = threading.RLock()
        self._idle: list[Connection] = []  # idle connections of readers
        self._undone: list[Callable[[], None]] = []  # see if_undone
        with translated(NAME, ADVICE):
            self._writer = self._connect(create=not read_only)
            if read_only:
                self._writer.execute("PRAGMA query_only = ON")
                if self._version() < latest():
                    raise Unavailable(
                        f"{path} was written by an older program: start the server once, it migrates"
                    )
            else:
                self._writer.execute("PRAGMA journal_mode = WAL")
        self._migrate()

    def read(self, sql: str, *values: Any, **named: Any) -> list[Row]:
        """Return the rows of a query (placeholders positional or named) as of the last commit. It never waits for the
        writer.

        Raises:
            DatabaseBusy, DatabaseFailed, DatabaseDamaged: see ``translated``.
        """
        with translated(NAME, ADVICE):
            try:
                db = self._idle.pop()
            except IndexError:
                db = self._reader()
            try:
                return db.execute(sql, named or values).fetchall()
            finally:
                if len(self._idle) < IDLE_READERS:
                    self._idle.append(db)
                else:
                    db.close()

    def probe(self) -> None:
        """Read the file anew, past what open connections keep of it in memory. Raise as ``read``."""
        with translated(NAME, ADVICE), closing(self._reader()) as db:
            db.execute("SELECT 1 FROM files LIMIT 1").fetchone()

    def one(self, sql: str, *values: Any) -> Row | None:
        """Return the first row of a query, or None."""
        rows = self.read(sql, *values)
        return rows[0] if rows else None

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Run a transaction, which is committed and durable when the block ends, and undone when it raises.

        Raises:
            StorageFull: the disk is full; nothing was changed.
            DatabaseBusy: another process, or another thread of this one, keeps it locked for ``PATIENCE`` seconds.
            LibraryGone: the database at this path is not the one that was opened, so nothing written would be found.
            DatabaseFailed, DatabaseDamaged: see ``translated``.
        """
        deadline = time.monotonic() + PATIENCE
        if not self._lock.acquire(timeout=PATIENCE):
            raise DatabaseBusy(f"{NAME} is busy with other changes; nothing was changed, try again")
        try:
            self._guard()
            with translated(NAME, ADVICE):
                try:
                    self._begin(deadline)
                    yield self._writer
                    self._writer.execute("COMMIT")
                except BaseException:
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                    for action in reversed(self._undone):
                        action()
                    raise
            self._guard()
        finally:
            self._undone.clear()
            self._lock.release()

    def if_undone(self, action: Callable[[], None]) -> None:
        """Register, within a transaction, what to do once it is undone, for what a rollback does not reach. The last
        action is called first, while no other transaction can begin; none may raise."""
        self._undone.append(action)

    def add_user(self, db: Connection, user: str, now: float) -> None:
        """Ensure, within a transaction, that a user has a row."""
        db.execute("INSERT OR IGNORE INTO users (id, created_at) VALUES (?, ?)", (user, now))

    def add_tombstones(self, db: Connection, paths: Iterable[str], now: float) -> None:
        """Remember, within the transaction that deletes the rows of these files, that they were deleted."""
        db.executemany("INSERT OR REPLACE INTO deleted VALUES (?, ?)", [(path, now) for path in paths])

    def tombstones(self, paths: Iterable[str]) -> set[str]:
        """Return the paths that have a tombstone."""
        sql = "SELECT path FROM deleted WHERE path IN (SELECT value FROM json_each(?))"
        return {row["path"] for row in self.read(sql, json.dumps(list(paths)))}

    def drop_tombstones(self, before: float) -> None:
        """Drop the tombstones of files that were deleted before this time, unless a file could not be removed, or
        cannot be looked at, or a remote store has yet to be told."""
        rows = self.read("SELECT path FROM deleted WHERE at < ? AND path NOT LIKE ?", before, f"{OWED}%")
        gone = [(row["path"],) for row in rows if self._is_gone(row["path"])]
        if gone:
            with self.write() as db:
                db.executemany("DELETE FROM deleted WHERE path = ?", gone)

    def _is_gone(self, path: str) -> bool:
        """Return whether there is certainly no such file in the library."""
        try:
            return status_of(self.path.parent / path) is None
        except OSError:
            return False

    def identify(self, library: str) -> None:
        """Write the id of the library into a catalogue that has none.

        Raises:
            IntegrityError: it is the catalogue of another library.
        """
        row = self.one("SELECT id FROM library")
        if row is None:
            with self.write() as db:
                db.execute("INSERT INTO library VALUES (?)", (library,))
        elif row["id"] != library:
            raise IntegrityError(f"{self.path} is the catalogue of the library {row['id']}, not of {library}")

    def check_paths(self) -> None:
        """Check that every row has the path that its owner and its id imply: files are read and deleted by these paths,
        and the catalogue may come from a stranger's backup.

        Raises:
            IntegrityError: there are rows that no library writes.
        """
        wrong = [
            row["path"]
            for table, columns in NAMED_BY.items()
            for row in self.read(f"SELECT {columns}, path FROM {table}")
            if path_of_row(table, row) != row["path"]
        ]
        names = [row["id"] for row in self.read("SELECT id FROM caches")]
        wrong += [name for name in names if not CACHE_SIDECAR.fullmatch(f"{name}{SIDECAR}")]
        if wrong:
            raise IntegrityError(
                f"{len(wrong)} rows of the catalogue are not as a library writes them, such as {repr(wrong[0])[:200]}: "
                "`mpic library recover --force` makes a new one from the files"
            )

    def check(self) -> None:
        """Verify the database itself. Raise IntegrityError: it is damaged."""
        for pragma in ("integrity_check", "foreign_key_check"):
            rows = [tuple(row) for row in self.read(f"PRAGMA {pragma}")]
            if rows not in ([], [("ok",)]):
                raise IntegrityError(f"the catalogue fails {pragma}: {rows[:3]}")

    def fold(self) -> None:
        """Fold the log into the database, whose own file then holds everything. SQLite does so on closing as well, but
        does not tell when it fails.

        Raises:
            DatabaseBusy: another connection reads or writes.
            StorageFull, DatabaseFailed: see ``translated``.
        """
        with self._lock, translated(NAME, ADVICE):
            self._writer.execute("PRAGMA busy_timeout = 0")
            busy, left, folded = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy or left != folded:
            raise DatabaseBusy(f"{NAME} is in use, and cannot be written to its file; try again")

    def close(self) -> None:
        """Close the database; SQLite folds the log into it. No thread may be reading."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
            self._writer.close()

    def _begin(self, deadline: float) -> None:
        """Begin a transaction, waiting for other processes until ``deadline``."""
        left = max(0, round((deadline - time.monotonic()) * 1000))
        self._writer.execute(f"PRAGMA busy_timeout = {left}")
        self._writer.execute("BEGIN IMMEDIATE")

    def _reader(self) -> Connection:
        db = self._connect()
        try:
            db.execute("PRAGMA query_only = ON")
            self._guard()
        except BaseException:
            db.close()
            raise
        return db

    def _connect(self, create: bool = False) -> Connection:
        db = self._filesystem.database(self.path, create)
        db.row_factory = Row
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        return db

    def _version(self) -> int:
        return self._writer.execute("PRAGMA user_version").fetchone()[0]

    def _migrate(self) -> None:
        done = self._version()
        if done > latest():
            raise IntegrityError(
                f"{self.path} has version {done}, this program knows {latest()}: it was written by a newer one"
            )
        if done and done not in MIGRATIONS:
            raise IntegrityError(
                f"{self.path} has version {done}, which no release of the last two writes ({min(MIGRATIONS)} is that "
                "of 0.1.0): open it once with the version that follows the one that wrote it (docs/upgrade.md)"
            )
        for number, step in MIGRATIONS.items():
            if number > done:
                with self.write() as db:
                    step(db)
                    db.execute(f"PRAGMA user_version = {number}")


def latest() -> int:
    """Return the version of the catalogues that this program writes."""
    return max(MIGRATIONS)


def to_row(record: File | Reference, root: Path) -> dict[str, Any]:
    """Return the columns of a record: the digest in place of the key, the path relative to the library's root,
    metadata as JSON."""
    values = {name: value for name, value in vars(record).items() if name != "key"}
    if values.get("split") is not None:
        values["split"] = json.dumps(values["split"], sort_keys=True)
    return values | {
        "digest": record.key.digest,
        "path": relative_path(record, root),
        "metadata": json.dumps(record.metadata, sort_keys=True),
    }


def from_row(row: CatalogRow, root: Path) -> dict[str, Any]:
    """Return the fields of the record that a row holds; the inverse of ``to_row``."""
    values = dict(row)
    values.pop("seq", None)
    values["key"] = ChunkKey(values["kind"], values.pop("digest"))
    values["path"] = root / values["path"]
    values["metadata"] = json.loads(values["metadata"])
    if values.get("split") is not None:
        values["split"] = json.loads(values["split"])
    values["pinned"] = bool(values.get("pinned", False))
    return values


def relative_path(record: File | Reference, root: Path) -> str:
    """Return the path of an original as the catalogue holds it."""
    return str(record.path.relative_to(root))


def insert_row(db: Connection, table: str, values: Mapping[str, Any]) -> None:
    """Insert one row, given by column."""
    columns, placeholders = ", ".join(values), ", ".join(f":{name}" for name in values)
    db.execute(f"INSERT INTO {table} ({columns}) VALUES ({placeholders})", dict(values))


def update_row(db: Connection, table: str, values: Mapping[str, Any]) -> None:
    """Update the row of the same ``id`` with these values, given by column."""
    changes = ", ".join(f"{column} = :{column}" for column in values)
    db.execute(f"UPDATE {table} SET {changes} WHERE id = :id", dict(values))


def page_of(table: str, order: str, where: str) -> str:
    """Return the query of a page of a listing by age, after the row with the id ``:after`` if that is not None, of at
    most ``:limit`` rows; ``order`` is ``asc`` or ``desc``."""
    beyond = ">" if order == "asc" else "<"
    return f"""
        SELECT * FROM {table} WHERE {where}
        AND (:after IS NULL OR seq {beyond} (SELECT seq FROM {table} WHERE id = :after))
        ORDER BY seq {"ASC" if order == "asc" else "DESC"} LIMIT :limit"""
