"""What is checked before a route sees a request: Host, Origin, size. Plain ASGI, so that streaming stays streaming."""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpic.errors import Forbidden, MPICError, TooLarge
from mpic.server import errors

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MULTIPART_SLACK = 1 << 20  # boundaries and the other form fields


def is_loopback(host: str) -> bool:
    """Whether binding to ``host`` keeps the server on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LoopbackOnly:
    """Without API keys only pages and programs of this machine may call.

    A page on the web can make a browser send requests to 127.0.0.1 (cross-site forms), or let its own name resolve to
    127.0.0.1 (DNS rebinding). The first shows in ``Origin``, the second in ``Host``.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str] = LOCAL_NAMES) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        error = self.refuse(Headers(scope=scope))
        if error is not None:
            return await errors.response(error)(scope, receive, send)
        await self.app(scope, receive, send)

    def refuse(self, headers: Headers) -> MPICError | None:
        host = headers.get("host", "")
        if _name(host) not in self.names:
            return Forbidden(
                f"host {host!r} is not this machine: without API keys the server answers only for "
                f"{', '.join(sorted(self.names))}",
                param="Host",
            )
        origin = headers.get("origin")
        if origin is not None and _name(re.sub("^https?://", "", origin)) not in self.names:
            return Forbidden(f"requests from pages of {origin!r} are refused", param="Origin")
        return None


def _name(host: str) -> str | None:
    """``localhost:8000`` -> ``localhost``; None for anything that is not exactly a name and perhaps a port."""
    match = re.fullmatch(r"(?:\[([0-9a-f:]+)\]|([a-z0-9.-]+))(?::\d+)?", host.lower())
    return match and (match[1] or match[2])


class BodyLimit:
    """Refuses bodies over a size, by Content-Length before reading and by count while reading.

    Args:
        uploads: limit of ``POST /v1/files``; every other route has the limit ``other``.
    """

    def __init__(self, app: ASGIApp, uploads: int, other: int) -> None:
        self.app = app
        self.uploads = uploads
        self.other = other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit = self.other
        if scope["path"].rstrip("/") == "/v1/files":
            limit = self.uploads + MULTIPART_SLACK
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            return await errors.response(_too_large(limit))(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise _too_large(limit)
            return message

        await self.app(scope, counted, send)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit:,} bytes", limit_bytes=limit)
