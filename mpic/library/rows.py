"""Rows of the catalogue about uploaded files, and users' quotas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from sqlite3 import Connection, Row
from typing import Any

from mpic.errors import HandleTaken, StorageQuotaExceeded
from mpic.kv.chunk import ChunkKey
from mpic.library.catalog import Catalog
from mpic.library.limits import Limits
from mpic.library.records import File, State
from mpic.library.sidecars import Sidecars

ALIVE = "owner = :owner AND (expires_at IS NULL OR expires_at > :now)"
"""The condition every lookup of a user carries: the user's own, and not expired."""


def handle_taken(handle: str) -> HandleTaken:
    return HandleTaken(f"you already have a file with the handle {handle!r}", param="handle", handle=handle)


class FileRows:
    """Uploaded files. Whatever takes a user sees nothing but that user's living files."""

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

    def of_cache(self, user: str, cache: str) -> list[File]:
        """The chunks of a cache, in order."""
        sql = f"""
            SELECT files.* FROM files JOIN cache_chunks USING (id)
            WHERE {ALIVE} AND cache = :cache ORDER BY position"""
        return self._files(self._catalog.read(sql, owner=user, now=self._clock(), cache=cache))

    def by_handle(self, user: str, handle: str) -> File | None:
        """Handles ignore case."""
        return self._first(user, "handle = :handle COLLATE NOCASE", handle=handle)

    def listing(self, user: str, after: str | None, limit: int, order: str, kind: str | None) -> list[File]:
        """At most ``limit`` uploads by age; ``order`` is ``asc`` or ``desc``, ``after`` an id that exists."""
        beyond = ">" if order == "asc" else "<"
        sql = f"""
            SELECT * FROM files WHERE {ALIVE} AND id NOT IN (SELECT id FROM cache_chunks)
            AND (:after IS NULL OR seq {beyond} (SELECT seq FROM files WHERE id = :after))
            AND (:kind IS NULL OR kind = :kind)
            ORDER BY seq {order} LIMIT :limit"""
        values = {"owner": user, "now": self._clock(), "after": after, "kind": kind, "limit": limit}
        return self._files(self._catalog.read(sql, **values))

    def pending(self) -> list[File]:
        """Living files of all users that wait for compilation, oldest first."""
        sql = "SELECT * FROM files WHERE state = 'compiling' AND (expires_at IS NULL OR expires_at > ?) ORDER BY seq"
        return self._files(self._catalog.read(sql, self._clock()))

    def expired(self) -> list[File]:
        """Expired files of all users."""
        return self._files(self._catalog.read("SELECT * FROM files WHERE expires_at <= ?", self._clock()))

    def paths(self) -> set[str]:
        """Where originals should lie, relative to the root."""
        return {row["path"] for row in self._catalog.read("SELECT path FROM files")}

    def insert(self, file: File) -> None:
        """Commit a new file. An expired file that still holds its handle loses it. Raises HandleTaken,
        StorageQuotaExceeded."""
        with self._catalog.write() as db:
            self.insert_in(db, file)

    def insert_in(self, db: Connection, file: File) -> None:
        """``insert`` within a transaction."""
        self._catalog.add_user(db, file.owner, file.created_at)
        if file.handle is not None:
            where = "owner = ? AND handle = ? COLLATE NOCASE"
            own = (file.owner, file.handle)
            now = self._clock()
            db.execute(f"UPDATE files SET handle = NULL WHERE {where} AND expires_at <= ?", (*own, now))
            if db.execute(f"SELECT 1 FROM files WHERE {where}", own).fetchone():
                raise handle_taken(file.handle)
        self.check_quota(file.owner, file.bytes, db)
        insert_row(db, "files", self.values(file))

    def values(self, file: File) -> dict[str, Any]:
        """The columns of a file's row."""
        values = {name: value for name, value in vars(file).items() if name != "key"}
        return values | {
            "digest": file.key.digest,
            "path": str(file.path.relative_to(self._root)),
            "metadata": json.dumps(file.metadata, sort_keys=True),
        }

    def check_quota(self, user: str, size: int, db: Connection | None = None) -> None:
        """Whether the user may store one more original of this size. What has expired does not count.

        Raises:
            StorageQuotaExceeded.
        """
        read = self._catalog.read if db is None else lambda sql, *values: db.execute(sql, values).fetchall()
        files, room = quota(read, user, "files", self._limits), quota(read, user, "bytes", self._limits)
        if not files and not room:
            return
        (used,) = read("SELECT count, bytes FROM usage WHERE owner = ? AND tier = 'original'", user) or [
            (0, 0)
        ]
        if not _exceeded(used, files, room, size):
            return
        sql = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE owner = ? AND expires_at <= ?"
        (gone,) = read(sql, user, self._clock())
        used = used[0] - gone[0], used[1] - gone[1]
        which = _exceeded(used, files, room, size)
        if which == "files":
            raise StorageQuotaExceeded(
                f"you have {used[0]} files; your quota is {files}", quota=files, used=used[0]
            )
        if which == "bytes":
            raise StorageQuotaExceeded(
                f"the upload has {size} bytes and your files {used[1]}; your quota is {room} bytes",
                quota=room,
                used=used[1],
            )

    def set_expiry(self, user: str, file_id: str, expires_at: float | None) -> None:
        """A file that has expired stays so."""
        sql = f"UPDATE files SET expires_at = :at WHERE id = :id AND {ALIVE}"
        values = {"at": expires_at, "id": file_id, "owner": user, "now": self._clock()}
        with self._catalog.write() as db:
            if db.execute(sql, values).rowcount:
                self._sidecars.rewrite_files(db, [file_id])

    def set_pin(self, user: str, file_id: str, pinned: bool) -> None:
        sql = "UPDATE files SET pinned = ? WHERE owner = ? AND id = ?"
        with self._catalog.write() as db:
            if db.execute(sql, (pinned, user, file_id)).rowcount:
                self._sidecars.rewrite_files(db, [file_id])

    def set_state(self, user: str, file_id: str, state: State, tokens: int | None, error: str | None) -> None:
        sql = "UPDATE files SET state = ?, tokens = COALESCE(?, tokens), error = ? WHERE owner = ? AND id = ?"
        with self._catalog.write() as db:
            db.execute(sql, (state, tokens, error, user, file_id))

    def mark_lost(self, lost: Iterable[str], here: set[str]) -> None:
        """Files whose originals are gone cannot be compiled any more; those whose originals are back can."""
        mark_lost(self._catalog, "files", lost, here)

    def delete(self, db: Connection, file: File, expired: bool) -> bool:
        """Within a transaction; False when the file was deleted meanwhile, or (``expired``) lives on."""
        sql = "DELETE FROM files WHERE id = ? AND (NOT ? OR expires_at <= ?)"
        if db.execute(sql, (file.id, expired, self._clock())).rowcount == 0:
            return False
        self._catalog.bury(db, [str(file.path.relative_to(self._root))], self._clock())
        return True

    def caches_of(self, db: Connection, files: Iterable[File]) -> list[str]:
        """Within a transaction: ids of the explicit caches that these files are chunks of."""
        ids = json.dumps([file.id for file in files])
        sql = "SELECT DISTINCT cache FROM cache_chunks WHERE id IN (SELECT value FROM json_each(?))"
        return [row["cache"] for row in db.execute(sql, (ids,))]

    def settle_caches(self, db: Connection, caches: Iterable[str]) -> list[Path]:
        """Within a transaction that has deleted chunks of these caches: forget those that have none left, and write the
        sidecars of the others anew. Sidecars that are to be removed when it is committed."""
        empty = []
        for cache in caches:
            if db.execute("SELECT 1 FROM cache_chunks WHERE cache = ?", (cache,)).fetchone():
                self._sidecars.rewrite_cache(db, cache)
                continue
            owner = db.execute("SELECT owner FROM caches WHERE id = ?", (cache,)).fetchone()["owner"]
            empty.append(self._sidecars.cache_path(owner, cache))
            db.execute("DELETE FROM caches WHERE id = ?", (cache,))
        self._catalog.bury(db, [str(path.relative_to(self._root)) for path in empty], self._clock())
        return empty

    def has_content(self, db: Connection, owner: str, key: ChunkKey) -> bool:
        """Within a transaction: does a file of this owner hold this content?"""
        sql = "SELECT 1 FROM files WHERE owner = ? AND digest = ? AND kind = ?"
        return db.execute(sql, (owner, key.digest, key.kind)).fetchone() is not None

    def _first(self, user: str, where: str, **values: Any) -> File | None:
        sql = f"SELECT * FROM files WHERE {ALIVE} AND {where}"
        return next(iter(self._files(self._catalog.read(sql, owner=user, now=self._clock(), **values))), None)

    def _files(self, rows: Iterable[Row]) -> list[File]:
        files = []
        for values in map(dict, rows):
            del values["seq"]
            values["key"] = ChunkKey(values["kind"], values.pop("digest"))
            values["path"] = self._root / values["path"]
            values["metadata"] = json.loads(values["metadata"])
            values["pinned"] = bool(values["pinned"])
            files.append(File(**values))
        return files


