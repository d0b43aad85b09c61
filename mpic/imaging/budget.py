"""A budget of bytes and callers for work that runs at the same time, granted in the order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from mpic.errors import DecoderBusy


class Budget:
    """A semaphore over bytes and callers. Callers are served in the order of their arrival, so that a stream of small
    requests cannot keep a large one waiting for ever. Thread-safe.

    Args:
        most: maximum number of callers inside at a time, whatever their size.
        most_waiting: maximum number of callers that may wait; further ones are refused.

    Attributes:
        bytes, running: bytes and callers that are inside now.
        most_bytes, most_running: the highest values these have had.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self.most, self.most_waiting = most, most_waiting
        self.bytes = self.running = self.most_bytes = self.most_running = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int, capacity: int, patient: bool = False) -> Iterator[None]:
        """Waits for its turn and for ``size`` bytes, and holds them inside the block.

        Args:
            size: number of bytes; a caller that asks for more than ``capacity`` runs alone.
            capacity: bytes that all callers may hold together.
            patient: wait even if too many others do, for work that a client cannot be asked to send again.

        Raises:
            DecoderBusy: ``most_waiting`` callers are waiting already.
        """
        size = min(size, capacity)
        ticket = object()
        with self._changed:
            if not patient and len(self._line) >= self.most_waiting:
                raise DecoderBusy(
                    "too many large files are waiting to be decoded; try again", retry_after=2.0
                )
            self._line.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: (
                        self._line[0] is ticket and self.running < self.most and self.bytes + size <= capacity
                    )
                )
                self._count(size, 1)
            finally:
                self._line.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._count(-size, -1)
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Returns the number of callers that wait."""
        return len(self._line)

    def _count(self, size: int, callers: int) -> None:
        self.bytes += size
        self.running += callers
        self.most_bytes = max(self.most_bytes, self.bytes)
        self.most_running = max(self.most_running, self.running)
