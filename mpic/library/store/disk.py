"""The disk tier: one file a compiled chunk, a row for each, a byte budget, least recently used first out.

``kv/<model, 12 digits>/<hash of owner>/<KVKey.digest>.safetensors``; the digest in the name is whole and covers owner,
content, model and recipe, so the folders only group. A row goes through ``ready`` -> ``evicted | expired | corrupt |
missing`` -> ``ready`` (compiled again); the rows that are not ready have no file and remember why.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from sqlite3 import Connection, Row

import torch

from mpic.durable import Files, write_durably
from mpic.errors import CorruptFile, IntegrityError, StorageFull
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey, digest
from mpic.kv.file import ChunkFile, encode
from mpic.library.catalog import Catalog
from mpic.library.limits import Limits

log = logging.getLogger(__name__)

REASONS = {"evicted": "evicted", "expired": "expired", "corrupt": "corrupt", "missing": "corrupt"}
"""What ``missing_reason`` says for a row's state."""

MAX_TOUCHED = 4096
"""Uses kept in memory before they are written down."""


def owner_folder(owner: str) -> str:
    """Folder name of a user's files; the user's id itself never reaches the file system."""
    return digest("owner", owner)


class DiskChunk:
    """A stored chunk, open for reading; see ``mpic.engine.base.StoredChunk``."""

    def __init__(self, store: DiskStore, file: ChunkFile) -> None:
        self._store = store
        self._file = file
        self.inputs: ChunkInputs = file.inputs

    def read_into(self, destination: torch.Tensor, ready: Callable[[int], None] | None = None) -> None:
        """Fill ``destination [layers, 2, kv_heads, n, head_dim]``; ``ready(layer)`` is called layer by layer.

        Raises:
            CorruptFile: a checksum or the size does not match. The file has been moved aside and counted.
        """
        try:
            self._file.read_into(destination, ready)
        except CorruptFile as error:
            self._store._set_aside(self._file.key, error)
            raise
        self._store._count(bytes_read=destination.nbytes)

    def close(self) -> None:
        self._file.close()


