"""Rows of the catalogue about compiled chunks: all SQL of the disk tier."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sqlite3 import Connection
from threading import Lock
from typing import NamedTuple

from mpic.errors import IntegrityError
from mpic.kv.chunk import ChunkKey, KVKey
from mpic.library.catalog.database import Catalog, insert_row
from mpic.library.catalog.quotas import quota
from mpic.library.limits import Limits
from mpic.library.records import SHARED
from mpic.library.store.shares import Held, TierBounds, Why, make_room


class ChunkRow(NamedTuple):
    """The row of a stored chunk: ``KVKey.digest``, path relative to the root, bytes of the file."""

    key: str
    path: str
    bytes: int


class DurableChunk(NamedTuple):
    """A chunk whose file is durable: path relative to the root, bytes of the file, and number of tokens."""

    key: KVKey
    path: str
    bytes: int
    tokens: int


class ExpiredChunk(NamedTuple):
    """A form of a content that nobody has used for too long; with ``last`` it was the last form of it."""

    row: ChunkRow
    owner: str
    content: ChunkKey
    last: bool


NEVER = 1 << 40
"""Seconds that no chunk lives."""
UNUSED = """
    SELECT key, path, bytes, owner, kind, digest FROM chunks AS c
    WHERE tier = 'disk' AND state = 'ready' AND last_used <= :before AND CASE WHEN owner = :shared THEN
        last_used <= :now - :default
        AND NOT EXISTS (SELECT 1 FROM refs AS f WHERE f.digest = c.digest AND f.kind = c.kind AND f.pinned)
    ELSE
        NOT EXISTS (
            SELECT 1 FROM contents AS f WHERE f.owner = c.owner AND f.digest = c.digest AND f.kind = c.kind
            AND (f.pinned OR c.last_used > :now - COALESCE(f.kv_ttl, :default)))
        AND (last_used <= :now - :default OR EXISTS (
            SELECT 1 FROM contents AS f WHERE f.owner = c.owner AND f.digest = c.digest AND f.kind = c.kind))
    END"""
"""The chunks that were not used for as long as they are kept. One that several files hold is kept for the longest."""


class ChunkRows:
    """Compiled chunks. Their state is ``ready``, or the reason why they are gone (``evicted | expired | corrupt |
    missing``)."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._touched: dict[str, float] = {}  # last uses, written with the next eviction or flush
        self._lock = Lock()  # guards _touched; held for a moment only

    def present(self, keys: Sequence[KVKey]) -> dict[KVKey, int]:
        """Return the chunks that are ready, by a single query, and how many tokens each has."""
        by_digest = {key.digest: key for key in keys}
        placeholders = ", ".join("?" * len(by_digest))
        rows = self._catalog.read(
            f"SELECT key, tokens FROM chunks WHERE state = 'ready' AND key IN ({placeholders})", *by_digest
        )
        return {by_digest[digest]: tokens for digest, tokens in rows}

    def ready(self) -> list[ChunkRow]:
        sql = "SELECT key, path, bytes FROM chunks WHERE tier = 'disk' AND state = 'ready'"
        return [ChunkRow(*row) for row in self._catalog.read(sql)]

    def every(self) -> list[tuple[ChunkRow, str]]:
        """Return all rows with their states, also of chunks that are gone."""
        rows = self._catalog.read("SELECT key, path, bytes, state FROM chunks WHERE tier = 'disk'")
        return [(ChunkRow(*row[:3]), row["state"]) for row in rows]

    def totals(self) -> tuple[int, int]:
        """Return the number of ready chunks and their bytes."""
        sql = "SELECT COALESCE(SUM(count), 0), COALESCE(SUM(bytes), 0) FROM usage WHERE tier = 'disk'"
        return tuple(self._catalog.read(sql)[0])

    def state(self, key: KVKey) -> str | None:
        row = self._catalog.one("SELECT state FROM chunks WHERE key = ?", key.digest)
        return None if row is None else row["state"]

    def models(self, owner: str, chunk: ChunkKey) -> set[str]:
        """Return the models for which this content was ever compiled."""
        sql = "SELECT model FROM chunks WHERE owner = ? AND kind = ? AND digest = ?"
        return {row["model"] for row in self._catalog.read(sql, owner, chunk.kind, chunk.digest)}

    def put_all(self, chunks: Iterable[DurableChunk]) -> None:
        """Commit chunks whose files are durable."""
        with self._catalog.write() as db:
            for chunk in chunks:
                self._put(db, chunk)

    def _put(self, db: Connection, chunk: DurableChunk) -> None:
        now, key = self._clock(), chunk.key
        values = {
            "key": key.digest,
            "owner": key.owner,
            "kind": key.chunk.kind,
            "digest": key.chunk.digest,
            "model": key.model,
            "recipe": json.dumps(key.recipe.fields(), sort_keys=True),
            "path": chunk.path,
            "bytes": chunk.bytes,
            "tokens": chunk.tokens,
            "state": "ready",
            "created_at": now,
            "last_used": now,
        }
        self._catalog.add_user(db, key.owner, now)
        # INSERT OR REPLACE would not fire triggers
        db.execute("DELETE FROM chunks WHERE key = ?", (key.digest,))
        db.execute("DELETE FROM deleted WHERE path = ?", (chunk.path,))
        insert_row(db, "chunks", values)

    def mark(self, keys: Iterable[str], state: str, was: str = "ready") -> None:
        """Mark chunks of a state as gone, for the reason that ``state`` names, or as ready because their files are
        back."""
        with self._catalog.write() as db:
            sql = "UPDATE chunks SET state = ? WHERE key = ? AND state = ?"
            db.executemany(sql, [(state, key, was) for key in keys])

    def evict(
        self, owner: str, size: int, writing: Mapping[str, int], limits: Limits
    ) -> list[tuple[ChunkRow, Why]]:
        """Mark chunks as evicted so that ``owner`` can store ``size`` bytes (see ``shares``), and return them.

        Args:
            writing: bytes that are being written, by owner, without ``size``.

        Raises:
            StorageFull, StorageQuotaExceeded: nothing was changed.
        """
        with self._catalog.write() as db:
            self._write_touched(db)
            used = dict(db.execute("SELECT owner, bytes FROM usage WHERE tier = 'disk' AND bytes > 0"))
            for name, coming in writing.items():
                used[name] = used.get(name, 0) + coming
            read = lambda sql, *values: db.execute(sql, values).fetchall()
            bounds = TierBounds(limits.disk_bytes, quota(read, owner, "disk", limits), limits.shared_fraction)
            gone = make_room(bounds, used, owner, size, lambda name: self._candidates(db, name))
            sql = "UPDATE chunks SET state = 'evicted', why = ? WHERE key = ?"
            db.executemany(sql, [(why, held.key.key) for held, why in gone])
        return [(held.key, why) for held, why in gone]

    def expire(self, default: int) -> list[ExpiredChunk]:
        """Mark chunks as expired that were used for the last time longer ago than every file of their content says
        (``kv_ttl``), and return them. Pinned ones stay.

        Args:
            default: seconds for contents of which no file says so; 0: for ever.
        """
        values = {"default": default or NEVER, "shared": SHARED}
        least = self._catalog.read("SELECT MIN(kv_ttl) FROM files WHERE kv_ttl IS NOT NULL")[0][0] or NEVER
        before = self._clock() - min(least, values["default"])
        if before <= 0 or not self._catalog.read(UNUSED, **values, now=self._clock(), before=before):
            return []
        with self._catalog.write() as db:
            self._write_touched(db)
            rows = db.execute(UNUSED, values | {"now": self._clock(), "before": before}).fetchall()
            sql = "UPDATE chunks SET state = 'expired', last_used = ? WHERE key = ?"
            db.executemany(sql, [(self._clock(), row["key"]) for row in rows])
            left = "SELECT 1 FROM chunks WHERE owner = ? AND kind = ? AND digest = ? AND state = 'ready'"
            return [
                ExpiredChunk(
                    ChunkRow(row["key"], row["path"], row["bytes"]),
                    row["owner"],
                    ChunkKey(row["kind"], row["digest"]),
                    not db.execute(left, (row["owner"], row["kind"], row["digest"])).fetchone(),
                )
                for row in rows
            ]

    def pinned(self, owner: str, chunk: ChunkKey) -> bool:
        """Return whether a pinned file or reference of this owner holds this content."""
        table, own = ("refs", "TRUE") if owner == SHARED else ("contents", "owner = :owner")
        sql = f"SELECT 1 FROM {table} WHERE {own} AND digest = :digest AND kind = :kind AND pinned"
        return bool(self._catalog.read(sql, owner=owner, digest=chunk.digest, kind=chunk.kind))

    def _candidates(self, db: Connection, owner: str) -> Iterator[Held]:
        """Yield an owner's chunks, least recently used first. A chunk counts as pinned if a pinned file or reference
        holds it."""
        table = "refs" if owner == SHARED else "contents"
        same = "f.digest = chunks.digest AND f.kind = chunks.kind AND f.pinned"
        if owner != SHARED:
            same += " AND f.owner = chunks.owner"
        sql = f"""
            SELECT key, path, bytes, last_used, EXISTS (SELECT 1 FROM {table} AS f WHERE {same}) FROM chunks
            WHERE owner = ? AND tier = 'disk' AND state = 'ready' ORDER BY last_used"""
        for key, path, size, last_used, pinned in db.execute(sql, (owner,)):
            yield Held(ChunkRow(key, path, size), size, bool(pinned), last_used)

    def drop(
        self, db: Connection, owner: str, chunk: ChunkKey, state: str | None, unfinished: Iterable[str] = ()
    ) -> list[ChunkRow]:
        """Make, within a transaction, all compiled forms of a content unavailable; return their rows.

        Args:
            state: keep the rows with this state, which records why they are gone; None deletes them.
            unfinished: paths, relative to the root, of files of this content that are being written.
        """
        where, values = "owner = ? AND kind = ? AND digest = ?", (owner, chunk.kind, chunk.digest)
        rows = db.execute(f"SELECT key, path, bytes FROM chunks WHERE {where}", values).fetchall()
        self._catalog.add_tombstones(db, unfinished, self._clock())
        if state is None:
            db.execute(f"DELETE FROM chunks WHERE {where}", values)
            self._catalog.add_tombstones(db, [row["path"] for row in rows], self._clock())
        else:
            sql = f"UPDATE chunks SET state = ?, last_used = ? WHERE {where}"
            db.execute(sql, (state, self._clock(), *values))
        return [ChunkRow(*row) for row in rows]

    def forget_gone(self, before: float) -> None:
        """Delete the rows of chunks that are gone and were last used before this time."""
        with self._catalog.write() as db:
            db.execute("DELETE FROM chunks WHERE state != 'ready' AND last_used < ?", (before,))

    def check_usage(self) -> None:
        """Check that the recorded usage of each owner is the sum of its rows. One query reads both, so that no change
        of another process comes between them.

        Raises:
            IntegrityError: the usage differs.
        """
        sql = """
            WITH counted AS (
                SELECT owner, 'original' AS tier, COUNT(*), SUM(bytes) FROM files GROUP BY owner
                UNION ALL SELECT ?, 'original', COUNT(*), SUM(bytes) FROM refs HAVING COUNT(*) > 0
                UNION ALL SELECT owner, tier, COUNT(*), SUM(bytes) FROM chunks WHERE state = 'ready'
                    GROUP BY owner, tier),
            kept AS (SELECT owner, tier, count, bytes FROM usage WHERE count != 0 OR bytes != 0)
            SELECT * FROM (SELECT * FROM counted EXCEPT SELECT * FROM kept)
            UNION ALL SELECT * FROM (SELECT * FROM kept EXCEPT SELECT * FROM counted)"""
        wrong = {tuple(row) for row in self._catalog.read(sql, SHARED)}
        if wrong:
            raise IntegrityError(f"the recorded usage and the rows disagree: {sorted(wrong)[:3]}")

    def touch(self, keys: Iterable[KVKey]) -> None:
        """Note in memory that the chunks were used now, also those that were found nearer to the device."""
        with self._lock:
            self._touched.update(dict.fromkeys((key.digest for key in keys), self._clock()))

    def flush(self) -> None:
        """Write down when chunks were last used."""
        with self._catalog.write() as db:
            self._write_touched(db)

    def _write_touched(self, db: Connection) -> None:
        with self._lock:
            touched, self._touched = self._touched, {}
        self._catalog.if_undone(lambda: self._keep_touched(touched))
        sql = "UPDATE chunks SET last_used = ? WHERE key = ?"
        db.executemany(sql, [(at, key) for key, at in touched.items()])

    def _keep_touched(self, touched: dict[str, float]) -> None:
        """Keep last uses that could not be written, unless there are later ones."""
        with self._lock:
            self._touched = touched | self._touched
