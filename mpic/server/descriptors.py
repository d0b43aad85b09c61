"""The limit on open files of the process, and the number of connections that it allows."""

from __future__ import annotations

import logging
import resource
from contextlib import suppress

import psutil

from mpic.config import ConfigError

WANTED = 65_536
"""The most that is asked for: some programs iterate over all possible descriptors."""
MACOS = 10_240
"""The most that macOS grants to a process whose hard limit is infinite."""
RESERVE = 128
"""Descriptors reserved for the catalogue, for chunks that are loaded or written, and for the engine."""
PER_CONNECTION = 3
"""Descriptors one connection may hold: its socket, an upload that is spooled to disk, and the stored original."""
FEWEST = 8

log = logging.getLogger("mpic.server")


def raise_limit() -> int:
    """Raise the soft limit on open files as far as the hard one allows, and return it. It is never lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (WANTED, MACOS):
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with suppress(ValueError, OSError):  # the kernel grants less than the hard limit says
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                return wanted
    return WANTED if soft == resource.RLIM_INFINITY else soft


def connection_limit(limit: int, asked: int, held: int | None = None) -> int:
    """Return how many connections may be open at once.

    Args:
        limit: number of files that the process may open.
        asked: number of connections that the configuration allows.
        held: number of files that are open already; counted when left out.

    Raises:
        ConfigError: the process may open too few files for a server.
    """
    held = psutil.Process().num_fds() if held is None else held
    possible = (limit - held - RESERVE) // PER_CONNECTION
    if possible < min(FEWEST, asked):
        raise ConfigError(
            f"the process may open only {limit} files, of which it holds {held} already; at least "
            f"{held + RESERVE + PER_CONNECTION * FEWEST} are needed (ulimit -n, or LimitNOFILE= of systemd)",
            param="max_connections",
        )
    if possible < asked:
        log.warning(
            "The process may open %d files, so at most %d connections are kept instead of %d. Raise the limit with "
            "ulimit -n, or LimitNOFILE= of systemd.",
            limit,
            possible,
            asked,
        )
    return min(possible, asked)
