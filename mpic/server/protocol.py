"""uvicorn's HTTP/1.1 protocol with limits on the cost of a client that has not shown a key.

uvicorn waits for a header, a body and the reader of an answer as long as they take, and keeps headers of any size. Here
each of them has a size or a deadline. A header must arrive in a fixed time. Bodies must arrive, and answers must be
read, at ``min_bytes_per_second`` at least, and may fall behind this pace by a fixed time. Time in which the server
itself is busy, or does not read because the application is slow, is not counted.
"""

from __future__ import annotations

import fcntl
import json
import re
import socket
import struct
import sys
import termios
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mpic.errors import HeadersTooLarge, InvalidHTTP, MPICError, RequestTimeout, TooManyConnections
from mpic.server.connections import Connections, addresses

FIELD_BYTES = 32
"""Bytes that a header field counts in addition to its name and value, as in HTTP/2."""
FRAMING_BYTES = 8
"""Bytes of chunk framing that are accepted for each byte of a body, in addition to one header's worth."""
PIPELINED = 16
"""Requests that may wait on one connection behind the one that is being answered."""
DRAINED = 48 << 10
"""Bytes that have left the write buffer, at least, when it falls from its high-water mark to its low one."""
LINGER_SECONDS = 1.0
"""Time in which the rest of a refused request is discarded, so that the client reads the error."""
EVENTS = ("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete")


class _BehindHeader:
    """Passes the events of a parser on to a connection, without those of the first header."""

    def __init__(self, connection: HTTPConnection) -> None:
        self._passing = False
        for name in EVENTS:
            setattr(self, name, partial(self._pass, name, getattr(connection, name)))

    def _pass(self, name: str, event: Callable[..., None], *args: bytes) -> None:
        if self._passing:
            event(*args)
        elif name == "on_headers_complete":
            self._passing = True


