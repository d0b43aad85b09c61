"""Retries failures that may be temporary, after growing pauses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from mpic.errors import RateLimited, Unavailable

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 120.0  # seconds


def passing(error: Exception) -> bool:
    """Return whether an error may be temporary, because its cause is memory, a lock or a disk and not the content."""
    return isinstance(error, (OSError, RateLimited, Unavailable))


class Retries:
    """Names of failed items and their next attempts. After each failure a name waits twice as long as before. Not
    thread-safe.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def failed(self, names: Iterable[str]) -> None:
        """Record that these names failed; each waits for its next turn."""
        for name in names:
            before = self._failures.get(name, 0)
            self._failures[name] = before + 1
            self._due[name] = self._clock() + min(FIRST_PAUSE * 2.0 ** min(before, 30), LONGEST_PAUSE)

    def take(self, most: int) -> list[str]:
        """Return the names whose turn has come; they do not wait again until they fail once more."""
        now = self._clock()
        taken = [name for name, due in self._due.items() if due <= now][:most]
        for name in taken:
            del self._due[name]
        return taken

    def forget(self, names: Iterable[str]) -> None:
        """Drop names that have succeeded or are no longer wanted."""
        for name in names:
            self._failures.pop(name, None)
            self._due.pop(name, None)

    def pause(self) -> float | None:
        """Return the seconds until the next turn, or None if nothing waits."""
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None


def soonest(*waiting: Retries) -> float | None:
    """Return the shortest time in seconds until the next turn of any of these, or None if nothing waits."""
    return min((pause for one in waiting if (pause := one.pause()) is not None), default=None)
