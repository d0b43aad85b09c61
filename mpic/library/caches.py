"""Explicit context caching (EPIC, section 3: the context-cache API): a text is cut into chunks that prompts link by id,
in any order. Each chunk is a file of the user (``cache-...``), so it is durable, counted, compiled, expired and deleted
as uploads are. Chunks that were created together form a *cache* (``group-...``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Row
from typing import Any, NamedTuple

from mpic.errors import BadRequest, CacheNotFound, InvalidText, TooLarge, cut
from mpic.keys import KeyLimits
from mpic.kv.chunk import ChunkKey
from mpic.library.catalog.database import insert_row, page_of
from mpic.library.catalog.file_rows import ALIVE, FileRows
from mpic.library.catalog.quotas import NO_KEY
from mpic.library.folder.originals import Incoming, seal_all
from mpic.library.folder.sidecars import Sidecar
from mpic.library.intake.checks import check_life, clean_name, new_id
from mpic.library.intake.decode import decode_text
from mpic.library.part import LibraryPart, Storage
from mpic.library.records import File, Removed, State
from mpic.library.uploads import MOST_CHUNKS, UploadLibrary

GROUP, CHUNK = "group-", "cache-"
LISTED = 4096
"""A page of a listing ends with the cache that reaches so many chunks, however many caches were asked for."""
AT_ONCE = 32
"""Chunks that are made durable together."""


class CachedText(NamedTuple):
    """A text to cache, and its characters ``[start, end)`` in the text that the client sent."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class CacheChunk:
    """A chunk of a cache; see ``CachedText``."""

    file: File
    start: int
    end: int


@dataclass(frozen=True)
class Cache:
    """Chunks that were cached together.

    Args:
        id: ``group-`` and 24 random characters; ids of chunks begin with ``cache-``.
        split: the settings by which the text was cut, or None when the client cut it.
        created_at, expires_at: seconds since the epoch; the chunks expire with the cache.
        chunks: the chunks in order, without those that were deleted individually.
    """

    id: str
    owner: str
    name: str
    split: dict[str, Any] | None
    created_at: float
    expires_at: float | None
    chunks: tuple[CacheChunk, ...]

    @property
    def state(self) -> State:
        states = {chunk.file.state for chunk in self.chunks}
        return "failed" if "failed" in states else "compiling" if "compiling" in states else "ready"

    @property
    def pinned(self) -> bool:
        return all(chunk.file.pinned for chunk in self.chunks)

    @property
    def kv_ttl(self) -> int | None:
        return self.chunks[0].file.kv_ttl if self.chunks else None

    @property
    def bytes(self) -> int:
        return sum(chunk.file.bytes for chunk in self.chunks)

    @property
    def tokens(self) -> int | None:
        counts = [chunk.file.tokens for chunk in self.chunks if chunk.file.tokens is not None]
        return sum(counts) if len(counts) == len(self.chunks) else None


class CachePage(NamedTuple):
    caches: list[Cache]
    has_more: bool


