"""The catalogue: one SQLite database (WAL, ``synchronous=FULL``) that says what the library holds.

One writer at a time behind a lock; readers have connections of their own. A file is durable before its row is
committed, so a row always speaks the truth. The rows that are deleted leave the paths of their files in the table
``deleted``, in the same transaction: a file without a row that is listed there was left by a crash in the middle of a
deletion and may be removed, any other may be the only copy of what somebody uploaded.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpic.database import PATIENCE, translated
from mpic.durable import Files
from mpic.errors import DatabaseBusy, IntegrityError, Unavailable
from mpic.library.migrations import MIGRATIONS

IDLE_READERS = 8
"""Connections kept for the next reader; a burst of readers must not hold files for ever."""

NAME = "the catalogue"
ADVICE = "stop the server and run `mpic library recover`"


class Catalog:
    """Connections to the database; the SQL about its rows stands in rows.py.

    Args:
        look: only look, beside a process that has the library open: nothing is migrated or written.
        guard: called before and after every transaction, and whenever a connection is made; it raises when the database
            at ``path`` is not the one that was opened.

    Raises:
        IntegrityError: the database was written by a newer version of this program.
        Unavailable: only to look, and the database is not there or was written by an older version.
        DatabaseDamaged, DatabaseBusy, DatabaseFailed: it cannot be used.
    """

    def __init__(
        self,
        path: Path,
        files: Files | None = None,
        look: bool = False,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.look = look
        self._files = files or Files()
        self._guard = guard
        if look and not path.is_file():
            raise Unavailable(f"there is no library in {path.parent}")
        self._lock = threading.RLock()
        self._idle: list[sqlite3.Connection] = []  # readers nobody uses just now
        with translated(NAME, ADVICE):
            self._writer = self._connect(create=not look)
            if look:
                self._writer.execute("PRAGMA query_only = ON")
                if self._version() < len(MIGRATIONS):
                    raise Unavailable(
                        f"{path} was written by an older program: start the server once, it migrates"
                    )
            else:
                self._writer.execute("PRAGMA journal_mode = WAL")
        self._migrate()

    def read(self, sql: str, *values: Any, **named: Any) -> list[sqlite3.Row]:
        """Rows of a query (placeholders positional or named), as last committed. Never waits for the writer.

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

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """The first row of a query, or None."""
        rows = self.read(sql, *values)
        return rows[0] if rows else None

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction of the one writer: committed and durable when the block ends, undone when it raises.

        Raises:
            StorageFull: the disk is full; nothing was changed.
            DatabaseBusy: another process, or another thread of this one, keeps it locked for ``PATIENCE`` seconds.
            LibraryGone: the database at this path is not the one that was opened; nobody will find what was written.
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
                    raise
            self._guard()
        finally:
            self._lock.release()

    def add_user(self, db: sqlite3.Connection, user: str, now: float) -> None:
        """Make sure a user's row exists, within a transaction."""
        db.execute("INSERT OR IGNORE INTO users (id, created_at) VALUES (?, ?)", (user, now))

    def bury(self, db: sqlite3.Connection, paths: Iterable[str], now: float) -> None:
        """Within a transaction: remember that the rows of these files were deleted, until ``forget_deleted``."""
        db.executemany("INSERT OR REPLACE INTO deleted VALUES (?, ?)", [(path, now) for path in paths])

    def deleted(self, paths: Iterable[str]) -> set[str]:
        """Those of the paths whose rows were deleted."""
        sql = "SELECT path FROM deleted WHERE path IN (SELECT value FROM json_each(?))"
        return {row["path"] for row in self.read(sql, json.dumps(list(paths)))}

    def forget_deleted(self, before: float) -> None:
        """Forget the files that were deleted before this time, except those that could not be removed."""
        rows = self.read("SELECT path FROM deleted WHERE at < ?", before)
        gone = [(row["path"],) for row in rows if not (self.path.parent / row["path"]).exists()]
        if gone:
            with self.write() as db:
                db.executemany("DELETE FROM deleted WHERE path = ?", gone)

    def identify(self, library: str) -> None:
        """Note which library this is the catalogue of, if it does not say so yet.

        Raises:
            IntegrityError: it says that it is another's.
        """
        row = self.one("SELECT id FROM library")
        if row is None:
            with self.write() as db:
                db.execute("INSERT INTO library VALUES (?)", (library,))
        elif row["id"] != library:
            raise IntegrityError(f"{self.path} is the catalogue of the library {row['id']}, not of {library}")

    def check(self) -> None:
        """Verify the database itself. Raises IntegrityError."""
        for pragma in ("integrity_check", "foreign_key_check"):
            rows = [tuple(row) for row in self.read(f"PRAGMA {pragma}")]
            if rows not in ([], [("ok",)]):
                raise IntegrityError(f"the catalogue fails {pragma}: {rows[:3]}")

    def close(self) -> None:
        """Fold the log into the database and close. No thread may be reading."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
            self._writer.close()

    def _begin(self, deadline: float) -> None:
        """Begin a transaction, waiting for other processes until ``deadline``."""
        left = max(0, round((deadline - time.monotonic()) * 1000))
        self._writer.execute(f"PRAGMA busy_timeout = {left}")
        self._writer.execute("BEGIN IMMEDIATE")

    def _reader(self) -> sqlite3.Connection:
        db = self._connect()
        try:
            db.execute("PRAGMA query_only = ON")
            self._guard()
        except BaseException:
            db.close()
            raise
        return db

    def _connect(self, create: bool = False) -> sqlite3.Connection:
        db = self._files.database(self.path, create)
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        return db

    def _version(self) -> int:
        return self._writer.execute("PRAGMA user_version").fetchone()[0]

    def _migrate(self) -> None:
        done = self._version()
        if done > len(MIGRATIONS):
            raise IntegrityError(
                f"{self.path} has version {done}, this program knows {len(MIGRATIONS)}: it was written by a newer one"
            )
        for number, step in enumerate(MIGRATIONS[done:], start=done + 1):
            with self.write() as db:
                step(db)
                db.execute(f"PRAGMA user_version = {number}")
