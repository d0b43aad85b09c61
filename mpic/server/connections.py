"""All open connections: how many there may be, which one makes room for a newcomer, and what became of the others.

Whether a client holds a key is known only after its header has been read. A full server therefore never turns a
newcomer away while somebody without a key can be closed in its place: the oldest such connection goes. Next come idle
connections of clients who have shown a key. A request with a key that is under way is never closed for a newcomer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mpic.config import proxies
from mpic.errors import TooManyConnections

if TYPE_CHECKING:
    from mpic.config import ServerConfig

REASONS = (
    "refused_full",  # newcomers that found all connections busy with requests of key holders
    "refused_address",  # the same among the connections of their own address
    "replaced_full",  # closed for a newcomer
    "replaced_address",
    "headers_too_large",
    "invalid_http",
    "header_timeout",
    "body_timeout",
    "send_timeout",
    "unread_body",  # still sending a body after it was answered
)
"""Why the server closes connections before their clients do. Idle ones, closed in due course, are not counted."""
LOG_SECONDS = 10.0
MOST_TICK = 0.5
log = logging.getLogger("mpic.server")


class Connection(Protocol):
    """What this module needs to know of a connection."""

    host: str
    """The client's address."""
    network: str
    """What its connections are counted by; see ``addresses``."""

    def has_key(self) -> bool:
        """Whether a request with a valid key has come over it."""

    def is_answering(self) -> bool:
        """Whether a whole header has arrived whose request is not answered yet."""

    def give_way(self, error: TooManyConnections) -> None:
        """Close at once."""

    def drop(self) -> None:
        """Close at once, without a word."""

    def tick(self, seconds: float) -> None:
        """Take note that time has passed, and close when the client has used up its own."""


class _Crowd:
    """Connections by age, those with a key apart from the others."""

    def __init__(self) -> None:
        self._strangers: dict[Connection, None] = {}
        self._known: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    def __iter__(self) -> Iterator[Connection]:
        return iter([*self._strangers, *self._known])

    def add(self, connection: Connection) -> None:
        self._strangers[connection] = None

    def remove(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def least_needed(self) -> Connection | None:
        """The one that makes room for a newcomer, or None. Each connection is moved to ``_known`` only once, so that
        the search is short even while thousands of newcomers arrive."""
        while self._strangers:
            oldest = next(iter(self._strangers))
            if not oldest.has_key():
                return oldest
            del self._strangers[oldest]
            self._known[oldest] = None
        return next((one for one in self._known if not one.is_answering()), None)


class Connections:
    """The connections of one server. Everything but ``collect`` belongs to the event loop.

    Args:
        config: limits and deadlines.
        most: how many connections there may be, which can be fewer than the configuration asks for.
    """

    def __init__(self, config: ServerConfig, most: int) -> None:
        self.config = config
        self.most = most
        self.accepted = 0
        self.closed = dict.fromkeys(REASONS, 0)
        self._exempt = proxies(config)
        self._all = _Crowd()
        self._addresses: dict[str, _Crowd] = {}
        self._told, self._told_at = dict(self.closed), -LOG_SECONDS
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
        """Count a newcomer in, closing another connection for it where one must go; the error when none can."""
        self.accepted += 1
        crowd = self._addresses.get(newcomer.network)
        crowded = crowd is not None and len(crowd) >= self.config.max_connections_per_address
        if crowded and not self._is_exempt(newcomer.host) and not self._make_room(crowd, "address"):
            return TooManyConnections("the address of the client has too many connections open")
        if len(self._all) >= self.most and not self._make_room(self._all, "full"):
            return TooManyConnections("the server has too many connections open")
        self._all.add(newcomer)
        self._addresses.setdefault(newcomer.network, _Crowd()).add(newcomer)
        return None

    def leave(self, connection: Connection) -> None:
        """Forget a connection that is closed, or about to be."""
        self._all.remove(connection)
        crowd = self._addresses.get(connection.network)
        if crowd is not None:
            crowd.remove(connection)
            if not len(crowd):
                del self._addresses[connection.network]

    def drop(self) -> None:
        """Close all of them."""
        for connection in self._all:
            connection.drop()

    def _make_room(self, crowd: _Crowd, what: str) -> bool:
        one = crowd.least_needed()
        if one is None:
            self.closed[f"refused_{what}"] += 1
            return False
        self.closed[f"replaced_{what}"] += 1
        self.leave(one)
        one.give_way(TooManyConnections("the connection was closed in favour of a newer one"))
        return True

    def _is_exempt(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in trusted for trusted in self._exempt)

    # ---- time

    def watch(self) -> None:
        """Let time pass for all connections from now on. One timer does it, so that a request costs none of its own."""
        asyncio.get_running_loop().call_later(self._tick, self.watch)
        now = time.monotonic()
        passed = min(
            now - self._ticked, 2 * self._tick
        )  # when the loop itself was held up, no client is to blame
        self._ticked = now
        for connection in self._all:
            connection.tick(passed)
        self._tell(now)

    def _tell(self, now: float) -> None:
        """One line in the log about everything that was closed since the last one."""
        if self.closed == self._told or now - self._told_at < LOG_SECONDS:
            return
        news = {
            name: count - self._told[name] for name, count in self.closed.items() if count > self._told[name]
        }
        self._told, self._told_at = dict(self.closed), now
        shown = ", ".join(f"{name} {count}" for name, count in news.items())
        log.warning(
            "Connections were refused or closed early: %s; %d of at most %d are open.",
            shown,
            len(self),
            self.most,
        )

    # ---- metrics

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
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
    """The address of a client, and what its connections are counted by: the address itself, or the /64 network of an
    IPv6 client, all of which belongs to one customer of a provider. IPv4 in the clothes of IPv6 is told as IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a Unix socket
        return host, host
    if address.version == 4:
        return host, host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped), str(address.ipv4_mapped)
    return host, str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
