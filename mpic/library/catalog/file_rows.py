"""Rows of the catalogue about uploaded files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from sqlite3 import Connection, Row
from typing import Any, Literal, NamedTuple

from mpic.errors import HandleTaken
from mpic.handles import canonical
from mpic.keys import KeyLimits
from mpic.kv.chunk import ChunkKey
from mpic.library.catalog.database import Catalog, from_row, insert_row, page_of, relative_path, to_row
from mpic.library.catalog.quotas import NO_KEY, check_originals
from mpic.library.folder.sidecars import Sidecars
from mpic.library.limits import Limits
from mpic.library.records import File, State

ALIVE = "owner = :owner AND (expires_at IS NULL OR expires_at > :now)"
"""The condition that every lookup of a user carries: the row is the user's own and has not expired."""


class DocumentPiece(NamedTuple):
    """Characters ``[start, end)`` of a document, the digest of this text (``ChunkKey.digest``), and the page that it is
    on, if there are pages."""

    start: int
    end: int
    digest: str
    page: int | None = None


def handle_taken(handle: str) -> HandleTaken:
    return HandleTaken(f"you already have a file with the handle {handle!r}", param="handle", handle=handle)


class FileRows:
    """Uploaded files. Methods that take a user see only that user's files, and none that has expired."""

    def __init__(
        self, catalog: Catalog, root: Path, limits: Limits, clock: Callable[[], float], sidecars: Sidecars
    ) -> None:
        self._catalog = catalog
        self._sidecars = sidecars
        self._root = root
        self._limits = limits
        self._clock = clock

    def by_id(self, user: str, file_id: str) -> File | None:
        return self._first(user, "id = :id", id=file_id)

    def missing(self, user: str, ids: Iterable[str]) -> list[str]:
        """Return those of some ids that no file of the user has."""
        wanted = list(ids)
        sql = f"SELECT id FROM files WHERE {ALIVE} AND id IN (SELECT value FROM json_each(:ids))"
        rows = self._catalog.read(sql, owner=user, now=self._clock(), ids=json.dumps(wanted))
        found = {row["id"] for row in rows}
        return [id for id in wanted if id not in found]

    def of_cache(self, user: str, cache: str) -> list[File]:
        """Return the chunks of a cache, in order."""
        sql = f"""
            SELECT files.* FROM files JOIN cache_chunks USING (id)
            WHERE {ALIVE} AND cache = :cache ORDER BY position"""
        return self._files(self._catalog.read(sql, owner=user, now=self._clock(), cache=cache))

    def by_handle(self, user: str, handle: str) -> File | None:
        """Return the file of this handle, ignoring case."""
        return self._first(user, "handle = :handle COLLATE NOCASE", handle=canonical(handle))

    def listing(
        self, user: str, after: str | None, limit: int, order: str, kinds: Sequence[str] | None
    ) -> list[File]:
        """Return at most ``limit`` uploads by age; ``order`` is ``asc`` or ``desc``, ``after`` an id that exists."""
        wanted = "(:kinds IS NULL OR kind IN (SELECT value FROM json_each(:kinds)))"
        where = f"{ALIVE} AND id NOT GLOB 'cache-*' AND {wanted}"  # for the index of this condition
        values = {"owner": user, "now": self._clock(), "after": after, "limit": limit}
        values["kinds"] = None if kinds is None else json.dumps(list(kinds))
        return self._files(self._catalog.read(page_of("files", order, where), **values))

    def pending(self) -> list[File]:
        """Return the files of all users that wait for compilation and have not expired, oldest first."""
        sql = "SELECT * FROM files WHERE state = 'compiling' AND (expires_at IS NULL OR expires_at > ?) ORDER BY seq"
        return self._files(self._catalog.read(sql, self._clock()))

    def expired(self) -> list[File]:
        """Return the expired files of all users."""
        return self._files(self._catalog.read("SELECT * FROM files WHERE expires_at <= ?", self._clock()))

    def paths(self) -> set[str]:
        """Return the paths of all originals, relative to the root."""
        return {row["path"] for row in self._catalog.read("SELECT path FROM files")}

    def insert(
        self, file: File, may_replace: Callable[[File], bool] = lambda old: False, key: KeyLimits = NO_KEY
    ) -> File | None:
        """Commit a new file. An expired file that still holds its handle loses it.

        Args:
            may_replace: called within the transaction with the file that has the handle; returns whether that file may
                be replaced, in which case it loses the handle and expires at once.
            key: limits of the API key that is used.

        Returns:
            The file that was replaced, to be removed.

        Raises:
            HandleTaken: another file of the user has this handle.
            StorageQuotaExceeded: a quota is used up.
        """
        with self._catalog.write() as db:
            old = self._holder(db, file)
            if old is not None:
                if not may_replace(old):
                    raise handle_taken(file.handle or "")
                sql = "UPDATE files SET handle = NULL, expires_at = ? WHERE id = ?"
                db.execute(sql, (self._clock(), old.id))
            self.insert_in(db, file, key)
            if old is not None:  # last, because a refusal above would have to undo it
                self._sidecars.rewrite(db, "file", old.id)
            return old

    def insert_in(self, db: Connection, file: File, key: KeyLimits = NO_KEY) -> None:
        """Insert a row within a transaction. Raise as ``insert``."""
        self._catalog.add_user(db, file.owner, file.created_at)
        if file.handle is not None:
            self._claim_handle(db, file.owner, file.handle, file.id)
        self.check_quota(file.owner, file.bytes, key=key, db=db)
        insert_row(db, "files", self.values(file))

    def _holder(self, db: Connection, file: File) -> File | None:
        """Return, within a transaction, the file that has the handle of a new one."""
        if file.handle is None:
            return None
        sql = f"SELECT * FROM files WHERE {ALIVE} AND handle = :handle COLLATE NOCASE"
        values = {"owner": file.owner, "handle": file.handle, "now": self._clock()}
        return next(iter(self._files(db.execute(sql, values).fetchall())), None)

    def values(self, file: File) -> dict[str, Any]:
        return to_row(file, self._root)

    def check_quota(
        self, user: str, size: int, files: int = 1, key: KeyLimits = NO_KEY, db: Connection | None = None
    ) -> None:
        """Check that the user may store this many more originals of ``size`` bytes; see ``check_originals``."""
        read = self._catalog.read if db is None else lambda sql, *values: db.execute(sql, values).fetchall()
        check_originals(read, user, files, size, self._limits, key, self._clock())

    def set_column(
        self, user: str, file_id: str, column: Literal["expires_at", "pinned", "kv_ttl"], value: float | None
    ) -> None:
        """Change a column of a file. A file that has expired stays as it is."""
        with self._catalog.write() as db:
            self._set(db, user, file_id, column, value)

    def set_handle(self, user: str, file_id: str, handle: str | None) -> None:
        """Give a file another handle, or none. A file that has expired keeps its own.

        Raises:
            HandleTaken: another file of the user has this handle.
        """
        with self._catalog.write() as db:
            if handle is not None:
                self._claim_handle(db, user, handle, file_id)
            self._set(db, user, file_id, "handle", handle)

    def _claim_handle(self, db: Connection, user: str, handle: str, file_id: str) -> None:
        """Check within a transaction that no other file has a handle; an expired one loses it."""
        where = "owner = ? AND handle = ? COLLATE NOCASE AND id != ?"
        own = (user, handle, file_id)
        db.execute(f"UPDATE files SET handle = NULL WHERE {where} AND expires_at <= ?", (*own, self._clock()))
        if db.execute(f"SELECT 1 FROM files WHERE {where}", own).fetchone():
            raise handle_taken(handle)

    def _set(self, db: Connection, user: str, file_id: str, column: str, value: Any) -> None:
        """Change a column of a file that has not expired, within a transaction."""
        sql = f"UPDATE files SET {column} = :value WHERE id = :id AND {ALIVE}"
        values = {"value": value, "id": file_id, "owner": user, "now": self._clock()}
        if db.execute(sql, values).rowcount:
            self._sidecars.rewrite(db, "file", file_id)

    def set_cut(
        self, db: Connection, file: File, split: dict[str, Any] | None, content: ChunkKey, pages: int | None
    ) -> list[ChunkKey]:
        """Set, within a transaction, what the text of a document is and how it is to be cut, and forget its pieces.

        Returns:
            The contents that the document held before and no file of the owner holds any more.
        """
        before = self.keys_of(db, file)
        text = None if split is None else json.dumps(split, sort_keys=True)
        sql = "UPDATE files SET split = ?, digest = ?, pages = ? WHERE id = ?"
        db.execute(sql, (text, content.digest, pages, file.id))
        db.execute("DELETE FROM pieces WHERE file = ?", (file.id,))
        self._sidecars.rewrite(db, "file", file.id)
        return [key for key in before if not self.has_content(db, file.owner, key)]

    def set_state(
        self, user: str, file_id: str, state: State, tokens: int | None = None, error: str | None = None
    ) -> None:
        """Record the outcome of compiling. A file that was deleted meanwhile is ignored."""
        sql = "UPDATE files SET state = ?, tokens = COALESCE(?, tokens), error = ? WHERE owner = ? AND id = ?"
        with self._catalog.write() as db:
            db.execute(sql, (state, tokens, error, user, file_id))

    def delete(self, db: Connection, file: File, expired: bool) -> bool:
        """Delete a file's row within a transaction.

        Returns:
            False if the row was deleted meanwhile or, with ``expired``, the file has not expired after all.
        """
        sql = "DELETE FROM files WHERE id = ? AND (NOT ? OR expires_at <= ?)"
        if db.execute(sql, (file.id, expired, self._clock())).rowcount == 0:
            return False
        self._catalog.add_tombstones(db, [relative_path(file, self._root)], self._clock())
        return True

    def caches_of(self, db: Connection, files: Iterable[File]) -> list[str]:
        """Return, within a transaction, the ids of the explicit caches that these files are chunks of."""
        ids = json.dumps([file.id for file in files])
        sql = "SELECT DISTINCT cache FROM cache_chunks WHERE id IN (SELECT value FROM json_each(?))"
        return [row["cache"] for row in db.execute(sql, (ids,))]

    def settle_caches(self, db: Connection, caches: Iterable[str]) -> list[Path]:
        """Finish a transaction that has deleted chunks of these caches: delete the caches that have none left, and
        rewrite the sidecars of the others.

        Returns:
            Sidecars to remove once the transaction is committed.
        """
        empty = []
        for cache in caches:
            if db.execute("SELECT 1 FROM cache_chunks WHERE cache = ?", (cache,)).fetchone():
                self._sidecars.rewrite(db, "cache", cache)
                continue
            row = db.execute("SELECT id, owner FROM caches WHERE id = ?", (cache,)).fetchone()
            empty.append(self._sidecars.path("cache", row))
            db.execute("DELETE FROM caches WHERE id = ?", (cache,))
        self._catalog.add_tombstones(db, [str(path.relative_to(self._root)) for path in empty], self._clock())
        return empty

    def has_content(self, db: Connection, owner: str, key: ChunkKey) -> bool:
        """Tell, within a transaction, whether a file of this owner holds this content."""
        sql = "SELECT 1 FROM contents WHERE owner = ? AND digest = ? AND kind = ?"
        return db.execute(sql, (owner, key.digest, key.kind)).fetchone() is not None

    def pieces(self, file_id: str) -> list[DocumentPiece]:
        """Return the pieces of a document in order; none while it is not cut."""
        sql = 'SELECT start, "end", digest, page FROM pieces WHERE file = ? ORDER BY position'
        return [DocumentPiece(*row) for row in self._catalog.read(sql, file_id)]

    def with_pieces(self, user: str, beginnings: Iterable[str]) -> dict[str, list[str]]:
        """Return the user's documents that have pieces whose digests begin like this: file id -> these beginnings."""
        sql = """
            SELECT DISTINCT files.id, wanted.value AS beginning FROM json_each(?) AS wanted
            CROSS JOIN pieces ON pieces.digest BETWEEN wanted.value AND wanted.value || 'g'  -- after the hex digits
            CROSS JOIN files ON files.id = pieces.file WHERE files.owner = ?"""
        found: dict[str, list[str]] = {}
        for row in self._catalog.read(sql, json.dumps(list(beginnings)), user):
            found.setdefault(row["id"], []).append(row["beginning"])
        return found

    def counts(self, user: str, ids: Iterable[str]) -> dict[str, int]:
        """Return the number of pieces of those of the user's files that are documents which are cut, by id."""
        count = "(SELECT COUNT(*) FROM pieces WHERE file = files.id) AS pieces"
        sql = f"""
            SELECT files.id, {count} FROM json_each(:ids) AS asked CROSS JOIN files ON files.id = asked.value
            WHERE owner = :owner AND split IS NOT NULL"""
        rows = self._catalog.read(sql, owner=user, ids=json.dumps(list(ids)))
        return {row["id"]: row["pieces"] for row in rows if row["pieces"]}

    def set_pieces(self, file: File, pieces: Iterable[DocumentPiece]) -> list[DocumentPiece] | None:
        """Record the pieces into which a document was cut, unless some have been recorded already, and return the
        recorded ones; None if it was deleted meanwhile, or is to be cut in another way than ``file`` says."""
        with self._catalog.write() as db:
            row = db.execute("SELECT split FROM files WHERE id = ?", (file.id,)).fetchone()
            if row is None or row["split"] is None or json.loads(row["split"]) != file.split:
                return None
            if not db.execute("SELECT 1 FROM pieces WHERE file = ?", (file.id,)).fetchone():
                rows = [(file.id, position, *piece) for position, piece in enumerate(pieces)]
                db.executemany("INSERT INTO pieces VALUES (?, ?, ?, ?, ?, ?)", rows)
        return self.pieces(file.id)

    def keys_of(self, db: Connection, file: File) -> list[ChunkKey]:
        """Return, within a transaction, the contents that a file stands for."""
        rows = db.execute("SELECT digest FROM pieces WHERE file = ?", (file.id,)).fetchall()
        return list(dict.fromkeys([file.key, *(ChunkKey(file.kind, row["digest"]) for row in rows)]))

    def _first(self, user: str, where: str, **values: Any) -> File | None:
        sql = f"SELECT * FROM files WHERE {ALIVE} AND {where}"
        return next(iter(self._files(self._catalog.read(sql, owner=user, now=self._clock(), **values))), None)

    def _files(self, rows: Iterable[Row]) -> list[File]:
        return [File(**from_row(row, self._root)) for row in rows]
