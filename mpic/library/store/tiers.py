"""Tiers below the device in one ``ChunkStore``: asked from the nearest to the farthest, filled on the way back.

The disk is the tier of record: what was saved is durable there, and only it knows why something is gone. A nearer tier
(host memory) and a farther one (remote) are caches of it, and are told when a content is deleted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpic.errors import CorruptFile, MPICError
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey
from mpic.library.chunk_rows import ChunkRow
from mpic.library.store.disk import DiskStore
from mpic.library.store.orphans import Orphans

if TYPE_CHECKING:
    from mpic.engine.base import StoredChunk

log = logging.getLogger(__name__)


class Tier(Protocol):
    """A place for compiled chunks beside the disk. A remote tier implements this over its own transport; chunks travel
    well as the files of ``mpic.kv.file``, which carry their identity and checksums. Thread-safe."""

    name: str

    def find(self, keys: Sequence[KVKey]) -> Mapping[KVKey, StoredChunk]:
        """Those that are stored. One question for a whole prompt; answers in milliseconds, or with nothing."""
        ...

    def save(self, chunk: ChunkKV) -> None:
        """Keep a copy, or not: a tier that is full or out of reach counts that and does not raise."""
        ...

    def drop(self, owner: str, chunk: ChunkKey) -> None:
        """Forget all forms of a content. Returns at once (a slow tier queues it); invisible from now on."""
        ...

    def stats(self) -> dict[str, int]:
        """At least ``requested``, ``hits``, ``chunks``, ``bytes``, ``evicted``."""
        ...

    def check(self) -> None:
        """Raises IntegrityError."""
        ...


class Promoted:
    """A chunk of one tier that is copied to nearer tiers when it has been read whole."""

    def __init__(self, key: KVKey, stored: StoredChunk, nearer: Sequence[Tier | DiskStore]) -> None:
        self._key, self._stored, self._nearer = key, stored, nearer

    @property
    def tier(self) -> str:
        return self._stored.tier

    @property
    def inputs(self) -> ChunkInputs:
        return self._stored.inputs

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        yield from self._stored.read_layers(destination)
        try:
            chunk = ChunkKV(self._key, self._stored.inputs, destination)
            for tier in self._nearer:
                tier.save(chunk)
        except (MPICError, OSError) as error:  # the read itself went well
            log.warning("chunk %s was not copied to a nearer tier: %s", self._key.chunk, error)


class TieredStore:
    """A ``ChunkStore`` over a disk with tiers around it. What is not named here is the disk's.

    Args:
        nearer: for instance a ``HostTier``.
        farther: for instance a remote tier.
    """

    def __init__(self, disk: DiskStore, nearer: Sequence[Tier] = (), farther: Sequence[Tier] = ()) -> None:
        self.disk = disk
        self.lock, self.root = disk.lock, disk.root
        self._tiers: list[Tier | DiskStore] = [*nearer, disk, *farther]
        self._others: list[Tier] = [*nearer, *farther]

    # For the engine

    def find(self, keys: Sequence[KVKey]) -> dict[KVKey, StoredChunk]:
        found: dict[KVKey, StoredChunk] = {}
        for number, tier in enumerate(self._tiers):
            left = [key for key in dict.fromkeys(keys) if key not in found]
            if not left:
                break
            for key, stored in tier.find(left).items():
                found[key] = Promoted(key, stored, self._tiers[:number]) if number else stored
        return found

    def open(self, key: KVKey) -> StoredChunk | None:
        """The stored chunk with its inputs read, or None. Never raises for a bad one."""
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
        """Durable on the disk first; a failure there is the caller's, the other tiers may have it or not."""
        self.disk.save(chunk)
        for tier in self._others:
            tier.save(chunk)

    def missing_reason(self, key: KVKey) -> str:
        return self.disk.missing_reason(key)

    # For the library

    def drop(self, db: Connection, owner: str, chunk: ChunkKey, state: str | None = None) -> list[ChunkRow]:
        """See ``DiskStore.drop``; the other tiers forget it at once."""
        for tier in self._others:
            tier.drop(owner, chunk)
        return self.disk.drop(db, owner, chunk, state)

    def erase(self, rows: Iterable[ChunkRow]) -> None:
        self.disk.erase(rows)

    def set_aside(self, key: KVKey, error: CorruptFile) -> None:
        self.disk.set_aside(key, error)

    def flush(self) -> None:
        self.disk.flush()

    def path(self, key: KVKey) -> Path:
        return self.disk.path(key)

    def reconcile(self, orphans: Orphans) -> Counter[str]:
        return self.disk.reconcile(orphans)

    def stats(self) -> dict[str, Any]:
        """The disk's."""
        return self.disk.stats()

    def check(self) -> None:
        for tier in self._tiers:
            tier.check()

    def tiers(self) -> dict[str, dict[str, int]]:
        """Counters of every tier, nearest first."""
        return {tier.name: tier.stats() for tier in self._tiers}
