"""Decides when to ask again whether an item is compiled; the callers do the waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from mpic.client.errors import TimedOut
from mpic.errors import CompileFailed

WAIT = 600.0
"""Seconds that ``wait=True`` waits."""


class CompileWait:
    """Decides how long to wait before asking about a compilation again.

    Args:
        timeout: maximum number of seconds to wait altogether.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._pauses = pauses()

    def pause(self, found: Any) -> float | None:
        """Return the seconds until the next request, or None if ``found`` is compiled.

        Raises:
            CompileFailed: the item cannot be compiled.
            TimedOut: the timeout has passed.
        """
        name = getattr(found, "filename", None) or getattr(found, "name", None) or found.id
        if found.state == "ready":
            return None
        if found.state == "failed":
            own = getattr(found, "status_details", None) or getattr(found, "error", None)
            # a file lists its chunks as positions, which carry no error
            parts = getattr(found, "chunks", None) or ()
            chunks = [part.error for part in parts if getattr(part, "error", None)]
            raise CompileFailed(f"{name}: {own or '; '.join(chunks) or 'not compiled'}", id=found.id)
        if time.monotonic() > self._deadline:
            raise TimedOut(f"{name} is not compiled after {self._timeout:g} s")
        return next(self._pauses)


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between requests about an item that is being compiled."""
    pause = 0.05
    while True:
        yield pause
        pause = min(1.0, pause * 1.5)
