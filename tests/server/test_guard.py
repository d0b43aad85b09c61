"""The hosts that may call, and the sizes they may send."""

import asyncio
from http.cookies import SimpleCookie

import httpx
import pytest
import starlette.requests
from server_helpers import refused_field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mpic.config import ConfigError
from mpic.errors import MPICError
from mpic.http.errors import response
from mpic.http.hosts import is_loopback, seen_from_here
from mpic.http.listening import bind, url_of
from mpic.server.guard import BODIES, MULTIPART_SLACK, OPEN_BYTES, BodyLimit, HostGuard
from mpic.server.uploads import UploadsUnderWay


async def echo(request: Request):
    return PlainTextResponse(str(len(await request.body())))


async def show(request: Request, exc: Exception):
    return response(exc)


def client(url="http://127.0.0.1:8000"):
    routes = [Route("/{path:path}", echo, methods=["GET", "POST", "PUT"])]
    app = Starlette(routes=routes, exception_handlers={MPICError: show})
    app.add_middleware(BodyLimit, under_way=UploadsUnderWay(1 << 30), uploads=1000, other=100, open=1 << 30)
    app.add_middleware(HostGuard)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url)


async def test_the_bodies_of_all_requests_under_way_take_bounded_memory_and_give_it_back():
    """One user's many large bodies must not end the answers of all others."""
    read, going = [], asyncio.Event()

    async def held(request: Request):
        read.append(len(await request.body()))
        await going.wait()
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/", held, methods=["POST"])], exception_handlers={MPICError: show})
    app.add_middleware(BodyLimit, under_way=UploadsUnderWay(1 << 30), uploads=1000, other=100, open=1 << 30)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        tasks = [asyncio.ensure_future(http.post("/", content=bytes(100))) for _ in range(BODIES // 2)]
        while len(read) < len(tasks):
            await asyncio.sleep(0.01)
        refused = await asyncio.wait_for(http.post("/", content=b"1"), 60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_bytes")
        assert refused.headers["retry-after"]
        going.set()
        assert {(await task).status_code for task in tasks} == {200}
        assert (await http.post("/", content=bytes(100))).status_code == 200


def test_a_browser_on_the_server_finds_one_that_listens_everywhere():
    assert seen_from_here("http://0.0.0.0:8000") == "http://127.0.0.1:8000"
    assert seen_from_here("http://[::]:8000") == "http://[::1]:8000"
    assert seen_from_here("http://10.0.0.1:8000") == "http://10.0.0.1:8000"


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "127.0.0.2:8000", "localhost:1", "[::1]:8000", "LOCALHOST"]
)
async def test_local_clients_and_pages_may_call(host):
    async with client(f"http://{host}") as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/", headers={"origin": "http://localhost:8000"})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "127.0.0.2.evil.example"},
        {"host": "192.168.0.1"},
        {"host": "localhost@evil.example"},
        {"host": "localhost#.evil.example:80"},
        {"host": "[::1"},
        {"host": ""},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost.evil.example"},
        {"origin": "http://evil.example/localhost"},
    ],
)
async def test_other_hosts_and_origins_may_not_call(headers):
    async with client() as http:
        answer = await http.get("/", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize(
    "field",
    [
        "Forwarded",
        "Via",
        "X-Forwarded-For",
        "X-Forwarded-Host",
        "X-Forwarded-Proto",
        "X-Forwarded-Port",
        "X-Forwarded-Prefix",
        "X-Forwarded",
        "X-Real-IP",
        "X-Original-Host",
        "X-Client-IP",
        "CF-Connecting-IP",
        "CF-Connecting-IPv6",
        "True-Client-IP",
        "X-Scheme",
        "X-Azure-ClientIP",
        "X-Amz-Cf-Id",
        "X-Envoy-External-Address",
        "X-ARR-SSL",
        "X-Varnish",
        "Front-End-Https",
        "Proxy-Connection",
        "DO-Connecting-IP",
        "CDN-Loop",
    ],
)
async def test_without_keys_nobody_may_call_through_a_proxy(server, field):
    value = "/x" if "Prefix" in field else "1.2.3.4"
    for path in ("/v1/files", "/ui/", "/ui/config"):
        answer = await server.http.get(path, headers={field: value})
        assert refused_field(answer) == (403, "keys_needed", field.lower())
        assert "mpic keys create" in answer.json()["error"]["message"]
    assert (
        await server.http.get("/v1/files", headers={"X-Forwarding": "", "User-Agent": "via"})
    ).status_code == 200
    key = server.key()
    assert (await server.http.get("/v1/files", headers={field: value, **key})).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "size", "status"),
    [
        ("POST", "/", 100, 200),
        ("POST", "/", 101, 413),
        ("POST", "/v1/files", 1000, 200),
        ("POST", "/v1/references", 1000, 200),
        ("PUT", "/v1/references/ref_a", 1000, 200),
        ("POST", "/v1/references/search", 1000, 413),
        ("POST", "/v1/references/reindex", 1000, 413),
    ],
)
async def test_body_limits(method, path, size, status):
    async with client() as http:
        assert (await http.request(method, path, content=b"x" * size)).status_code == status


async def test_the_body_limit_counts_undeclared_bytes():
    async def body():
        for _ in range(3):
            yield b"x" * (MULTIPART_SLACK // 2)

    async with client() as http:
        answer = await http.post("/v1/files", content=body())
    assert answer.status_code == 413
    assert answer.json()["error"]["details"] == {"limit_bytes": 1000 + MULTIPART_SLACK}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_without_keys_only_loopback_is_bound(host):
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="no API keys"):
        bind(host, 0)


def test_a_taken_port_is_named():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"{port}"):
            bind("127.0.0.1", port)


async def test_a_request_that_needs_no_key_may_not_send_much(server):
    server.app.state.mpic.keys.create("root", "admin")
    login = {"url": "/ui/login", "headers": {"Content-Type": "application/x-www-form-urlencoded"}}
    assert (await server.http.post(**login, content=b"key=" + b"x" * 1000)).status_code == 400
    answer = await server.http.post(**login, content=b"key=" + b"x" * OPEN_BYTES)
    assert (answer.status_code, answer.json()["error"]["details"]) == (413, {"limit_bytes": OPEN_BYTES})


@pytest.mark.parametrize("path", ["/health/live", "/docs", "/ui/login", "/ui/", "/v1/models", "/nowhere"])
async def test_only_our_own_cookie_is_parsed(server, monkeypatch, path):
    """Undoing the quotes of one takes time quadratic in its length, on the event loop, before any key is checked."""
    parsed = []
    for owner, name in ((starlette.requests, "cookie_parser"), (SimpleCookie, "load")):
        parse = getattr(owner, name)
        noted = lambda *args, parse=parse: parsed.append(args[-1]) or parse(*args)
        monkeypatch.setattr(owner, name, noted)
    server.app.state.mpic.keys.create("root", "admin")
    hostile = 'a="' + '\\"' * 10_000 + '"; mpic_session="\\"\\""; mpic_session=abc-_1; '
    hostile += "mpic_session=" + "x" * 500
    await server.http.get(path, headers={"Cookie": hostile})
    assert set(parsed) <= {"mpic_session=abc-_1", ""}
