"""Finds the ``User`` of a request by ``Authorization: Bearer KEY`` or ``x-api-key: KEY``, and enforces the limits of
the key.

Without keys there is one user, ``local``, an admin, and the server answers this machine only. Once a key has been made
(``mpic keys create``) every route needs one, except those in ``OPEN``, even after the last key is revoked.

The check is plain ASGI, in front of everything that reads a body: a request without a key costs nothing, and a request
that streams its answer counts as under way until the last byte is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpic.errors import Forbidden, MPICError, RateLimited, TooManyAtOnce, Unauthorized, UnsupportedParameter
from mpic.http import errors
from mpic.http.sse import NOT_KEPT, event
from mpic.keys import Key, KeyLimits, KeyNotFound, KeyStore, Role

LOCAL_USER = "local"
OPEN = frozenset({"/", "/docs", "/openapi.json", "/health/live", "/health/ready"})
UI = "/ui"
"""The web interface has its own login. Its requests to this API come with the key of the login in
``scope["state"]["login"]``, where no client can put one. The page's own files and pictures are under no limit: a page
shows many at once, they are small or kept, and pictures are made on the user's share of the threads."""


WATCH_SECONDS = 0.4
"""Time between two looks for revoked keys."""


@dataclass(frozen=True)
class User:
    """The user who makes a request. ``id`` comes from the key, never from the request, and isolates everything that
    belongs to a user."""

    id: str
    role: Role
    limits: KeyLimits = field(default_factory=KeyLimits)


LOCAL = User(LOCAL_USER, "admin")


class RateLimiter:
    """Limits the requests of one key: a bucket that holds one minute's worth and is refilled evenly."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._spent = 0.0

    def acquire(self, per_minute: int, now: float) -> float:
        """Count one request. Return 0, or the seconds until the next request is allowed if this one is not."""
        self._spent = max(0.0, self._spent - (now - self._at) * per_minute / 60)
        self._at = now
        if self._spent + 1 > per_minute + 1e-9:
            return (self._spent + 1 - per_minute) * 60 / per_minute
        self._spent += 1
        return 0.0


class KeyRates:
    """Counts the requests of every key, for ``requests_per_minute``. It lives on the server's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limiters: dict[str, RateLimiter] = {}

    def count(self, key: Key) -> None:
        """Count one request of a key. Raise RateLimited when the key has used up its limit."""
        most = key.limits.requests_per_minute
        if most is None:
            return
        now = self._clock()
        wait = self._limiters.setdefault(key.prefix, RateLimiter(now)).acquire(most, now)
        if wait:
            raise RateLimited(f"this key may send {most} requests a minute", retry_after=wait, limit=most)


class _Running:
    """A request under way, which ends when its key is revoked: for the application its client has then left."""

    def __init__(self, key: Key, receive: Receive, send: Send) -> None:
        self.key = key
        self.revoked = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._send = send
        self._kind: str | None = None  # the type of the answer, once it has begun
        self._complete = False

    async def receive(self) -> Message:
        arriving = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({arriving, self.revoked}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if self.revoked.done() else await arriving
        finally:
            arriving.cancel()

    async def send(self, message: Message) -> None:
        if self.revoked.done():
            return
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            self._kind = headers.get("content-type", "")
            headers.setdefault("cache-control", NOT_KEPT)
        self._complete = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)

    async def end(self, scope: Scope) -> None:
        """Tell the client of a revoked key why its answer ends. What is no stream of events is cut off."""
        error = Unauthorized("the API key was revoked while its request was answered")
        if self._kind is None:
            await errors.response(error)(scope, self._receive, self._send)
        elif not self._complete and self._kind.startswith("text/event-stream"):
            said = scope["state"].get("failure", lambda error: event(error.body()))
            await self._send({"type": "http.response.body", "body": said(error)})


class UnderWay:
    """The share of its key's ``concurrent`` that a request takes until it ends: one for each of its answers.

    Args:
        counts: answers under way, by key.
    """

    def __init__(self, counts: Counter[str], key: Key) -> None:
        self._counts, self._key, self._taken = counts, key, 0

    def take(self, answers: int) -> None:
        """Count answers. Raise TooManyAtOnce when the key would have more under way than it may."""
        most, prefix = self._key.limits.concurrent, self._key.prefix
        if most is not None and self._counts[prefix] + answers > most:
            if self._taken + answers > most:
                raise UnsupportedParameter(
                    f"n is {self._taken + answers}, and this key may have {most} answers under way", param="n"
                )
            raise TooManyAtOnce(
                f"{self._counts[prefix]} requests of this key are running, of {most} that it may have",
                limit=most,
            )
        self._counts[prefix] += answers
        self._taken += answers

    def end(self) -> None:
        self._counts[self._key.prefix] -= self._taken
        self._counts += Counter()  # drops zeros
        self._taken = 0


