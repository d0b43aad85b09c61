"""The disk tier: a file and a row for each compiled chunk, within a byte budget; the least recently used are evicted.

Files are ``kv/<model, 12 digits>/<hash of owner>/<KVKey.digest>.safetensors``. The digest covers owner, content, model
and recipe, so the folders only group. The state of a row goes ``ready`` -> ``evicted | expired | corrupt | missing`` ->
``ready`` (compiled again); rows that are not ready have no file and tell why.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from stat import S_ISREG

import torch

from mpic.durable import FileSystem, write_durably
from mpic.errors import CorruptFile, IntegrityError, MPICError, NotFound, OutOfMemory
from mpic.file_status import status_of
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey
from mpic.kv.file import ChunkFile, encode
from mpic.kv.parts import LayerRange, Piece, PieceReader
from mpic.library.catalog.database import OWED, Catalog
from mpic.library.folder.layout import chunk_path, scan
from mpic.library.limits import Limits
from mpic.library.store.chunk_rows import ChunkRow, ChunkRows, DurableChunk
from mpic.library.store.tombstones import DeletedContents
from mpic.memory import is_exhaustion

log = logging.getLogger(__name__)

REASONS = {"evicted": "evicted", "expired": "expired", "corrupt": "corrupt", "missing": "corrupt"}
"""The result of ``missing_reason`` for a row's state."""

COUNTERS = (
    *("requested", "hits", "missing", "corrupt", "unreadable", "saved"),
    *("evicted", "evicted_quota", "evicted_budget", "evicted_share", "expired"),
    *("bytes_evicted", "bytes_read", "bytes_written"),
)


