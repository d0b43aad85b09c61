"""Torch's allocator of page-locked memory, over ordinary memory: it rounds sizes up to powers of two and keeps what was
freed, by size."""

from __future__ import annotations

import math
import threading
from collections import Counter
from weakref import finalize

import torch

from mpic.kv.page_locked import PageLocked


class HostAllocator:
    """See above. Thread-safe.

    Attributes:
        held: bytes of all blocks, in use or freed.
        most: the most that ``held`` has been.
        made, emptied: blocks that were asked of the system, and times that freed ones were given back to it.
    """

    def __init__(self) -> None:
        self.held = self.most = self.made = self.emptied = 0
        self._free: Counter[int] = Counter()
        self._lock = threading.RLock()  # a tensor may end at any moment

    def allocate(self, shape, dtype) -> torch.Tensor:
        size = 1 << (math.prod(shape) * dtype.itemsize - 1).bit_length()
        with self._lock:
            if self._free[size]:
                self._free[size] -= 1
            else:
                self.made += 1
                self.held += size
                self.most = max(self.most, self.held)
        memory = torch.empty(tuple(shape), dtype=dtype)
        finalize(memory.untyped_storage(), self._freed, size).atexit = False
        return memory

    def give_back(self) -> None:
        with self._lock:
            self.held -= sum(size * count for size, count in self._free.items())
            self._free.clear()
            self.emptied += 1

    def _freed(self, size: int) -> None:
        with self._lock:
            self._free[size] += 1


def page_locked(spare: int = 0) -> tuple[PageLocked, HostAllocator]:
    """Return page-locked memory over such an allocator, and the allocator."""
    allocator = HostAllocator()
    return PageLocked(allocator.allocate, allocator.give_back, spare), allocator
