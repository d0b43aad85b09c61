"""Limits on clients before they are identified, with a server on a real port and small limits."""

import contextlib
import io
import logging
import re
import socket
import time
from collections import Counter
from dataclasses import replace

import httpx
import pytest
from front_server import LIMITS, eventually, front_server, trickle
from PIL import Image

import mpic.engine.stream as stream_module
from mpic.config import Config, EngineConfig
from mpic.engine import load_engine
from mpic.keys import KeyStore
from mpic.library import Library
from mpic.prompt import ChatTemplate
from mpic.server import create_app

CHUNKED = ("Transfer-Encoding: chunked", "Content-Type: application/json")
LATE, NOTHING, INVALID = (408, "request_timeout"), (0, ""), (400, "")
CHAT, GET = "POST /v1/chat/completions", b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory, template):
    with front_server(tmp_path_factory.mktemp("front"), template) as front:
        yield front


@pytest.fixture
def front(running):
    """The server, without connections left behind by the previous test."""
    assert running.settled()
    running.engine.pause, running.engine.answer = 0.0, "An answer."
    yield running
    running.engine.pause = 0.0


@pytest.fixture
def client(front):
    client = front.connect()
    yield client
    client.close()


@pytest.fixture(scope="module")
def patient(tmp_path_factory, template):
    """A server that waits long, so that nothing but a newcomer closes a connection."""
    limits = replace(LIMITS, header_seconds=60.0, body_seconds=60.0, keep_alive_seconds=60.0)
    with front_server(tmp_path_factory.mktemp("patient"), template, limits) as front:
        yield front


@pytest.fixture
def crowd(patient):
    """Open connections to the patient server, and close them after the test."""
    made = []

    def connect(*sources):
        made.extend(patient.connect(source) for source in sources)
        return made[-len(sources) :]

    yield connect
    for one in made:
        one.close()
    assert patient.settled()


def gone_up(front, before, reason, by=1):
    return front.closed()[reason] == before[reason] + by


# ---- time


def fast_start(client):
    """Bytes that were sent fast earn no time for later."""
    client.head(CHAT, "Content-Length: 60000000", "Content-Type: application/json")
    client.send(b" " * 4_000_000)


def told_to_continue(client):
    client.head(CHAT, "Content-Length: 10", "Expect: 100-continue")
    assert client.answer()[0] == 100


def answered(client, then=b""):
    client.head("GET /v1/models")
    assert client.answer()[0] == 200
    client.send(then)


