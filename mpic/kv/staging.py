"""A fixed ring of page-locked memory through which chunks are read to a device.

A reader takes a slot for one piece, reads it from its file straight into the slot, starts the slot's copy to the
device and gives the slot back with the copy's mark; the next reader that takes the slot waits for that mark. A reader
that holds a slot never waits for another slot, another load or a step, and a copy waits for nothing but the device. So
every slot comes back, however many loads there are and however large their chunks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpic import memory
from mpic.errors import EngineStopped
from mpic.kv.page_locked import PAGE_LOCKED

if TYPE_CHECKING:
    from mpic.kv.copies import Copies

SLOTS = 16
LEAST_SLOT, MOST_SLOT = 64 << 10, 64 << 20  # bytes of a slot whose size is not configured
SHARE = 64  # the ring takes one part in so many of the free memory
HOST_SHARE = 8  # and at most one part in so many of the budget of host memory


class Staging(NamedTuple):
    """The size of a ring.

    Args:
        slots: how many.
        slot_bytes: of each; a power of two, because torch rounds page-locked memory up to one.
    """

    slots: int
    slot_bytes: int

    @property
    def bytes(self) -> int:
        return self.slots * self.slot_bytes


def staging_for(slots: int = SLOTS, slot_bytes: int = 0, host_bytes: int = 0) -> Staging:
    """Return the size of a ring.

    Args:
        slot_bytes: 0 chooses: as large as the free memory and the budget allow, between ``LEAST_SLOT`` and
            ``MOST_SLOT``.
        host_bytes: budget of chunks in host memory, of which the ring is a part; 0: there is none.
    """
    if not slot_bytes:
        room = min(memory.room() / SHARE, host_bytes / HOST_SHARE if host_bytes else float("inf"))
        fitting = int(min(max(room / slots, LEAST_SLOT), MOST_SLOT))
        slot_bytes = 1 << (fitting.bit_length() - 1)
    return Staging(slots, slot_bytes)


class Slot:
    """A slot that a reader holds for one piece."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.mark: Any = None
        """This belongs to the copy from it; None as long as none has been started."""

    def of(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the slot's memory as a contiguous tensor.

        Raises:
            ValueError: it does not fit.
        """
        size = prod(shape) * dtype.itemsize
        if size > len(self._memory):
            raise ValueError(f"a piece of {size} bytes does not fit a slot of {len(self._memory)}")
        return self._memory[:size].view(dtype).view(tuple(shape))


class StagingRing:
    """See above. Its memory is allocated once, here. Thread-safe.

    Args:
        copies: from its slots to the device.
        size: slots, and bytes of each.
    """

    def __init__(self, copies: Copies, size: Staging) -> None:
        self.size, self._copies = size, copies
        self._changed = threading.Condition()
        self._closed = False
        PAGE_LOCKED.allow(self, size.bytes)
        # those that can be taken, with the mark of the copy that still reads them or None, in the order of the copies
        self._free: deque[tuple[torch.Tensor, Any]] = deque(
            (copies.buffer((size.slot_bytes,), torch.uint8), None) for _ in range(size.slots)
        )

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Lend a slot, once one is free and the copy from it is done. Set its ``mark`` when a copy has been started; a
        slot without one has no copy under way.

        Raises:
            EngineStopped: the ring was closed.
        """
        held = Slot(self._take())
        try:
            yield held
        finally:
            self._give(held._memory, held.mark)

    def _take(self) -> torch.Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise EngineStopped("the engine was stopped")
            memory, mark = self._free.popleft()
        if mark is not None:
            try:
                self._copies.wait(mark)
            except BaseException:
                self._give(memory, mark)
                raise
        return memory

    def _give(self, memory: torch.Tensor, mark: Any) -> None:
        with self._changed:
            if mark is None:
                self._free.appendleft((memory, mark))
            else:
                self._free.append((memory, mark))
            self._changed.notify_all()

    @property
    def held(self) -> int:
        """Number of slots that readers hold."""
        return self.size.slots - len(self._free)

    def close(self) -> None:
        """Refuse readers that wait for a slot, wait for those that hold one and for all copies, then free the memory.
        Safe to call twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.held)
            left = list(self._free)
        try:
            for _, mark in left:
                if mark is not None:
                    self._copies.wait(mark)
        finally:
            self._free.clear()
