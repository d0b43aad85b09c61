"""Tombstones of chunks that were deleted while requests that use them are unfinished."""

from __future__ import annotations

import threading
import time

from mpic.kv.chunk import Chunk, ChunkKey, KVKey


class Tombstones:
    """Prevents requests that were admitted before a deletion from storing the chunk again. Such a request may still
    compute the chunk for itself, but the KV is not shown to others, not stored, and not remembered.

    A tombstone is kept while anything is unfinished that might have begun before it. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[tuple[str, ChunkKey], float] = {}
        self._unfinished = 0

    def begin(self) -> float:
        """Registers something that uses chunks. Returns its time of arrival; ``end`` must follow once."""
        with self._lock:
            self._unfinished += 1
            return time.monotonic()

    def end(self) -> None:
        with self._lock:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._times.clear()

    def mark(self, chunk: Chunk) -> None:
        """Records that a chunk is deleted now."""
        with self._lock:
            if self._unfinished:
                self._times[chunk.owner, chunk.key] = time.monotonic()

    def since(self, arrived: float, owner: str, chunk: ChunkKey) -> bool:
        """Returns whether the chunk has been deleted since ``arrived``."""
        with self._lock:
            return self._times.get((owner, chunk), 0.0) >= arrived

    def key_since(self, arrived: float, key: KVKey) -> bool:
        return self.since(arrived, key.owner, key.chunk)
