"""Page-locked host memory, with a bound on how much of it is kept.

Torch's allocator rounds page-locked memory up to a power of two. Whatever is freed it keeps, for later tensors of the
same rounded size and for no others. Where sizes change, each size would come to hold as much as it ever has at once:
several times the budget of those who use it. So everything as large as a chunk is allocated here, where blocks are
counted by size, and freed ones are given back to the system before the sum grows beyond the budgets.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, finalize

import torch

SPARE = 256 << 20
"""Bytes beyond the budgets up to which freed blocks are kept, so that a chunk of another size does not always evict
them."""


def page_locked_bytes(size: int) -> int:
    """Return the page-locked bytes that a tensor of so many bytes takes: torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length()


def _allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def _give_back() -> None:
    torch._C._host_emptyCache()  # its public name, torch.accelerator.empty_host_cache, is newer than torch 2.11


class PageLocked:
    """The large page-locked memory of a process. Thread-safe.

    A block counts as used while a tensor holds it. Torch withholds it a moment longer, while a copy reads it; if the
    block is wanted or given back in that moment, the bound is exceeded by its size.

    Args:
        allocate: returns page-locked memory of a shape and a type.
        give_back: makes the allocator return all freed blocks to the system. It takes about as long as page-locking
            the same bytes did, so it is done only when the budgets would be exceeded.
        spare: bytes beyond all budgets up to which freed blocks are kept.
    """

    def __init__(
        self,
        allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor] = _allocate,
        give_back: Callable[[], None] = _give_back,
        spare: int = SPARE,
    ) -> None:
        self._allocate, self._give_back, self._spare = allocate, give_back, spare
        self._lock = threading.Lock()
        self._budgets: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._used: Counter[int] = Counter()  # blocks held by tensors, by size in bytes
        self._held: Counter[int] = Counter()  # blocks held by the allocator: those, and freed ones
        self._freed: deque[int] = deque()  # a tensor may end at any moment, also under the lock

    def allow(self, owner: object, size: int) -> None:
        """Set how many bytes an owner may use, for as long as it lives."""
        with self._lock:
            self._budgets[owner] = size

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised page-locked memory.

        Raises:
            RuntimeError: there is not enough memory.
        """
        size = page_locked_bytes(math.prod(shape) * dtype.itemsize)
        with self._lock:
            self._take(size)
        try:
            memory = self._allocate(shape, dtype)
        except BaseException:
            self._freed.append(size)
            raise
        # the storage, not the tensor: a view of the memory may live longer
        finalize(memory.untyped_storage(), self._freed.append, size).atexit = False
        return memory

    @property
    def held(self) -> int:
        """Bytes that the allocator holds for what was allocated here, freed blocks included."""
        with self._lock:
            return _sum(self._held)

    def _take(self, size: int) -> None:
        """Count a block as used; first give freed blocks back if it would exceed the budgets. Call this with the lock
        held, since no freed block may be taken meanwhile."""
        while self._freed:
            self._used[self._freed.popleft()] -= 1
        if self._used[size] == self._held[size]:  # no freed block has this size
            limit = sum(self._budgets.values()) + self._spare
            if _sum(self._held) > _sum(self._used) and _sum(self._held) + size > limit:
                self._give_back()
                self._held = Counter(self._used)
            self._held[size] += 1
        self._used[size] += 1


def _sum(blocks: Counter[int]) -> int:
    return sum(size * count for size, count in blocks.items())


PAGE_LOCKED = PageLocked()
"""The page-locked memory of this process, whose allocator is one."""
