"""API keys with their users, roles and limits.

They are kept in a small SQLite file beside the catalogue, because the library's folder belongs to one process, while
keys are made and revoked (``mpic keys``) while the server runs. The server sees the change with its next request, and
also that another file has taken the place of this one (a copy of earlier keys, for example).

A key reads ``mpic_<8 characters>_<43 characters>``. The first part is public: it names the key in lists and finds its
row. The second part is 256 random bits, so a plain SHA-256 of the whole key suffices (nothing can be guessed, so a slow
hash would protect nothing); it is compared in constant time. The key itself is shown once and never stored.

Logins of the web interface are kept in the same file, so that they outlast the server: the digest of a random cookie,
and the key that it stands for. The file contains nothing that a browser could send.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mpic.database import PATIENCE, translated
from mpic.errors import BadRequest, DatabaseFailed, IntegrityError, NotFound

log = logging.getLogger(__name__)
FILE = "keys.sqlite"
VERSION = 2
LOGIN_SECONDS = 12 * 3600
"""How long a login lasts."""
MOST_LOGINS = 100
"""Logins of one key that are kept; the oldest end first."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
KEY = re.compile(r"mpic_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")
Role = Literal["user", "admin"]
ROLES: tuple[Role, ...] = ("user", "admin")


class KeyNotFound(NotFound):
    """No key has this prefix."""

    code = "key_not_found"


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key. None means no limit. A request for several answers (``n``) counts once.

    Args:
        requests_per_minute: requests of any kind, refilled evenly; those of a whole minute may come at once.
        concurrent: requests under way at the same time, including running streams.
        bytes: originals of the user's uploads and caches, together.
        files: uploads and caches of the user, together.
    """

    requests_per_minute: int | None = None
    concurrent: int | None = None
    bytes: int | None = None
    files: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise BadRequest(f"{field.name} must be at least 1, not {value}", param=field.name)


@dataclass(frozen=True)
class Key:
    """A key as lists show it, without the secret. Times are seconds since the epoch."""

    prefix: str
    user: str
    role: Role
    limits: KeyLimits
    created_at: float
    revoked_at: float | None


class KeyStore:
    """The keys below one folder. Thread-safe; several processes may have it open.

    Every method may raise the errors of ``translated``: DatabaseBusy, DatabaseFailed, DatabaseDamaged, StorageFull.
    When another file has the store's name, it is opened instead; when there is none, every method but ``exist`` raises
    DatabaseFailed.

    Args:
        folder: the library's folder.
        clock: function that returns seconds since the epoch.
        patience: seconds to wait for a process that has the file locked; short in a server, which asks on its event
            loop.

    Raises:
        IntegrityError: the file was written by a newer version of this program.
    """

    def __init__(
        self, folder: Path, clock: Callable[[], float] = time.time, patience: float = PATIENCE
    ) -> None:
        self.path = folder / FILE
        self._clock, self._patience = clock, patience
        self._opened: tuple[int, int] | None = None  # the file that the connections are of
        self._missing = False  # the log says that there is none
        self._any = False  # a key was ever seen
        # Every request reads, and must not wait for those who write, as these wait for the disk.
        self._reading, self._writing = threading.Lock(), threading.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._translated():
            self._connect("rwc", PATIENCE).close()  # makes the file if there is none
            self._open(PATIENCE)
        self._opened = self._identity()

    def create(self, user: str, role: Role = "user", limits: KeyLimits | None = None) -> tuple[str, Key]:
        """Makes a key for a user and returns it; the key itself cannot be retrieved again.

        Raises:
            BadRequest: the user name or the role is not valid.
        """
        limits = limits or KeyLimits()
        if not NAME.fullmatch(user):
            raise BadRequest(
                f"a user is 1 to 64 of A-Z a-z 0-9 _ . -, beginning with a letter or digit, not {user[:80]!r}",
                param="user",
            )
        if role not in ROLES:
            raise BadRequest(f"a role is {' or '.join(ROLES)}, not {role!r}", param="role")
        prefix = secrets.token_hex(4)
        secret = f"mpic_{prefix}_{secrets.token_urlsafe(32)}"
        row = (prefix, _hash(secret), user, role, self._clock(), None)
        row += (limits.requests_per_minute, limits.concurrent, limits.bytes, limits.files)
        with self._using(self._writing):
            self._writer.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        return secret, self.get(prefix)

    def find(self, secret: str) -> Key | None:
        """Returns the key with this text, or None if there is none or it was revoked."""
        match = KEY.fullmatch(secret)
        row = self._one("SELECT * FROM keys WHERE prefix = ?", match[1]) if match else None
        known = row["hash"] if row else b"\0" * 32
        if not hmac.compare_digest(_hash(secret), known) or row is None or row["revoked_at"] is not None:
            return None
        return _key(row)

    def get(self, prefix: str) -> Key:
        """Returns the key of this prefix, revoked or not. Raises KeyNotFound."""
        row = self._one("SELECT * FROM keys WHERE prefix = ?", prefix)
        if row is None:
            raise KeyNotFound(f"no key {prefix!r}; mpic keys list shows them", prefix=prefix)
        return _key(row)

    def listing(self) -> list[Key]:
        """Lists all keys, oldest first, including revoked ones."""
        with self._using(self._reading):
            rows = self._reader.execute("SELECT * FROM keys ORDER BY created_at, prefix")
            return [_key(row) for row in rows]

    def revoke(self, prefix: str) -> Key:
        """Revokes a key, at once and for good. Raises KeyNotFound."""
        prefix = match[1] if (match := KEY.fullmatch(prefix)) else prefix.removeprefix("mpic_")
        self.get(prefix)
        with self._using(self._writing):
            self._writer.execute(
                "UPDATE keys SET revoked_at = COALESCE(revoked_at, ?) WHERE prefix = ?",
                (self._clock(), prefix),
            )
        return self.get(prefix)

    def exist(self) -> bool:
        """Returns whether a key was ever made here. Revoked keys count, because revoking the last key must not open the
        server. So do keys that this store has seen in a file that was removed or replaced since."""
        if not self._any:
            found = self._identity()
            if found is not None or self._opened is None:  # a removed file is asked as long as it is open
                self._follow(found)
            with self._reading, self._translated():
                self._any = self._reader.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is not None
        return self._any

    def log_in(self, key: Key) -> str:
        """Returns a new cookie that stands for a key, for ``LOGIN_SECONDS`` or until the key is revoked."""
        cookie, now = secrets.token_urlsafe(32), self._clock()
        with self._using(self._writing):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                self._writer.execute("DELETE FROM logins WHERE until <= ?", (now,))
                self._writer.execute(
                    "DELETE FROM logins WHERE rowid IN "
                    "(SELECT rowid FROM logins WHERE key = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                    (key.prefix, MOST_LOGINS - 1),
                )
                self._writer.execute(
                    "INSERT INTO logins VALUES (?, ?, ?)", (_hash(cookie), key.prefix, now + LOGIN_SECONDS)
                )
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # SQLite ends it itself when the disk is full
                    self._writer.execute("ROLLBACK")
                raise
        return cookie

    def logged_in(self, cookie: str) -> Key | None:
        """Returns the key that a cookie stands for, or None if the login has ended."""
        row = self._one(
            "SELECT keys.* FROM logins JOIN keys ON keys.prefix = logins.key "
            "WHERE logins.hash = ? AND until > ? AND revoked_at IS NULL",
            *(_hash(cookie), self._clock()),
        )
        return row and _key(row)

    def log_out(self, cookie: str) -> None:
        """Ends a login, if there is one."""
        with self._using(self._writing):
            self._writer.execute("DELETE FROM logins WHERE hash = ?", (_hash(cookie),))

    def close(self) -> None:
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()

    def _connect(self, mode: Literal["rw", "rwc"], timeout: float) -> sqlite3.Connection:
        """Opens the file; ``rwc`` makes it if there is none."""
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=timeout)

    def _open(self, timeout: float) -> None:
        """Opens the connections, waiting ``timeout`` seconds at most for a process that has the file locked."""
        self._writer, self._reader = self._connect("rw", timeout), self._connect("rw", timeout)
        try:
            self.path.chmod(0o600)
        except OSError as error:
            raise DatabaseFailed(f"{FILE} cannot be hidden from others ({error.strerror})") from error
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.execute("PRAGMA synchronous = FULL")
        self._migrate()
        self._reader.row_factory = sqlite3.Row
        for db in (self._writer, self._reader):
            db.execute(f"PRAGMA busy_timeout = {round(self._patience * 1000)}")

    def _identity(self) -> tuple[int, int] | None:
        """Returns what tells the file that has the store's name from others; None if there is none. An empty one is
        none: it is being copied."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return (status.st_dev, status.st_ino) if status.st_size else None

    def _follow(self, found: tuple[int, int] | None) -> None:
        """Opens the file that has the store's name if it is not the one that is open.

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
        if found == self._opened:
            return
        with self._writing, self._reading, self._translated():
            if found == self._opened:  # another thread was here
                return
            if self._opened is not None:
                self._empty_log()
                self._opened = None
            self._reader.close()
            self._writer.close()
            self._open(self._patience)
            self._opened = found  # as it was before opening: a file that came in between is noticed next time
            log.warning("%s was replaced: the keys in it count from now on", self.path)

    def _empty_log(self) -> None:
        """Moves what is in the log of a replaced file into that file: SQLite would read it into the new one.

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

    @contextmanager
    def _using(self, lock: threading.Lock) -> Iterator[None]:
        """Holds a lock, with the file open that has the store's name, and translates the errors inside the block."""
        self._follow(self._identity())
        with lock, self._translated():
            yield

    def _one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        with self._using(self._reading), closing(self._reader.execute(sql, values)) as cursor:
            return cursor.fetchone()

    def _translated(self) -> AbstractContextManager[None]:
        advice = f"move {FILE}, {FILE}-wal and {FILE}-shm away first, then put a copy of {FILE} there or make new keys"
        return translated("the key store", advice)

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
            self._writer.execute(f"PRAGMA user_version = {VERSION}")
        self._writer.execute("COMMIT")


def any_keys(folder: Path) -> bool:
    """Returns whether a key was ever made for this folder. Unlike a ``KeyStore``, it creates neither the folder nor a
    file."""
    if not (folder / FILE).is_file():
        return False
    with closing(KeyStore(folder)) as keys:
        return keys.exist()


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _key(row: sqlite3.Row) -> Key:
    limits = KeyLimits(**{field.name: row[field.name] for field in fields(KeyLimits)})
    return Key(row["prefix"], row["user"], row["role"], limits, row["created_at"], row["revoked_at"])
