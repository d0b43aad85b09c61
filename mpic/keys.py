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
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mpic.database import PATIENCE
from mpic.durable import FileSystem
from mpic.errors import BadRequest, DatabaseDamaged, DatabaseFailed, NotFound, Unavailable, cut
from mpic.file_status import is_file
from mpic.key_file import ADVICE, FILE, KeyFile

LOGIN_SECONDS = 12 * 3600
"""Lifetime of a login."""
MOST_LOGINS = 100
"""Logins of one key that are kept; the oldest end first."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
KEY = re.compile(r"mpic_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")
NEEDED = "keys.needed"
"""File beside the keys that records that there were some: a server that loses its keys must not become open."""
Role = Literal["user", "admin", "metrics"]
ROLES: tuple[Role, ...] = ("user", "admin", "metrics")


class KeyNotFound(NotFound):
    """No key has this prefix."""

    code = "key_not_found"


class KeysLost(Unavailable):
    """The folder has had keys, and has none now."""

    code = "keys_lost"


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key. None means no limit.

    Args:
        requests_per_minute: requests of any kind, refilled evenly; those of a whole minute may come at once. One for
            several answers (``n``) counts once.
        concurrent: requests under way at the same time, including running streams. One for ``n`` answers counts ``n``.
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
        self._file = KeyFile(folder, patience)
        self.path = self._file.path
        self._clock = clock
        self._any = False  # a key was ever seen

    def create(self, user: str, role: Role = "user", limits: KeyLimits | None = None) -> tuple[str, Key]:
        """Make a key for a user and return it; the key itself cannot be retrieved again.

        Raises:
            BadRequest: the user name or the role is not valid.
        """
        limits = limits or KeyLimits()
        if not NAME.fullmatch(user):
            raise BadRequest(
                f"a user is 1 to 64 of A-Z a-z 0-9 _ . -, beginning with a letter or digit, not {cut(user)!r}",
                param="user",
            )
        if role not in ROLES:
            raise BadRequest(f"a role is {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {role!r}", param="role")
        prefix = secrets.token_hex(4)
        secret = f"mpic_{prefix}_{secrets.token_urlsafe(32)}"
        row = (prefix, _hash(secret), user, role, self._clock(), None)
        row += (limits.requests_per_minute, limits.concurrent, limits.bytes, limits.files)
        with self._file.writing() as db:
            columns = "prefix, hash, user, role, created_at, revoked_at, requests_per_minute, concurrent, bytes, files"
            db.execute(f"INSERT INTO keys ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        mark_keys(self.path.parent)
        return secret, self.get(prefix)

    def find(self, secret: str) -> Key | None:
        """Return the key with this text, or None if there is none or it was revoked."""
        match = KEY.fullmatch(secret)
        row = self._one("SELECT * FROM keys WHERE prefix = ?", match[1]) if match else None
        known = row["hash"] if row else b"\0" * 32
        if not hmac.compare_digest(_hash(secret), known) or row is None or row["revoked_at"] is not None:
            return None
        return _key(row)

    def get(self, prefix: str) -> Key:
        """Return the key of this prefix, revoked or not. Raise KeyNotFound."""
        row = self._one("SELECT * FROM keys WHERE prefix = ?", prefix)
        if row is None:
            raise KeyNotFound(f"no key {cut(prefix)!r}; mpic keys list shows them", prefix=prefix)
        return _key(row)

    def listing(self) -> list[Key]:
        """List all keys, oldest first, including revoked ones."""
        with self._file.reading() as db:
            rows = db.execute("SELECT * FROM keys ORDER BY created_at, prefix")
            return [_key(row) for row in rows]

    def revoke(self, prefix: str) -> Key:
        """Revoke a key, at once and for good. Raise KeyNotFound."""
        prefix = match[1] if (match := KEY.fullmatch(prefix)) else prefix.removeprefix("mpic_")
        self.get(prefix)
        with self._file.writing() as db:
            db.execute(
                "UPDATE keys SET revoked_at = COALESCE(revoked_at, ?) WHERE prefix = ?",
                (self._clock(), prefix),
            )
        return self.get(prefix)

    def exist(self) -> bool:
        """Return whether a key was ever made here. Revoked keys count, because revoking the last key must not open the
        server. So do those of a file that was lost, emptied or replaced since: ``NEEDED`` remembers them."""
        if not self._any:
            self._any = _has_mark(self.path.parent)
        if not self._any:
            with self._file.reading(removed=True) as db:
                self._any = db.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is not None
            if self._any:  # made by an earlier version, which left no mark
                mark_keys(self.path.parent)
        return self._any

    def version(self) -> tuple[object, ...]:
        """Return a value that changes whenever another connection or process has changed the keys."""
        with self._file.reading() as db:
            return self._file.opened, db.execute("PRAGMA data_version").fetchone()[0]

    def log_in(self, key: Key) -> str:
        """Return a new cookie that stands for a key, for ``LOGIN_SECONDS`` or until the key is revoked."""
        cookie, now = secrets.token_urlsafe(32), self._clock()
        with self._file.writing() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                db.execute("DELETE FROM logins WHERE until <= ?", (now,))
                db.execute(
                    "DELETE FROM logins WHERE rowid IN "
                    "(SELECT rowid FROM logins WHERE key = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                    (key.prefix, MOST_LOGINS - 1),
                )
                db.execute(
                    "INSERT INTO logins VALUES (?, ?, ?)", (_hash(cookie), key.prefix, now + LOGIN_SECONDS)
                )
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # SQLite ends it itself when the disk is full
                    db.execute("ROLLBACK")
                raise
        return cookie

    def logged_in(self, cookie: str) -> Key | None:
        """Return the key that a cookie stands for, or None if the login has ended."""
        row = self._one(
            "SELECT keys.* FROM logins JOIN keys ON keys.prefix = logins.key "
            "WHERE logins.hash = ? AND until > ? AND revoked_at IS NULL",
            *(_hash(cookie), self._clock()),
        )
        return None if row is None else _key(row)

    def log_out(self, cookie: str) -> None:
        """End a login, if there is one."""
        with self._file.writing() as db:
            db.execute("DELETE FROM logins WHERE hash = ?", (_hash(cookie),))

    def close(self) -> None:
        self._file.close()

    def _one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        with self._file.reading() as db, closing(db.execute(sql, values)) as cursor:
            return cursor.fetchone()


def any_keys(folder: Path) -> bool:
    """Return whether a key was ever made for this folder. Unlike a ``KeyStore``, it creates neither the folder nor the
    file of the keys. Raise the errors of a ``KeyStore``."""
    if not _is_there(folder / FILE):
        return _has_mark(folder)
    with closing(KeyStore(folder)) as keys:
        return keys.exist()


def check_not_lost(folder: Path) -> None:
    """Raise KeysLost if the folder has had keys and has none now, and the errors of a ``KeyStore``."""
    if not any_keys(folder):
        return
    there = _is_there(folder / FILE)
    if there:
        with closing(KeyStore(folder)) as keys:
            if keys.listing():
                return
    raise KeysLost(
        f"{folder} has had API keys, but {f'{FILE} holds none' if there else f'{FILE} is missing'}: put a copy of it "
        f"back, or make a key with `mpic keys create NAME --role admin`. To serve this machine without keys again, "
        f"remove {NEEDED} from the folder."
    )


def mark_keys(folder: Path) -> None:
    """Mark a folder as one that has keys, durably. Raise DatabaseFailed if that cannot be written."""
    filesystem = FileSystem()
    try:
        with suppress(FileExistsError):
            os.close(filesystem.create(folder / NEEDED))
            filesystem.sync_folder(folder)
    except OSError as error:
        raise DatabaseFailed(f"{folder / NEEDED} cannot be written ({error.strerror})") from error


def _has_mark(folder: Path) -> bool:
    """Return whether the folder has ``NEEDED``. Whatever has that name counts: a link to nothing, say."""
    try:
        os.lstat(folder / NEEDED)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DatabaseFailed(f"{folder / NEEDED} cannot be looked at ({error.strerror})") from error
    return True


def _is_there(path: Path) -> bool:
    """Return whether there is a file. Raise DatabaseFailed: it is something else, or cannot be looked at."""
    try:
        if is_file(path):
            return True
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DatabaseFailed(f"{path} cannot be looked at ({error.strerror})") from error
    raise DatabaseFailed(f"{path} is not a file; {ADVICE}")


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _key(row: sqlite3.Row) -> Key:
    """Return the key of a row. Raise DatabaseDamaged: it is not one that this program writes."""
    try:
        limits = KeyLimits(**{field.name: row[field.name] for field in fields(KeyLimits)})
        known = NAME.fullmatch(row["user"]) and row["role"] in ROLES and row["created_at"] >= 0
    except (TypeError, BadRequest):
        known = None
    if not known:
        raise DatabaseDamaged(
            f"the key {cut(row['prefix'])!r} in {FILE} is not one that this program writes; {ADVICE}"
        )
    return Key(row["prefix"], row["user"], row["role"], limits, row["created_at"], row["revoked_at"])
