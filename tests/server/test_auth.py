"""A server with keys: access, rates, and quotas."""

import asyncio
import dataclasses
import sqlite3
from contextlib import closing
from unittest.mock import Mock

import httpx
import pytest
from front_server import eventually, front_server
from server_helpers import fake_server, png, refusal, wait_until
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mpic.config import Config, ServerConfig
from mpic.errors import EngineStopped
from mpic.keys import KeyLimits, KeyStore
from mpic.server.auth import Authenticate, KeyRates, RateLimiter
from mpic.server.guard import HostGuard


def bearer(secret):
    return {"Authorization": f"Bearer {secret}"}


V1 = ["/v1/files", "/v1/models", "/v1/chat/completions", "/v1/nothing"]
PROTECTED = [*V1, "/health", "/metrics", "/nowhere"]
OPEN = ["/", "/docs", "/openapi.json", "/health/live", "/health/ready"]


async def test_without_keys_every_client_is_the_local_admin(server):
    assert (await server.http.get("/v1/files")).status_code == 200
    assert (await server.http.get("/v1/files", headers=bearer("whatever"))).status_code == 200


@pytest.mark.parametrize("path", PROTECTED)
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer "}, {"Authorization": "Basic eDp5"}, bearer("mpic_x")]
)
async def test_with_keys_every_route_needs_one(server, path, headers):
    server.key()
    answer = await server.http.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthorized"
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_engine_counters_are_for_admins(server):
    counted = {"running": 0, "pages": {"own": 0, "free": 400}}
    assert (await server.http.get("/health")).json()["engine"] == counted  # without keys everybody is one
    keys = {role: server.key(role, role) for role in ("user", "admin")}
    of = {role: (await server.http.get("/health", headers=key)).json() for role, key in keys.items()}
    assert of["admin"].pop("engine") == counted and of["user"].pop("engine") == {}
    assert list(of["admin"].pop("tiers")) == ["disk"] and of["user"].pop("tiers") == {}
    assert of["user"] == of["admin"] and of["user"]["ready"]


async def test_users_see_why_the_engine_is_not_ready(server, monkeypatch):
    monkeypatch.setattr(server.engine, "ready", Mock(side_effect=EngineStopped("stopped")))
    answer = await server.http.get("/health", headers=server.key())
    assert (answer.status_code, answer.json()["engine"]) == (503, {"error": "engine_stopped"})


@pytest.mark.parametrize("path", OPEN)
async def test_routes_without_user_data_are_open(server, path):
    server.key()
    assert (await server.http.get(path)).status_code < 400


async def test_a_revoked_key_is_refused_from_the_next_request(server):
    secret, key = server.app.state.mpic.keys.create("alice")
    assert (await server.http.get("/v1/files", headers=bearer(secret))).status_code == 200
    server.app.state.mpic.keys.revoke(key.prefix)
    for headers in (bearer(secret), {}):  # the last key's end does not open the door
        assert (await server.http.get("/v1/files", headers=headers)).status_code == 401


def test_answers_end_when_their_key_is_revoked_and_those_of_other_keys_go_on(tmp_path, template):
    """Another process revokes it. Both keys are of the same user."""
    with front_server(tmp_path, template) as front, closing(KeyStore(tmp_path)) as other:
        (revoked, key), (kept, _) = other.create("ann"), other.create("ann")
        front.engine.pause, front.engine.answer = 0.02, " ".join(["word"] * 500)
        clients = []
        for secret, stream in ((revoked, True), (revoked, False), (kept, True)):
            clients.append(front.connect())
            clients[-1].key = secret.encode()
            clients[-1].chat(stream=stream, max_tokens=500)
        assert eventually(lambda: len(front.engine.held) == 3)
        other.revoke(key.prefix)
        assert eventually(lambda: len(front.engine.held) == 1), "the engine goes on"
        streamed, whole = clients[0].until(b"0\r\n\r\n"), clients[1].refusal()
        front.engine.pause = 0.0
        *events, last = [frame for frame in streamed.split(b"\r\n") if frame.startswith(b"data: ")]
        assert b'"code":"unauthorized"' in last and b"[DONE]" not in streamed
        assert len(events) < 100, "of 500, at 50 a second"
        assert whole == (401, "unauthorized")
        assert b"[DONE]" in clients[2].until(b"0\r\n\r\n")
        clients[0].chat()
        assert clients[0].refusal() == (401, "unauthorized")