def quota(read: Callable[..., list[Row]], user: str, what: str, limits: Limits) -> int:
    """A user's own quota of ``files``, ``bytes`` (of originals) or ``disk`` (bytes of compiled chunks), else the
    limits'; 0: none."""
    rows = read(f"SELECT quota_{what} FROM users WHERE id = ?", user)
    own = rows[0][0] if rows else None
    return getattr(limits, f"user_{what}" if what != "disk" else "user_disk_bytes") if own is None else own


def _exceeded(used: tuple[int, int], files: int, room: int, size: int) -> str | None:
    if files and used[0] + 1 > files:
        return "files"
    return "bytes" if room and used[1] + size > room else None


LOST = "the original is lost"


def mark_lost(catalog: Catalog, table: str, lost: Iterable[str], here: set[str]) -> None:
    """Rows of ``files`` or ``refs`` whose originals are gone have failed, until the originals are back (a disk was not
    mounted, say).

    Args:
        lost: paths relative to the library's root.
        here: the paths of the originals that are there.
    """
    rows = catalog.read(f"SELECT path FROM {table} WHERE state = 'failed' AND error = ?", LOST)
    back = [row["path"] for row in rows if row["path"] in here]
    with catalog.write() as db:
        sql = f"UPDATE {table} SET state = ?, error = ? WHERE path = ?"
        db.executemany(sql, [("failed", LOST, path) for path in lost])
        db.executemany(sql, [("compiling", None, path) for path in back])


def insert_row(db: Connection, table: str, values: dict[str, Any]) -> None:
    """One value a column."""
    columns, slots = ", ".join(values), ", ".join(f":{name}" for name in values)
    db.execute(f"INSERT INTO {table} ({columns}) VALUES ({slots})", values)
