"""Reads chunk files from a real file system, cold or warm, for the benches of the disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from mpic.library import Library
from mpic_lab.bench.harness import BenchFailed

IN_MEMORY = {"tmpfs", "ramfs"}


@contextmanager
def fresh_library() -> Iterator[Library]:
    """Open a library in the system's temporary folder (``TMPDIR`` chooses another), and remove it at the end.

    Raises:
        BenchFailed: that folder is in memory, or this system cannot drop a file from its page cache.
    """
    with tempfile.TemporaryDirectory(prefix="mpic-bench-", ignore_cleanup_errors=True) as folder:
        if file_system(folder) in IN_MEMORY:
            raise BenchFailed(f"{tempfile.gettempdir()} is memory, not a disk: set TMPDIR to a folder on one")
        if not hasattr(os, "posix_fadvise"):
            raise BenchFailed("this system cannot drop files from its page cache: nothing can be read cold")
        with Library.open(Path(folder, "library")) as library:
            yield library


def file_system(folder: str) -> str:
    """Return the type of the file system that holds a folder, or an empty string when the system does not say."""
    real = os.path.realpath(folder)
    mounts = [p for p in psutil.disk_partitions(all=True) if real.startswith(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""


def drop_from_cache(paths: Sequence[Path]) -> None:
    """Make the next read of files a cold one: they are written back, then dropped from the page cache
    (``POSIX_FADV_DONTNEED``). Caches of the device itself stay."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