async def test_no_cache_keeps_an_answer_that_depends_on_who_asks(server):
    alice = server.key()
    file = server.library.files.add("alice", png(), "p.png", handle="P")
    own = ["", f"/{file.id}", f"/{file.id}/content", "/nothing/content"]
    for path in [f"/v1/files{rest}" for rest in own] + ["/v1/models", "/v1/savings", "/health", "/metrics"]:
        answer = await server.http.get(path, headers=alice)
        assert answer.headers["cache-control"] == "private, no-store", path
    part = await server.http.get(f"/v1/files/{file.id}/content", headers={**alice, "Range": "bytes=0-3"})
    assert (part.status_code, part.headers["cache-control"]) == (206, "private, no-store")


async def test_a_refused_upload_is_not_even_read(server):
    server.key()
    read = 0

    async def body():
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"x" * 65536

    assert (await server.http.post("/v1/files", content=body())).status_code == 401
    assert read <= 100 and list(server.library.root.glob("tmp/*")) == []


async def test_a_reachable_server_needs_keys_even_if_none_exist(tmp_path, template):
    config = dataclasses.replace(Config(), server=ServerConfig(host="0.0.0.0"))
    async with fake_server(tmp_path, template, config=config) as server:
        assert (await server.http.get("/v1/files")).status_code == 401


# ---- limits


def test_the_rate_limiter_refills_evenly_and_returns_the_seconds_to_wait():
    pace = RateLimiter(0.0)
    assert [pace.acquire(60, 0.0) for _ in range(60)] == [0.0] * 60
    assert pace.acquire(60, 0.0) == pytest.approx(1.0)
    assert pace.acquire(60, 0.5) == pytest.approx(0.5)
    assert pace.acquire(60, 1.0) == 0.0
    assert pace.acquire(60, 1.0) > 0
    assert [pace.acquire(60, 1000.0) for _ in range(61)].count(0.0) == 60


async def test_requests_per_minute(server):
    limited = server.key(requests_per_minute=3)
    answers = [await server.http.get("/v1/models", headers=limited) for _ in range(4)]
    assert [a.status_code for a in answers] == [200, 200, 200, 429]
    assert answers[-1].json()["error"]["code"] == "rate_limited"
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 20
    assert (await server.http.get("/v1/models", headers=server.key())).status_code == 200


async def test_concurrent_requests_include_streams_until_their_last_byte(server):
    server.engine.pause, server.engine.answer = 0.02, " ".join(["word"] * 1000)
    server.http.headers.update(server.key(concurrent=2))
    tasks = [asyncio.ensure_future(server.ask(stream=True)) for _ in range(5)]
    await wait_until(lambda: sum(task.done() for task in tasks) == 3)
    for task in tasks:
        if task.done():
            assert refusal(task.result()) == (429, "too_many_concurrent")
            assert task.result().headers["retry-after"] == "1"
    server.engine.pause = 0.0
    assert [answer.status_code for answer in await asyncio.gather(*tasks)].count(200) == 2
    assert (await server.ask(stream=True)).status_code == 200


async def test_a_request_for_several_answers_counts_each_of_them(server):
    server.engine.pause, server.engine.answer = 0.02, " ".join(["word"] * 1000)
    server.http.headers.update(server.key(concurrent=5))
    several = {"stream": True, "temperature": 1.0}
    running = asyncio.ensure_future(server.ask(n=4, **several))
    await wait_until(lambda: len(server.engine.requests) == 4)
    assert refusal(await server.ask(n=2, **several)) == (429, "too_many_concurrent")
    never = await server.ask(n=6, **several)
    assert refusal(never) == (400, "unsupported_parameter") and never.json()["error"]["param"] == "n"
    one_more = asyncio.ensure_future(server.ask(stream=True))
    await wait_until(lambda: len(server.engine.requests) == 5)
    server.engine.pause = 0.0
    assert [answer.status_code for answer in await asyncio.gather(running, one_more)] == [200, 200]
    assert (await server.ask(n=5, **several)).status_code == 200


async def test_a_quota_of_files_holds_for_concurrent_uploads(server):
    server.http.headers.update(server.key(files=3))
    answers = await asyncio.gather(*(server.upload(f"text {i}".encode(), f"{i}.txt") for i in range(8)))
    assert sorted(a.status_code for a in answers) == [200] * 3 + [403] * 5
    refused = next(a for a in answers if a.status_code == 403)
    assert refused.json()["error"]["code"] == "storage_quota_exceeded"
    first = next(a for a in answers if a.status_code == 200).json()["id"]
    await server.http.delete(f"/v1/files/{first}")
    assert (await server.upload(b"text 9", "9.txt")).status_code == 200


