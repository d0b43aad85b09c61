"""Responses that are kept for a while, so that a request may go on from one: by ``previous_response_id``, or in a
thread of ``/v1/messages``."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpic.errors import ResponseNotFound, cut

LIFE_SECONDS = 3600
"""Time for which a response is kept after it was last used."""
USER_BYTES, ALL_BYTES = 64 << 20, 256 << 20
"""Bytes of the conversations of the responses that are kept for one user, and for all: the oldest go first."""
OVERHEAD = 4096
"""Bytes that a response counts in addition to its conversation."""


@dataclass(frozen=True)
class KeptResponse:
    """A response, and the conversation up to its end.

    Args:
        body: what the client got.
        messages: the messages of the chat (``MessageParam``) from which others may go on.
        size: bytes of the conversation.
        items: the messages of its output items, by id.
        tools: the tools of the chat, where whoever goes on keeps them.
    """

    body: dict[str, Any]
    messages: Sequence[Any]
    size: int
    items: dict[str, Any] = field(default_factory=dict)
    tools: Any = None


class KeptResponses:
    """Keeps responses in memory, by user. It lives on the server's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._users: dict[str, OrderedDict[str, tuple[float, KeptResponse]]] = {}  # of each, the oldest first
        self._bytes: dict[str, int] = {}

    def keep(self, user: str, response: KeptResponse) -> None:
        """Keep a response, for which older ones may have to go. One that is too large by itself is not kept."""
        self._drop_expired()
        self._users.setdefault(user, OrderedDict())[response.body["id"]] = self._clock(), response
        self._bytes[user] = self._bytes.get(user, 0) + response.size + OVERHEAD
        while self._bytes.get(user, 0) > USER_BYTES:
            self._drop(user, next(iter(self._users[user])))
        while sum(self._bytes.values()) > ALL_BYTES:
            oldest = min(self._users, key=self._since)
            self._drop(oldest, next(iter(self._users[oldest])))

    def get(self, user: str, id: str, param: str | None = None) -> KeptResponse:
        """Return a response of the user, which is then kept for another hour. Raise ResponseNotFound."""
        self._drop_expired()
        kept = self._users.get(user) or OrderedDict()
        if id not in kept:
            raise ResponseNotFound(
                f"no response {cut(id)!r} is kept: they are forgotten after an hour, or earlier to make room",
                param=param,
                id=id,
            )
        response = kept[id][1]
        kept[id] = self._clock(), response
        kept.move_to_end(id)
        return response

    def item(self, user: str, id: str, param: str) -> Any:
        """Return the message of an output item of the user. Raise ResponseNotFound."""
        response = self.get(user, "resp_" + id.partition("_")[2].partition("_")[0], param)
        if id not in response.items:
            raise ResponseNotFound(f"the response has no item {cut(id)!r}", param=param, id=id)
        return response.items[id]

    def remove(self, user: str, id: str, param: str | None = None) -> None:
        """Forget a response. Raise ResponseNotFound."""
        self.get(user, id, param)
        self._drop(user, id)

    def _since(self, user: str) -> float:
        return next(iter(self._users[user].values()))[0]

    def _drop(self, user: str, id: str) -> None:
        self._bytes[user] -= self._users[user].pop(id)[1].size + OVERHEAD
        if not self._users[user]:
            del self._users[user], self._bytes[user]

    def _drop_expired(self) -> None:
        expired = self._clock() - LIFE_SECONDS
        for user in list(self._users):
            while user in self._users and self._since(user) <= expired:
                self._drop(user, next(iter(self._users[user])))
