"""The remote tier: chunk files in a store that several servers share, as caches of each server's disk.

::

    chunks/<hash of owner>/<kind>-<digest>/<KVKey.digest>.safetensors    a chunk, the file of ``mpic.kv.file``
    chunks/<hash of owner>/<kind>-<digest>/<KVKey.digest>.damaged        one that was not what its checksums say
    deleted/<hash of owner>/<kind>-<digest>                              a tombstone: which library deleted the content

Nobody waits for an upload: a thread copies files from the disk, one at a time, also those that are found there later. A
deletion is noted in the catalogue until the store has been told. Its tombstone stays: another server that has the
content keeps it to itself, until the library that deleted it stores it again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from mpic.errors import CorruptFile, MPICError, NotFound
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey
from mpic.kv.file import ChunkFile
from mpic.library.folder.layout import owner_folder
from mpic.library.store.disk import DiskStore
from mpic.library.store.objects import PAUSE, ObjectReader, Objects, StoreUnavailable
from mpic.library.store.tombstones import DeletedContents

CHUNKS, DELETED = "chunks", "deleted"
SUFFIX, DAMAGED = ".safetensors", ".damaged"
QUEUE = 1024
"""Uploads that may wait. One that finds no room is made when the chunk is next read from the disk."""
KNOWN = 1 << 16
"""Objects that are remembered to be in the store."""
STALE = 60.0
"""Seconds after which a chunk is loaded although the bandwidth speaks against it, which measures that again."""
COUNTERS = ("requested", "hits", "missing", "slower", "damaged", "failed_reads", "bytes_read")
COUNTERS += ("saved", "bytes_written", "refused", "kept_away", "deleted", "evicted")

log = logging.getLogger(__name__)


def content_of(owner: str, chunk: ChunkKey) -> str:
    """Return the name of a content in the store, which all its forms begin with."""
    return f"{owner_folder(owner)}/{chunk.kind}-{chunk.digest}"


def object_of(key: KVKey) -> str:
    """Return the name of a chunk's object."""
    return f"{CHUNKS}/{content_of(key.owner, key.chunk)}/{key.digest}{SUFFIX}"


class RemoteChunk:
    """A chunk in the store, whose header was read; see ``mpic.kv.store.StoredChunk``."""

    tier = "remote"

    def __init__(self, store: RemoteTier, key: KVKey, file: ChunkFile, reader: ObjectReader) -> None:
        self._store, self._key, self._file, self._reader = store, key, file, reader
        self._inputs: ChunkInputs | None = None

    @property
    def inputs(self) -> ChunkInputs:
        if self._inputs is None:
            with self._store.reading(self._key, self._reader):
                file = ChunkFile(self._file.path, self._key, self._reader)
            self._inputs = file.inputs
        assert self._inputs is not None
        return self._inputs

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        """Read layer after layer, a few ranges ahead; see ``StoredChunk.read_layers``."""
        self._reader.begin(self._file.kv_end)
        try:
            with self._store.reading(self._key, self._reader):
                yield from self._file.read_layers(destination)
        finally:
            self._reader.end()
        self._store.count(bytes_read=destination.nbytes)

    def worth(self, seconds: float) -> bool:
        """Return whether its KV is expected to be here in less time than computing it takes; see ``StoredChunk``."""
        return self._store.worth(self._file, seconds)

    def refuse(self, error: CorruptFile) -> None:
        self._store.set_aside(self._key, self._reader, error)


