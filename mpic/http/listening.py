"""The socket that a server listens on."""

from __future__ import annotations

import socket

from mpic.config import ConfigError
from mpic.http.hosts import is_loopback


def bind(host: str, port: int, has_keys: bool = False) -> socket.socket:
    """Return a bound socket. Without API keys only loopback addresses are accepted.

    Raises:
        ConfigError: the address cannot be used.
    """
    if not has_keys and not is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {host!r}: there are no API keys, so anyone who reaches the port could read every "
            "upload. Make one with `mpic keys create NAME --role admin`, or listen on 127.0.0.1.",
            param="host",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {exc.strerror}; --port takes another port, 0 any free one",
            param="port",
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the address of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
