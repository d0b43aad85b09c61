"""Combines all tiers below the device in one ``ChunkStore``. They are asked from the nearest to the farthest, and a
chunk that was found is copied to the nearer ones.

The disk is the tier of record: saved chunks are durable there, and only the disk knows why a chunk is gone. A nearer
tier (host memory) and a farther one (remote) are caches of it, and are notified when a content is deleted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpic.errors import CorruptFile, MPICError
from mpic.kv.chunk import ChunkKey, ChunkKV, KVKey
from mpic.kv.store import optional
from mpic.library.store.chunk_rows import ChunkRow
from mpic.library.store.disk import DiskStore

if TYPE_CHECKING:
    from mpic.kv.store import PartedChunk, Reservation, StoredChunk

log = logging.getLogger(__name__)


class Tier(Protocol):
    """A place for compiled chunks beside the disk. A remote tier implements this over its own transport; chunks travel
    well as the files of ``mpic.kv.file``, which carry their identity and checksums. Thread-safe.

    A tier whose ``page_locked`` is true also has ``reserve`` (see ``HostTier``): what is brought nearer to a device is
    read into its memory. A tier beyond the disk may have ``begin(disk, library)``, called before all else with the id
    of the library, ``close()``, ``offer(keys)``, called with the chunks that were found on the disk, and
    ``owes(owner, chunk)``, the name under which the catalogue notes a deletion until the tier settles it
    (``DiskStore.owe``).
    """

    name: str

    def find(self, keys: Sequence[KVKey]) -> Mapping[KVKey, StoredChunk]:
        """Return the chunks that are stored. It is called once for a whole prompt and must return within milliseconds,
        if necessary with no chunks. A remote tier takes a round trip, and its own limit when it finds its store
        gone."""
        ...

    def save(self, chunk: ChunkKV) -> None:
        """Keep a copy if possible. A tier that is full or out of reach counts the failure and does not raise."""
        ...

    def drop(self, owner: str, chunk: ChunkKey) -> None:
        """Drop all forms of a content, which are invisible from now on. Return at once; a slow tier queues the
        work."""
        ...

    def stats(self) -> dict[str, int]:
        """Return at least ``requested``, ``hits``, ``chunks``, ``bytes`` and ``evicted``."""
        ...

    def check(self) -> None:
        """Check the tier. Raise IntegrityError if its records are wrong."""
        ...


class Promoted:
    """A chunk of one tier that is copied to nearer tiers once it has been read completely. Whatever else it can do is
    that of its tier."""

    def __init__(self, key: KVKey, stored: StoredChunk, nearer: Sequence[Tier | DiskStore]) -> None:
        self._key, self._stored, self._nearer = key, stored, nearer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def in_parts(self, most: int) -> PartedChunk | None:
        """Open the chunk to be read in parts, if every nearer tier can be read into (``reserve``): others are given
        a chunk when it lies in memory as a whole."""
        if not all(getattr(tier, "page_locked", False) for tier in self._nearer):
            return None
        return optional(self._stored, "in_parts", most)

    def reserve(self, shape: Sequence[int], dtype: torch.dtype) -> Reservation | None:
        """Return memory of the nearest tier in page-locked memory that takes the chunk, to be read into."""
        for tier in self._nearer:
            if getattr(tier, "page_locked", False):
                return tier.reserve(self._key, self._stored.inputs, shape, dtype)  # ty: ignore[missing-attribute] (those with page-locked memory have it)
        return None

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        layer = -1
        for layer in self._stored.read_layers(destination):
            yield layer
        if layer + 1 < len(destination):
            raise CorruptFile(f"chunk {self._key.chunk} of tier {self.tier} has only {layer + 1} layers")
        try:
            chunk = ChunkKV(self._key, self._stored.inputs, destination)
            for tier in self._nearer:
                tier.save(chunk)
        # page-locked memory that cannot be had is a RuntimeError
        except (MPICError, OSError, RuntimeError, MemoryError) as error:  # the read itself has succeeded
            log.warning("chunk %s was not copied to a nearer tier: %s", self._key.chunk, error)


class TieredStore:
    """A ``ChunkStore`` over a disk with tiers around it.

    Args:
        nearer: tiers nearer to the device, such as a ``HostTier``; the nearest comes first.
        farther: tiers beyond the disk, such as a remote one; the nearest comes first.
    """

    def __init__(self, disk: DiskStore, nearer: Sequence[Tier] = (), farther: Sequence[Tier] = ()) -> None:
        self.disk = disk
        self.lock, self.root = disk.lock, disk.root
        self._tiers: list[Tier | DiskStore] = [*nearer, disk, *farther]
        self._others: list[Tier] = [*nearer, *farther]
        self._nearer, self._farther = nearer, farther
        self._failed: Counter[str] = Counter({tier.name: 0 for tier in self._others})
        # only the disk, the tier of record, does these
        self.touch = disk.touch
        self.missing_reason, self.stats = disk.missing_reason, disk.stats
        self.erase, self.reject, self.flush = disk.erase, disk.reject, disk.flush
        self.path, self.reconcile, self.forget_gone = disk.path, disk.reconcile, disk.forget_gone

    def begin(self, library: str) -> None:
        """Start the tiers that work in the background; ``close`` ends them.

        Args:
            library: id of the library.
        """
        for tier in self._farther:
            optional(tier, "begin", self.disk, library)

    def close(self) -> None:
        for tier in self._farther:
            optional(tier, "close")

    # For the engine

    def find(self, keys: Sequence[KVKey]) -> dict[KVKey, StoredChunk]:
        found: dict[KVKey, StoredChunk] = {}
        for number, tier in enumerate(self._tiers):
            left = [key for key in dict.fromkeys(keys) if key not in found]
            if not left:
                break
            hits = tier.find(left)
            if tier is self.disk:
                for remote in self._farther:
                    optional(remote, "offer", hits)
            else:
                self.touch(hits)  # the disk, which is not asked for them, evicts what was used longest ago
            for key, stored in hits.items():
                found[key] = Promoted(key, stored, self._tiers[:number]) if number else stored  # ty: ignore[invalid-assignment] (it passes on what it lacks)
        return found

    def open(self, key: KVKey) -> StoredChunk | None:
        """Return the stored chunk with its inputs read, or None if it is missing or bad."""
        stored = self.find([key]).get(key)
        if stored is None:
            return None
        try:
            _ = stored.inputs  # read and verified here
        except (MPICError, OSError) as error:
            log.warning("chunk %s of tier %s cannot be used: %s", key.chunk, stored.tier, error)
            return None
        return stored

    def save(self, chunk: ChunkKV) -> None:
        """Save a chunk on the disk first, whose errors are raised, then in the other tiers if possible: one that fails
        is counted and does not undo what is durable."""
        self.disk.save(chunk)
        for tier in self._others:
            try:
                tier.save(chunk)
            except Exception as error:  # any driver may raise anything
                self._failed[tier.name] += 1
                log.warning("chunk %s was not copied to tier %s: %s", chunk.key.chunk, tier.name, error)

    # For the library

    def drop(self, db: Connection, owner: str, chunk: ChunkKey, state: str | None = None) -> list[ChunkRow]:
        """Drop a content; see ``DiskStore.drop``. The other tiers drop it at once."""
        for tier in self._others:
            tier.drop(owner, chunk)
            if (owed := optional(tier, "owes", owner, chunk)) is not None:
                self.disk.owe(db, [owed])
        return self.disk.drop(db, owner, chunk, state)

    def expire(self, default: int) -> list[tuple[str, ChunkKey]]:
        """Remove what nobody has used for too long from the disk and the tiers nearer than it; see
        ``DiskStore.expire``. What lies beyond belongs to other servers, too."""
        gone = self.disk.expire(default)
        for tier in self._nearer:
            for owner, chunk in gone:
                tier.drop(owner, chunk)
        return gone

    def check(self) -> None:
        for tier in self._tiers:
            tier.check()

    def tiers(self) -> dict[str, dict[str, int]]:
        """Return the counters of every tier, nearest first; ``failed`` counts the saves that a tier beside the disk
        could not make."""
        failed = {name: {"failed": count} for name, count in self._failed.items()}
        return {tier.name: tier.stats() | failed.get(tier.name, {}) for tier in self._tiers}
