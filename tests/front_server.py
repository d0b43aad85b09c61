"""The whole application over an engine that computes nothing, behind the server's own protocol on a real port."""

from __future__ import annotations

import json
import random
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fake_engine import FakeEngine
from threads_kit import started

from mpic.config import Config, ServerConfig
from mpic.keys import KeyStore
from mpic.library import Library
from mpic.server import create_app
from mpic.server.connections import Connections
from mpic.server.run import bind, uvicorn_config

LIMITS = (
    ServerConfig(  # the deadlines are a second, because a busy machine may stop a client for a part of one
        max_connections=8,
        max_connections_per_address=5,
        trusted_proxies="127.0.0.9",
        max_header_bytes=4096,
        header_seconds=1.0,
        body_seconds=1.0,
        send_seconds=1.0,
        keep_alive_seconds=1.0,
        grace_seconds=1.0,
        log_level="warning",
    )
)


ESTABLISHED = 1


class _Server(uvicorn.Server):
    connections: Connections

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.connections.watch()


@dataclass
class Front:
    """A running server, as a test uses it."""

    port: int
    connections: Connections
    engine: FakeEngine | None
    key: str

    def connect(self, source: str = "127.0.0.1", **options: int) -> Client:
        return Client(self, source, **options)

    def closed(self) -> dict[str, int]:
        """Connections closed so far, by reason."""
        return dict(self.connections.closed)

    def settled(self, count: int = 0) -> bool:
        """Return whether exactly this many connections are open soon."""
        return eventually(lambda: len(self.connections) == count)


class Client:
    """A socket, and the server's output on it."""

    def __init__(self, front: Front, source: str, receive_buffer: int = 0) -> None:
        self.key = front.key.encode()
        self.socket = socket.socket()
        self.socket.settimeout(60)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.bind((source, 0))
        self.socket.connect(("127.0.0.1", front.port))

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def head(self, line: str, *fields: str, key: bool = True) -> None:
        """Send a header, whole: between two pieces a busy machine may let the server's time for headers pass."""
        lines = [f"{line} HTTP/1.1", "Host: 127.0.0.1"]
        if key:
            lines.append(f"Authorization: Bearer {self.key.decode()}")
        self.send("".join(f"{each}\r\n" for each in (*lines, *fields, "")).encode())

    def chat(self, **fields: Any) -> None:
        """Send a chat request."""
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()
        self.head(
            "POST /v1/chat/completions", f"Content-Length: {len(body)}", "Content-Type: application/json"
        )
        self.send(body)

    def is_closed(self) -> bool:
        """Return whether the server has closed; its reply can still be read."""
        return self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED

    def rest(self) -> bytes:
        """Return the server's output until it closes."""
        said = b""
        try:
            while piece := self.socket.recv(65536):
                said += piece
        except ConnectionError:
            pass
        return said

    def until(self, end: bytes) -> bytes:
        """Return the server's output up to these bytes."""
        said = b""
        while not said.endswith(end):
            piece = self.socket.recv(65536)
            assert piece, said
            said += piece
        return said

    def answer(self) -> tuple[int, Any]:
        """Return status and JSON body (None if it is not JSON) of one response with a Content-Length, and 0 if the
        server closed without one. Closing is a reset when something of ours arrived after it."""
        stream = self.socket.makefile("rb")
        try:
            status = stream.readline().split()
        except ConnectionResetError:
            return 0, None
        length = 0
        while (line := stream.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = stream.read(length)
        return int(status[1]) if status else 0, json.loads(body) if body.startswith(b"{") else None

    def refusal(self) -> tuple[int, str]:
        """Return status and code of an error, and close this end. What is no HTTP gets a code from nobody."""
        status, body = self.answer()
        self.close()
        return status, body["error"]["code"] if body else ""

    def close(self) -> None:
        self.socket.close()


def trickle(pieces: dict[Client, bytes], every: float = 0.05, seconds: float = 60.0) -> None:
    """Has each client send its piece periodically until the server closes its connection."""
    end = time.monotonic() + seconds
    while left := {one: piece for one, piece in pieces.items() if not one.is_closed()}:
        assert time.monotonic() < end, f"{len(left)} connections are still open after {seconds} s"
        for one, piece in left.items():
            with suppress(OSError):
                one.send(piece)
        time.sleep(every)


def eventually(true: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return bool(true())


def free_port() -> int:
    """Return a port for a program that takes no socket. It is none of those that the system gives to clients and to
    whoever asks for port 0: one of them may be taken again before the program binds it."""
    chance = random.SystemRandom()
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port := chance.randrange(20_000, 32_000)))
            return port


@contextmanager
def front_server(
    root: Path,
    template: Any,
    limits: ServerConfig = LIMITS,
    app: Any = None,
    engine: FakeEngine | None = None,
):
    """The server in a thread of this process; ``app`` in place of the whole application."""
    config, engine, key = Config(server=limits), engine or FakeEngine(), ""
    connections = Connections(limits, limits.max_connections)
    if app is None:
        keys = KeyStore(root)
        key = keys.create("root", "admin")[0]
        keys.close()
        app = create_app(engine, Library.open(root, config.library.limits()), template, config)
        app.state.mpic.metrics.registry.register(connections)
    with bind("127.0.0.1", 0) as sock:
        server = _Server(uvicorn_config(app, limits, connections))
        server.connections = connections
        thread = started(server.run, [sock])
        try:
            assert eventually(lambda: server.started)
            yield Front(sock.getsockname()[1], connections, engine, key)
        finally:
            server.should_exit = True
            thread.join()
