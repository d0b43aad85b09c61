"""The host tier: compiled chunks in (pinned) memory, between an accelerator's pages and the disk.

On the CPU the device's pages are host memory already, so the tier is not used there.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from mpic.errors import CorruptFile, IntegrityError, StorageFull, StorageQuotaExceeded
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey
from mpic.kv.page_locked import PAGE_LOCKED, page_locked_bytes
from mpic.library.store.shares import Held, TierBounds, make_room
from mpic.library.store.tombstones import DeletedContents

log = logging.getLogger(__name__)

COUNTERS = (
    *("requested", "hits", "saved", "refused", "evicted"),
    *("bytes_evicted", "bytes_read", "bytes_written"),
)


def allocated(size: int, page_locked: bool) -> int:
    """Return how many bytes of memory a tensor of ``size`` bytes takes."""
    return page_locked_bytes(size) if page_locked else size


def memory_for(shape: Sequence[int], dtype: torch.dtype, page_locked: bool) -> torch.Tensor:
    """Return host memory for a chunk's KV."""
    return PAGE_LOCKED.empty(shape, dtype) if page_locked else torch.empty(tuple(shape), dtype=dtype)


class HostChunk:
    """A chunk in host memory; see ``mpic.kv.store.StoredChunk``. It can still be read after it was evicted."""

    tier = "host"

    def __init__(
        self,
        inputs: ChunkInputs,
        kv: torch.Tensor,
        page_locked: bool,
        count: Callable[..., None],
        remove: Callable[[HostChunk], None],
    ) -> None:
        self.inputs, self._kv, self._page_locked, self._count = inputs, kv, page_locked, count
        self._remove = remove
        self.bytes = allocated(kv.nbytes, page_locked) + inputs.nbytes

    def refuse(self, error: CorruptFile) -> None:
        """Leave the tier; see ``StoredChunk``."""
        log.warning("%s; its copy in host memory is dropped", error)
        self._remove(self)

    def lend(self) -> torch.Tensor | None:
        """Return the KV itself if a device can copy from it while the host continues. It must not be changed."""
        if not self._page_locked:
            return None
        self._count(bytes_read=self._kv.nbytes)
        return self._kv

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        for layer in range(self._kv.shape[0]):
            destination[layer].copy_(self._kv[layer])
            yield layer
        self._count(bytes_read=self._kv.nbytes)


class HostReservation:
    """Memory of the tier that is being filled; see ``mpic.kv.store.Reservation``. End it once, with ``keep`` or
    ``drop``."""

    def __init__(self, tier: HostTier, key: KVKey, chunk: HostChunk, kv: torch.Tensor) -> None:
        self.kv, self._tier, self._key, self._chunk = kv, tier, key, chunk

    def keep(self) -> None:
        self._tier._end(self._key, self._chunk.bytes, self._chunk)

    def drop(self) -> None:
        self._tier._end(self._key, self._chunk.bytes, None)


