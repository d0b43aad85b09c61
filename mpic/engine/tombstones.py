"""Tombstones of chunks that were deleted while requests that use them are unfinished."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable

from mpic.kv.chunk import Chunk, ChunkKey, KVKey


class Tombstones:
    """Prevents requests that were admitted before a deletion from storing the chunk again. Such a request may still
    compute the chunk for itself, but the KV is not shown to others, not stored, and not remembered.

    A tombstone is kept while anything is unfinished that began before it. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[tuple[str, ChunkKey], float] = OrderedDict()  # the oldest first
        self._unfinished: list[float] = []  # times of arrival, ascending

    def begin(self, arrived: float | None = None) -> float:
        """Register something that uses chunks. Return its time of arrival; ``end`` must follow once.

        Args:
            arrived: the time of arrival of what it is done for, which is unfinished but may end before it. None: now.
        """
        with self._lock:
            if arrived is None:
                arrived = time.monotonic()
            insort(self._unfinished, arrived)
            return arrived

    def begin_existing(self, exists: Callable[[], object] | None) -> float:
        """Register something that uses what ``exists`` does not raise for: a deletion after that is noticed."""
        arrived = self.begin()
        try:
            if exists is not None:
                exists()
        except BaseException:
            self.end(arrived)
            raise
        return arrived

    def end(self, arrived: float) -> None:
        """End what ``begin`` has registered, and returned this time for."""
        with self._lock:
            del self._unfinished[bisect_left(self._unfinished, arrived)]
            oldest = self._unfinished[0] if self._unfinished else math.inf
            while self._times and next(iter(self._times.values())) < oldest:
                self._times.popitem(last=False)

    def mark(self, chunk: Chunk) -> None:
        """Record that a chunk is deleted now."""
        name = chunk.owner, chunk.key
        with self._lock:
            if self._unfinished:
                self._times[name] = time.monotonic()
                self._times.move_to_end(name)

    def since(self, arrived: float, owner: str, chunk: ChunkKey) -> bool:
        """Return whether the chunk has been deleted since ``arrived``."""
        with self._lock:
            return self._times.get((owner, chunk), 0.0) >= arrived

    def key_since(self, arrived: float, key: KVKey) -> bool:
        return self.since(arrived, key.owner, key.chunk)
