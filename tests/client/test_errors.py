"""The error tree, mirrored one to one."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

import mpic
from mpic import errors
from mpic.cli import completion
from mpic.client.errors import from_response
from mpic.client.httpx_options import client_options
from mpic.server import create_app  # noqa: F401  every error a server can send is then defined


def tree(cls=errors.MPICError):
    return [cls, *(c for sub in cls.__subclasses__() for c in tree(sub))]


def sent(error, headers=None):
    return httpx.Response(error.status, json=error.body(), headers=headers)


OURS = [c for c in tree() if c.__module__ == "mpic.errors"]
LAYERS = ("mpic.server", "mpic.library", "mpic.engine", "mpic.prompt")
LAYERS += ("mpic.link", "mpic.keys", "mpic.config")
OTHERS = [c for c in tree() if c.__module__.startswith(LAYERS)]


@pytest.mark.parametrize("cls", OURS, ids=lambda c: c.__name__)
def test_every_error_of_the_server_is_the_same_error_here(cls):
    error = from_response(sent(cls("what happened", param="messages", pages=3)))
    assert type(error) is cls is getattr(mpic, cls.__name__)
    assert (error.message, error.param, error.details) == ("what happened", "messages", {"pages": 3})
    assert (error.code, error.status) == (cls.code, cls.status)
    assert str(error) == "what happened"


@pytest.mark.parametrize("cls", OTHERS, ids=lambda c: c.__name__)
def test_a_code_not_known_here_is_the_class_of_its_status(cls):
    error = from_response(sent(cls("what happened")))
    assert isinstance(error, errors.MPICError) and (error.code, error.status) == (cls.code, cls.status)
    assert issubclass(cls, type(error))


def test_codes_are_unique():
    codes = [c.code for c in OURS + OTHERS]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"{}", b'{"error": "no"}', b"[1]", b'{"error": {"code": "x"}}']
)
def test_an_answer_of_something_else_is_said_to_be(body):
    error = from_response(httpx.Response(502, content=body))
    assert isinstance(error, mpic.BadResponse) and error.status == 502 and "HTTP 502" in error.message


@pytest.mark.parametrize(
    "cls", [mpic.QueueFull, mpic.errors.RateLimited, mpic.Unavailable, mpic.EngineStopped]
)
def test_a_refusal_says_how_long_the_server_asks_to_wait(cls):
    assert from_response(sent(cls("later"), {"retry-after": "3600"})).retry_after == 3600
    assert from_response(sent(cls("later"))).retry_after == cls("later").retry_after


def scripted(answer):
    """A client of a server that gives this answer, or fails with this error."""

    def respond(request):
        if isinstance(answer, httpx.RequestError):
            raise answer
        return answer

    return mpic.MPIC(transport=httpx.MockTransport(respond))


def test_nobody_there():
    with mpic.MPIC("http://127.0.0.1:9", max_retries=0) as client:
        with pytest.raises(mpic.Unreachable, match="mpic serve"):
            client.health()


def test_too_late():
    with scripted(httpx.ReadTimeout("timed out")) as client, pytest.raises(mpic.TimedOut):
        client.health()


def test_a_client_without_a_free_connection_says_so():
    with scripted(httpx.PoolTimeout("")) as client:
        with pytest.raises(mpic.TimedOut, match=r"no connection .* was free"):
            client.health()


async def test_more_requests_than_httpx_has_connections_run_at_once():
    """Nothing is answered before every request has arrived."""
    count, arrived, everybody = 150, 0, asyncio.Event()

    async def answer(reader, writer):
        nonlocal arrived
        await reader.readuntil(b"\r\n\r\n")
        arrived += 1
        if arrived == count:
            everybody.set()
        await everybody.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, backlog=count) as server:
        port = server.sockets[0].getsockname()[1]
        async with mpic.AsyncMPIC(f"127.0.0.1:{port}", max_retries=0) as client:
            assert await asyncio.gather(*(client.metrics() for _ in range(count))) == ["ok"] * count


@pytest.mark.parametrize("timeout", [None, 1.0])
def test_a_request_waits_for_a_connection_as_long_as_for_an_answer(timeout):
    pool = client_options(None, None, timeout)["timeout"].pool
    assert pool == client_options(None, None, None)["timeout"].read


def test_the_line_feed_of_a_file_is_no_part_of_a_key():
    assert client_options(None, " mpic_secret\n", None)["headers"]["Authorization"] == "Bearer mpic_secret"


@pytest.mark.parametrize("key", ["mpic_sécret", "mpic_secret\nmpic_secret"])
@pytest.mark.parametrize("kind", [mpic.MPIC, mpic.AsyncMPIC])
def test_a_key_that_cannot_be_sent_is_refused_at_once_and_not_shown(kind, key):
    with pytest.raises(mpic.BadRequest, match="the API key") as caught:
        kind(api_key=key)
    assert "mpic_s" not in caught.value.message


def test_an_answer_that_cannot_be_decoded_is_a_bad_response():
    broken = httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"not gzip"))
    with scripted(broken) as client:
        with pytest.raises(mpic.client.BadResponse, match="decoded"):
            client.health()


def test_a_request_that_cannot_be_sent_is_an_error_of_the_client():
    with scripted(httpx.LocalProtocolError("Illegal header value")) as client:
        with pytest.raises(mpic.client.ClientError, match="cannot be sent") as caught:
            client.health()
    assert not isinstance(caught.value, mpic.client.Unreachable)


HALF = "a\ud83d"
"""A text that ends in half of a surrogate pair."""


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda client: client.chat.completions.create(HALF), "messages"),
        (lambda client: client.chat.completions.create("hi", temperature=float("nan")), "temperature"),
        (lambda client: client.references.search("hi", filter={"year": float("inf")}), "filter"),
        (lambda client: client.files.create(b"text", HALF), "handle"),
        (lambda client: client.files.list(after=HALF), "after"),
        (lambda client: client.files.retrieve(HALF), "id"),
        (lambda client: client.models.retrieve(HALF), "id"),
        (lambda client: client.files.retrieve("x" * 70_000), None),
    ],
)
def test_a_value_that_no_request_can_hold_is_refused_by_name(call, param):
    with scripted(httpx.Response(200)) as client, pytest.raises(mpic.BadRequest) as caught:
        list(call(client))
    assert caught.value.param == param
    caught.value.message.encode()  # it can be printed


@pytest.mark.parametrize("kind", [mpic.MPIC, mpic.AsyncMPIC])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("ALL_PROXY", "socks://127.0.0.1:9"),
        ("HTTPS_PROXY", "http://host:port"),
        ("SSL_CERT_FILE", "/no/such/file"),
    ],
)
def test_a_proxy_or_certificates_that_cannot_be_used_are_an_error_of_ours(monkeypatch, kind, name, value):
    monkeypatch.setitem(sys.modules, "socksio", None)  # as where it is not installed
    monkeypatch.setenv(name, value)
    kind("http://127.0.0.1:8000")  # this machine is reached without a proxy
    with pytest.raises(mpic.BadRequest, match=r"that the environment names cannot be used.*ALL_PROXY"):
        kind("http://example.org")
    context = SimpleNamespace(params={"url": "http://example.org", "api_key": None})
    assert completion.handles(context, "") == []


def test_the_sdk_needs_neither_torch_nor_the_server():
    code = (
        "import sys; from mpic import MPIC, AsyncMPIC, NotFound; MPIC().close()\n"
        "print([m for m in ('torch', 'fastapi', 'starlette', 'mpic.config') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = mpic.Nothing
