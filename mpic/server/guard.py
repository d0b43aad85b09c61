"""Checks that run before a route sees a request: Host, Origin, cookies, size.

They are plain ASGI, so that bodies and answers still stream.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpic.errors import Forbidden, KeysNeeded, MPICError, TooLarge, TooManyBytes, cut
from mpic.http import errors
from mpic.http.hosts import host_name, is_address, is_loopback
from mpic.keys import KeyStore
from mpic.server.uploads import UploadsUnderWay

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PROXIED = re.compile(
    "forwarded|via|x-(?:forwarded|original|envoy|amzn|amz-cf|azure|appengine|arr|vercel|nf|proxy)(?:-.*)?"
    "|(?:x-)?(?:real|client|cluster-client|proxyuser|true-client|fastly-client|fly-client|do-connecting)-ip"
    "|cf-(?:connecting-ip(?:v6)?|ray|visitor|ipcountry)|cdn-loop|x-(?:varnish|scheme|url-scheme|host|rewrite-url)"
    "|(?:front-end|x-front-end)-https|proxy-connection|akamai-origin-hop"
)
"""Fields that proxies add to a request: those of RFC 9110 and 7239, and those of common programs and services."""
UPLOADS = re.compile(
    "POST (/v1/(files|references|uploads/[^/]+/parts)/?|/ui/gradio_api/upload)|PUT /v1/(files|references)/[^/]+/?"
)
MULTIPART_SLACK = 1 << 20  # boundaries and the other form fields
OPEN_BYTES = 64 << 10
"""Largest body of a request without a key. The only such body is the form of a login."""


class HostGuard:
    """Without API keys only pages and programs of this machine may call.

    A page on the web can make a browser send requests to 127.0.0.1 (cross-site forms), or let its own name resolve to
    127.0.0.1 (DNS rebinding). ``Origin`` shows the first, ``Host`` the second. A proxy on this machine passes on what
    others send, and may put its own ``Host`` on it: the fields that proxies add (``PROXIED``) show that. With keys the
    server may also be called through proxies, by an address (rebinding needs a name), by ``names``, and by pages it
    serves itself.

    Args:
        names: comma-separated; ``*`` for any.
        origins: origins of other sites whose pages may call; ``*``, for any, counts only with keys.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyStore | None = None, names: str = "", origins: Iterable[str] = ()
    ) -> None:
        self.app = app
        self.keys = keys
        self.origins = frozenset(origins)
        self.names = frozenset(name.strip().lower() for name in names.split(",") if name.strip())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            error = self.refuse(Headers(scope=scope))
        except MPICError as failure:  # the key store cannot be read
            error = failure
        if error is not None:
            return await errors.response(error)(scope, receive, send)
        await self.app(scope, receive, send)

    def refuse(self, headers: Headers) -> MPICError | None:
        """Return the error of a request that is refused, None for others."""
        with_keys = self.keys is not None and self.keys.exist()
        if not with_keys and (field := next(filter(PROXIED.fullmatch, headers), None)):
            return KeysNeeded(
                f"the request came through a proxy ({field}), and without API keys this server answers only programs "
                "of this machine, as an admin: make a key with `mpic keys create NAME --role admin`",
                param=field,
            )
        host = headers.get("host", "")
        if not self._is_allowed(host_name(host), with_keys):
            why = (
                "it is not in --hosts"
                if with_keys
                else "without API keys the server answers only for this machine"
            )
            known = ", ".join(sorted(LOCAL_NAMES | (self.names if with_keys else frozenset())))
            return Forbidden(f"host {cut(host)!r} is refused: {why} ({known})", param="Host")
        origin = headers.get("origin")
        if origin is None or origin in self.origins or (with_keys and "*" in self.origins):
            return None
        if not self._is_allowed(host_name(re.sub("^https?://", "", origin)), with_keys):
            return Forbidden(
                f"requests from pages of {cut(origin)!r} are refused (--cors-origins)", param="Origin"
            )
        return None

    def _is_allowed(self, name: str | None, with_keys: bool) -> bool:
        if name is None:
            return False
        return is_loopback(name) or (
            with_keys and (name in self.names or "*" in self.names or is_address(name))
        )


class CookieFilter:
    """Keeps one cookie of a request and drops the others, which no route needs.

    Python takes time quadratic in the length of a cookie's value to undo its quoting, and FastAPI reads the cookies of
    every request, with or without a key: one header of 60 KB would block the event loop for seconds.

    Args:
        name: the cookie to keep.
        value: the form of its value, which needs no quoting.
    """

    def __init__(self, app: ASGIApp, name: str, value: re.Pattern[bytes]) -> None:
        self.app = app
        self.prefix = f"{name}=".encode()
        self.value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(name == b"cookie" for name, _ in scope["headers"]):
            scope["headers"] = [*self._kept(scope["headers"])]
        await self.app(scope, receive, send)

    def _kept(self, headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for name, value in headers:
            if name != b"cookie":
                yield name, value
                continue
            for one in value.split(b";"):
                one = one.strip()
                if one.startswith(self.prefix) and self.value.fullmatch(one, len(self.prefix)):
                    yield name, one
                    break


BODIES = 16
"""The bodies of all requests under way may take so many times the largest one, and those of one user half of that."""


class BodyLimit:
    """Refuses bodies over a size, by Content-Length before reading and by count while reading, and further bodies while
    those of the requests under way take ``BODIES`` times ``other``: a body is in memory until its answer has ended.
    Uploads do not count: their files are on the disk, where ``under_way`` counts them until their answer has ended, and
    ``forms.TEXT_BYTES`` bounds what else they hold.

    Args:
        under_way: the uploads of all users.
        uploads: largest file of an upload (``UPLOADS``), whose form may be a little larger.
        other: limit of every other request.
        open: limit of requests without a user.
    """

    def __init__(
        self, app: ASGIApp, under_way: UploadsUnderWay, uploads: int, other: int, open: int = OPEN_BYTES
    ) -> None:
        self.app = app
        self.under_way = under_way
        self.uploads = uploads
        self.other = other
        self.open = open
        self._held: Counter[str | None] = Counter()  # bytes of bodies by user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit, state = self.other, scope.get("state", {})
        user = state["user"].id if "user" in state else state["visitor"].user if "visitor" in state else None
        upload = None
        if UPLOADS.fullmatch(f"{scope['method']} {scope['path']}"):
            limit, upload = self.uploads + MULTIPART_SLACK, self.under_way.of(user or "")
        if user is None:
            limit = min(limit, self.open)
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            return await errors.response(_too_large(limit))(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            size = len(message.get("body", b""))
            seen += size
            if upload is None:
                self._held[user] += size
            if seen > limit:
                raise _too_large(limit)
            if size and upload is not None:
                await upload.add(size)
            elif size:
                self._check_memory(user)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            if upload is not None:
                upload.end()
            else:
                self._held[user] -= seen
                if not self._held[user]:
                    del self._held[user]

    def _check_memory(self, user: str | None) -> None:
        """Raise TooManyBytes if the bodies of all requests, or of one user's, take more memory than they may."""
        most = BODIES * self.other
        if self._held.total() > most or self._held[user] > most // 2:
            raise TooManyBytes(
                "the bodies of the requests under way take all the memory that they may; try again"
            )


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit:,} bytes", limit_bytes=limit)