async def test_a_quota_of_bytes(server):
    server.http.headers.update(server.key(bytes=len(png()) + 10))
    for data, status in ((b"x" * 11, 200), (png(), 403), (b"y" * 10, 200)):
        answer = await server.upload(data, "f")
        assert answer.status_code == status, answer.text


# ---- hosts


async def ok(request):
    return PlainTextResponse("ok")


@pytest.mark.parametrize(
    ("names", "host", "origin", "status"),
    [
        ("", "127.0.0.1:1", None, 200),
        ("", "192.168.1.5:8000", None, 200),
        ("", "[2001:db8::1]:8000", "http://[2001:db8::1]:8000", 200),
        ("", "api.example.org", None, 403),
        ("api.example.org, b.example.org", "API.example.org:443", "https://api.example.org", 200),
        ("api.example.org", "api.example.org", "https://evil.example", 403),
        ("*", "anything.example", "https://anything.example", 200),
        ("*", "not a host", None, 403),
    ],
)
async def test_hosts_when_there_are_keys(tmp_path, names, host, origin, status):
    keys = KeyStore(tmp_path)
    app = Starlette(routes=[Route("/", ok)])
    app.add_middleware(HostGuard, keys=keys, names=names)
    headers = {"host": host, **({"origin": origin} if origin else {})}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        local = host.startswith("127.")
        assert (await http.get("/", headers=headers)).status_code == (200 if local else 403)
        keys.create("alice")
        assert (await http.get("/", headers=headers)).status_code == status
    keys.close()


async def test_finished_requests_are_not_counted(tmp_path):
    keys = KeyStore(tmp_path)
    gate = Authenticate(Starlette(routes=[Route("/v1/x", ok)]), keys, KeyRates())
    secret, _ = keys.create("alice", limits=KeyLimits(concurrent=1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as http:
        for _ in range(3):
            assert (await http.get("/v1/x", headers=bearer(secret))).status_code == 200
    assert not gate._running and not gate._counts
    keys.close()


async def test_a_request_that_cannot_be_watched_is_not_counted_for_ever(tmp_path, monkeypatch):
    with closing(KeyStore(tmp_path)) as keys:
        gate = Authenticate(Starlette(routes=[Route("/v1/x", ok)]), keys, KeyRates())
        secret, _ = keys.create("alice", limits=KeyLimits(concurrent=1))
        monkeypatch.setattr(keys, "version", Mock(side_effect=ZeroDivisionError))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as http:
            with pytest.raises(ZeroDivisionError):
                await http.get("/v1/x", headers=bearer(secret))
        assert not gate._running and not gate._counts


@pytest.mark.parametrize(
    "path", [path for path in [*PROTECTED, "/v1/savings", "/v1/references"] if path != "/metrics"]
)
async def test_a_key_for_metrics_may_read_these_and_nothing_else(server, path):
    key = server.key("prometheus", "metrics")
    assert (await server.http.get("/metrics", headers=key)).status_code == 200
    for method in ("GET", "POST", "DELETE"):
        answer = await server.http.request(method, path, headers=key)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "forbidden"
    assert (await server.http.get("/metrics", headers=server.key("ann"))).status_code == 403
    secret = key["Authorization"].removeprefix("Bearer ")
    assert (await server.http.post("/ui/login", data={"key": secret})).status_code == 403


def test_keys_of_an_earlier_version_keep_their_roles(tmp_path):
    with closing(KeyStore(tmp_path)) as keys:
        made = {role: keys.create("ann", role)[0] for role in ("user", "admin")}
    with closing(sqlite3.connect(tmp_path / "keys.sqlite")) as db:
        db.executescript("""
            ALTER TABLE keys RENAME COLUMN role TO later;
            ALTER TABLE keys ADD COLUMN role TEXT NOT NULL DEFAULT 'user' CHECK (role IN ('user', 'admin'));
            UPDATE keys SET role = later; ALTER TABLE keys DROP COLUMN later; PRAGMA user_version = 2;""")
    with closing(KeyStore(tmp_path)) as keys:
        assert {role: keys.find(secret).role for role, secret in made.items()} == {
            "user": "user",
            "admin": "admin",
        }
        assert keys.find(keys.create("prometheus", "metrics")[0]).role == "metrics"