class DiskStore:
    """Compiled chunks on the local disk. Thread-safe.

    Args:
        root: the library's folder; files lie in ``kv`` and ``quarantine`` below it.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        limits: Limits,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root = root
        self.counters: Counter[str] = Counter()
        self._catalog = catalog
        self._limits = limits
        self._files = files or Files()
        self._clock = clock
        self.lock = threading.RLock()  # taken before the catalogue's, never after
        self._saving: dict[KVKey, bool] = {}  # in flight; False once the chunk was deleted
        self._reserved = 0
        self._touched: dict[str, float] = {}

    # Reading

    def open(self, key: KVKey) -> DiskChunk | None:
        """The stored chunk with its inputs verified, or None. A bad file is moved aside and counted, never raised."""
        self._count(requested=1)
        row = self._row(key)
        if row is None:
            return None
        try:
            file = ChunkFile(self.root / row["path"], key, self._files)
        except FileNotFoundError:
            self._mark(key.digest, "missing")
            self._count(missing=1)
            return None
        except CorruptFile as error:
            self._set_aside(key, error)
            return None
        self._count(hits=1)
        with self.lock:
            self._touched[key.digest] = self._clock()
            if len(self._touched) > MAX_TOUCHED:
                self.flush()
        return DiskChunk(self, file)

    def missing_reason(self, key: KVKey) -> str:
        """Why ``open`` found nothing: ``new | evicted | expired | model_changed | recipe | corrupt``."""
        rows = self._catalog.read(
            "SELECT key, model, state FROM chunks WHERE owner = ? AND kind = ? AND digest = ?",
            key.owner,
            key.chunk.kind,
            key.chunk.digest,
        )
        for row in rows:
            if row["key"] == key.digest and row["state"] in REASONS:
                return REASONS[row["state"]]
        if any(row["model"] == key.model for row in rows):
            return "recipe"
        return "model_changed" if rows else "new"

    # Writing

    def save(self, chunk: ChunkKV) -> None:
        """Make a compiled chunk durable and findable; one that is there, or being saved already, is left as it is.

        Raises:
            StorageFull: the disk is full, or the chunk is larger than the budget. What was stored stays readable.
        """
        key, path = chunk.key, self.path(chunk.key)
        with self.lock:
            if key in self._saving or self._row(key) is not None:
                return
            self._saving[key] = True
        reserved = 0
        try:
            parts = encode(chunk)
            size = sum(map(len, parts))
            self._make_room(size)
            reserved = size
            write_durably(self._files, path, parts)
            with self.lock:
                if not self._saving[key]:  # deleted meanwhile
                    self._remove(path)
                    return
                try:
                    self._commit(key, path, size, len(chunk.inputs))
                except BaseException:
                    self._remove(path)
                    raise
        finally:
            with self.lock:
                del self._saving[key]
                self._reserved -= reserved
        self._count(saved=1, bytes_written=size)

    def delete(self, key: KVKey) -> None:
        """Forget one compiled chunk, and why it was there."""
        with self.lock:
            if key in self._saving:
                self._saving[key] = False
            with self._catalog.write() as db:
                rows = db.execute("SELECT key, path FROM chunks WHERE key = ?", (key.digest,)).fetchall()
                db.execute("DELETE FROM chunks WHERE key = ?", (key.digest,))
            self.erase(rows)

    def delete_rows(self, db: Connection, owner: str, chunk: ChunkKey, state: str | None = None) -> list[Row]:
        """Within a transaction and the store's lock, make all compiled forms of a chunk invisible. Give the result to
        ``erase`` after the transaction, still under the lock.

        Args:
            state: keep the rows in this state (``expired``), so that it is known why they are gone; None drops them.
        """
        for key in self._saving:
            if key.owner == owner and key.chunk == chunk:
                self._saving[key] = False
        which = "owner = ? AND kind = ? AND digest = ?"
        values = (owner, chunk.kind, chunk.digest)
        rows = db.execute(f"SELECT key, path FROM chunks WHERE {which}", values).fetchall()
        if state is None:
            db.execute(f"DELETE FROM chunks WHERE {which}", values)
        else:
            db.execute(
                f"UPDATE chunks SET state = ?, last_used = ? WHERE {which}", (state, self._clock(), *values)
            )
        return rows

    def erase(self, rows: Iterable[Row]) -> None:
        """Remove the files of rows that are gone, in the quarantine too. Under the store's lock."""
        names = {Path(row["path"]).name for row in rows}
        folder = self.root / "quarantine"
        for name in os.listdir(folder) if names and folder.is_dir() else ():
            if name.partition("@")[0] in names:
                self._remove(folder / name)
        self._remove_files(rows)

    def flush(self) -> None:
        """Write down when chunks were last used (kept in memory between writes)."""
        with self.lock, self._catalog.write() as db:
            self._flush(db)

    def path(self, key: KVKey) -> Path:
        """Where a chunk's file lies, if it does."""
        return self.root / "kv" / key.model[:12] / owner_folder(key.owner) / f"{key.digest}.safetensors"

    # Keeping house

    def reconcile(self) -> dict[str, int]:
        """Make files and rows agree, at start-up: rows without their file become ``missing``, files without a row go.

        Returns:
            How many of each: ``missing``, ``orphans``.
        """
        sizes = {}
        for folder, _, names in os.walk(self.root / "kv"):
            for name in names:
                path = Path(folder, name)
                sizes[str(path.relative_to(self.root))] = path.stat().st_size
        lost = []
        for row in self._catalog.read("SELECT key, path, bytes FROM chunks WHERE state = 'ready'"):
            if sizes.get(row["path"]) == row["bytes"]:
                del sizes[row["path"]]
            else:
                lost.append((row["key"],))
        now = self._clock()
        with self.lock, self._catalog.write() as db:
            db.executemany("UPDATE chunks SET state = 'missing' WHERE key = ?", lost)
            oldest = now - self._limits.tombstone_seconds
            db.execute("DELETE FROM chunks WHERE state != 'ready' AND last_used < ?", (oldest,))
        for name in sizes:
            self._remove(self.root / name)
        self._count(missing=len(lost), orphans=len(sizes))
        return {"missing": len(lost), "orphans": len(sizes)}

    def stats(self) -> dict[str, int]:
        """Counters since the start (``hits`` over ``requested``, bytes, evictions) and what is stored now."""
        row = self._catalog.one("SELECT COUNT(*) AS n, SUM(bytes) AS size FROM chunks WHERE state = 'ready'")
        assert row is not None
        with self.lock:
            counters = dict(self.counters)
        gauges = {"chunks": row["n"], "bytes": row["size"] or 0, "budget": self._limits.disk_bytes}
        names = ("requested", "hits", "evicted", "corrupt", "missing", "saved", "bytes_read", "bytes_written")
        return {**dict.fromkeys(names, 0), **counters, **gauges}

    def check(self) -> None:
        """Every ready row has its file, of its size, and the budget holds. Raises IntegrityError."""
        with self.lock:
            rows = self._catalog.read("SELECT path, bytes FROM chunks WHERE state = 'ready'")
            for row in rows:
                path = self.root / row["path"]
                if not path.is_file() or path.stat().st_size != row["bytes"]:
                    raise IntegrityError(
                        f"{path.name} is catalogued with {row['bytes']} bytes and is not there so"
                    )
            used = sum(row["bytes"] for row in rows)
            if used > self._limits.disk_bytes:
                raise IntegrityError(
                    f"{used} bytes of chunks on disk, the budget is {self._limits.disk_bytes}"
                )

    def _make_room(self, size: int) -> None:
        """Reserve bytes within the budget, evicting the least recently used chunks."""
        budget = self._limits.disk_bytes
        with self.lock:
            if size + self._reserved > budget:
                raise StorageFull(
                    f"the chunk takes {size} bytes, the budget of the disk is {budget}", budget=budget
                )
            with self._catalog.write() as db:
                self._flush(db)
                used = db.execute("SELECT SUM(bytes) FROM chunks WHERE state = 'ready'").fetchone()[0] or 0
                excess = used + self._reserved + size - budget
                victims = self._victims(db, excess) if excess > 0 else []
                db.executemany(
                    "UPDATE chunks SET state = 'evicted' WHERE key = ?", [(v["key"],) for v in victims]
                )
            self._reserved += size
            self._remove_files(victims)
        self._count(evicted=len(victims))

    def _victims(self, db: Connection, excess: int) -> list[Row]:
        """The chunks to evict so that ``excess`` bytes come free."""
        victims = []
        ready = (
            "SELECT key, path, bytes FROM chunks WHERE tier = 'disk' AND state = 'ready' ORDER BY last_used"
        )
        for row in db.execute(ready):
            if excess <= 0:
                break
            victims.append(row)
            excess -= row["bytes"]
        return victims

    def _commit(self, key: KVKey, path: Path, size: int, tokens: int) -> None:
        now = self._clock()
        values = {
            "key": key.digest,
            "owner": key.owner,
            "kind": key.chunk.kind,
            "digest": key.chunk.digest,
            "model": key.model,
            "recipe": json.dumps(asdict(key.recipe), sort_keys=True),
            "path": str(path.relative_to(self.root)),
            "bytes": size,
            "tokens": tokens,
            "state": "ready",
            "created_at": now,
            "last_used": now,
        }
        columns, slots = ", ".join(values), ", ".join(f":{name}" for name in values)
        with self.lock, self._catalog.write() as db:
            self._catalog.add_user(db, key.owner, now)
            db.execute(f"INSERT OR REPLACE INTO chunks ({columns}) VALUES ({slots})", values)

    def _flush(self, db: Connection) -> None:
        used = [(when, key) for key, when in self._touched.items()]
        db.executemany("UPDATE chunks SET last_used = ? WHERE key = ?", used)
        self._touched.clear()

    def _mark(self, key: str, state: str) -> None:
        with self.lock, self._catalog.write() as db:
            db.execute("UPDATE chunks SET state = ? WHERE key = ? AND state = 'ready'", (state, key))

    def _set_aside(self, key: KVKey, error: CorruptFile) -> None:
        """Move a bad file to the quarantine (bounded) and remember that its chunk was corrupt."""
        path, folder = self.path(key), self.root / "quarantine"
        with self.lock:
            self._count(corrupt=1)
            if key in self._saving:  # it is being replaced
                return
            self._mark(key.digest, "corrupt")
            log.warning("%s; it is moved to quarantine/ and will be compiled again", error)
            try:
                self._files.make_folder(folder)
                self._files.rename(path, folder / f"{path.name}@{self._clock():.6f}")
            except OSError:
                self._remove(path)
                return
            aside = sorted(folder.iterdir(), key=lambda p: p.name.partition("@")[2])
            for old in aside[: -self._limits.quarantine_files]:
                self._remove(old)

    def _row(self, key: KVKey) -> Row | None:
        return self._catalog.one("SELECT path FROM chunks WHERE key = ? AND state = 'ready'", key.digest)

    def _remove_files(self, rows: Iterable[Row]) -> None:
        """Remove the files of rows that are not ready, unless they are just being written again."""
        saving = {key.digest for key in self._saving}
        for row in rows:
            if row["key"] not in saving:
                self._remove(self.root / row["path"])

    def _remove(self, path: Path) -> None:
        """Remove a file that nothing refers to; one that cannot be removed is collected at the next start."""
        with suppress(OSError):
            self._files.remove(path)

    def _count(self, **by: int) -> None:
        with self.lock:
            self.counters.update(by)