LENGTH = ("Content-Length: 100000", "Content-Type: application/json")
SLOW = {
    "a field": (lambda one: one.send(GET + b"x: "), b"y", LATE, "header_timeout"),
    "an old protocol": (lambda one: one.send(b"GET / HTTP/1.0\r\n"), b"y", LATE, "header_timeout"),
    "the first line": (lambda one: one.send(b"GET /"), b"y", LATE, "header_timeout"),
    "line breaks": (lambda one: one.send(b"\r\n"), b"\r\n", INVALID, "invalid_http"),
    "nothing": (lambda one: None, b"", NOTHING, "header_timeout"),
    "nothing after an answer": (answered, b"", NOTHING, None),
    "a field after an answer": (lambda one: answered(one, GET + b"x: "), b"y", LATE, "header_timeout"),
    "line breaks after an answer": (answered, b"\r\n", INVALID, "invalid_http"),
    "a body": (lambda one: one.head(CHAT, *LENGTH), b" ", LATE, "body_timeout"),
    "a body in chunks": (lambda one: one.head(CHAT, *CHUNKED), b"1\r\n \r\n", LATE, "body_timeout"),
    "a body with a fast start": (fast_start, b"", LATE, "body_timeout"),
    "a body it was told to send": (told_to_continue, b"", LATE, "body_timeout"),
    "a body after a refusal": (
        lambda one: one.head(CHAT, *LENGTH, key=False),
        b" ",
        (401, "unauthorized"),
        "unread_body",
    ),
}
"""By what a client sends slowly: its beginning, the piece that it repeats, the answer, and the reason counted."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory, template):
    """Return the refusal that each slow client got before the server closed its connection, and how often each reason
    was counted. All of them send at the same time."""
    limits = replace(LIMITS, max_connections=32, max_connections_per_address=32)
    with front_server(tmp_path_factory.mktemp("slow"), template, limits) as front:
        clients = {name: front.connect() for name in SLOW}
        for name, client in clients.items():
            SLOW[name][0](client)
        trickle({client: SLOW[name][1] for name, client in clients.items()})
        told = {name: client.refusal() for name, client in clients.items()}
        assert front.settled()
        yield told, front.closed()


@pytest.mark.parametrize("what", SLOW)
def test_a_client_that_sends_slowly_is_answered_and_closed(slow, what):
    assert slow[0][what] == SLOW[what][2]


def test_slow_clients_are_counted_by_what_they_were_late_with(slow):
    expected = Counter(reason for *_, reason in SLOW.values() if reason)
    assert {reason: count for reason, count in slow[1].items() if count} == expected


def test_a_body_at_the_accepted_pace_may_take_long(front, client):
    body = b'{"messages": [{"role": "user", "content": "hello"}]}' + b" " * 4000
    client.head(CHAT, f"Content-Length: {len(body)}", "Content-Type: application/json")
    for at in range(0, len(body), 100):  # 41 pieces, two seconds together: twice the deadline
        client.send(body[at : at + 100])
        time.sleep(0.05)
    assert client.answer()[0] == 200


@pytest.fixture(scope="module")
def large(running):
    """(id, content) of an upload of seven megabytes."""
    content = io.BytesIO()
    Image.frombytes("RGB", (1600, 1500), bytes(1600 * 1500 * 3)).save(content, "PNG", compress_level=0)
    headers = {"Authorization": f"Bearer {running.key}"}
    files = {"file": ("a.png", content.getvalue())}
    url = f"http://127.0.0.1:{running.port}/v1/files"
    made = httpx.post(url, files=files, data={"purpose": "vision"}, headers=headers, timeout=60)
    return made.json()["id"], content.getvalue()


def test_answers_that_are_not_read_to_their_end_are_given_up(large, front):
    """Bytes that were read fast earn no time for later: two megabytes in 0.4 s."""
    before = front.closed()
    readers = [front.connect(receive_buffer=buffer) for buffer in (4096, 1 << 16)]
    for reader in readers:
        reader.head(f"GET /v1/files/{large[0]}/content")
    stream = readers[1].socket.makefile("rb")
    for _ in range(40):
        assert len(stream.read(50_000)) == 50_000
        time.sleep(0.01)
    assert eventually(lambda: gone_up(front, before, "send_timeout", 2)) and front.settled()
    for reader in readers:
        reader.close()


def test_an_answer_whose_end_is_not_read_is_given_up_although_the_application_has_finished(front):
    """Its last bytes wait for the reader when uvicorn closes the connection."""
    before = front.closed()
    reader = front.connect(receive_buffer=4096)
    reader.head("GET /openapi.json", "Connection: close")
    assert eventually(lambda: gone_up(front, before, "send_timeout")) and front.settled()
    reader.close()


def test_an_answer_that_is_read_slowly_but_steadily_arrives(large, front):
    before, (id, content) = front.closed(), large
    reader = front.connect(receive_buffer=1 << 16)
    reader.head(f"GET /v1/files/{id}/content")
    start, got = time.monotonic(), b""
    while len(got) < len(content) and (piece := reader.socket.recv(1 << 16)):
        got += piece
        time.sleep(0.014)
    reader.close()
    assert got.partition(b"\r\n\r\n")[2] == content[: len(got) - got.index(b"\r\n\r\n") - 4]
    assert time.monotonic() - start > 1.5 * LIMITS.send_seconds
    assert front.closed() == before


def test_a_stream_that_is_not_read_ends_and_its_request_is_aborted(front):
    before = front.closed()
    front.engine.answer = " ".join(["word" * 2000] * 2000)
    reader = front.connect(receive_buffer=4096)
    reader.chat(stream=True, max_tokens=100_000)
    assert eventually(lambda: gone_up(front, before, "send_timeout"))
    assert eventually(lambda: not front.engine.held) and front.settled()
    reader.close()


@pytest.fixture
def unread(monkeypatch):
    """The tokens and alternatives that waited for the reader with each delta, which should be 210 and one delta's."""
    seen, put = [], stream_module.DeltaStream.put

    def watched(stream, item):
        put(stream, item)
        seen.append(stream._written - stream._read)

    monkeypatch.setattr(stream_module, "UNREAD", 210)
    monkeypatch.setattr(stream_module.DeltaStream, "put", watched)
    return seen


