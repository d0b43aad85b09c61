"""Orders vLLM's requests so that users take turns at the rows of a step; vLLM's own order is by arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from mpic.engine.vllm.wire import USER

if TYPE_CHECKING:
    from vllm.v1.request import Request

CREDIT = 8
"""Maximum lag of a user behind the user with the most rows, in steps' worth of rows. A new user starts with the full
lag, and so goes first."""


def user_of(request: Request) -> str:
    """Return the user of a request."""
    params = request.sampling_params
    return str(((params and params.extra_args) or {}).get(USER, ""))


def is_prefill(request: Request) -> bool:
    """Return whether more than one token of a request is still to be computed."""
    return request.num_tokens - request.num_computed_tokens > 1


class RowTurns:
    """Counts the rows that users with requests have received.

    Args:
        rows: maximum rows of a step.
    """

    def __init__(self, rows: int) -> None:
        self._step = rows
        self._had: Counter[str] = Counter()
        self._tried: set[str] = set()

    def begin(self, running: Iterable[Request], waiting: Iterable[Request]) -> Callable[[Request], int]:
        """Begin a step; return the key by which requests are sorted: requests of the user with the fewest rows come
        first."""
        users = dict.fromkeys(map(user_of, (*running, *waiting)))
        had = {user: self._had[user] for user in users if user in self._had}
        most = max(had.values(), default=0)
        floor = most - CREDIT * self._step
        self._had = Counter({user: max(had.get(user, floor), floor) - floor for user in users})
        return lambda request: self._had[user_of(request)]

    def limit(self, running: list[Request], waiting: list[Request]) -> tuple[int, set[str]]:
        """Return the maximum rows of a step for one prompt (0: no limit), and the ids of prompts that get none. While
        several users have prompts, answers keep their rows. A new request of a user with nothing running gets one step
        without the prompts of users who have had more rows; if it cannot start then, it gets a share like the
        others."""
        prompts = [request for request in running if is_prefill(request)]
        present = set(map(user_of, running))
        new = {request.request_id: user_of(request) for request in waiting if user_of(request) not in present}
        if len(present.union(new.values())) < 2:
            return 0, set()
        left = max(1, self._step - len(running) + len(prompts))
        least = min((self._had[user] for id, user in new.items() if id not in self._tried), default=0)
        first, self._tried = new.keys() - self._tried, set(new)
        if first:
            return left, {one.request_id for one in prompts if self._had[user_of(one)] > least}
        return max(1, left // (len(prompts) + 1)) if new else left, set()

    def end(self, scheduled: Mapping[str, int], requests: Mapping[str, Request]) -> None:
        """Count the rows given to requests."""
        for id, rows in scheduled.items():
            self._had[user_of(requests[id])] += rows
