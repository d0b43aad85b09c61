"""Lets users' requests into vLLM in turn. vLLM's own queue does not know users, so only as many requests are let in as
can run."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CONCURRENT_COMPILES = 8
"""Maximum compiles at once; each holds a chunk's KV in memory until it is durable."""


class Entered:
    """A request inside vLLM. ``rows`` is the number of rows that vLLM still has to compute for its first token."""

    def __init__(self, gate: Gate, user: str, rows: int) -> None:
        self._gate, self.user, self.rows = gate, user, rows

    def answers(self) -> None:
        """Record that vLLM has begun to answer."""
        self._gate.change(self, -self.rows)
        self.rows = 0


class Gate:
    """Requests inside vLLM or waiting to get in, by user. The next to enter is the oldest request of the user with the
    fewest inside. Its methods run on the event loop unless they say otherwise.

    Some places are reserved for users with nothing inside. While one user's prompts fill a whole step, further requests
    of that user wait, so that another user's first request waits for at most that step and one more prompt.

    Args:
        places: maximum number of requests that vLLM runs at once.
        rows: maximum number of rows in a step.
    """

    def __init__(self, places: int, rows: int) -> None:
        self.places, self._step = places, rows
        self._queues: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        self._inside: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()

    def inside(self) -> Counter[str]:
        """Return how many requests of each user are inside. May be called from any thread."""
        return Counter(dict(list(self._inside.items())))

    @asynccontextmanager
    async def turn(self, user: str, rows: int) -> AsyncIterator[Entered]:
        """Wait for a request's turn; it is inside within the block.

        Args:
            rows: number of rows computed for its first token.
        """
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(user, deque()).append((admitted, rows))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():  # its turn came at the same moment
                self._leave(Entered(self, user, rows))
            raise
        turn = Entered(self, user, rows)
        try:
            yield turn
        finally:
            self._leave(turn)

    def _leave(self, turn: Entered) -> None:
        self._inside[turn.user] -= 1
        self.change(turn, -turn.rows)

    def change(self, turn: Entered, rows: int) -> None:
        """Add to the rows of a request inside, and admit the requests that may enter now."""
        self._rows[turn.user] += rows
        for counts in (self._inside, self._rows):
            if not counts[turn.user]:
                del counts[turn.user]
        self._admit()

    def _admit(self) -> None:
        while True:
            for user, queue in list(self._queues.items()):
                while queue and queue[0][0].cancelled():
                    queue.popleft()
                if not queue:
                    del self._queues[user]
            users = [user for user in self._queues if self._may_enter(user)]
            if not users:
                return
            user = min(users, key=lambda user: self._inside[user])
            admitted, rows = self._queues[user].popleft()
            if not self._queues[user]:
                del self._queues[user]  # so that this user comes last among equals
            else:
                self._queues[user] = self._queues.pop(user)
            self._inside[user] += 1
            self._rows[user] += rows
            admitted.set_result(None)

    def _may_enter(self, user: str) -> bool:
        free = self.places - self._inside.total()
        if not self._inside[user]:
            return free > 0
        kept = self.places // 16 or int(self.places >= 4)
        return free > kept and self._rows[user] < self._step
