"""The connections that are closed for newcomers, in a registry without a network."""

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from mpic.config import ConfigError, ServerConfig, check_server, proxies
from mpic.server import connections, descriptors
from mpic.server.connections import REASONS, Connections, addresses


@dataclass(eq=False)
class Client:
    """A connection that records the calls to it."""

    host: str = "10.0.0.1"
    key: bool = False
    busy: bool = False
    closed: bool = False
    asked: int = 0
    waited: float = field(default=0.0)

    @property
    def network(self):
        return addresses(self.host)[1]

    def has_key(self):
        self.asked += 1
        return self.key

    def is_answering(self):
        return self.busy

    def evict(self, error):
        assert error.code == "too_many_connections"
        self.closed = True

    def drop(self):
        self.closed = True

    def tick(self, seconds):
        self.waited += seconds


def registry(most=4, **config):
    return Connections(ServerConfig(**{"max_connections_per_address": 100, **config}), most)


def admitted(front, *clients):
    """Admit all of them; return those that are open afterwards."""
    for client in clients:
        assert front.admit(client) is None
    return [client for client in clients if not client.closed]


def test_the_oldest_connection_without_a_key_is_evicted():
    front, clients = registry(), [Client() for _ in range(7)]
    assert admitted(front, *clients) == clients[3:]
    assert len(front) == 4 and front.closed["replaced_full"] == 3


def test_connections_with_a_key_are_evicted_last_and_never_during_a_request():
    front = registry()
    idle, busy, later = Client(key=True), Client(key=True, busy=True), Client(key=True, busy=True)
    stranger = Client(busy=True)  # reads an open page
    admitted(front, idle, busy, stranger, later)
    admitted(front, Client(key=True, busy=True))
    assert [c.closed for c in (idle, busy, stranger, later)] == [False, False, True, False]
    admitted(front, Client(key=True, busy=True))
    assert [c.closed for c in (idle, busy, later)] == [True, False, False]
    refused = Client()
    assert front.admit(refused).code == "too_many_connections"
    assert len(front) == 4 and front.closed["refused_full"] == 1


def test_a_flood_does_not_search_all_connections_for_each_new_one():
    """Otherwise accepting would take time quadratic in the number of connections, on the event loop."""
    front = registry(most=1000, max_connections_per_address=10_000)
    holders = [Client(key=True, busy=True) for _ in range(900)]
    admitted(front, *holders)
    strangers = [Client() for _ in range(2000)]
    admitted(front, *strangers)
    assert not any(holder.closed for holder in holders)
    assert sum(client.asked for client in holders + strangers) < 2 * (900 + 2000)


def test_an_address_over_its_share_evicts_its_own_connections():
    front = registry(most=100, max_connections_per_address=3)
    other = Client("10.0.0.2")
    admitted(front, other)
    clients = [Client() for _ in range(5)]
    assert admitted(front, *clients) == clients[2:] and not other.closed
    assert front.closed["replaced_address"] == 2
    for client in clients[2:]:
        client.key = client.busy = True
    assert front.admit(Client()) is not None and front.closed["refused_address"] == 1
    assert front.admit(Client("10.0.0.3")) is None


def test_a_closed_connection_is_not_counted():
    front = registry(most=2, max_connections_per_address=2)
    for _ in range(5):
        client = Client()
        admitted(front, client)
        front.leave(client)
        front.leave(client)
    assert len(front) == 0 and not any(front.closed.values()) and not front._addresses


@pytest.mark.parametrize("proxies", ["10.0.0.1", "10.0.0.0/24", "127.0.0.1, 10.0.0.1"])
def test_a_trusted_proxy_may_open_all_connections(proxies):
    front = registry(most=10, max_connections_per_address=1, trusted_proxies=proxies)
    clients = [Client("10.0.0.1") for _ in range(10)]
    assert admitted(front, *clients) == clients


def test_addresses_of_one_ipv6_customer_are_one():
    assert addresses("2001:db8:1:2:3::4")[1] == addresses("2001:db8:1:2::ffff")[1] == "2001:db8:1:2::/64"
    assert addresses("2001:db8:1:3::4")[1] != addresses("2001:db8:1:2::4")[1]
    assert addresses("::ffff:10.1.2.3") == addresses("10.1.2.3") == ("10.1.2.3", "10.1.2.3")
    assert addresses("") == ("", "")


def test_one_ipv6_address_that_is_trusted_does_not_exempt_its_neighbours():
    front = registry(most=10, max_connections_per_address=2, trusted_proxies="2001:db8::1")
    admitted(front, *(Client("2001:db8::1") for _ in range(5)))
    neighbour = Client("2001:db8::2")
    admitted(front, neighbour)
    assert front.closed["replaced_address"] == 1


@pytest.fixture
def clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


async def test_refusals_are_logged_in_few_lines(caplog, clock):
    front = registry(most=1)
    with caplog.at_level(logging.WARNING, "mpic.server"):
        for _ in range(50):
            admitted(front, *(Client() for _ in range(20)))
            clock[0] += 0.5
            front.watch()
    lines = [record.message for record in caplog.records]
    assert 2 <= len(lines) <= 4 and "replaced_full 19;" in lines[0]
    told = sum(int(line.split("replaced_full ")[1].split(";")[0]) for line in lines)
    assert told <= front.closed["replaced_full"] == 999


async def test_time_in_which_the_event_loop_was_blocked_is_not_counted(clock):
    front, client = registry(), Client()
    admitted(front, client)
    clock[0] += 60
    front.watch()
    assert client.waited <= 1.0


def test_metrics_have_every_reason_from_the_start():
    front = registry()
    admitted(front, *(Client() for _ in range(5)))
    shown = {(s.name, *s.labels.values()): s.value for metric in front.collect() for s in metric.samples}
    assert shown["mpic_connections",] == shown["mpic_connections_limit",] == 4
    assert shown["mpic_connections_accepted_total",] == 5
    assert {labels[0] for _, *labels in shown if labels} == set(REASONS)
    assert shown["mpic_connections_closed_total", "replaced_full"] == 1


# ---- descriptors and configuration


def test_connections_leave_descriptors_for_files(caplog):
    assert descriptors.connection_limit(65_536, 2048, held=50) == 2048 and not caplog.records
    fewer = descriptors.connection_limit(1024, 2048, held=50)
    assert fewer * descriptors.PER_CONNECTION + descriptors.RESERVE + 50 <= 1024
    assert "1024 files" in caplog.text and "ulimit -n" in caplog.text
    with pytest.raises(ConfigError, match="ulimit -n"):
        descriptors.connection_limit(150, 2048, held=50)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"trusted_proxies": "example.org"}, "trusted_proxies holds addresses"),
        ({"trusted_proxies": "*"}, "trusted_proxies holds addresses"),
        ({"max_connections": 0}, "max_connections must be at least"),
        ({"header_seconds": 0.0}, "header_seconds must be at least"),
        ({"max_header_bytes": 10}, "max_header_bytes must be at least"),
    ],
)
def test_limits_that_cannot_work_are_refused(values, says):
    with pytest.raises(ConfigError, match=says):
        check_server(ServerConfig(**values))


def test_proxies_are_addresses_and_networks():
    found = proxies(ServerConfig(trusted_proxies="127.0.0.1,10.0.0.0/8, ::1,"))
    assert [str(p) for p in found] == ["127.0.0.1/32", "10.0.0.0/8", "::1/128"]
    assert proxies(ServerConfig(trusted_proxies="")) == []
