"""The open connections: limits their number, and chooses which one is closed for a new one.

The server knows whether a client has a key only after it has read its header. A full server therefore accepts a new
connection as long as it can close another one in its place: first the oldest without a key, then idle connections with
a key. A request with a key that is under way is never closed for a new connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mpic.config import proxies
from mpic.errors import TooManyConnections

if TYPE_CHECKING:
    from mpic.config import ServerConfig

REASONS = (
    "refused_full",  # new connections while all others were busy with requests of key holders
    "refused_address",  # the same among the connections of their own address
    "replaced_full",  # closed for a new connection
    "replaced_address",
    "headers_too_large",
    "invalid_http",
    "header_timeout",
    "body_timeout",
    "send_timeout",
    "unread_body",  # still sending a body after it was answered
)
"""Why the server closes connections before their clients do. Connections that were idle for long are not counted."""
READ_BYTES = 16 << 10
"""Bytes that are parsed at a time: the parser is in Python, and a body in tiny chunks takes it many steps a byte."""
LOG_SECONDS = 10.0
MOST_TICK = 0.5
log = logging.getLogger("mpic.server")


class Connection(Protocol):
    """The part of a connection that this module needs."""

    host: str
    """The client's address."""
    network: str
    """The key that its connections are counted by; see ``addresses``."""

    def has_key(self) -> bool:
        """Return whether a request with a valid key has arrived over it."""

    def is_answering(self) -> bool:
        """Return whether a whole header has arrived whose request is not answered yet."""

    def evict(self, error: TooManyConnections) -> None:
        """Close at once, with this error if that is still possible."""

    def drop(self) -> None:
        """Close at once, without an answer."""

    def tick(self, seconds: float) -> None:
        """Count the seconds that have passed, and close when the client has used up its time."""


class _ConnectionGroup:
    """Connections by age; those known to have a key are kept apart."""

    def __init__(self) -> None:
        self._anonymous: dict[Connection, None] = {}
        self._authenticated: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._anonymous) + len(self._authenticated)

    def __iter__(self) -> Iterator[Connection]:
        return iter([*self._anonymous, *self._authenticated])

    def add(self, connection: Connection) -> None:
        self._anonymous[connection] = None

    def remove(self, connection: Connection) -> None:
        self._anonymous.pop(connection, None)
        self._authenticated.pop(connection, None)

    def eviction_candidate(self) -> Connection | None:
        """Return the connection to close for a new one, or None.

        Each connection is moved to ``_authenticated`` only once, so the search is short even while thousands arrive.
        """
        while self._anonymous:
            oldest = next(iter(self._anonymous))
            if not oldest.has_key():
                return oldest
            del self._anonymous[oldest]
            self._authenticated[oldest] = None
        return next((one for one in self._authenticated if not one.is_answering()), None)


class Connections:
    """The connections of one server. Everything but ``collect`` belongs to the event loop.

    Args:
        config: limits and deadlines.
        most: most open connections, which can be fewer than the configuration asks for.
    """

    def __init__(self, config: ServerConfig, most: int) -> None:
        self.config = config
        self.most = most
        self.accepted = 0
        self.closed = dict.fromkeys(REASONS, 0)
        self.buffer = bytearray(READ_BYTES)  # of whichever connection reads now
        self._exempt = proxies(config)
        self._all = _ConnectionGroup()
        self._addresses: dict[str, _ConnectionGroup] = {}
        self._logged, self._logged_at = dict(self.closed), -LOG_SECONDS
        deadlines = (
            config.header_seconds,
            config.body_seconds,
            config.send_seconds,
            config.keep_alive_seconds,
        )
        self._tick = min(MOST_TICK, *(seconds / 4 for seconds in deadlines))
        self._ticked = time.monotonic()

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, newcomer: Connection) -> TooManyConnections | None:
        """Count a new connection, closing another one for it if necessary; return the error if none can be closed."""
        self.accepted += 1
        group = self._addresses.get(newcomer.network, _ConnectionGroup())
        full = len(group) >= self.config.max_connections_per_address and not self._is_exempt(newcomer.host)
        if full and not self._evict_one(group, "address"):
            return TooManyConnections("the address of the client has too many connections open")
        if len(self._all) >= self.most and not self._evict_one(self._all, "full"):
            return TooManyConnections("the server has too many connections open")
        self._all.add(newcomer)
        self._addresses.setdefault(newcomer.network, _ConnectionGroup()).add(newcomer)
        return None

    def leave(self, connection: Connection) -> None:
        """Forget a connection that is closed, or is about to be."""
        self._all.remove(connection)
        group = self._addresses.get(connection.network)
        if group is not None:
            group.remove(connection)
            if not len(group):
                del self._addresses[connection.network]

    def drop(self) -> None:
        """Close all of them."""
        for connection in self._all:
            connection.drop()

    def _evict_one(self, group: _ConnectionGroup, what: str) -> bool:
        one = group.eviction_candidate()
        if one is None:
            self.closed[f"refused_{what}"] += 1
            return False
        self.closed[f"replaced_{what}"] += 1
        self.leave(one)
        one.evict(TooManyConnections("the connection was closed in favour of a newer one"))
        return True

    def _is_exempt(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in trusted for trusted in self._exempt)

    # ---- time

    def watch(self) -> None:
        """Start the one timer that lets time pass for all connections."""
        asyncio.get_running_loop().call_later(self._tick, self.watch)
        now = time.monotonic()
        # clients are not to blame for a loop that was held up
        passed = min(now - self._ticked, 2 * self._tick)
        self._ticked = now
        for connection in self._all:
            connection.tick(passed)
        self._log_closed(now)

    def _log_closed(self, now: float) -> None:
        """Log one line about everything that was closed since the last one."""
        if self.closed == self._logged or now - self._logged_at < LOG_SECONDS:
            return
        news = Counter(self.closed) - Counter(self._logged)
        self._logged, self._logged_at = dict(self.closed), now
        shown = ", ".join(f"{name} {count}" for name, count in news.items())
        log.warning(
            f"Connections were refused or closed early: {shown}; {len(self)} of {self.most} are open."
        )

    # ---- metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        yield GaugeMetricFamily("mpic_connections", "Connections open", value=len(self))
        yield GaugeMetricFamily("mpic_connections_limit", "Most connections open at once", value=self.most)
        yield CounterMetricFamily("mpic_connections_accepted", "Connections accepted", value=self.accepted)
        closed = CounterMetricFamily(
            "mpic_connections_closed",
            "Connections refused, replaced or closed at a deadline",
            labels=["reason"],
        )
        for reason, count in list(self.closed.items()):
            closed.add_metric([reason], count)
        yield closed


def addresses(host: str) -> tuple[str, str]:
    """Return the address of a client and the address or network that its connections are counted by.

    An IPv6 client is counted by its /64 network, which belongs to one customer of a provider. An IPv4 address mapped
    into IPv6 is returned as IPv4.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # the client of a Unix socket has no address
        return host, host
    if address.version == 4:
        return host, host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped), str(address.ipv4_mapped)
    return host, str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