class DiskChunk:
    """A stored chunk; see ``mpic.kv.store.StoredChunk``.

    Its file is opened by the first read, so that a look-up costs neither a file descriptor nor a read.

    Args:
        tokens: of the chunk, as the catalogue has it.
    """

    tier = "disk"

    def __init__(self, store: DiskStore, key: KVKey, tokens: int) -> None:
        self._store, self._key, self._tokens = store, key, tokens
        self._file: ChunkFile | None = None

    @property
    def inputs(self) -> ChunkInputs:
        if self._file is None or self._file.inputs is None:
            self._file = self._store._file(self._key, self._tokens)
        assert self._file.inputs is not None
        return self._file.inputs

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        """Read layer after layer; see ``StoredChunk.read_layers`` and ``ChunkFile.read_layers``."""
        file = self._file or self._store._file(self._key, self._tokens, inputs=False)
        try:
            yield from file.read_layers(destination)
        except (CorruptFile, OSError) as error:
            self._store.failed(self._key, file, error)
            raise
        finally:
            if file is not self._file:
                file.close()
        self._store._count(bytes_read=destination.nbytes)

    def in_parts(self, most: int) -> DiskParts:
        """Open the file to be read in pieces of at most ``most`` bytes; raise what ``read_layers`` does."""
        own = self._file is None
        file = self._file or self._store._file(self._key, self._tokens, inputs=False)
        return DiskParts(self._store, self._key, file, own, most)

    def read_ahead(self) -> None:
        """Begin reading the file; see ``StoredChunk``."""
        self._store._filesystem.read_ahead(self._store.path(self._key))

    def refuse(self, error: CorruptFile) -> None:
        """Remove the file that was read; see ``StoredChunk``."""
        self._store.reject(self._key, error, self._file)

    def close(self) -> None:
        """Close the file; reading the chunk opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class DiskParts:
    """A chunk that several threads read at the same time; see ``mpic.kv.store.PartedChunk``.

    Args:
        own: ``close`` closes the file.
        most: bytes of the largest piece.
    """

    def __init__(self, store: DiskStore, key: KVKey, file: ChunkFile, own: bool, most: int) -> None:
        self._store, self._key, self._file, self._own = store, key, file, own
        self._told = threading.Lock()  # taken for good with the first error
        self.shape, self.dtype = file.shape.extent(file.slots), file.dtype
        self.parts = file.parts(most)

    def read_part(self, part: LayerRange) -> Iterator[tuple[Piece, PieceReader]]:
        for piece, read in self._file.read_part(part):
            yield piece, partial(self._read, read)

    def _read(self, read: PieceReader, memory: torch.Tensor) -> None:
        try:
            read(memory)
        except (CorruptFile, OSError) as error:
            if self._told.acquire(blocking=False):
                self._store.failed(self._key, self._file, error)
            raise
        self._store._count(bytes_read=memory.nbytes)

    def close(self) -> None:
        if self._own:
            self._file.close()


class DiskStore:
    """Compiled chunks on the local disk. Thread-safe.

    Args:
        root: the library's folder; files are in ``kv`` below it.
        clock: function that returns seconds since the epoch.
        guard: raises when the library's folder is not there any more.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        limits: Limits,
        filesystem: FileSystem | None = None,
        clock: Callable[[], float] = time.time,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = root
        self.lock = threading.RLock()  # taken before the catalogue's, never after
        self._guard = guard
        self._catalog, self._rows = catalog, ChunkRows(catalog, clock)
        self.touch, self.flush, self.pinned = self._rows.touch, self._rows.flush, self._rows.pinned
        self.forget_gone = self._rows.forget_gone
        self._limits = limits
        self._filesystem = filesystem or FileSystem()
        self._clock = clock
        self._saving: dict[KVKey, bool] = {}  # chunks being saved; False once the chunk was deleted
        self._unread: set[KVKey] = set()  # stored chunks that could not be read
        self._deleted = DeletedContents()
        self._reserved: Counter[str] = Counter()  # bytes of the chunks being saved, by owner
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._tally = threading.Lock()  # guards _counters; held for a moment only

    # Reading

    def find(self, keys: Sequence[KVKey]) -> dict[KVKey, DiskChunk]:
        """Return the chunks that the catalogue has, by a single query; a file is opened only when it is read."""
        self._deleted.look_up(keys)
        found = self._rows.present(keys)
        self._rows.touch(found)
        self._count(requested=len(keys), hits=len(found))
        return {key: DiskChunk(self, key, tokens) for key, tokens in found.items()}

    def open(self, key: KVKey) -> DiskChunk | None:
        """Return the stored chunk with its inputs verified, or None. A bad file is removed and counted."""
        self._count(requested=1)
        self._deleted.look_up([key])
        found = self._rows.present([key])
        if not found:
            return None
        stored = DiskChunk(self, key, found[key])
        try:
            _ = stored.inputs
        except (NotFound, CorruptFile, OutOfMemory, OSError):
            return None
        self._rows.touch([key])
        self._count(hits=1)
        return stored

    def _file(self, key: KVKey, tokens: int, inputs: bool = True) -> ChunkFile:
        """Open a chunk's file, which must have so many tokens.

        Raises:
            NotFound: it is gone; its row is marked, unless the whole library is gone.
            CorruptFile: it is damaged, or another one; it has been removed and counted.
            OSError: it cannot be read now (too many open files, no permission, a disk that does not answer), but may be
                intact; this is counted.
            OutOfMemory: there is no memory for its inputs now; this is counted too.
        """
        path = self.path(key)
        try:
            file = ChunkFile(path, key, self._filesystem, inputs, partial(self.reject, key))
        except FileNotFoundError:
            self._gone(key, path)
            raise NotFound(f"chunk {key.chunk} is not stored") from None
        except (OSError, OutOfMemory) as error:
            self._unreadable(key, error)
            raise
        if file.tokens != tokens:
            error = CorruptFile(f"{path.name} has {file.tokens} tokens, its row says {tokens}")
            self.reject(key, error, file)
            file.close()
            raise error
        return file

    def missing_reason(self, key: KVKey) -> str:
        """Return and count the reason why ``open`` found nothing: ``new | evicted | expired | model_changed | recipe
        | corrupt``."""
        reason = self._missing_reason(key)
        self._count(**{f"missed_{reason}": 1})
        return reason

    # Writing

    def save(self, chunk: ChunkKV) -> None:
        """Store a compiled chunk durably, unless it is stored or being saved already. A stored file that could not be
        read is replaced. The chunk is not kept if its content was deleted meanwhile, or after the last look-up
        (``DeletedContents``).

        Raises:
            StorageFull: the disk is full, or no room can be made for the chunk (``shares``). Stored chunks stay
                readable.
            StorageQuotaExceeded: the chunk does not fit the user's quota.
            LibraryGone: the library's folder is not there any more.
        """
        self._guard()
        key, path = chunk.key, self.path(chunk.key)
        with self.lock:
            if key in self._saving or not self._deleted.allows(key):
                return
            if key not in self._unread and self._rows.present([key]):
                return
            self._saving[key] = True
        size = reserved = 0
        try:
            parts = encode(chunk)
            size = sum(map(len, parts))
            self._make_room(key.owner, size)
            reserved = size
            write_durably(self._filesystem, path, parts)
            with self.lock:
                try:
                    if self._saving[key]:
                        name = str(path.relative_to(self.root))
                        self._rows.put_all([DurableChunk(key, name, size, len(chunk.inputs))])
                        self._unread.discard(key)
                        self._reserved[key.owner] -= reserved  # its bytes are those of its row from now on
                        reserved = 0
                    else:
                        self._filesystem.try_remove(path)
                except BaseException:
                    self._filesystem.try_remove(path)
                    raise
        finally:
            with self.lock:
                del self._saving[key]
                self._reserved[key.owner] -= reserved
        self._count(saved=1, bytes_written=size)

    def drop(self, db: Connection, owner: str, chunk: ChunkKey, state: str | None = None) -> list[ChunkRow]:
        """Make all compiled forms of a content invisible, within a transaction and the store's lock. Pass the result
        to ``erase`` after the transaction, still under the lock.

        Args:
            state: keep the rows with this reason (``expired``); None deletes them.
        """
        unfinished = [key for key in self._saving if (key.owner, key.chunk) == (owner, chunk)]
        self._saving.update(dict.fromkeys(unfinished, False))
        self._deleted.add(owner, chunk)
        paths = [str(self.path(key).relative_to(self.root)) for key in unfinished]
        return self._rows.drop(db, owner, chunk, state, paths)

    def owe(self, db: Connection, contents: Iterable[str]) -> None:
        """Note deletions, within the transaction that makes them, of which a remote store has yet to be told."""
        self._catalog.add_tombstones(db, [OWED + content for content in contents], self._clock())

    def owed(self) -> list[str]:
        """Return the deletions that ``owe`` has noted and nobody has settled."""
        rows = self._catalog.read("SELECT path FROM deleted WHERE path LIKE ?", f"{OWED}%")
        return [row["path"].removeprefix(OWED) for row in rows]

    def settle(self, contents: Iterable[str]) -> None:
        """Forget deletions of which the store has been told."""
        with self._catalog.write() as db:
            db.executemany("DELETE FROM deleted WHERE path = ?", [(OWED + content,) for content in contents])

    def erase(self, rows: Iterable[ChunkRow]) -> None:
        """Remove the files of these rows durably. Call it under the store's lock."""
        rows = list(rows)
        for row in rows:
            self._filesystem.try_remove(self.root / row.path)
        for folder in {(self.root / row.path).parent for row in rows}:
            # the catalogue says that they are deleted, and the next start removes them
            with suppress(OSError):
                self._filesystem.sync_folder(folder)

    def expire(self, default: int) -> list[tuple[str, ChunkKey]]:
        """Remove the chunks that nobody has used for as long as they are kept (``ChunkRows.expire``), and return the
        contents of which none is left, with their owners."""
        with self.lock:
            gone = self._rows.expire(default)
            for one in gone:
                self._filesystem.try_remove(self.root / one.row.path)
        self._count(expired=len(gone))
        return list(dict.fromkeys((one.owner, one.content) for one in gone if one.last))

    def path(self, key: KVKey) -> Path:
        """Return the path of a chunk's file, whether or not it exists."""
        return self.root / chunk_path(key)

    # Housekeeping

    def reconcile(self) -> Counter[str]:
        """Make files and rows agree, at start-up. A file that the catalogue knows to be gone (evicted, expired,
        deleted) was left by a crash and is removed; one that it does not know gets a row, if its header is intact.

        Returns:
            How many of each: ``missing_chunks`` have no file any more (one of the wrong size is removed),
            ``found_chunks`` have a row again, ``leftovers`` were removed; left alone were ``unlisted_files``, whose
            header cannot be used, and ``unknown``, which have no name of this program.
        """
        found = scan(self.root, "kv")
        for path in found.leftovers:  # before anything is written: they may be what fills the disk
            self._filesystem.try_remove(self.root / path)
        lost, revived, gone = [], [], []
        for row, state in self._rows.every():
            size = found.chunks.pop(row.path, None)
            if state == "ready" and size != row.bytes:
                lost.append(row.key)
                if size is not None:
                    gone.append(row.path)
            elif state == "missing" and size == row.bytes:
                revived.append(row.key)
            elif state != "ready" and size is not None:
                gone.append(row.path)
        self._rows.mark(lost, "missing")
        self._rows.mark(revived, "ready", was="missing")
        deleted = self._catalog.tombstones(found.chunks)
        unlisted = [path for path in found.chunks if path not in deleted]
        adopted = self.adopt(unlisted, lambda path, why: log.warning("%s %s", path, why))
        for path in (*gone, *deleted):
            self._filesystem.try_remove(self.root / path)
        self._count(missing=len(lost))
        removed = len(found.leftovers) + len(gone) + len(deleted)
        done = Counter(missing_chunks=len(lost), found_chunks=len(revived) + adopted, leftovers=removed)
        return done + Counter(unlisted_files=len(unlisted) - adopted, unknown=len(found.unknown))

    def adopt(self, paths: Iterable[str], report: Callable[[str, str], None]) -> int:
        """Make rows of chunk files whose headers are intact, and return how many. Their layers are verified when they
        are read, as those of every chunk.

        Args:
            paths: relative to the library's root.
            report: called with the others, and what is wrong with them.
        """
        found = []
        for path in sorted(paths):
            try:
                with closing(ChunkFile(self.root / path, files=self._filesystem)) as file:
                    if str(chunk_path(file.key)) == path:
                        found.append(DurableChunk(file.key, path, file.bytes, file.tokens))
                    else:
                        report(
                            path, "holds another chunk than its name says; it is compiled again on next use"
                        )
            except CorruptFile:
                report(path, "is damaged; it is compiled again on next use")
            except (OSError, OutOfMemory) as error:
                report(path, f"cannot be read ({error}); it is compiled again on next use")
        if found:
            self._rows.put_all(found)
        return len(found)

    def stats(self) -> dict[str, int]:
        """Return counters since the start (``hits`` of ``requested``, bytes, evictions) and the number and bytes of
        stored chunks."""
        count, size = self._rows.totals()
        with self._tally:
            return {**self._counters, "chunks": count, "bytes": size, "budget": self._limits.disk_bytes}

    def tiers(self) -> dict[str, dict[str, int]]:
        """Return the counters of every tier below the device, nearest first."""
        return {self.name: self.stats()}

    def check(self) -> None:
        """Check that every ready row has a file of its size. Exceeding the budget is not an error: the budget may have
        been reduced, and room is made at the next save.

        Raises:
            IntegrityError: a file is missing or has another size, or the recorded usage is wrong.
        """
        with self.lock:
            wrong = [row for row in self._rows.ready() if not self._has_file(row)]
            if wrong:  # the lock is this process's own: a server may have evicted or replaced them meanwhile
                ready = set(self._rows.ready())
                wrong = [row for row in wrong if row in ready and not self._has_file(row)]
            for row in wrong:
                raise IntegrityError(
                    f"{Path(row.path).name} is missing, or does not have the {row.bytes} bytes of its row"
                )
            self._rows.check_usage()

    # Inside

    def _has_file(self, row: ChunkRow) -> bool:
        """Return whether the file of a row is there and has its size."""
        found = status_of(self.root / row.path)
        return found is not None and S_ISREG(found.st_mode) and found.st_size == row.bytes

    def _missing_reason(self, key: KVKey) -> str:
        state = self._rows.state(key)
        if state is not None:
            return REASONS.get(state, "new")
        models = self._rows.models(key.owner, key.chunk)
        if key.model in models:
            return "recipe"
        return "model_changed" if models else "new"

    def _make_room(self, owner: str, size: int) -> None:
        """Reserve bytes within budget and quota, and evict chunks for them (``shares``)."""
        with self.lock:
            victims = self._rows.evict(owner, size, self._reserved, self._limits)
            self._reserved[owner] += size
            for victim, _ in victims:
                self._filesystem.try_remove(self.root / victim.path)
        for victim, why in victims:
            self._count(**{"evicted": 1, f"evicted_{why}": 1, "bytes_evicted": victim.bytes})

    def _gone(self, key: KVKey, path: Path) -> None:
        """Mark a chunk as missing whose file was not found, unless it has been saved again meanwhile."""
        self._count(missing=1)
        try:
            with self.lock:  # a save publishes its row under it
                if key not in self._saving and not os.path.lexists(path):
                    self._rows.mark([key.digest], "missing")
        except MPICError as error:  # such as a full disk; the next reader tries again
            log.warning("%s is gone, but its row cannot be changed: %s", path.name, error)

    def failed(self, key: KVKey, file: ChunkFile, error: CorruptFile | OSError) -> None:
        """Handle an error of reading the layers of an open file."""
        if isinstance(error, CorruptFile):
            self.reject(key, error, file)
        else:
            self._unreadable(key, error)

    def _unreadable(self, key: KVKey, error: OSError | OutOfMemory) -> None:
        """Count a file that cannot be read now. It stays where it is, since it may be intact; but if the chunk is
        compiled again, the next save replaces it."""
        log.warning("%s cannot be read: %s", self.path(key).name, error)
        self._count(unreadable=1)
        if not is_exhaustion(error) and not isinstance(error, OutOfMemory):
            with self.lock:
                self._unread.add(key)

    def reject(self, key: KVKey, error: CorruptFile, file: ChunkFile | None = None) -> None:
        """Remove a bad file and mark its chunk as corrupt.

        Args:
            file: the file that was read, still open; nothing is removed if its path names another one now. None: the
                file at the path.
        """
        self._count(corrupt=1)
        with self.lock:
            if key in self._saving or (file is not None and not file.named()):  # it was or is being replaced
                return
            log.warning("%s; it is removed and will be compiled again", error)
            try:
                self._rows.mark([key.digest], "corrupt")
            except MPICError as refusal:  # such as a full disk; the next reader tries again
                log.warning("its row cannot be changed: %s", refusal)
            else:
                self._filesystem.try_remove(self.path(key))

    def _count(self, **by: int) -> None:
        with self._tally:
            self._counters.update(by)
