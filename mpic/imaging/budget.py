"""A budget of bytes and callers for concurrent work, granted to users in turn."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

from mpic.errors import DecoderBusy

_user: ContextVar[str] = ContextVar("user", default="")


@contextmanager
def on_behalf_of(user: str) -> Iterator[None]:
    """Set the user on whose behalf the block waits for budgets."""
    token = _user.set(user)
    try:
        yield
    finally:
        _user.reset(token)


class _Ticket:
    """A caller in the line."""

    def __init__(self, user: str) -> None:
        self.user = user


class Budget:
    """A semaphore over bytes and callers. Thread-safe.

    Users take turns (``on_behalf_of``): the next caller belongs to the user with the fewest callers inside; between
    equals, to the user whose last turn was longest ago. The callers of one user are served in the order of their
    arrival, so that a stream of small requests cannot keep a large one waiting for ever. A user may have at most as
    many callers waiting as the line has free places left, so that nobody fills it alone.

    Args:
        most: maximum number of callers inside at a time, whatever their size.
        most_waiting: maximum number of callers that may wait; further ones are refused.

    Attributes:
        bytes, running: number of bytes and of callers inside now.
        most_bytes, most_running: the highest values these have had.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self.most, self.most_waiting = most, most_waiting
        self.bytes = self.running = self.most_bytes = self.most_running = 0
        self._line: list[_Ticket] = []
        self._inside: Counter[str] = Counter()
        self._turns: dict[str, int] = {}  # number of the last turn of each user who waits or is inside
        self._numbers = count(1)
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int, capacity: int, patient: bool = False) -> Iterator[None]:
        """Wait for the caller's turn and for ``size`` bytes, and hold them inside the block.

        Args:
            size: number of bytes; a caller that asks for more than ``capacity`` runs alone.
            capacity: bytes that all callers may hold together.
            patient: wait even if the line is full, for work that a client cannot be asked to send again.

        Raises:
            DecoderBusy: too many callers are waiting already, of this user or of all.
        """
        size = min(size, capacity)
        ticket = _Ticket(_user.get())
        with self._changed:
            own = sum(waiting.user == ticket.user for waiting in self._line)
            if not patient and own >= self.most_waiting - len(self._line):
                raise DecoderBusy(
                    "too many large files are waiting to be decoded; try again", retry_after=2.0
                )
            self._line.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: (
                        self._next() is ticket and self.running < self.most and self.bytes + size <= capacity
                    )
                )
                self._count(size, 1, ticket.user)
                self._turns[ticket.user] = next(self._numbers)
            finally:
                self._line.remove(ticket)
                self._forget(ticket.user)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._count(-size, -1, ticket.user)
                self._forget(ticket.user)
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Return the number of callers that wait."""
        return len(self._line)

    def _next(self) -> _Ticket:
        """Return the caller whose turn it is."""
        return min(self._line, key=lambda one: (self._inside[one.user], self._turns.get(one.user, 0)))

    def _forget(self, user: str) -> None:
        """Forget a user who neither waits nor is inside."""
        if not self._inside[user]:
            del self._inside[user]
            if all(one.user != user for one in self._line):
                self._turns.pop(user, None)

    def _count(self, size: int, callers: int, user: str) -> None:
        self.bytes += size
        self.running += callers
        self._inside[user] += callers
        self.most_bytes = max(self.most_bytes, self.bytes)
        self.most_running = max(self.most_running, self.running)
