"""Visitors of the page: a cookie stands for a login, and a login for an API key, with which the SDK calls the API."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from mpic.errors import Forbidden, Unauthorized, Unavailable
from mpic.keys import LOGIN_SECONDS, Key, KeyStore, Role

if TYPE_CHECKING:
    from mpic.client import AsyncMPIC

COOKIE = "mpic_session"
COOKIE_VALUE = re.compile(rb"[A-Za-z0-9_-]{1,128}")
UNKNOWN_KEY = "This key is not known here, or it was revoked."
METRICS_KEY = "This key is for metrics only."
LOCAL = "local"
CLIENTS = 256
"""Maximum clients kept, and maximum logins of a standalone page."""
ASK_SECONDS = 60.0
"""Seconds until a standalone page asks its server again whether it still needs no key."""


class Visitor(NamedTuple):
    """The user who makes a request.

    Attributes:
        keyed: whether the user has logged in with a key; else the server needs none.
        client: calls the API as this user.
    """

    user: str
    role: Role
    keyed: bool
    client: AsyncMPIC


class Logins(Protocol):
    """The logins of a page."""

    async def visitor(self, cookie: str | None) -> Visitor | None:
        """Return the visitor with this cookie; None if a login is needed first."""

    async def log_in(self, key: str) -> str:
        """Return a new cookie for an API key. Raise Unauthorized, RateLimited."""

    async def log_out(self, cookie: str) -> None:
        """End a login, if there is one."""

    async def close(self) -> None:
        """Close the clients when the page ends."""


class ServedLogins:
    """Logins of the page that a server serves. The key store keeps them, and revokes them with their keys.

    Args:
        app: the server, which is called in this process.
        keys: the keys of the server.
        always: True if a key is needed even while none exist.
        admit: counts a login against the limits of its key, and returns the new cookie.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyStore, always: bool, admit: Callable[[Key], Awaitable[str]]
    ) -> None:
        self._app = app
        self._keys = keys
        self._always = always
        self._admit = admit
        self._clients: OrderedDict[str, AsyncMPIC] = OrderedDict()

    async def visitor(self, cookie: str | None) -> Visitor | None:
        if not self._always and not self._keys.exist():
            return Visitor(LOCAL, "admin", False, self._client(None))
        key = self._keys.logged_in(cookie) if cookie else None
        return None if key is None else Visitor(key.user, key.role, True, self._client(key))

    async def log_in(self, key: str) -> str:
        found = self._keys.find(key)
        if found is None:
            raise Unauthorized(UNKNOWN_KEY)
        if found.role == "metrics":
            raise Forbidden(METRICS_KEY)
        return await self._admit(found)

    async def log_out(self, cookie: str) -> None:
        self._keys.log_out(cookie)

    async def close(self) -> None:
        self._clients.clear()

    def _client(self, key: Key | None) -> AsyncMPIC:
        from mpic.client import AsyncInProcess, AsyncMPIC  # needed by the first visitor, not at the start

        name = key.prefix if key else ""
        if name not in self._clients:

            async def with_key(scope: Scope, receive: Receive, send: Send) -> None:
                scope["state"]["login"] = (
                    key  # server/auth.py looks for it; no request from outside can hold it
                )
                await self._app(scope, receive, send)

            client = AsyncMPIC(
                "http://127.0.0.1",
                "",
                transport=AsyncInProcess(with_key if key else self._app),
                local_files=False,
            )
            self._clients[name] = client
            if len(self._clients) > CLIENTS:
                self._clients.popitem(last=False)  # a client of this process holds no connection
        return self._clients[name]


class _Login(NamedTuple):
    until: float
    visitor: Visitor


class LoginsAlone:
    """Logins of a standalone page in front of a server elsewhere. They hold keys, so they are kept in memory only,
    and end with the process.

    Args:
        url: address of the server.
        clock: function that returns seconds.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._keyless: AsyncMPIC | None = None  # of all visitors without a key
        self._open: Visitor | None = None  # the visitor without a key, if the server needs none
        self._ask_at = 0.0
        self._logins: OrderedDict[str, _Login] = OrderedDict()  # least recently used first

    async def visitor(self, cookie: str | None) -> Visitor | None:
        digest = _digest(cookie) if cookie else ""
        login = self._logins.get(digest)
        if login is not None and login.until > self._clock():
            self._logins.move_to_end(digest)
            return login.visitor
        if self._open is None or self._clock() >= self._ask_at:
            await self._ask()
        return self._open

    async def log_in(self, key: str) -> str:
        client = self._client(key)
        try:
            role = await _role_of(client)
        except BaseException as error:  # a visitor who guesses keys must not leave connections behind
            await client.close()
            if isinstance(error, Unauthorized):
                raise Unauthorized(UNKNOWN_KEY) from None
            raise
        # the server does not tell the name of a user; the first part of a key is public
        visitor = Visitor(key.rpartition("_")[0] or LOCAL, role, bool(key), client)
        cookie = secrets.token_urlsafe(32)
        self._logins[_digest(cookie)] = _Login(self._clock() + LOGIN_SECONDS, visitor)
        if len(self._logins) > CLIENTS:
            await self._end(next(iter(self._logins)))
        return cookie

    async def log_out(self, cookie: str) -> None:
        await self._end(_digest(cookie))

    async def close(self) -> None:
        for digest in list(self._logins):
            await self._end(digest)
        if self._keyless is not None:
            await self._keyless.close()

    async def _end(self, digest: str) -> None:
        login = self._logins.pop(digest, None)
        if login is not None:
            await login.visitor.client.close()

    async def _ask(self) -> None:
        """Ask the server whether it needs a key. A server that was open before and does not answer now is assumed to be
        still open.

        Raises:
            Unavailable: the server does not answer, and never has.
        """
        self._keyless = self._keyless or self._client("")
        self._ask_at = self._clock() + ASK_SECONDS  # other visitors need not ask in the meantime
        try:
            self._open = Visitor(LOCAL, await _role_of(self._keyless), False, self._keyless)
        except Unauthorized:
            self._open = None
        except Unavailable:
            if self._open is None:
                raise

    def _client(self, key: str) -> AsyncMPIC:
        from mpic.client import AsyncMPIC

        return AsyncMPIC(self._url, key, local_files=False)


async def _role_of(client: AsyncMPIC) -> Role:
    """Ask the server for the role of a client's key.

    Raises:
        Unauthorized: the key is not known.
        Forbidden: it may read metrics only.
        Unavailable: the server does not answer.
    """
    from mpic.client import ClientError

    try:
        await client.references.index()  # for administrators
        return "admin"
    except Forbidden:
        pass
    except ClientError as error:
        raise Unavailable(error.message) from error
    try:
        await client.models.list()  # for every user
    except Forbidden:
        raise Forbidden(METRICS_KEY) from None
    except ClientError as error:
        raise Unavailable(error.message) from error
    return "user"


def _digest(cookie: str) -> str:
    return hashlib.sha256(cookie.encode()).hexdigest()