class CacheLibrary(LibraryPart):
    """Caches of all users. Thread-safe. Every method blocks on the disk."""

    def __init__(self, storage: Storage, rows: FileRows, uploads: UploadLibrary) -> None:
        super().__init__(storage)
        self._rows, self._sidecars, self._uploads = rows, storage.sidecars, uploads

    def create(
        self,
        user: str,
        parts: Sequence[CachedText],
        *,
        name: str = "",
        split: dict[str, Any] | None = None,
        ttl: int | None = None,
        key: KeyLimits = NO_KEY,
    ) -> Cache:
        """Cache texts, all or none; when this returns, they survive a crash. Their state is ``compiling``.

        Args:
            name: shown in lists and traces.
            ttl: seconds until they expire; None: never.
            key: limits of the API key that is used.

        Raises:
            InvalidText, TooLarge: a text is not accepted.
            BadRequest: there are no texts or too many, or the ttl is not valid.
            StorageQuotaExceeded, StorageFull: nothing was stored.
        """
        check_life("ttl", ttl)
        if not 0 < len(parts) <= MOST_CHUNKS:
            raise BadRequest(
                f"a cache has 1 to {MOST_CHUNKS} chunks, not {len(parts)}; larger pieces (split.tokens) make fewer",
                param="text" if split else "chunks",
                chunks=len(parts),
                limit=MOST_CHUNKS,
            )
        name, now = clean_name(name, self._limits) if name else "cache", self._clock()
        expires_at = None if ttl is None else now + ttl
        texts = [
            self.accepted(part.text, "text" if split else f"chunks[{i}]") for i, part in enumerate(parts)
        ]
        size = sum(len(text.encode()) for text in texts)
        self._rows.check_quota(user, size, len(texts), key)  # checked before anything is written
        labels = [f"{name} {i}" if len(parts) > 1 else name for i in range(1, len(parts) + 1)]
        cache_id = new_id(GROUP)
        uploads: list[tuple[Incoming, Path]] = []
        made: list[CacheChunk] = []
        with ExitStack() as stack:  # discards the uploads that are not published
            for part, text, label in zip(parts, texts, labels):
                file, incoming = self._receive(user, text, label, now, expires_at)
                uploads.append((stack.enter_context(incoming), file.path))
                made.append(CacheChunk(file, part.start, part.end))
                if len(made) % AT_ONCE == 0:  # sealed now, so that few files are open at a time
                    seal_all([upload for upload, _ in uploads[-AT_ONCE:]])
            cache = Cache(cache_id, user, name, split, now, expires_at, tuple(made))
            self._commit(cache, uploads, key)
        return cache  # to read it again could fail, and a client that then tries again would have two

    def get(self, user: str, cache_id: str) -> Cache:
        """Return the user's cache of this id.

        Raises:
            CacheNotFound: there is no such cache, it has expired, or it belongs to another user.
        """
        rows = self._catalog.read(
            f"SELECT * FROM caches WHERE {ALIVE} AND id = :id", owner=user, now=self._clock(), id=cache_id
        )
        found = self._show(user, rows[0]) if rows else None
        if found is None or not found.chunks:
            raise CacheNotFound(f"no cache {cut(cache_id)!r}", id=cache_id)
        return found

    def chunk(self, user: str, chunk_id: str) -> CacheChunk:
        """Return one chunk. Raise as ``get``."""
        row = self._catalog.one("SELECT * FROM cache_chunks WHERE id = ?", chunk_id)
        file = self._rows.by_id(user, chunk_id) if row else None
        if row is None or file is None:
            raise CacheNotFound(f"no cache {cut(chunk_id)!r}", id=chunk_id)
        return CacheChunk(file, row["start"], row["end"])

    def resolve(self, user: str, id: str) -> list[File]:
        """Return the files that an id in a prompt stands for: one chunk, or all of a cache in order. Raise as
        ``get``."""
        if id.startswith(GROUP):
            return [chunk.file for chunk in self.get(user, id).chunks]
        return [self.chunk(user, id).file]

    def page(
        self, user: str, *, after: str | None = None, limit: int = 100, order: str = "desc"
    ) -> CachePage:
        """List the user's caches by age, newest first (``order`` is ``asc | desc``); fewer than ``limit`` if they have
        many chunks.

        Args:
            after: id of the last cache of the previous page.

        Raises:
            CacheNotFound: the cache ``after`` is gone.
        """
        if after is not None:
            self.get(user, after)
        where = f"{ALIVE} AND EXISTS (SELECT 1 FROM cache_chunks WHERE cache = caches.id)"
        sql = page_of("caches", order, where)
        rows = self._catalog.read(sql, owner=user, now=self._clock(), after=after, limit=limit + 1)
        shown: list[Cache] = []
        chunks = 0
        for row in rows[:limit]:
            if chunks >= LISTED:
                break
            shown.append(self._show(user, row))
            chunks += len(shown[-1].chunks)
        return CachePage(shown, len(rows) > len(shown))

    def extend(self, user: str, cache_id: str, ttl: int | None) -> Cache:
        """Set a cache to expire in this many seconds from now (None: never).

        Raises:
            CacheNotFound: see ``get``.
            BadRequest: the number of seconds is not valid.
        """
        check_life("ttl", ttl)
        expires_at = None if ttl is None else self._clock() + ttl
        values = {"at": expires_at, "id": cache_id, "owner": user, "now": self._clock()}
        with self._catalog.write() as db:
            changed = db.execute(f"UPDATE caches SET expires_at = :at WHERE id = :id AND {ALIVE}", values)
            if changed.rowcount:
                db.execute(
                    "UPDATE files SET expires_at = :at WHERE id IN (SELECT id FROM cache_chunks WHERE cache = :id)",
                    values,
                )
                self._sidecars.rewrite(db, "cache", cache_id)
        return self.get(user, cache_id)

    def pin(self, user: str, cache_id: str, pinned: bool = True) -> Cache:
        """Protect the compiled chunks of a cache from eviction for the user's newer ones, or end that. Raise as
        ``get``."""
        return self._set(user, cache_id, "pinned", pinned)

    def keep_kv(self, user: str, cache_id: str, seconds: int | None) -> Cache:
        """Set ``kv_ttl`` of all chunks of a cache; see ``UploadLibrary.keep_kv``. Raise as ``get``."""
        check_life("kv_ttl", seconds)
        return self._set(user, cache_id, "kv_ttl", seconds)

    def delete(self, user: str, id: str) -> list[Removed]:
        """Delete a cache or one chunk, and everything compiled from it. Raise as ``get``."""
        removed = self._uploads.delete_all(self.resolve(user, id))
        self.sweep()
        return removed

    def sweep(self) -> None:
        """Delete caches without chunks, which an earlier version has left. No listing shows them."""
        empty = "NOT EXISTS (SELECT 1 FROM cache_chunks WHERE cache = caches.id)"
        if not self._catalog.one(f"SELECT 1 FROM caches WHERE {empty} LIMIT 1"):
            return
        with self._catalog.write() as db:
            ids = [row["id"] for row in db.execute(f"SELECT id FROM caches WHERE {empty}").fetchall()]
            sidecars = self._rows.settle_caches(db, ids)
        self._originals.remove_files(sidecars)

    # Inside

    def _set(self, user: str, cache_id: str, column: str, value: int | None) -> Cache:
        """Change a column of all chunks of a cache. Raise as ``get``."""
        self.get(user, cache_id)
        sql = (
            f"UPDATE files SET {column} = :value WHERE id IN (SELECT id FROM cache_chunks WHERE cache = :id)"
        )
        with self._catalog.write() as db:
            db.execute(sql, {"value": value, "id": cache_id})
            self._sidecars.rewrite(db, "cache", cache_id)
        return self.get(user, cache_id)

    def accepted(self, text: str, param: str = "text") -> str:
        """Return a text in the form in which it would be cached.

        Args:
            param: the field that holds it.

        Raises:
            InvalidText, TooLarge: it is not accepted.
        """
        try:
            return decode_text(text.encode(), self._limits)
        except UnicodeEncodeError as error:
            raise InvalidText("the text contains half of a surrogate pair", param=param) from error
        except (InvalidText, TooLarge) as error:
            error.param = param
            raise

    def _receive(
        self, user: str, text: str, label: str, now: float, expires_at: float | None
    ) -> tuple[File, Incoming]:
        """Write one text under a temporary name; return its future row and the open upload."""
        data = text.encode()
        chunk_id = new_id(CHUNK)
        incoming = self._originals.incoming(len(data))
        try:
            incoming.write(data)
        except BaseException:
            incoming.discard()
            raise
        file = File(
            id=chunk_id,
            owner=user,
            handle=None,
            kind="text",
            filename=label,
            bytes=len(data),
            key=ChunkKey.of_text(text),
            created_at=now,
            expires_at=expires_at,
            sha256=hashlib.sha256(data).hexdigest(),
            path=self._originals.path(user, chunk_id),
        )
        return file, incoming

    def _commit(self, cache: Cache, uploads: Sequence[tuple[Incoming, Path]], key: KeyLimits) -> None:
        """Publish the chunks and their common sidecar, then commit the rows."""
        row = {name: value for name, value in vars(cache).items() if name != "chunks"}
        spans = [
            {"position": position, "start": chunk.start, "end": chunk.end}
            for position, chunk in enumerate(cache.chunks)
        ]
        described = [self._rows.values(chunk.file) | span for chunk, span in zip(cache.chunks, spans)]
        sidecar = self._sidecars.path("cache", row)
        self._originals.publish(uploads, Sidecar.of("cache", row, described), sidecar)
        try:
            with self._catalog.write() as db:
                self._catalog.add_user(db, cache.owner, cache.created_at)
                insert_row(db, "caches", row | {"split": json.dumps(cache.split)})
                for chunk, span in zip(cache.chunks, spans):
                    self._rows.insert_in(db, chunk.file, key)
                    values = (chunk.file.id, cache.id, span["position"], chunk.start, chunk.end)
                    db.execute("INSERT INTO cache_chunks VALUES (?, ?, ?, ?, ?)", values)
        except BaseException:
            self._originals.remove_files([sidecar, *(path for _, path in uploads)])
            raise

    def _show(self, user: str, row: Row) -> Cache:
        spans = {
            r["id"]: (r["start"], r["end"])
            for r in self._catalog.read("SELECT * FROM cache_chunks WHERE cache = ?", row["id"])
        }
        chunks = [CacheChunk(f, *spans[f.id]) for f in self._rows.of_cache(user, row["id"]) if f.id in spans]
        values = {name: row[name] for name in ("id", "owner", "name", "created_at", "expires_at")}
        return Cache(**values, split=json.loads(row["split"]), chunks=tuple(chunks))