class RemoteTier:
    """Chunks in a shared store. Thread-safe. A dead store costs a request at most the limit of ``objects``, once.

    Args:
        queue: uploads that may wait.
    """

    name = "remote"

    def __init__(self, objects: Objects, queue: int = QUEUE) -> None:
        self.objects, self._most = objects, queue
        self._disk: DiskStore | None = None
        self._library = ""
        self._known: OrderedDict[str, int] = OrderedDict()  # bytes by key digest, the oldest first
        # what is to be moved aside: its object, and the version that was read
        self._damaged: dict[KVKey, tuple[str, str | None]] = {}
        self._uploads: OrderedDict[KVKey, None] = OrderedDict()
        self._deletions: OrderedDict[str, None] = OrderedDict()  # contents
        self._dropped = DeletedContents()
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._changed = threading.Condition()
        self._working = self._stopping = False
        self._thread = threading.Thread(target=self._work, name="mpic-remote", daemon=True)

    def begin(self, disk: DiskStore, library: str) -> None:
        """Start the thread that writes, with the deletions that an earlier process has left.

        Args:
            library: id of the library, by which it knows its own tombstones.
        """
        self._disk, self._library = disk, library
        self._deletions.update(dict.fromkeys(disk.owed()))
        self._thread.start()

    # Reading

    def find(self, keys: Sequence[KVKey]) -> dict[KVKey, RemoteChunk]:
        """Return the chunks that the store has and whose header is good. All are asked for at once, and waited for at
        most the limit."""
        self._dropped.look_up(keys)
        with self._changed:
            asked = [
                key
                for key in keys
                if key not in self._damaged and content_of(key.owner, key.chunk) not in self._deletions
            ]
        heads = self.objects.heads([object_of(key) for key in asked])
        found = {}
        for key in asked:
            name = object_of(key)
            if name in heads:
                reader = ObjectReader(self.objects, name, heads[name])
                try:
                    file = ChunkFile(Path(name), key, reader, inputs=False)
                except CorruptFile as error:
                    self.set_aside(key, reader, error)
                    continue
                except (MPICError, OSError) as error:
                    log.warning("chunk %s of the remote store cannot be read: %s", key.chunk, error)
                    continue
                found[key] = RemoteChunk(self, key, file, reader)
                self._know(key, file.bytes)
        self.count(requested=len(keys), hits=len(found), missing=len(keys) - len(found))
        return found

    @contextmanager
    def reading(self, key: KVKey, reader: ObjectReader) -> Iterator[None]:
        """Turn what goes wrong while a chunk is read into what ``StoredChunk`` raises, and count it."""
        try:
            yield
        except FileNotFoundError:
            self.forget(key)
            raise NotFound(f"chunk {key.chunk} has left the remote store") from None
        except CorruptFile as error:
            self.set_aside(key, reader, error)
            raise
        except OSError:
            self.count(failed_reads=1)
            raise

    def worth(self, file: ChunkFile, seconds: float) -> bool:
        """Apply the cost rule: ``latency + bytes / bandwidth < seconds``. A chunk is loaded while the bandwidth is
        unknown, and once a minute although it speaks against loading, to measure it anew."""
        rate = self.objects.rate
        expected = rate.seconds(file.kv_end)
        if expected is None or expected < seconds:
            return True
        with self._changed:
            if self.objects.clock() - rate.measured >= STALE:
                rate.measured = self.objects.clock()  # others do not load meanwhile
                return True
        self.count(slower=1)
        return False

    def set_aside(self, key: KVKey, reader: ObjectReader, error: CorruptFile) -> None:
        """Queue a damaged object to be renamed. It is not served from now on, and another may take its place."""
        log.warning("%s; it is moved aside in the remote store and will be compiled again", error)
        self.count(damaged=1)
        self.forget(key)
        with self._changed:
            self._damaged[key] = object_of(key), reader.etag
            self._changed.notify_all()

    # Writing

    def save(self, chunk: ChunkKV) -> None:
        """Queue an upload; see ``offer``. The file is read from the disk, which has it already."""
        self.offer([chunk.key])

    def offer(self, keys: Iterable[KVKey]) -> None:
        """Queue uploads of chunks that are on the disk, unless they are known to be in the store. One that finds no
        room is counted as refused."""
        with self._changed:
            for key in keys:
                if key.digest in self._known or key in self._uploads or not self._dropped.allows(key):
                    continue
                if len(self._uploads) >= self._most:
                    self._counters["refused"] += 1
                    continue
                self._uploads[key] = None
            self._changed.notify_all()

    def drop(self, owner: str, chunk: ChunkKey) -> None:
        """Queue a deletion of all forms of a content; an upload under way is undone. The catalogue notes it too
        (``owes``), so that the next process makes it if this one cannot."""
        self._dropped.add(owner, chunk)
        content = content_of(owner, chunk)
        with self._changed:
            for key in [key for key in self._uploads if (key.owner, key.chunk) == (owner, chunk)]:
                del self._uploads[key]
            self._deletions[content] = None
            self._changed.notify_all()

    def owes(self, owner: str, chunk: ChunkKey) -> str:
        """Return the name by which the catalogue notes a deletion until the store has been told."""
        return content_of(owner, chunk)

    def close(self) -> None:
        """End the thread after what it does now. What it has not uploaded is uploaded when it is next used; deletions
        are in the catalogue."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(self.objects.seconds)
        self.objects.close()

    def stats(self) -> dict[str, int]:
        """Return counters. ``chunks`` and ``bytes`` are those that this process has found or put there; ``up`` and
        ``writable`` are 0 while the store is not read or not written."""
        rate = self.objects.rate
        with self._changed:
            measured = {
                "chunks": len(self._known),
                "bytes": sum(self._known.values()),
                "uploads_waiting": len(self._uploads),
                "deletions_waiting": len(self._deletions),
                "up": int(self.objects.reads.error is None),
                "writable": int(self.objects.writes.error is None),
            }
            if rate.latency is not None:
                measured["latency_us"] = round(1e6 * rate.latency)
            if rate.seconds_per_byte is not None:
                measured["bytes_per_second"] = round(1 / max(rate.seconds_per_byte, 1e-12))
            return {**self._counters, **measured}

    def check(self) -> None:
        """Do nothing: the store has no records here. ``mpic library check --remote`` reads what it holds."""

    def count(self, **by: int) -> None:
        with self._changed:
            self._counters.update(by)

    def forget(self, key: KVKey) -> None:
        """Forget that a chunk is in the store."""
        with self._changed:
            self._known.pop(key.digest, None)

    def _know(self, key: KVKey, size: int) -> None:
        with self._changed:
            self._known[key.digest] = size
            self._known.move_to_end(key.digest)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)

    # The thread

    def _work(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
                self.objects.writes.succeeded()
            except StoreUnavailable:
                pass  # logged by the breaker; what was not done is still queued
            except Exception:  # such as a busy catalogue; it is tried again
                log.exception("the remote store could not be written")
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, PAUSE)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do, deletions first; None: stop."""
        with self._changed:
            while not self._stopping:
                if pause := self.objects.writes.pause():
                    self._changed.wait(pause)
                    continue
                for queue, do in (
                    (self._deletions, self._delete),
                    (self._damaged, self._move_aside),
                    (self._uploads, self._upload),
                ):
                    if queue:
                        self._working = True
                        return partial(do, next(iter(queue)))
                self._changed.wait()
            return None

    def _delete(self, content: str) -> None:
        """Delete all forms of a content, of whatever server. The tombstone is there first: an upload of another server
        that begins before it sees it when it ends."""
        self.objects.put(f"{DELETED}/{content}", json.dumps({"library": self._library}).encode())
        for found in self.objects.list(f"{CHUNKS}/{content}/"):
            self.objects.delete(found["path"])
            with self._changed:
                self._known.pop(Path(found["path"]).stem, None)
                self._counters["deleted"] += 1
        assert self._disk is not None  # `begin` comes first
        self._disk.settle([content])
        with self._changed:
            self._deletions.pop(content, None)

    def _move_aside(self, key: KVKey) -> None:
        name, etag = self._damaged[key]
        found = self.objects.exists(name)
        if found is not None and found["e_tag"] == etag:  # and not one that has taken its place
            with suppress(FileNotFoundError):
                self.objects.rename(name, name.removesuffix(SUFFIX) + DAMAGED)
        with self._changed:
            del self._damaged[key]

    def _upload(self, key: KVKey) -> None:
        try:
            self._put(key)
        except StoreUnavailable:
            raise  # it keeps its place in the queue
        except FileNotFoundError:
            pass  # evicted meanwhile
        except Exception as error:  # a damaged file, say
            log.warning("chunk %s was not copied to the remote store: %s", key.chunk, error)
        with self._changed:
            self._uploads.pop(key, None)

    def _put(self, key: KVKey) -> None:
        objects, name = self.objects, object_of(key)
        tombstone = f"{DELETED}/{content_of(key.owner, key.chunk)}"
        if (found := objects.exists(name)) is not None:
            return self._know(key, found["size"])
        if (by := objects.get(tombstone)) is not None:
            if not self._is_mine(by):
                return self.count(kept_away=1)
            objects.delete(tombstone)  # the content was added anew
        assert self._disk is not None
        path = self._disk.path(key)
        with closing(ChunkFile(path, key, inputs=True)) as file:
            file.map_layers(range(file.shape.layers))  # what is damaged here stays here
            size = file.bytes
        objects.put(name, path)
        if not self._dropped.allows(key) or objects.exists(tombstone) is not None:
            return objects.delete(name)
        self._know(key, size)
        self.count(saved=1, bytes_written=size)

    def _is_mine(self, tombstone: bytes) -> bool:
        try:
            return json.loads(tombstone)["library"] == self._library
        except (ValueError, KeyError, TypeError):
            return False
