"""The memory of this process: what may still be allocated, what has been set aside, and giving freed pages back.

Some libraries end the process when an allocation fails (the tokenizers, in Rust, do), which no ``except`` can catch.
The memory that a request is going to need there is therefore set aside first, and the request is refused when there is
not enough.
"""

from __future__ import annotations

import ctypes
import errno
import math
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from mpic.errors import OutOfMemory

MiB = 1 << 20
UNCHECKED = 1 * MiB
"""Smaller amounts are not checked, because a check takes a tenth of a millisecond."""
FLOOR = 64 * MiB
"""This much is left for everything that does not set its memory aside."""
M_ARENA_MAX, ARENAS = -8, 2  # of malloc.h

_EXHAUSTED = re.compile(r"can't allocate|not enough memory|out of memory|can't start new thread", re.I)
_lock = threading.Lock()
_set_aside = 0


def room() -> float:
    """Bytes that this process may still allocate: the lesser of what the limit of its address space (``ulimit -v``)
    leaves and what the machine has available."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    left = math.inf if limit == resource.RLIM_INFINITY else limit - _address_space()
    return min(left, psutil.virtual_memory().available)


@contextmanager
def set_aside(size: int, what: str) -> Iterator[None]:
    """Inside the block ``size`` bytes may be allocated.

    While the block runs they are counted twice, as set aside and as allocated, so that requests which come together
    cannot all rely on the same free memory.

    Args:
        what: what needs the memory, as the subject of the error's sentence.

    Raises:
        OutOfMemory: there is not enough memory, or an allocation inside the block has failed.
    """
    global _set_aside
    if size > UNCHECKED:
        with _lock:
            if not _fits(size):
                give_back()
                if not _fits(size):
                    needs = f"{what} needs {size // MiB} MiB of memory"
                    raise OutOfMemory(f"{needs}, which the server does not have now")
            _set_aside += size
    try:
        with as_errors():
            yield
    finally:
        if size > UNCHECKED:
            with _lock:
                _set_aside -= size


@contextmanager
def as_errors() -> Iterator[None]:
    """Turn every form in which a library says that memory is exhausted into OutOfMemory."""
    try:
        yield
    except Exception as error:
        if not is_exhaustion(error):
            raise
        raise OutOfMemory("the server has not enough memory for this request now") from error


def is_exhaustion(error: BaseException) -> bool:
    """Whether an exception says that memory (or a thread's stack) could not be had."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if type(error) is RuntimeError or type(error).__name__ == "OutOfMemoryError":  # torch, threading
        return _EXHAUSTED.search(str(error)) is not None
    return isinstance(error, MemoryError)


def few_arenas() -> None:
    """If the address space is limited, keep the C library (glibc) from reserving 64 MiB of it for every thread, because
    it never returns them. Call this before there are threads."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Return freed pages to the operating system where the C library keeps them (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _fits(size: int) -> bool:
    return room() - _set_aside - FLOOR >= size


def _address_space() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return psutil.Process().memory_info().vms
