"""Rows of the catalogue: all SQL about files and compiled chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from sqlite3 import Connection, Row
from threading import Lock
from typing import Any, NamedTuple

from mpic.errors import HandleTaken
from mpic.kv.chunk import ChunkKey, KVKey
from mpic.library.catalog import Catalog
from mpic.library.records import File, State

ALIVE = "owner = :owner AND (expires_at IS NULL OR expires_at > :now)"
"""The condition every lookup of a user carries: the user's own, and not expired."""


def handle_taken(handle: str) -> HandleTaken:
    return HandleTaken(f"you already have a file with the handle {handle!r}", param="handle", handle=handle)


class FileRows:
    """Uploaded files. Whatever takes a user sees nothing but that user's living files."""

    def __init__(self, catalog: Catalog, root: Path, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._root = root
        self._clock = clock

    def by_id(self, user: str, file_id: str) -> File | None:
        return self._first(user, "id = :id", id=file_id)

    def by_handle(self, user: str, handle: str) -> File | None:
        """Handles ignore case."""
        return self._first(user, "handle = :handle COLLATE NOCASE", handle=handle)

    def listing(self, user: str, after: str | None, limit: int, order: str, kind: str | None) -> list[File]:
        """At most ``limit`` files by age; ``order`` is ``asc`` or ``desc``, ``after`` an id that exists."""
        beyond = ">" if order == "asc" else "<"
        sql = f"""
            SELECT * FROM files WHERE {ALIVE}
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
        """Commit a new file. An expired file that still holds its handle loses it. Raises HandleTaken."""
        values = {name: value for name, value in vars(file).items() if name != "key"}
        values |= {
            "digest": file.key.digest,
            "path": str(file.path.relative_to(self._root)),
            "metadata": json.dumps(file.metadata, sort_keys=True),
        }
        with self._catalog.write() as db:
            self._catalog.add_user(db, file.owner, file.created_at)
            if file.handle is not None:
                where = "owner = ? AND handle = ? COLLATE NOCASE"
                own = (file.owner, file.handle)
                now = self._clock()
                db.execute(f"UPDATE files SET handle = NULL WHERE {where} AND expires_at <= ?", (*own, now))
                if db.execute(f"SELECT 1 FROM files WHERE {where}", own).fetchone():
                    raise handle_taken(file.handle)
            insert_row(db, "INSERT", "files", values)

    def set_state(self, user: str, file_id: str, state: State, tokens: int | None, error: str | None) -> None:
        sql = "UPDATE files SET state = ?, tokens = COALESCE(?, tokens), error = ? WHERE owner = ? AND id = ?"
        with self._catalog.write() as db:
            db.execute(sql, (state, tokens, error, user, file_id))

    def mark_lost(self, paths: Iterable[str]) -> None:
        """Files whose originals are gone cannot be compiled any more."""
        sql = "UPDATE files SET state = 'failed', error = 'the original is lost' WHERE path = ?"
        with self._catalog.write() as db:
            db.executemany(sql, [(path,) for path in paths])

    def delete(self, db: Connection, file: File) -> bool:
        """Within a transaction; False when the file was deleted meanwhile."""
        return db.execute("DELETE FROM files WHERE id = ?", (file.id,)).rowcount > 0

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
            files.append(File(**values))
        return files


class ChunkRow(NamedTuple):
    """What the disk tier needs to know of a stored chunk: KVKey.digest, path relative to the root, size of the file."""

    key: str
    path: str
    bytes: int


class ChunkRows:
    """Compiled chunks: ``ready``, or gone and why (``evicted | expired | corrupt | missing``)."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._touched: dict[str, float] = {}  # last uses, written down with the next eviction or flush
        self._lock = Lock()  # guards touched; held for a moment only

    def present(self, keys: Sequence[KVKey]) -> list[KVKey]:
        """Those of the chunks that are ready, each once; one query whatever their number."""
        by_digest = {key.digest: key for key in keys}
        slots = ", ".join("?" * len(by_digest))
        rows = self._catalog.read(
            f"SELECT key FROM chunks WHERE state = 'ready' AND key IN ({slots})", *by_digest
        )
        return [by_digest[row["key"]] for row in rows]

    def ready(self) -> list[ChunkRow]:
        sql = "SELECT key, path, bytes FROM chunks WHERE tier = 'disk' AND state = 'ready'"
        return [ChunkRow(*row) for row in self._catalog.read(sql)]

    def totals(self) -> tuple[int, int]:
        """Number of ready chunks and their bytes."""
        sql = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM chunks WHERE tier = 'disk' AND state = 'ready'"
        return tuple(self._catalog.read(sql)[0])

    def state(self, key: KVKey) -> str | None:
        row = self._catalog.one("SELECT state FROM chunks WHERE key = ?", key.digest)
        return row and row["state"]

    def models(self, owner: str, chunk: ChunkKey) -> set[str]:
        """The models for which this content was ever compiled."""
        sql = "SELECT model FROM chunks WHERE owner = ? AND kind = ? AND digest = ?"
        return {row["model"] for row in self._catalog.read(sql, owner, chunk.kind, chunk.digest)}

    def put(self, key: KVKey, path: str, size: int, tokens: int) -> None:
        """Commit a chunk whose file is durable."""
        now = self._clock()
        values = {
            "key": key.digest,
            "owner": key.owner,
            "kind": key.chunk.kind,
            "digest": key.chunk.digest,
            "model": key.model,
            "recipe": json.dumps(asdict(key.recipe), sort_keys=True),
            "path": path,
            "bytes": size,
            "tokens": tokens,
            "state": "ready",
            "created_at": now,
            "last_used": now,
        }
        with self._catalog.write() as db:
            self._catalog.add_user(db, key.owner, now)
            insert_row(db, "INSERT OR REPLACE", "chunks", values)

    def mark(self, keys: Iterable[str], state: str) -> None:
        """Ready chunks are so no longer, and this is why."""
        with self._catalog.write() as db:
            self._mark(db, keys, state)

    def evict(self, allowed: int) -> list[ChunkRow]:
        """Mark the least recently used as evicted until at most ``allowed`` bytes are ready; those that must go."""
        victims = []
        with self._catalog.write() as db:
            self._write_touched(db)
            ready = "FROM chunks WHERE tier = 'disk' AND state = 'ready'"
            excess = (db.execute(f"SELECT SUM(bytes) {ready}").fetchone()[0] or 0) - allowed
            if excess > 0:
                for row in db.execute(f"SELECT key, path, bytes {ready} ORDER BY last_used"):
                    victims.append(ChunkRow(*row))
                    excess -= row["bytes"]
                    if excess <= 0:
                        break
            self._mark(db, [victim.key for victim in victims], "evicted")
        return victims

    def drop(self, db: Connection, owner: str, chunk: ChunkKey, state: str | None) -> list[ChunkRow]:
        """Within a transaction: no form of this content is ready any more; the rows concerned.

        Args:
            state: keep the rows in this state, so that it is known why they are gone; None forgets them.
        """
        where, values = "owner = ? AND kind = ? AND digest = ?", (owner, chunk.kind, chunk.digest)
        rows = db.execute(f"SELECT key, path, bytes FROM chunks WHERE {where}", values).fetchall()
        if state is None:
            db.execute(f"DELETE FROM chunks WHERE {where}", values)
        else:
            sql = f"UPDATE chunks SET state = ?, last_used = ? WHERE {where}"
            db.execute(sql, (state, self._clock(), *values))
        return [ChunkRow(*row) for row in rows]

    def drop_one(self, key: KVKey) -> list[ChunkRow]:
        """Forget one form of a chunk; the row concerned, if there was one."""
        with self._catalog.write() as db:
            row = db.execute("SELECT key, path, bytes FROM chunks WHERE key = ?", (key.digest,)).fetchone()
            db.execute("DELETE FROM chunks WHERE key = ?", (key.digest,))
        return [ChunkRow(*row)] if row else []

    def forget_gone(self, before: float) -> None:
        """Forget why chunks are gone that were last used before this time."""
        with self._catalog.write() as db:
            db.execute("DELETE FROM chunks WHERE state != 'ready' AND last_used < ?", (before,))

    def touch(self, keys: Iterable[KVKey]) -> None:
        """The chunks were used now. Costs no write."""
        with self._lock:
            self._touched.update(dict.fromkeys((key.digest for key in keys), self._clock()))

    def flush(self) -> None:
        """Write down when chunks were last used."""
        with self._catalog.write() as db:
            self._write_touched(db)

    def _mark(self, db: Connection, keys: Iterable[str], state: str) -> None:
        sql = "UPDATE chunks SET state = ? WHERE key = ? AND state = 'ready'"
        db.executemany(sql, [(state, key) for key in keys])

    def _write_touched(self, db: Connection) -> None:
        with self._lock:
            touched, self._touched = self._touched, {}
        sql = "UPDATE chunks SET last_used = ? WHERE key = ?"
        db.executemany(sql, [(at, key) for key, at in touched.items()])


def insert_row(db: Connection, verb: str, table: str, values: dict[str, Any]) -> None:
    """``verb INTO table``, one value a column."""
    columns, slots = ", ".join(values), ", ".join(f":{name}" for name in values)
    db.execute(f"{verb} INTO {table} ({columns}) VALUES ({slots})", values)