@pytest.fixture
def computing(tmp_path, tiny_model):
    """A server whose engine computes."""
    keys = KeyStore(tmp_path)
    key = keys.create("root", "admin")[0]
    keys.close()
    library = Library.open(tmp_path)
    engine, processor = load_engine(EngineConfig(model=tiny_model, pool_bytes=64 << 20), library.store)
    app = create_app(engine, library, ChatTemplate(processor), Config(server=LIMITS))
    with front_server(tmp_path, None, app=app) as front:
        front.engine, front.key = engine, key
        yield front


def test_a_stream_that_is_not_read_is_computed_no_further_and_dropped_while_another_goes_on(
    computing, unread
):
    engine, before = computing.engine, computing.closed()
    wanted = {"stream": True, "max_tokens": 1900, "logprobs": True, "top_logprobs": 20, "temperature": 1}
    wanted["mpic"] = {"ignore_eos": True}
    reader = computing.connect(receive_buffer=4096)
    reader.chat(n=3, **wanted)  # more than the kernel's buffers take
    assert eventually(lambda: max(unread, default=0) > 210)
    other = computing.connect()
    other.chat(**wanted | {"max_tokens": 100})
    assert b"data: [DONE]" in other.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert eventually(lambda: gone_up(computing, before, "send_timeout"))
    assert eventually(lambda: engine.scheduler.idle)
    counters = engine.stats()["counters"]
    assert max(unread) <= 210 + 21
    assert (counters["finished_abort"], counters["finished_length"]) == (3, 1)
    reader.close()
    other.close()


# ---- size


