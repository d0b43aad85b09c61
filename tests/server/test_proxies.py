"""The configurations for reverse proxies in deploy/ are accepted by the proxies and work as intended."""

import json
import shlex
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from front_server import LIMITS, eventually, free_port, front_server

DEPLOY = Path(__file__).parents[2] / "deploy"
WRAPPER = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    {configuration}
}}
"""


def changed(text, **places):
    """Return the text with replacements; each original has to occur in it."""
    for old, new in places.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = shlex.split("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2")
    command += ["-subj", "/CN=localhost", "-keyout", path, "-out", path.with_name("cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_name("cert.pem").read_text())
    return path


def nginx(folder, certificate, port, server):
    text = changed(
        (DEPLOY / "nginx.conf").read_text(),
        **{"listen 443 ssl": f"listen 127.0.0.1:{port} ssl", "127.0.0.1:8000": f"127.0.0.1:{server}"},
        **{"/etc/ssl/mpic/fullchain.pem": str(certificate), "/etc/ssl/mpic/privkey.pem": str(certificate)},
        **{"client_header_timeout 10s": "client_header_timeout 1s", " send_timeout 30s": " send_timeout 1s"},
        **{"limit_conn mpic_address 64": "limit_conn mpic_address 4"},
    )
    path = folder / "nginx.conf"
    path.write_text(WRAPPER.format(folder=folder, configuration=text))
    return ["nginx", "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(path)], "-t"


def haproxy(folder, certificate, port, server):
    text = changed(
        (DEPLOY / "haproxy.cfg").read_text(),
        **{"bind :443": f"bind 127.0.0.1:{port}", "127.0.0.1:8000": f"127.0.0.1:{server}"},
        **{"/etc/ssl/mpic/fullchain-and-privkey.pem": str(certificate)},
        **{"timeout http-request 10s": "timeout http-request 1s", "timeout client 30s": "timeout client 1s"},
        **{"sc0_conn_cur gt 64": "sc0_conn_cur gt 4"},
    )
    path = folder / "haproxy.cfg"
    path.write_text(text)
    return ["haproxy", "-f", str(path)], "-c"


@pytest.fixture(scope="module")
def behind(tmp_path_factory, template):
    """A server that trusts every connection from this machine as its proxy's."""
    limits = replace(LIMITS, trusted_proxies="127.0.0.1", max_connections=100, keep_alive_seconds=5.0)
    limits = replace(limits, send_seconds=60.0)
    limits = replace(limits, header_seconds=10.0, body_seconds=30.0, hosts="api.example.org")
    with front_server(tmp_path_factory.mktemp("behind"), template, limits) as front:
        yield front


@pytest.fixture(params=[nginx, haproxy], ids=["nginx", "haproxy"])
def proxy(request, tmp_path, certificate, behind):
    """The port of a running proxy before the server."""
    if not shutil.which(request.param.__name__):
        pytest.skip(f"{request.param.__name__} is not installed")
    port = free_port()
    command, only_check = request.param(tmp_path, certificate, port, behind.port)
    checked = subprocess.run([*command, only_check], capture_output=True, text=True)
    assert checked.returncode == 0 and "warn" not in checked.stderr.lower(), checked.stderr
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        assert eventually(lambda: answers(port)), (tmp_path / "log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait()


def answers(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def tls(port, receive_buffer=0):
    """A connection to a proxy whose certificate nobody knows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.socket() as sock:
        sock.settimeout(60)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(("127.0.0.1", port))
        with context.wrap_socket(sock) as wrapped:
            yield wrapped


def test_the_documented_configuration_of_a_proxy_does_its_work(proxy, behind):
    """One test for all of it, because each start of a proxy takes time."""
    behind.engine.pause, behind.engine.answer = 0.2, "one two three four five six"
    headers = {"Host": "api.example.org", "Authorization": f"Bearer {behind.key}"}
    headers["X-Forwarded-Proto"] = "gopher"
    with httpx.Client(
        base_url=f"https://127.0.0.1:{proxy}", verify=False, headers=headers, timeout=60
    ) as http:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/v1/models", headers={"Host": "other.example.org"}).status_code == 403
        prefixed = {"X-Forwarded-Prefix": "/x"}  # a client must not say which part of its path counts
        assert http.get("/x/v1/models", headers=prefixed).status_code == 404
        with tls(proxy) as sock:
            sock.sendall(b"POST /v1/files HTTP/1.1\r\nHost: api.example.org\r\n")
            sock.sendall(b"Content-Length: 80000000\r\n\r\n")
            assert b" 413 " in sock.recv(1000).splitlines()[0]

        file = ("a.txt", b"hello there. " * 2000)
        made = http.post("/v1/files", files={"file": file}, data={"purpose": "user_data"})
        assert made.status_code == 200, made.text

        # allowed only over https, which the proxy has to report
        logged_in = http.post("/ui/login", data={"key": behind.key})
        assert logged_in.status_code == 303 and "Secure" in logged_in.headers["set-cookie"]

        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            times = [time.monotonic() for _ in answer.iter_raw()]
    assert times[-1] - times[0] > behind.engine.pause  # words arrive while others are still being made


def test_a_proxy_keeps_slow_headers_to_itself(proxy, behind):
    assert behind.settled()
    with tls(proxy) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: api.example.org\r\nx: ")
        assert sock.recv(1000)[:12] in (b"", b"HTTP/1.1 408")
    assert len(behind.connections) == 0


def streaming(sock, behind):
    """Ask for a long stream."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 100_000}
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: api.example.org\r\nAuthorization: Bearer {behind.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall((head + body).encode())


def test_a_proxy_ends_the_connections_of_clients_that_do_not_read(proxy, behind):
    behind.engine.pause, behind.engine.answer = 0.0, " ".join(["word" * 2000] * 2000)
    with tls(proxy, receive_buffer=4096) as sock:
        streaming(sock, behind)
        assert eventually(lambda: behind.engine.held)
        assert eventually(lambda: not behind.engine.held) and behind.settled()


def test_a_proxy_refuses_more_connections_of_one_address_than_its_share(proxy, behind):
    behind.engine.pause, behind.engine.answer = 0.05, " ".join(["word"] * 2000)
    with ExitStack() as clients:
        for _ in range(4):
            streaming(clients.enter_context(tls(proxy)), behind)
        assert eventually(lambda: len(behind.engine.held) == 4)
        try:
            late = clients.enter_context(tls(proxy))
            streaming(late, behind)
            assert late.recv(1000)[:12] in (b"", b"HTTP/1.1 429")
        except OSError:
            pass  # refused before any request
        assert len(behind.engine.held) == 4
    assert eventually(lambda: not behind.engine.held)