class HTTPConnection(HttpToolsProtocol):
    """A connection of a client.

    Args:
        registry: counts the connection, and has the configuration.
        uvicorn: the arguments of uvicorn's own protocol.
    """

    parser: Any  # httptools' own; None once the connection has been lost

    def __init__(self, registry: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.registry = registry
        self.limits = registry.config
        self.host = self.network = ""
        self._state: Literal["header", "body", "complete", "refused"] = "header"
        self._error: MPICError | None = None  # the reason why the parser was stopped
        # the request that is being answered; ``cycle`` is the newest one, which may be queued
        self._answering: RequestResponseCycle | None = None
        self._known = False
        self._waited = 0.0  # seconds the client has been waited for in this state
        self._answered = False  # in state body: the answer went out before the body was complete
        self._header_bytes = 0  # bytes of the header parsed so far
        self._raw_bytes = 0  # bytes read in this state, except the piece in which it began
        self._body_bytes = self._body_seen = 0  # bytes read so far, and at the last tick
        self._unread = 0  # bytes of answers that the client had not received at the last tick
        self._drained = 0  # bytes that have certainly left since then
        self._behind = 0.0  # seconds by which the reader is behind the slowest accepted pace

    # ---- for the registry

    def has_key(self) -> bool:
        if not self._known and self.scope is not None:
            marks = {"user", "visitor"}  # set by Authenticate and by the proxy of /ui
            self._known = not marks.isdisjoint(self.scope["state"])
        return self._known

    def is_answering(self) -> bool:
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def evict(self, error: TooManyConnections) -> None:
        self._refuse(error, linger=False)

    def drop(self) -> None:
        self.transport.abort()

    def tick(self, seconds: float) -> None:
        limits = self.limits
        if self._stalls(seconds):
            return self._give_up("send_timeout")
        match self._state:
            case "header" if not self.is_answering():
                self._waited += seconds
                if self._waited > limits.header_seconds:
                    self._late("header", limits.header_seconds)
            case "complete" if self.is_answering():
                self._waited = 0.0
            case "complete":
                self._waited += seconds
                if self._waited > limits.keep_alive_seconds:
                    self.transport.close()
            case "body" if self.cycle.response_complete:
                self._waited = self._waited + seconds if self._answered else 0.0
                self._answered = True
                if self._waited > limits.header_seconds:
                    self._give_up("unread_body")
            case "body" if not (self.flow.read_paused or self.cycle.waiting_for_100_continue):
                arrived, self._body_seen = self._body_bytes - self._body_seen, self._body_bytes
                self._waited = max(0.0, self._waited + seconds - arrived / limits.min_bytes_per_second)
                if self._waited > limits.body_seconds:
                    self._late("body", limits.body_seconds)
            case "refused":
                self._waited += seconds
                if self._waited > LINGER_SECONDS:
                    self.transport.abort()

    def _stalls(self, seconds: float) -> bool:
        """Return whether the client has been too slow in reading its answer."""
        before, self._unread = self._unread, self._left_to_read()
        read, self._drained = self._drained + max(0, before - self._unread), 0
        if not self._unread:
            self._behind = 0.0
            return False
        self._behind = max(0.0, self._behind + seconds - read / self.limits.min_bytes_per_second)
        return self._behind > self.limits.send_seconds

    def _left_to_read(self) -> int:
        """Return the bytes that wait for the client here and, if there are any, in the kernel.

        The kernel takes more only when it has sent a third of its buffer, which can be megabytes. Without its queue
        no progress could be seen until then.
        """
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            return 0
        queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return unsent + int.from_bytes(queued, sys.byteorder)

    # ---- events of the transport

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        host, port = self.client or ("", 0)
        self.host, self.network = addresses(host)
        self.client = (self.host, port)
        error = self.registry.admit(self)
        if error is not None:
            self._refuse(error, linger=False)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disconnect()
        self._unset_keepalive_if_required()
        self.registry.leave(self)

    def _disconnect(self) -> None:
        """Tell the application that nobody waits for the answer that it is making; further output is dropped."""
        for cycle in (self._answering, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def resume_writing(self) -> None:
        self._drained += DRAINED
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._state == "refused":
            return
        if self._raw_bytes > self._allowed():
            return self._malformed()
        self._unset_keepalive_if_required()
        self._raw_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._malformed()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. It takes what follows the offer of another protocol for that protocol, but an offer that is
        ignored changes nothing (RFC 9110, 7.8): another parser, which has not seen the offer, reads on."""
        while data:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                fields = b"".join(b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade")
                version = self.parser.get_http_version().encode()
                head = b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, fields)
                self.parser = httptools.HttpRequestParser(_BehindHeader(self))
                self.parser.feed_data(head)

    def _allowed(self) -> int:
        """Return how many bytes may have been read in the present state."""
        if self._state == "body":
            return self.limits.max_header_bytes + (1 + FRAMING_BYTES) * self._body_bytes
        return self.limits.max_header_bytes

    # ---- events of the parser

    def on_message_begin(self) -> None:
        self.has_key()  # looks at the previous request, whose scope is about to be replaced
        super().on_message_begin()
        self._enter("header")
        self._header_bytes = self._body_bytes = self._body_seen = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the header, or of the trailer after a chunked body, which nobody reads."""
        self._count(len(name) + len(value) + FIELD_BYTES)
        if self._state == "header":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if wrong := self._wrong_in_header():
            self._stop(InvalidHTTP(wrong))
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False
        super().on_headers_complete()
        self._enter("body")
        if len(self.pipeline) > PIPELINED:
            self._stop(InvalidHTTP(f"more than {PIPELINED} requests wait on one connection"))
        if self.pipeline and self._unread_bodies() <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # uvicorn stops reading here, and then sees no client that disconnects

    def _wrong_in_header(self) -> str | None:
        """Return why a header is refused that the parser accepts, if it is: something between client and server may
        read another host, another length or another protocol in it."""
        version = self.parser.get_http_version()
        hosts, codings = (
            [v for n, v in self.headers if n == name] for name in (b"host", b"transfer-encoding")
        )
        authority = re.split(b"[/?#]", self.url.partition(b"://")[2])[0]
        if version not in ("1.0", "1.1"):
            return f"HTTP/{version} is not spoken here; send HTTP/1.1"
        if self.parser.get_method() == b"CONNECT":
            return "this server opens no tunnels (CONNECT)"
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            return f"a request has one Host field, not {len(hosts)}"
        if codings and (version == "1.0" or [coding.lower() for coding in codings] != [b"chunked"]):
            return "the only Transfer-Encoding is chunked, and only in HTTP/1.1"
        if self.url[:1] not in (b"/", b"*") and [authority.lower()] != [host.lower() for host in hosts]:
            return "the target of the request and its Host field name different hosts"
        return None

    def _unread_bodies(self) -> int:
        """Return the bytes of bodies that the application has not received yet."""
        cycles = [cycle for cycle, _ in self.pipeline]
        return sum(len(cycle.body) for cycle in (self._answering, *cycles) if cycle is not None)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] == "1.0":
            app = partial(_without_chunks, app, cycle)
        answered: Any = partial(_answered, app, cycle)
        super()._start_asgi_task(cycle, answered)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # only the header has ended, see ``_parse``
        super().on_message_complete()
        self._enter("complete")

    def _enter(self, state: Literal["header", "body", "complete"]) -> None:
        self._state, self._waited, self._answered, self._raw_bytes = state, 0.0, False, 0

    def _count(self, length: int) -> None:
        self._header_bytes += length
        if self._header_bytes > self.limits.max_header_bytes:
            self._stop(self._too_large())

    def _stop(self, error: MPICError) -> None:
        self._error = error
        raise error

    # ---- refusals

    def _malformed(self) -> None:
        """Refuse a request that cannot be, or must not be, parsed further."""
        error = self._error or InvalidHTTP("this is not a valid HTTP/1.1 request")
        if self._error is None and self._raw_bytes > self._allowed():
            in_body = self._state == "body"
            error = InvalidHTTP("the body has too much chunk framing") if in_body else self._too_large()
        reason = "headers_too_large" if isinstance(error, HeadersTooLarge) else "invalid_http"
        self.registry.closed[reason] += 1
        self._refuse(error)

    def _too_large(self) -> HeadersTooLarge:
        most = self.limits.max_header_bytes
        return HeadersTooLarge(f"the header of the request is larger than {most:,} bytes", limit_bytes=most)

    def _late(self, what: str, seconds: float) -> None:
        self.registry.closed[f"{what}_timeout"] += 1
        if self.scope is None and not self._raw_bytes:  # browsers open connections that they may never use
            return self.transport.close()
        self._refuse(RequestTimeout(f"the {what} of the request did not arrive in {seconds:g} s"))

    def _give_up(self, reason: str) -> None:
        self.registry.closed[reason] += 1
        at_once = struct.pack("ii", 1, 0)  # the kernel does not wait for the client either
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()

    def _refuse(self, error: MPICError, linger: bool = True) -> None:
        """End the connection, with an error response if the client cannot mistake it for another answer."""
        can_answer = self._can_answer()
        self._state, self._waited = "refused", 0.0
        self._disconnect()
        if not can_answer:
            return self.transport.abort()
        self.transport.write(self._error_response(error))
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # a slow reader must not keep the connection open with this
        elif linger:
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()

    def _can_answer(self) -> bool:
        """Return whether the client would read the next bytes as the answer to the refused request."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        if self._state == "body":
            return not self.pipeline and not self.cycle.response_started
        return self._state == "header" and not self.is_answering()

    def _error_response(self, error: MPICError) -> bytes:
        body = json.dumps(error.body()).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += "content-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n"
        for name, value in self.server_state.default_headers:
            head += f"{name.decode('latin-1')}: {value.decode('latin-1')}\r\n"
        return f"{head}\r\n".encode("latin-1") + body


async def _answered(
    app: Any, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the application. The framework raises what it has answered (``mpic.http.errors``, which logs it), too, and
    uvicorn would log all of it again."""
    try:
        await app(scope, receive, send)
    except Exception:
        if not cycle.response_complete:
            raise


async def _without_chunks(
    app: Any, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the application for a client of HTTP/1.0, which knows no chunks: an answer of unknown length ends with the
    connection."""

    declared = True

    async def sending(message: Message) -> None:
        nonlocal declared
        if message["type"] == "http.response.start":
            declared = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if declared else False  # None: uvicorn decides
        elif not declared:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn checks what is left of it
        await send(message)

    await app(scope, receive, sending)
