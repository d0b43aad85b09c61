"""How much may be decoded at a time: a byte budget and a number of places, in the order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from mpic.errors import DecoderBusy


class Budget:
    """Thread-safe. Who comes first is served first, so that large images are not passed over for ever.

    Args:
        places: most at a time, whatever their size.
        most_waiting: how many may wait before others are refused.

    Attributes:
        bytes, running: taken now.
        most_bytes, most_running: the most that were ever taken at a time.
    """

    def __init__(self, places: int, most_waiting: int) -> None:
        self.places, self.most_waiting = places, most_waiting
        self.bytes = self.running = self.most_bytes = self.most_running = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int, capacity: int, patient: bool = False) -> Iterator[None]:
        """Wait for a place and ``size`` bytes of ``capacity``; what is larger than that runs alone.

        Args:
            patient: wait however many others do: for work that nobody can be told to send again.

        Raises:
            DecoderBusy: too many are waiting.
        """
        size = min(size, capacity)
        ticket = object()
        with self._changed:
            if not patient and len(self._line) >= self.most_waiting:
                raise DecoderBusy(
                    "too many large images are waiting to be decoded; try again", retry_after=2.0
                )
            self._line.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: (
                        self._line[0] is ticket
                        and self.running < self.places
                        and self.bytes + size <= capacity
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
        return len(self._line)

    def _count(self, size: int, places: int) -> None:
        self.bytes += size
        self.running += places
        self.most_bytes = max(self.most_bytes, self.bytes)
        self.most_running = max(self.most_running, self.running)
