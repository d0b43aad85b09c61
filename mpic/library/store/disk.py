"""The disk tier: one file a compiled chunk, a row for each, a byte budget, least recently used first out.

``kv/<model, 12 digits>/<hash of owner>/<KVKey.digest>.safetensors``; the digest in the name is whole and covers owner,
content, model and recipe, so the folders only group. A row goes through ``ready`` -> ``evicted | expired | corrupt |
missing`` -> ``ready`` (compiled again); the rows that are not ready have no file and remember why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from sqlite3 import Connection

import torch

from mpic.durable import Files, write_durably
from mpic.errors import CorruptFile, IntegrityError, NotFound, Unavailable
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey
from mpic.kv.file import ChunkFile, encode
from mpic.library.catalog import Catalog
from mpic.library.chunk_rows import ChunkRow, ChunkRows
from mpic.library.limits import Limits
from mpic.library.names import chunk_path
from mpic.library.store.deleted import Deleted
from mpic.library.store.mend import mend
from mpic.library.store.orphans import Orphans
from mpic.library.store.quarantine import Quarantine

log = logging.getLogger(__name__)

REASONS = {"evicted": "evicted", "expired": "expired", "corrupt": "corrupt", "missing": "corrupt"}
"""What ``missing_reason`` says for a row's state."""

COUNTERS = (
    "requested",
    "hits",
    "missing",
    "corrupt",
    "unreadable",
    "saved",
    "evicted",
    "evicted_quota",
    "evicted_budget",
    "evicted_share",
    "bytes_evicted",
    "bytes_read",
    "bytes_written",
)


