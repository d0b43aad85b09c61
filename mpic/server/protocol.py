"""Limits on the cost of a client that has not shown a key, around uvicorn's own HTTP/1.1.

uvicorn waits for a header, a body and the reader of an answer as long as they take. Here each of them has a deadline: a
header must arrive in a fixed time; bodies must arrive, and answers must be read, at ``min_bytes_per_second`` at least,
and may fall behind this pace by a fixed time. Time in which the server itself is busy, or does not read because the
application is slow, is not counted.

Two public places suffice for this. ``ClientConnection`` stands between the event loop and uvicorn's protocol, as its
``http`` setting allows, and sees bytes and time; ``FrontDoor`` is an ASGI application around the real one, and sees
requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import select
import socket
import struct
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from mpic.config import ServerConfig, proxies
from mpic.errors import HeadersTooLarge, InvalidHTTP, MPICError, RequestTimeout, TooManyConnections
from mpic.http import errors
from mpic.server.connections import Connections, addresses

FIELD_BYTES = 32
"""Bytes that a header field counts in addition to its name and value, as in HTTP/2."""
UNSENT_BYTES = 16 << 10
"""Bytes that the kernel takes ahead of what it can send; with more, a slow reader's progress would be seen late."""
DRAINED = 48 << 10
"""Bytes that have left the write buffer, at least, when it falls from its high-water mark to its low one."""
LINGER_SECONDS = 1.0
"""Time in which the rest of a refused request is discarded, so that the client reads the error."""
CLIENT_MISTAKES = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library")
HANGUP = getattr(select, "POLLRDHUP", 0)  # Linux alone has it


