"""Memory that the system provides when it is first touched, or earlier on request."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14: provides pages without changing what is in them. Python 3.11 has no name for
it."""
SLICE = 2 << 20
"""Bytes that are provided at a time: one huge page, 0.2 ms on a machine and 4 ms on a virtual one whose host provides
memory as slowly."""


class LazyMemory:
    """``[elements]`` of a dtype in host memory, not cleared, so that even a large pool starts at once.

    Linux is asked for huge pages, which it may refuse. With them a core reads a span up to a quarter faster, because
    the processor's prefetching stops at the end of a page.

    Attributes:
        tensor: the memory.
        provided: bytes from the start that the system has been asked for.
    """

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self._bytes = elements * dtype.itemsize
        self._memory = mmap.mmap(-1, self._bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # the kernel was built without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype)
        self.provided = 0
        # mmap's own madvise holds Python's lock, which would block every other thread
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    @staticmethod
    def exists_here() -> bool:
        """Return whether the system has such memory (Linux)."""
        return hasattr(mmap, "MADV_HUGEPAGE")

    def provide(self, used: int, ahead: int) -> bool:
        """Ask the system for one more slice of the ``ahead`` bytes behind the first ``used``. Return whether there was
        one left to ask for."""
        begin = max(self.provided, used // SLICE * SLICE)
        end = min(used + ahead, self._bytes)
        if begin >= end:
            return False
        size = min(SLICE, self._bytes - begin)
        if self._madvise(self.tensor.data_ptr() + begin, size, _POPULATE_WRITE):
            self.provided = (
                self._bytes
            )  # an older kernel, or no memory is left: pages come when they are touched
            return False
        self.provided = begin + SLICE
        return True
