"""The SQLite file of the API keys, which is opened again when another file takes its place.

Keys are made and revoked while a server runs, and an administrator may put a copy of earlier keys back: what the file
that has the name says counts, never what a removed one said.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

from mpic.database import PATIENCE, translated
from mpic.errors import DatabaseDamaged, DatabaseFailed, IntegrityError

log = logging.getLogger(__name__)
FILE = "keys.sqlite"
VERSION = 3
ADVICE = (
    f"move {FILE}, {FILE}-wal and {FILE}-shm away first, then put a copy of {FILE} there or make new keys"
)


class KeyFile:
    """Two connections to the file below one folder, which is made if there is none. Thread-safe.

    Every method may raise the errors of ``translated``: DatabaseBusy, DatabaseFailed, DatabaseDamaged, StorageFull.

    Args:
        folder: the library's folder.
        patience: seconds to wait for a process that has the file locked.

    Raises:
        IntegrityError: the file was written by a newer version of this program.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self.path = folder / FILE
        self._patience = patience
        self.opened: tuple[int, int] | None = None  # which file the connections are of
        self._missing = False  # the log says that there is none
        # Every request reads, and must not wait for those who write, as these wait for the disk.
        self._reading, self._writing = threading.Lock(), threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise DatabaseFailed(
                f"the folder {folder} cannot be made or opened ({error.strerror})"
            ) from error
        with self._translated():
            self._connect("rwc", PATIENCE).close()  # makes the file if there is none
            self._open(PATIENCE)
        self.opened = self._identity()

    @contextmanager
    def reading(self, removed: bool = False) -> Iterator[sqlite3.Connection]:
        """Yield the connection for reading, to the file that has the name.

        Args:
            removed: if there is none, yield that to the file that was open.

        Raises:
            DatabaseFailed: there is none.
        """
        found = self._identity()
        if not (removed and found is None and self.opened is not None):
            self._follow(found)
        with self._reading, self._translated():
            yield self._reader

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for writing, to the file that has the name. Raise DatabaseFailed: there is none."""
        self._follow(self._identity())
        with self._writing, self._translated():
            yield self._writer

    def close(self) -> None:
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()

    def _connect(self, mode: Literal["rw", "rwc"], timeout: float) -> sqlite3.Connection:
        """Open the file; ``rwc`` makes it if there is none."""
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=timeout)

    def _open(self, timeout: float) -> None:
        """Open the connections, waiting ``timeout`` seconds at most for a process that has the file locked."""
        self._writer, self._reader = self._connect("rw", timeout), self._connect("rw", timeout)
        try:
            self.path.chmod(0o600)
        except OSError as error:
            raise DatabaseFailed(f"{FILE} cannot be hidden from others ({error.strerror})") from error
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA synchronous = FULL")
        try:
            self._migrate()
        except sqlite3.OperationalError as error:
            self.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            raise DatabaseDamaged(f"{FILE} is not a key store of this program ({error}); {ADVICE}") from error
        self._reader.row_factory = sqlite3.Row
        for db in (self._writer, self._reader):
            db.execute(f"PRAGMA busy_timeout = {round(self._patience * 1000)}")

    def _identity(self) -> tuple[int, int] | None:
        """Return what tells the file that has the store's name from others; None if there is none. An empty one is
        none: it is being copied."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return (status.st_dev, status.st_ino) if status.st_size else None

    def _follow(self, found: tuple[int, int] | None) -> None:
        """Open the file that has the store's name if it is not the one that is open.

        Args:
            found: its identity.

        Raises:
            DatabaseFailed: there is none, or it cannot be opened. The file that was open does not count any more.
        """
        if found is None:
            if not self._missing:
                log.error("%s was removed: every key is refused until it is back", self.path)
            self._missing = True
            raise DatabaseFailed(
                f"{FILE} was removed while it was in use: every key is refused until it is back"
            )
        self._missing = False
        if found == self.opened:
            return
        with self._writing, self._reading, self._translated():
            if found == self.opened:  # another thread was here
                return
            if self.opened is not None:
                self._empty_log()
                self.opened = None
            self._reader.close()
            self._writer.close()
            self._open(self._patience)
            self.opened = found  # as it was before opening: a file that came in between is noticed next time
            log.warning("%s was replaced: the keys in it count from now on", self.path)

    def _empty_log(self) -> None:
        """Move what is in the log of a replaced file into that file: SQLite would read it into the new one.

        Raises:
            DatabaseFailed: it cannot be moved, and the log is where that of the new file would be.
        """
        try:
            left = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        except sqlite3.Error:
            left = True
        path = self.path.with_name(f"{FILE}-wal")
        if left and path.is_file() and path.stat().st_size:
            raise DatabaseFailed(
                f"{FILE} was replaced beside the old log: move {FILE}-wal and {FILE}-shm away"
            )

    def _translated(self) -> AbstractContextManager[None]:
        return translated("the key store", ADVICE)

    def _migrate(self) -> None:
        self._writer.execute("BEGIN IMMEDIATE")
        [version] = self._writer.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            self._writer.execute("ROLLBACK")
            raise IntegrityError(f"{self.path} has version {version}, this program knows {VERSION}")
        if version == 0:
            self._writer.execute("""
                CREATE TABLE keys (
                    prefix TEXT PRIMARY KEY,
                    hash BLOB NOT NULL,          -- SHA-256 of the whole key
                    user TEXT NOT NULL,
                    role TEXT NOT NULL CHECK (role IN ('user', 'admin')),
                    created_at REAL NOT NULL,
                    revoked_at REAL,
                    requests_per_minute INTEGER,
                    concurrent INTEGER,
                    bytes INTEGER,
                    files INTEGER
                )""")
        if version < 2:
            self._writer.execute("""
                CREATE TABLE logins (
                    hash BLOB PRIMARY KEY,       -- SHA-256 of the cookie
                    key TEXT NOT NULL REFERENCES keys (prefix),
                    until REAL NOT NULL
                )""")
        if version < 3:  # the check of a column cannot be changed, so the column is made anew
            self._writer.execute("ALTER TABLE keys RENAME COLUMN role TO first_role")
            self._writer.execute(
                "ALTER TABLE keys ADD COLUMN role TEXT NOT NULL DEFAULT 'user' "
                "CHECK (role IN ('user', 'admin', 'metrics'))"
            )
            self._writer.execute("UPDATE keys SET role = first_role")
            self._writer.execute("ALTER TABLE keys DROP COLUMN first_role")
            self._writer.execute(f"PRAGMA user_version = {VERSION}")
        self._writer.execute("COMMIT")
        columns = (
            "prefix, hash, user, role, created_at, revoked_at, requests_per_minute, concurrent, bytes, files"
        )
        self._writer.execute(f"SELECT {columns} FROM keys LIMIT 0")
        self._writer.execute("SELECT hash, key, until FROM logins LIMIT 0")