class ClientConnection(asyncio.BufferedProtocol):
    """A connection of a client, whose bytes uvicorn's protocol parses.

    Args:
        registry: counts the connection, and has the configuration.
        uvicorn: the arguments of uvicorn's protocol.
    """

    transport: asyncio.Transport

    def __init__(self, registry: Connections, app_state: dict[str, Any], **uvicorn: Any) -> None:
        self.registry = registry
        self.limits = registry.config
        self.host = self.network = ""
        # a request's scope begins with this state, by which ``FrontDoor`` finds the connection
        self._inner = H11Protocol(app_state={**app_state, "connection": self}, **uvicorn)
        self._scope: Scope | None = None  # of the newest request
        self._known = self._sent = self._answering = self._answered = self._refused = False
        self._unread_body = False  # the application has not received the whole body of the newest request
        self._begun = True  # the next header, which the client of a new connection owes at once
        self._waited = 0.0  # seconds the client has been waited for between requests
        self._late: RequestTimeout | None = None  # the body did not arrive in time
        self._left = 0.0  # seconds by which the body may still fall behind
        self._patience: asyncio.Timeout | None = None  # while the application waits for a body
        self._unsent = 0  # bytes of answers that the client had not taken at the last tick
        self._drained = 0  # bytes that have certainly left since then
        self._behind = 0.0  # seconds by which the reader is behind the slowest accepted pace

    # ---- for the registry

    def has_key(self) -> bool:
        if not self._known and self._scope is not None:
            marks = {"user", "visitor"}  # set by Authenticate and by the proxy of /ui
            self._known = not marks.isdisjoint(self._scope["state"])
        return self._known

    def is_answering(self) -> bool:
        return self._answering

    def evict(self, error: TooManyConnections) -> None:
        self._refuse(error, linger=False)

    def drop(self) -> None:
        self.transport.abort()

    def tick(self, seconds: float) -> None:
        limits = self.limits
        if self._stalls(seconds):
            self._give_up("send_timeout")
        elif self._answering:
            if self._patience is not None:
                self._left -= seconds
                if self._left < 0:
                    self._left = math.inf  # only once: in the midst of expiring it takes no other time
                    self._patience.reschedule(0)
            elif not self.transport.is_reading() and self._has_hung_up():  # with requests behind this one
                self.transport.abort()
        elif self._refused:
            self._waited += seconds
            if self._waited > LINGER_SECONDS:
                self.transport.abort()
        elif self._begun:
            self._waited += seconds
            if self._waited > limits.header_seconds:
                self._end_late()

    def _stalls(self, seconds: float) -> bool:
        """Return whether the client has been too slow in reading its answer."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        read, self._drained = self._drained + max(0, before - self._unsent), 0
        if not self._unsent:
            self._behind = 0.0
            return False
        self._behind = max(0.0, self._behind + seconds - read / self.limits.min_bytes_per_second)
        return self._behind > self.limits.send_seconds

    def _has_hung_up(self) -> bool:
        """Return whether the client has closed its end, which the event loop sees only when it reads."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), HANGUP)
        return bool(poll.poll(0))

    # ---- events of the transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        sock, peer = transport.get_extra_info("socket"), transport.get_extra_info("peername")
        self.host, self.network = addresses(peer[0] if peer else "")
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and peer:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._inner.connection_made(transport)
        error = self.registry.admit(self)
        if error is not None:
            self._refuse(error, linger=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)
        self.registry.leave(self)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._drained += DRAINED
        self._inner.resume_writing()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.registry.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._refused:
            return
        self._begun = self._sent = True
        try:
            self._inner.data_received(bytes(self.registry.buffer[:nbytes]))
        except h11.LocalProtocolError:  # what follows is not HTTP, and the answer has begun
            self.transport.abort()
        if self.transport.is_closing():  # uvicorn refuses it
            self.registry.closed["invalid_http"] += 1

    # ---- requests

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request."""
        self.has_key()  # looks at the previous request
        self._scope, self._answering, self._answered = scope, True, False
        self._unread_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in scope["headers"]
        )
        self._left = self.limits.body_seconds
        self._late = None
        try:
            await app(scope, partial(self._receive, receive), partial(self._send, send))
        except Exception:
            # the framework raises what it has answered (``mpic.http.errors``, which logs it), and uvicorn would log it
            if not self._answered:
                raise
        finally:
            self._answering, self._begun, self._waited = False, self._unread_body, 0.0

    async def _receive(self, receive: Receive) -> Message:
        if not self._unread_body:
            return await receive()
        try:
            async with asyncio.timeout(None) as self._patience:
                message = await receive()
        except TimeoutError:
            self.registry.closed["body_timeout"] += 1
            seconds = self.limits.body_seconds
            self._late = RequestTimeout(f"the body of the request did not arrive in {seconds:g} s")
            raise self._late from None
        finally:
            self._patience = None
        self._unread_body = message.get("more_body", False)
        gained = len(message.get("body", b"")) / self.limits.min_bytes_per_second
        self._left = min(self.limits.body_seconds, self._left + gained)
        return message

    async def _send(self, send: Send, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._late is not None:
                MutableHeaders(raw=message["headers"])["connection"] = "close"
        else:
            self._answered = not message.get("more_body", False)
        await send(message)

    # ---- refusals

    def _end_late(self) -> None:
        """Close a connection whose client has not sent a header, or the rest of a body, in time."""
        if self._unread_body:
            self._give_up("unread_body")
            return
        self.registry.closed["header_timeout"] += 1
        if not self._sent:  # browsers open connections that they may never use
            self.transport.close()
            return
        seconds = self.limits.header_seconds
        self._refuse(RequestTimeout(f"the header of the request did not arrive in {seconds:g} s"))

    def _give_up(self, reason: str) -> None:
        self.registry.closed[reason] += 1
        at_once = struct.pack("ii", 1, 0)  # the kernel does not wait for the client either
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()

    def _refuse(self, error: MPICError, linger: bool = True) -> None:
        """End the connection, with an error response if the client cannot mistake it for another answer."""
        expected = self._begun and not (self._answering or self._unread_body)
        self._refused, self._begun, self._waited = True, False, 0.0
        if not expected or self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        body = json.dumps(error.body()).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        if linger:
            self.transport.write_eof()
        else:
            self.transport.close()


class FrontDoor:
    """ASGI application around the real one: leads each request through its ``ClientConnection``, and refuses headers
    that are too large or ambiguous.

    Args:
        app: the application; it sees the addresses that trusted proxies forward.
        config: limits, and the proxies.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        inner: Any = app  # uvicorn has types of its own for what Starlette calls ASGIApp
        self.app: Any = ProxyHeadersMiddleware(inner, [str(network) for network in proxies(config)])
        self.most = config.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        connection: ClientConnection = scope["state"].pop("connection")
        app: ASGIApp = self.app
        if error := self._refuse(scope):
            reason = "headers_too_large" if isinstance(error, HeadersTooLarge) else "invalid_http"
            connection.registry.closed[reason] += 1
            app = errors.response(error, {"connection": "close"})
        if scope["client"]:
            scope["client"] = (connection.host, scope["client"][1])
        await connection.answer(app, scope, receive, send)

    def _refuse(self, scope: Scope) -> MPICError | None:
        """Return why a request is refused that h11 accepts, if it is: it is too large, or something between client and
        server may read another host, another length or another protocol in it."""
        version, target, headers = scope["http_version"], scope["raw_path"], scope["headers"]
        size = sum(len(name) + len(value) + FIELD_BYTES for name, value in headers)
        if size + len(target) + len(scope["query_string"]) > self.most:
            return HeadersTooLarge(
                f"the header of the request is larger than {self.most:,} bytes", limit_bytes=self.most
            )
        fields = dict(headers)
        if version not in ("1.0", "1.1"):
            return InvalidHTTP(f"HTTP/{version} is not spoken here; send HTTP/1.1")
        if scope["method"] == "CONNECT":
            return InvalidHTTP("this server opens no tunnels (CONNECT)")
        if b"transfer-encoding" in fields and (version == "1.0" or b"content-length" in fields):
            return InvalidHTTP("Transfer-Encoding is for HTTP/1.1, and without a Content-Length")
        if target[:1] != b"/" and target != b"*":
            authority, _, path = target.partition(b"://")[2].partition(b"/")
            if authority.lower() != fields.get(b"host", b"").lower():
                return InvalidHTTP("the target of the request and its Host field name different hosts")
            scope["raw_path"] = b"/" + path
            scope["path"] = unquote(scope["raw_path"].decode("ascii"))
        return None


def _is_our_concern(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's is about more than a mistake of a client, of which anybody can make
    thousands; ``Connections`` counts those."""
    return not record.getMessage().startswith(CLIENT_MISTAKES)


def quiet_uvicorn() -> None:
    """Keep the mistakes of clients out of the log."""
    logging.getLogger("uvicorn.error").addFilter(_is_our_concern)