class HostTier:
    """Chunks in host memory; the least recently used are evicted, within each user's share (``shares``). Thread-safe.

    Args:
        bounds: budget and quota in bytes actually allocated.
        page_locked: use page-locked memory, so that copies to a CUDA device run beside computation.
        pinned: tells whether the owner has pinned this content.
    """

    name = "host"

    def __init__(
        self,
        bounds: TierBounds,
        page_locked: bool = False,
        pinned: Callable[[str, ChunkKey], bool] = lambda *_: False,
    ) -> None:
        self._bounds, self.page_locked, self._pinned = bounds, page_locked, pinned
        self._chunks: OrderedDict[KVKey, HostChunk] = OrderedDict()  # least recently used first
        self._used: Counter[str] = Counter()  # bytes by owner, those being copied included
        self._copying: dict[KVKey, bool] = {}  # False once the content was dropped
        self._dropped = DeletedContents()
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._lock = threading.Lock()
        if page_locked:
            PAGE_LOCKED.allow(self, bounds.budget)

    def find(self, keys: Sequence[KVKey]) -> dict[KVKey, HostChunk]:
        """Return the chunks that are in this tier."""
        self._dropped.look_up(keys)
        with self._lock:
            found = {key: self._chunks[key] for key in keys if key in self._chunks}
            for key in found:
                self._chunks.move_to_end(key)
            self._counters.update(requested=len(keys), hits=len(found))
            return found

    def save(self, chunk: ChunkKV) -> None:
        """Copy a chunk here. One that does not fit is only counted, because this tier is never the only one."""
        reserved = self.reserve(chunk.key, chunk.inputs, chunk.kv.shape, chunk.kv.dtype)
        if reserved is None:
            return
        try:
            reserved.kv.copy_(chunk.kv)
        except BaseException:
            reserved.drop()
            raise
        reserved.keep()

    def reserve(
        self, key: KVKey, inputs: ChunkInputs, shape: Sequence[int], dtype: torch.dtype
    ) -> HostReservation | None:
        """Return memory for a chunk that is not here yet. None if it is, or comes already, or was deleted, or does not
        fit, which is only counted."""
        size = allocated(math.prod(shape) * dtype.itemsize, self.page_locked) + inputs.nbytes
        with self._lock:
            if key in self._chunks or key in self._copying or not self._dropped.allows(key):
                return None
            try:
                gone = make_room(self._bounds, self._used, key.owner, size, self._candidates)
            except (StorageFull, StorageQuotaExceeded):
                self._counters["refused"] += 1
                return None
            for held, why in gone:
                self._counters.update({"evicted": 1, f"evicted_{why}": 1, "bytes_evicted": held.bytes})
                self._remove(held.key)
            self._used[key.owner] += size
            self._copying[key] = True
        try:
            kv = memory_for(shape, dtype, self.page_locked)
            remove = partial(self._refused, key)
            return HostReservation(
                self, key, HostChunk(inputs, kv, self.page_locked, self._count, remove), kv
            )
        except BaseException:
            self._end(key, size, None)
            raise

    def _end(self, key: KVKey, size: int, kept: HostChunk | None) -> None:
        """End a reservation of so many bytes: its chunk is here now, or the bytes are given back."""
        with self._lock:
            if self._copying.pop(key) and kept is not None:
                self._chunks[key] = kept
                self._counters.update(saved=1, bytes_written=size)
            else:
                self._used[key.owner] -= size

    def _refused(self, key: KVKey, chunk: HostChunk) -> None:
        with self._lock:
            if self._chunks.get(key) is chunk:
                self._remove(key)

    def drop(self, owner: str, chunk: ChunkKey) -> None:
        """Drop all forms of a content."""
        with self._lock:
            self._dropped.add(owner, chunk)
            for key in [key for key in self._chunks if (key.owner, key.chunk) == (owner, chunk)]:
                self._remove(key)
            for key in self._copying:
                if (key.owner, key.chunk) == (owner, chunk):
                    self._copying[key] = False

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                **self._counters,
                "chunks": len(self._chunks),
                "bytes": sum(self._used.values()),
                "budget": self._bounds.budget,
            }

    def check(self) -> None:
        """Check that the bytes add up and are within the budget. Raise IntegrityError: they do not."""
        with self._lock:
            if self._copying:
                return
            used = Counter()
            for key, chunk in self._chunks.items():
                used[key.owner] += chunk.bytes
            if used != +self._used or used.total() > self._bounds.budget:
                raise IntegrityError(f"the host tier holds {dict(used)} and counted {dict(self._used)}")

    def _candidates(self, owner: str) -> Iterator[Held]:
        for turn, (key, chunk) in enumerate(list(self._chunks.items())):
            if key.owner == owner:
                yield Held(key, chunk.bytes, self._pinned(owner, key.chunk), turn)

    def _remove(self, key: KVKey) -> None:
        self._used[key.owner] -= self._chunks.pop(key).bytes

    def _count(self, **by: int) -> None:
        with self._lock:
            self._counters.update(by)