class DiskChunk:
    """A stored chunk; see ``mpic.engine.base.StoredChunk``.

    Args:
        file: open, with its inputs; None opens the file when it is first read, so that what is only looked up costs
            neither a file descriptor nor a read.
    """

    tier = "disk"

    def __init__(self, store: DiskStore, key: KVKey, file: ChunkFile | None = None) -> None:
        self._store, self._key, self._file = store, key, file

    @property
    def inputs(self) -> ChunkInputs:
        if self._file is None or self._file.inputs is None:
            self._file = self._store._file(self._key)
        return self._file.inputs

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        """See ``StoredChunk.read_layers`` and ``ChunkFile.read_layers``."""
        file = self._file or self._store._file(self._key, inputs=False)
        try:
            yield from file.read_layers(destination)
        except CorruptFile as error:
            self._store.set_aside(self._key, error)
            raise
        finally:
            if file is not self._file:
                file.close()
        self._store._count(bytes_read=destination.nbytes)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class DiskStore:
    """Compiled chunks on the local disk. Thread-safe.

    Args:
        root: the library's folder; files lie in ``kv`` and ``quarantine`` below it.
        clock: seconds since the epoch.
        guard: raises when the library's folder is not there any more.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        limits: Limits,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = root
        self.lock = threading.RLock()  # taken before the catalogue's, never after
        self._guard = guard
        self._catalog, self._rows = catalog, ChunkRows(catalog, clock)
        self._limits = limits
        self._files = files or Files()
        self._clock = clock
        self._saving: dict[KVKey, bool] = {}  # in flight; False once the chunk was deleted
        self._deleted = Deleted()
        self._reserved: Counter[str] = Counter()  # bytes of what is in flight, by owner
        self._quarantine = Quarantine(root / "quarantine", limits.quarantine_files, self._files, clock)
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._tally = threading.Lock()  # guards counters; held for a moment only

    # Reading

    def find(self, keys: Sequence[KVKey]) -> dict[KVKey, DiskChunk]:
        """Those of the chunks that the catalogue says are here, by one query; no file is touched before it is read."""
        self._deleted.ask(keys)
        found = self._rows.present(keys)
        self._rows.touch(found)
        self._count(requested=len(keys), hits=len(found))
        return {key: DiskChunk(self, key) for key in found}

    def open(self, key: KVKey) -> DiskChunk | None:
        """The stored chunk with its inputs verified, or None. A bad file is moved aside and counted, never raised."""
        self._count(requested=1)
        self._deleted.ask([key])
        if not self._rows.present([key]):
            return None
        try:
            file = self._file(key)
        except (NotFound, CorruptFile, OSError):
            return None
        self._rows.touch([key])
        self._count(hits=1)
        return DiskChunk(self, key, file)

    def _file(self, key: KVKey, inputs: bool = True) -> ChunkFile:
        """A chunk's file, open.

        Raises:
            NotFound: it is gone; the catalogue knows now, unless the whole library is gone.
            CorruptFile: it is damaged; it has been moved aside and counted.
            OSError: it cannot be opened just now (too many open files, no permission) and may be good; counted.
        """
        try:
            return ChunkFile(self.path(key), key, self._files, inputs)
        except FileNotFoundError:
            self._count(missing=1)
            try:
                self._rows.mark([key.digest], "missing")
            except Unavailable as error:  # the next reader tries again
                log.warning("%s is gone, and the catalogue cannot say so: %s", self.path(key).name, error)
            raise NotFound(f"chunk {key.chunk} is not stored") from None
        except CorruptFile as error:
            self.set_aside(key, error)
            raise
        except OSError as error:
            log.warning("%s cannot be opened: %s", self.path(key).name, error)
            self._count(unreadable=1)
            raise

    def missing_reason(self, key: KVKey) -> str:
        """Why ``open`` found nothing: ``new | evicted | expired | model_changed | recipe | corrupt``. Counted."""
        reason = self._missing_reason(key)
        self._count(**{f"missed_{reason}": 1})
        return reason

    def pinned(self, owner: str, chunk: ChunkKey) -> bool:
        """Whether a pinned file or reference of this owner holds this content."""
        return self._rows.pinned(owner, chunk)

    # Writing

    def save(self, chunk: ChunkKV) -> None:
        """Make a compiled chunk durable and findable; one that is there, or being saved already, is left as it is.
        One whose content was deleted meanwhile, or since anybody last looked for it, is not kept (``Deleted``).

        Raises:
            StorageFull: the disk is full, or the chunk fits neither the budget nor what others were lent of it. What
                was stored stays readable.
            StorageQuotaExceeded: the chunk does not fit the user's quota.
            LibraryGone: the library's folder is not there any more.
        """
        self._guard()
        key, path = chunk.key, self.path(chunk.key)
        with self.lock:
            if key in self._saving or not self._deleted.allows(key) or self._rows.present([key]):
                return
            self._saving[key] = True
        size = reserved = 0
        try:
            parts = encode(chunk)
            size = sum(map(len, parts))
            self._make_room(key.owner, size)
            reserved = size
            write_durably(self._files, path, parts)
            with self.lock:
                try:
                    if self._saving[key]:
                        self._rows.put(key, str(path.relative_to(self.root)), size, len(chunk.inputs))
                    else:
                        self._remove(path)
                except BaseException:
                    self._remove(path)
                    raise
        finally:
            with self.lock:
                del self._saving[key]
                self._reserved[key.owner] -= reserved
        self._count(saved=1, bytes_written=size)

    def delete(self, key: KVKey) -> None:
        """Forget one compiled chunk, and why it was there."""
        with self.lock:
            if key in self._saving:
                self._saving[key] = False
            self.erase(self._rows.drop_one(key))

    def drop(self, db: Connection, owner: str, chunk: ChunkKey, state: str | None = None) -> list[ChunkRow]:
        """Within a transaction and the store's lock: make all compiled forms of a content invisible. Give the result
        to ``erase`` after the transaction, still under the lock.

        Args:
            state: remember them as gone for this reason (``expired``); None forgets them.
        """
        unfinished = [key for key in self._saving if (key.owner, key.chunk) == (owner, chunk)]
        self._saving.update(dict.fromkeys(unfinished, False))
        self._deleted.add(owner, chunk)
        paths = [str(self.path(key).relative_to(self.root)) for key in unfinished]
        return self._rows.drop(db, owner, chunk, state, paths)

    def erase(self, rows: Iterable[ChunkRow]) -> None:
        """Remove the files of rows that are gone, in the quarantine too, durably. Under the store's lock."""
        rows = list(rows)
        self._quarantine.purge({Path(row.path).name for row in rows})
        for row in rows:
            self._remove(self.root / row.path)
        for folder in {(self.root / row.path).parent for row in rows}:
            with suppress(
                OSError
            ):  # the catalogue says that they are deleted, and the next start removes them
                self._files.sync_folder(folder)

    def flush(self) -> None:
        """Write down when chunks were last used (kept in memory between writes)."""
        self._rows.flush()

    def path(self, key: KVKey) -> Path:
        """Where a chunk's file lies, if it does."""
        return self.root / chunk_path(key)

    # Keeping house

    def reconcile(self, orphans: Orphans) -> Counter[str]:
        """Make files and rows agree, at start-up; see ``mend``."""
        done = mend(self.root, self._rows, self._catalog, self._quarantine, self._files, orphans)
        self._rows.forget_gone(before=self._clock() - self._limits.tombstone_seconds)
        self._count(missing=done["missing_chunks"])
        return done

    def stats(self) -> dict[str, int]:
        """Counters since the start (``hits`` over ``requested``, bytes, evictions) and what is stored now."""
        count, size = self._rows.totals()
        with self._tally:
            return {**self._counters, "chunks": count, "bytes": size, "budget": self._limits.disk_bytes}

    def tiers(self) -> dict[str, dict[str, int]]:
        """Counters of every tier below the device, nearest first."""
        return {self.name: self.stats()}

    def check(self) -> None:
        """Every ready row has its file, of its size. Raises IntegrityError. More bytes than the budget are no damage:
        it may have been made smaller, and room is made at the next save."""
        with self.lock:
            for row in self._rows.ready():
                path = self.root / row.path
                if not path.is_file() or path.stat().st_size != row.bytes:
                    raise IntegrityError(f"{path.name} is not there with the {row.bytes} bytes of its row")
            self._rows.check_usage()

    # Inside

    def _missing_reason(self, key: KVKey) -> str:
        state = self._rows.state(key)
        if state is not None:
            return REASONS.get(state, "new")
        models = self._rows.models(key.owner, key.chunk)
        if key.model in models:
            return "recipe"
        return "model_changed" if models else "new"

    def _make_room(self, owner: str, size: int) -> None:
        """Reserve bytes within budget and quota, evicting what must go (``shares``)."""
        with self.lock:
            victims = self._rows.evict(owner, size, self._reserved, self._limits)
            self._reserved[owner] += size
            for victim, _ in victims:
                self._remove(self.root / victim.path)
        for victim, why in victims:
            self._count(**{"evicted": 1, f"evicted_{why}": 1, "bytes_evicted": victim.bytes})

    def set_aside(self, key: KVKey, error: CorruptFile) -> None:
        """Move a bad file to the quarantine and remember that its chunk was corrupt."""
        self._count(corrupt=1)
        with self.lock:
            if key in self._saving:  # it is being replaced already
                return
            log.warning("%s; it is moved to quarantine/ and will be compiled again", error)
            try:
                self._rows.mark([key.digest], "corrupt")
            except Unavailable as unavailable:  # the next reader tries again
                log.warning("the catalogue cannot say so: %s", unavailable)
            else:
                self._quarantine.take(self.path(key))

    def _remove(self, path: Path) -> None:
        """Remove a file that nothing refers to; one that cannot be removed is collected at the next start."""
        with suppress(OSError):
            self._files.remove(path)

    def _count(self, **by: int) -> None:
        with self._tally:
            self._counters.update(by)
