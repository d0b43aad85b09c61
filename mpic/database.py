"""Translates SQLite's errors to those of ``mpic.errors``, for the catalogue and the key store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from mpic.errors import DatabaseBusy, DatabaseDamaged, DatabaseFailed, MPICError, StorageFull

PATIENCE = 10.0
"""Seconds to wait for a database that another process has locked. Every waiting request holds a thread, so this is
shorter than the half minute for which some tools hold a lock; the client gets an error and tries again."""

BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
FAILED = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_NOMEM,
    }
)


@contextmanager
def translated(name: str, advice: str = "") -> Iterator[None]:
    """Translate SQLite's errors about the disk and about other processes inside the block to those of ``mpic.errors``.
    An error that only a mistake in a statement can cause (a constraint, for example) stays as it is.

    Args:
        name: the database's name in messages, such as "the catalogue".
        advice: a sentence about what an operator can do about a damaged database.

    Raises:
        DatabaseBusy: another process keeps it locked.
        StorageFull: the disk is full.
        DatabaseDamaged: the file is no longer a valid database.
        DatabaseFailed: it cannot be read or written for another reason.
    """
    try:
        yield
    except sqlite3.Error as error:
        ours = translation(error, name, advice)
        if ours is None:
            raise
        raise ours from error


def translation(error: sqlite3.Error, name: str, advice: str = "") -> MPICError | None:
    """Return the error of ``mpic.errors`` for one of SQLite's, or None; see ``translated``."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # Python's module itself raises it: a closed connection, a wrong number of values
        return None
    primary = code & 0xFF
    if primary in BUSY:
        return DatabaseBusy(f"{name} is locked by another process; nothing was changed, try again")
    if primary == sqlite3.SQLITE_FULL:
        return StorageFull(f"the disk that holds {name} is full")
    if primary in DAMAGED:
        return DatabaseDamaged(f"{name} is damaged ({error}){advice and f'; {advice}'}")
    if primary in FAILED:
        return DatabaseFailed(f"{name} cannot be used ({error})")
    return None
