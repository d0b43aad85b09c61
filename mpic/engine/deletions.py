"""Chunks that were deleted while requests that knew them were under way."""

from __future__ import annotations

import threading
import time

from mpic.kv.chunk import Chunk, ChunkKey, KVKey


class Deletions:
    """Who came before a deletion must not bring the chunk back: it may still compute it for itself, but its KV is not
    shown to others, not stored, and not remembered.

    A record is kept while anything is under way that might have begun before it. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[tuple[str, ChunkKey], float] = {}
        self._under_way = 0

    def begin(self) -> float:
        """Something begins that will use chunks; returns its time of arrival. ``end`` must follow once."""
        with self._lock:
            self._under_way += 1
            return time.monotonic()

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._times.clear()

    def mark(self, chunk: Chunk) -> None:
        with self._lock:
            if self._under_way:
                self._times[chunk.owner, chunk.key] = time.monotonic()

    def since(self, arrived: float, owner: str, chunk: ChunkKey) -> bool:
        """Whether the chunk has been deleted since ``arrived``."""
        with self._lock:
            return self._times.get((owner, chunk), 0.0) >= arrived

    def key_since(self, arrived: float, key: KVKey) -> bool:
        return self.since(arrived, key.owner, key.chunk)