@pytest.mark.parametrize(
    ("begins", "piece"),
    [
        (GET, b"a: b\r\n" * 10_000),
        (b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nx: ", b"y" * 65536),
        (b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: ", b'a="\\""; ' * 8000),
        (b"GET /v1/models?q=", b"y" * 65536),
        (b"GET /v1/models HTTP/1.1\r\n", b"y" * 65536),
    ],
)
def test_an_endless_header_is_refused_and_not_stored(front, client, begins, piece):
    """The limit is counted after two reads at most, wherever the header grows."""
    before = front.closed()
    client.send(begins)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 20 and front.closed() == before:
            client.send(piece)
            sent += 1
            time.sleep(0.02)
    assert (
        client.refusal() in (INVALID, NOTHING) and sent < 15
    )  # nothing: it went on sending when it was closed
    assert gone_up(front, before, "invalid_http") and front.settled()


def test_a_header_just_under_the_limit_is_accepted(front, client):
    client.head("GET /v1/models", f"x: {'y' * 3500}")
    assert client.answer()[0] == 200
    for fields in ([f"x{i}: y" for i in range(200)], [f"x: {'y' * 5000}"]):
        large = front.connect()
        large.head("GET /v1/models", *fields)
        assert large.refusal() == (431, "headers_too_large")


@pytest.mark.parametrize(
    ("begins", "piece"),
    [(b"1;", b"y" * 65536), (b"0\r\n", b"a: b\r\n" * 10_000), (b"0\r\nx: ", b"y" * 65536)],
)
def test_framing_of_a_body_in_chunks_is_bounded(front, client, begins, piece):
    before = front.closed()
    client.head(CHAT, *CHUNKED)
    with contextlib.suppress(ConnectionError):
        for sent in (begins, *[piece] * 4):
            client.send(sent)
            time.sleep(0.02)
    assert client.refusal() in (INVALID, NOTHING)
    assert gone_up(front, before, "invalid_http") and front.settled()


def test_a_body_in_chunks_of_one_byte_is_accepted(front, client):
    client.head(CHAT, *CHUNKED)
    body = b'{"messages": [{"role": "user", "content": "hello"}]}' + b" " * 20_000
    client.send(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert client.answer()[0] == 200


def test_pipelined_requests_are_answered_in_turn_and_read_no_faster(front, client):
    front.engine.pause = 0.02
    for _ in range(8):
        client.head("GET /v1/models")
    assert client.answer()[0] == 200
    many = front.connect()
    many.socket.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(1000):  # until the kernel takes no more, because nobody reads
            many.send(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 5000)
        pytest.fail("the server has read 200 MB of requests that it has not answered")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("bodies", [0, 1, 3])
def test_an_answer_ends_when_its_client_disconnects_although_it_has_sent_another_request(
    front, client, stream, bodies
):
    front.engine.pause, front.engine.answer = 0.02, " ".join(["word"] * 5000)
    client.chat(stream=stream, max_tokens=5000)
    assert eventually(lambda: len(front.engine.held) == 1)
    client.head("GET /v1/models")
    for _ in range(bodies):
        client.chat()
    time.sleep(0.1)
    assert len(front.engine.held) == 1
    client.close()
    assert eventually(lambda: not front.engine.held) and front.settled()


def test_what_is_no_request_is_refused_after_the_answers_before_it(front, client):
    front.engine.pause = 0.02
    client.chat(stream=True)
    client.send(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nrubbish\r\n\r\n")
    said = client.rest()
    assert re.findall(rb"HTTP/1.1 (\d+)", said) == [b"200", b"401", b"400"]
    assert b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 401" in said and front.settled()


def test_bodies_of_pipelined_requests_are_not_read_without_bound(front, client):
    front.engine.pause, front.engine.answer = 0.02, " ".join(["word"] * 5000)
    client.chat(max_tokens=5000)
    assert eventually(lambda: len(front.engine.held) == 1)
    client.socket.setblocking(False)
    body = b"POST /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 60000\r\n\r\n" + b" " * 60_000
    with contextlib.suppress(BlockingIOError):
        for _ in range(1000):
            client.send(body)
        pytest.fail("the server has read 60 MB behind the request that it answers")


def test_a_login_without_a_key_may_not_send_files(front, client):
    """Each of them would take a file descriptor."""
    form = "Content-Type: multipart/form-data; boundary=x"
    client.head("POST /ui/login", "Content-Length: 100000", form, key=False)
    assert client.refusal() == (413, "too_large")


# ---- form


def test_garbage_and_offers_of_other_protocols_take_no_line_of_the_log_each(front, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(30):
            one = front.connect()
            one.send(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert one.refusal() == INVALID
            offering = front.connect()
            offering.head("GET /v1/models", "Connection: Upgrade", "Upgrade: rubbish")
            assert offering.answer()[0] == 200
            offering.close()
    assert len(caplog.records) < 5


H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
OFFERS = {
    "h2c": H2C,
    "websocket": (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: eA==",
    ),
    "last": ("Upgrade: tls/1.0, irc", "connection: keep-alive, UPGRADE"),
}
HELLO = b'{"messages": [{"role": "user", "content": "hello"}]}'
INNER = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
"""A body that is a request itself."""


def in_chunks(body):
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\nx-trailer: 1\r\n\r\n"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("pieces", ["one", "header and body", "bytes"])
@pytest.mark.parametrize("offer", OFFERS)
def test_what_follows_an_offer_of_another_protocol_is_the_body_of_the_request(front, offer, pieces, chunked):
    """RFC 9110, 7.8. Behind it stand a second such request, whose body is a request, and one without a body."""

    def request(line, body):
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
        fields = [f"{line} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {front.key}", *OFFERS[offer]]
        head = "\r\n".join([*fields, "Content-Type: application/json", length, "", ""]).encode()
        return head, in_chunks(body) if chunked else body

    plain = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {front.key}\r\n\r\n"
    sent = [*request(CHAT, HELLO), *request(CHAT, INNER), *request("GET /v1/models", b""), plain.encode()]
    if pieces == "one":
        sent = [b"".join(sent)]
    elif pieces == "bytes":
        sent = [bytes([byte]) for byte in b"".join(sent)]
    client = front.connect()
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in sent:
        client.send(piece)
        if pieces == "header and body":
            time.sleep(0.05)  # in a segment of its own
    assert re.findall(rb"HTTP/1.1 (\d+)", client.rest()) == [b"200", b"400", b"200", b"200"]


def test_a_client_that_offers_another_protocol_is_told_to_continue(front, client):
    length = f"Content-Length: {len(HELLO)}"
    client.head(CHAT, *H2C, "Expect: 100-continue", "Content-Type: application/json", length)
    assert client.answer()[0] == 100
    client.send(HELLO)
    assert client.answer()[0] == 200


def test_a_body_behind_an_offer_of_another_protocol_is_bounded_in_time(front, client):
    client.head(CHAT, *H2C, *LENGTH)
    assert client.refusal() == LATE


def test_an_offer_of_another_protocol_without_a_body_is_answered_in_http(front, client):
    front.engine.pause = 0.2
    client.head("GET /v1/models", *OFFERS["websocket"])
    assert client.answer()[0] == 200
    assert client.rest() == b"" and front.settled()


HOST = b"Host: 127.0.0.1\r\n"
POST = b"POST /v1/models HTTP/1.1\r\n" + HOST
AMBIGUOUS = {
    "two hosts": b"GET / HTTP/1.1\r\n" + HOST + b"Host: other\r\n\r\n",
    "the same host twice": b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "two hosts in 1.0": b"GET / HTTP/1.0\r\n" + HOST + b"Host: other\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a target with another host": b"GET http://other/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target with another port": b"GET http://127.0.0.1:1/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target with a name before its host": b"GET http://127.0.0.1@other/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target of another scheme": b"GET x+y://other/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target and no host": b"GET http://127.0.0.1/ HTTP/1.0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "two lengths in one field": POST + b"Content-Length: 1, 2\r\n\r\nab",
    "a signed length": POST + b"Content-Length: +1\r\n\r\na",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "another coding": POST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "another coding before chunks": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "another coding in a field before": POST
    + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding after chunks": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunks twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "almost chunks": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks in 1.0": POST.replace(b"/1.1", b"/1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks without CR": POST + b"Transfer-Encoding: chunked\r\n\r\n1\na\n0\n\n",
    "a chunk with a sign": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\na\r\n0\r\n\r\n",
    "a CR in a field": b"GET / HTTP/1.1\r\n" + HOST + b"X: a\rb\r\n\r\n",
    "a zero byte in a field": b"GET / HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n\r\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    "a space before the first field": b"GET / HTTP/1.1\r\n Host: 127.0.0.1\r\n\r\n",
    "a tunnel": b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2 in text": b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/0.9 in text": b"GET / HTTP/0.9\r\n" + HOST + b"\r\n",
}


LENIENT = {
    "a folded field": b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",
    "lines without CR": b"GET / HTTP/1.1\nHost: 127.0.0.1\n\n",
    "a field without CR": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\nX: a\r\n\r\n",
}
"""Headers that RFC 9112 (2.2, 5.2) lets a server read in one way, or refuse."""


@pytest.mark.parametrize("what", LENIENT)
def test_old_forms_of_a_header_are_read_in_the_one_way_that_the_standard_allows(front, what):
    client = front.connect()
    client.send(LENIENT[what] + INNER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert re.findall(rb"HTTP/1.1 (\d+)", client.rest()) == [b"307", b"401"]


@pytest.mark.parametrize("offered", [False, True], ids=["", "with an offer of another protocol"])
@pytest.mark.parametrize("what", AMBIGUOUS)
def test_a_request_that_two_servers_may_read_differently_is_refused_with_all_that_follows_it(
    front, what, offered
):
    sent = AMBIGUOUS[what]
    if offered:
        sent = sent.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 1)
    client = front.connect()
    client.send(sent + INNER)
    assert re.findall(rb"HTTP/1.1 (\d+)", client.rest()) == [b"400"]


def test_a_target_with_the_host_of_the_request_is_served(front, client):
    client.send(b"GET http://LOCALHOST:80/health/live HTTP/1.1\r\nHost: localhost:80\r\n\r\n")
    assert client.answer()[0] == 200


def test_fields_behind_a_body_are_not_those_of_the_header(front, client):
    client.head("GET /v1/models", "Transfer-Encoding: chunked", key=False)
    client.send(f"0\r\nAuthorization: Bearer {front.key}\r\n\r\n".encode())
    assert client.answer()[0] == 401
    client.send(
        b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        + f"0\r\nAuthorization: Bearer {front.key}\r\n\r\n".encode()
    )
    assert client.answer()[0] == 401


@pytest.mark.parametrize("keep", ["", "Connection: keep-alive\r\n"], ids=["", "keep-alive"])
def test_answers_in_http_1_0_have_a_length_or_end_with_the_connection(front, keep):
    def ask(line, body=b"", more=""):
        client = front.connect()
        fields = f"Authorization: Bearer {front.key}\r\nContent-Type: application/json\r\n{keep}{more}"
        client.send(
            f"{line} HTTP/1.0\r\n{fields}Content-Length: {len(body)}\r\n".encode() + HOST + b"\r\n" + body
        )
        header, _, content = client.rest().partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in header.lower() and b"connection: close" in header.lower()
        return header, content

    whole, content = ask(CHAT, HELLO, "Expect: 100-continue\r\n")
    assert whole.startswith(b"HTTP/1.1 200") and f"content-length: {len(content)}".encode() in whole
    streamed, content = ask(CHAT, HELLO[:-1] + b', "stream": true}')
    assert b"content-length" not in streamed
    assert content.startswith(b"data: {") and content.endswith(b"\n\ndata: [DONE]\n\n")
    assert ask("HEAD /v1/models")[1] == b""


def test_a_refusal_cannot_be_mistaken_for_an_earlier_answer(front, client):
    front.engine.pause = 0.1
    client.chat(stream=True)
    client.send(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000)
    answer, _, refusal = client.rest().partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
    assert refusal.startswith(b"HTTP/1.1 400") or not refusal  # or it was lost, as we went on sending


# ---- number


def test_a_flood_of_half_sent_headers_does_not_exclude_clients_with_a_key(patient, crowd):
    before = patient.closed()
    for i in range(60):
        [one] = crowd(f"127.0.0.{2 + i % 5}")
        one.send(GET)
        assert len(patient.connections) <= LIMITS.max_connections
        if i % 6 == 5:
            [holder] = crowd("127.0.0.8")
            holder.head("GET /v1/models")
            assert holder.answer()[0] == 200
    assert patient.closed()["replaced_full"] > before["replaced_full"] + 40


def test_requests_with_a_key_continue_while_others_are_refused(patient, crowd):
    patient.engine.pause, patient.engine.answer = 0.05, " ".join(["word"] * 1000)
    holders = crowd(*(f"127.0.0.{2 + i % 4}" for i in range(LIMITS.max_connections)))
    for holder in holders:
        holder.chat(stream=True, max_tokens=1000)
    assert eventually(lambda: len(patient.engine.held) == len(holders))
    late = crowd(*(f"127.0.0.{20 + i}" for i in range(20)))
    assert [one.refusal() for one in late] == [(503, "too_many_connections")] * 20
    patient.engine.pause = 0.0
    for holder in holders:
        stream = holder.socket.makefile("rb")
        assert any(line == b"data: [DONE]\n" for line in stream)


def test_one_address_does_not_use_up_all_connections(patient, crowd):
    [other] = crowd("127.0.0.3")
    many = crowd(*["127.0.0.2"] * 7)
    assert eventually(lambda: many[1].is_closed())
    assert [one.is_closed() for one in (*many, other)] == [True, True, *[False] * 6]


def test_a_trusted_proxy_is_not_one_client(patient, crowd):
    many = crowd(*["127.0.0.9"] * 7)
    assert eventually(lambda: len(patient.connections) == 7) and not any(one.is_closed() for one in many)


def test_metrics_show_connections(front, client):
    client.send(b"rubbish\r\n\r\n")
    client.rest()
    headers = {"Authorization": f"Bearer {front.key}"}
    shown = httpx.get(f"http://127.0.0.1:{front.port}/metrics", headers=headers, timeout=60).text
    assert "mpic_connections_limit 8.0" in shown and re.search(r"mpic_connections [12]\.0", shown)
    count = float(front.closed()["invalid_http"])
    assert f'mpic_connections_closed_total{{reason="invalid_http"}} {count}' in shown


# ---- proxies


async def told(scope, receive, send):
    """An application that returns the client's address and the scheme."""
    assert scope["type"] == "http"
    body = f'{{"client": "{scope["client"][0]}", "scheme": "{scope["scheme"]}"}}'.encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(
    ("source", "client", "scheme"),
    [("127.0.0.9", "203.0.113.7", "https"), ("127.0.0.1", "127.0.0.1", "http")],
)
def test_forwarded_addresses_are_believed_from_trusted_proxies_alone(tmp_path, source, client, scheme):
    with front_server(tmp_path, None, replace(LIMITS, max_header_bytes=8192), app=told) as front:
        one = front.connect(source)
        one.head("GET /", "X-Forwarded-For: 203.0.113.7", "X-Forwarded-Proto: https")
        assert one.answer() == (200, {"client": client, "scheme": scheme})
        one.close()


async def failing(scope, receive, send):
    """Answer with 500 and then raise, as the framework does."""
    await send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})
    raise RuntimeError("a mistake of ours")


def test_a_failure_that_was_answered_is_not_logged_again(tmp_path, caplog):
    with front_server(tmp_path, None, app=failing) as front:
        client = front.connect()
        for _ in range(2):
            client.head("GET /")
            assert client.answer()[0] == 500
        client.close()
    assert not [record for record in caplog.records if record.exc_info]