class Authenticate:
    """ASGI middleware that puts the ``User`` into ``scope["state"]["user"]``, or refuses the request.

    Args:
        rates: counts the requests of keys.
        always: True if keys are needed even while none exist, because the server can be reached from outside.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore, rates: KeyRates, always: bool = False) -> None:
        self.app = app
        self.keys = keys
        self.rates = rates
        self.always = always
        self._counts: Counter[str] = Counter()  # answers under way, by the prefixes of keys
        self._running: dict[str, set[_Running]] = {}  # by the prefixes of keys
        self._watching: asyncio.TimerHandle | None = None
        self._version: tuple[object, ...] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            key = self._key(scope)
            if key is not None and key.role == "metrics" and scope["path"] != "/metrics":
                raise Forbidden("this key may read /metrics and nothing else")
            taken = None if key is None else self._admit(key)
        except MPICError as error:
            return await errors.response(error)(scope, receive, send)
        if key is None or taken is None:
            return await self.app(scope, receive, send)
        scope.setdefault("state", {}).update(user=User(key.user, key.role, key.limits), under_way=taken)
        running = _Running(key, receive, send)
        others = self._running.setdefault(key.prefix, set())
        others.add(running)
        try:
            if self._watching is None:
                self._watch()
            await self.app(scope, running.receive, running.send)
        finally:
            taken.end()
            others.remove(running)
            if not others:
                del self._running[key.prefix]
        if running.revoked.done():
            await running.end(scope)

    def _watch(self) -> None:
        """End the requests of keys that were revoked. Other processes revoke, so the file is asked, while requests are
        under way: for one counter, and for keys only when that has changed."""
        self._watching = None
        if not self._running:
            return
        self._watching = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._watch)
        try:
            before, self._version = self._version, self.keys.version()
            if self._version == before:
                return
            for prefix, requests in self._running.items():
                if not self._is_valid(prefix):
                    for one in requests:
                        one.revoked.done() or one.revoked.set_result(None)
        except (
            MPICError
        ):  # it cannot be read now: new requests are refused, and those under way asked about again
            self._version = None

    def _is_valid(self, prefix: str) -> bool:
        try:
            return self.keys.get(prefix).revoked_at is None
        except KeyNotFound:  # the file was replaced
            return False

    def _key(self, scope: Scope) -> Key | None:
        """Return the key of a request; None if it needs none."""
        if not self.always and not self.keys.exist():
            scope.setdefault("state", {})["user"] = LOCAL
            return None
        path = scope["path"]
        if path in OPEN or path == UI or path.startswith(UI + "/"):
            return None
        login: Key | None = scope.get("state", {}).get("login")
        if login is not None:
            if not self._is_valid(
                login.prefix
            ):  # an event of the page may make calls long after it was let in
                raise Unauthorized("the API key of this login was revoked")
            return login
        headers = Headers(scope=scope)
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if not scheme:  # clients of Anthropic's API
            scheme, secret = "bearer", headers.get("x-api-key", "")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthorized("an API key is needed: send the header Authorization: Bearer KEY")
        key = self.keys.find(secret.strip())
        if key is None:
            raise Unauthorized("the API key is not known here, or was revoked")
        return key

    def _admit(self, key: Key) -> UnderWay:
        """Count a request. Raise TooManyAtOnce or RateLimited when the key has used up its limits."""
        taken = UnderWay(self._counts, key)
        taken.take(1)
        try:
            self.rates.count(key)
        except RateLimited:
            taken.end()
            raise
        return taken


def take_answers(request: Request, n: int) -> None:
    """Count a request for ``n`` answers as ``n`` under way. Raise TooManyAtOnce when its key may not have so many at
    the moment, and UnsupportedParameter when it never may."""
    taken: UnderWay | None = getattr(request.state, "under_way", None)
    if taken is not None and n > 1:
        taken.take(n - 1)


_scheme = HTTPBearer(auto_error=False, description="only when the server has keys; see `mpic keys --help`")


async def _current(request: Request, shown: Annotated[object, Security(_scheme)]) -> User:
    """Return the user that the middleware has found. ``shown`` only documents the key in /docs. Like ``get_state``,
    it needs no thread."""
    return request.state.user


async def _admin(user: Annotated[User, Depends(_current)]) -> User:
    if user.role != "admin":
        raise Forbidden("this needs a key with the role admin")
    return user


async def _monitor(user: Annotated[User, Depends(_current)]) -> User:
    if user.role == "user":
        raise Forbidden("this needs a key with the role metrics or admin")
    return user


CurrentUser = Annotated[User, Depends(_current)]
AdminUser = Annotated[User, Depends(_admin)]
MonitorUser = Annotated[User, Depends(_monitor)]
