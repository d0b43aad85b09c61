"""The memory of this process: the amount that may still be allocated, reservations, and returning freed pages.

Some libraries end the process when an allocation fails (tokenizers, in Rust, for example), which no ``except`` can
catch. The memory that a request will need there is therefore set aside first, and the request is refused if there is
not enough.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import math
import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from mpic import cgroup
from mpic.errors import OutOfMemory

MiB = 1 << 20
UNCHECKED = 1 * MiB
"""Smaller amounts are not checked, because a check takes a tenth of a millisecond."""
FLOOR = 64 * MiB
"""This much is left for everything that does not set its memory aside."""
M_ARENA_MAX, ARENAS = -8, 2  # constants of malloc.h

_EXHAUSTED = re.compile(r"can't allocate|not enough memory|out of memory|can't start new thread", re.I)
_lock = threading.Lock()
_set_aside = 0
_paused = threading.Event()


def room() -> float:
    """Return the bytes that this process may still allocate: the least of what the limit of its address space
    (``ulimit -v``), the machine, and the limits of its container or unit leave."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    left = math.inf if limit == resource.RLIM_INFINITY else limit - _address_space()
    return min(left, psutil.virtual_memory().available, cgroup.available())


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cycle collector inside the block, and exempt the objects that exist at its end from later
    collections.

    Importing torch and transformers creates millions of objects that stay. Collections during a start find nothing and
    take a sixth of its time; collections after it would stop all threads for a fifth of a second each. A process that
    is forked inside the block collects as usual.
    """
    if not gc.isenabled():  # paused already, by a block around this one or by the user
        yield
        return
    gc.disable()
    _paused.set()
    try:
        yield
        gc.freeze()
    finally:
        _paused.clear()
        gc.enable()


def _resume_collector() -> None:
    if _paused.is_set():
        gc.enable()


os.register_at_fork(after_in_child=_resume_collector)


@contextmanager
def set_aside(size: int, what: str) -> Iterator[None]:
    """Ensure that ``size`` bytes may be allocated inside the block.

    While the block runs, they are counted twice, as set aside and as allocated, so that requests that come together
    cannot all rely on the same free memory.

    Args:
        what: the work that needs the memory, phrased as the subject of the error message.

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
    """Convert all errors by which libraries report exhausted memory to OutOfMemory."""
    try:
        yield
    except Exception as error:
        if not is_exhaustion(error):
            raise
        raise OutOfMemory("the server does not have enough memory for this request now") from error


def is_exhaustion(error: BaseException) -> bool:
    """Return whether an exception reports that memory (or a thread's stack) could not be allocated."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if type(error) is RuntimeError or type(error).__name__ == "OutOfMemoryError":  # torch, threading
        return _EXHAUSTED.search(str(error)) is not None
    return isinstance(error, MemoryError)


def few_arenas() -> None:
    """Keep the C library (glibc) from reserving 64 MiB of address space for every thread, if that space is limited: it
    never returns them. Call this before there are threads."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Return freed pages to the operating system if the C library keeps them (glibc)."""
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
