"""The page and the API under a sub-path, behind nginx, and a page that stands alone before another server."""

import json
import shutil
import socket
import subprocess
import time

import httpx
import pytest
from browsing import serving
from front_server import free_port
from page_kit import ask, kept, log_in, questions, until, upload
from small_models import SMALL_SAMPLES

from mpic.cli.ui import standalone
from mpic.client import MPIC

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIG = """
pid {folder}/pid; error_log {folder}/error.log; daemon off; master_process off;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/a;
  uwsgi_temp_path {folder}/b; scgi_temp_path {folder}/c;
  server {{
    listen 127.0.0.1:{port};
    location {prefix}/ {{
      proxy_pass {base}{path}; proxy_http_version 1.1; proxy_buffering off;
      proxy_set_header Host $http_host; {header}
    }}
  }}
}}
"""


@pytest.fixture
def behind(tmp_path, fake):
    """Start nginx in front of the server; return the address of the sub-path."""
    if NGINX is None:
        pytest.skip("no nginx on this machine: install the package nginx-light")
    running = []

    def started(prefix, strip, header):
        port = free_port()
        config = tmp_path / "nginx.conf"
        shown = f"proxy_set_header X-Forwarded-Prefix {prefix};" if header else ""
        path = "/" if strip else ""
        text = CONFIG.format(
            folder=tmp_path, port=port, prefix=prefix, base=fake.base, path=path, header=shown
        )
        config.write_text(text)
        running.append(subprocess.Popen([NGINX, "-c", config, "-e", tmp_path / "error.log"]))
        while running[-1].poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return f"http://127.0.0.1:{port}{prefix}"
            except OSError:
                time.sleep(0.02)
        raise AssertionError((tmp_path / "error.log").read_text())

    yield started
    for process in running:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    "strip", [True, False], ids=["the proxy strips the prefix", "the proxy leaves the prefix"]
)
def test_page_and_api_work_below_a_path_behind_nginx(fake, open_page, behind, strip):
    url = behind("/tools/mpic", strip, header=True)
    key, _ = fake.keys.create("ann", "admin")
    page = open_page(url, ready=False)  # the address without /ui leads to the page
    assert page.url == f"{url}/ui/login"
    log_in(page, key)
    assert page.url == f"{url}/ui/"
    [cookie] = page.context.cookies()
    assert cookie["path"] == "/tools/mpic/ui" and cookie["sameSite"] == "Strict" and cookie["httpOnly"]
    upload(page, SMALL_SAMPLES / "vera.txt")
    until(page, lambda: page.input_value("#box textarea").strip() == "FILE#VERA")
    ask(page, "FILE#VERA Who?")
    page.reload()
    until(page, lambda: questions(page) == ["FILE#VERA Who?"])
    page.click("button:text-is('Log out')")
    page.wait_for_url(f"{url}/ui/login")
    with MPIC(url, key) as client:
        assert [file.handle for file in client.files.list()] == ["VERA"]
        assert client.chat.completions.create("FILE#VERA Who?").text
    assert httpx.get(f"{url}/openapi.json", timeout=60).json()["servers"] == [{"url": "/tools/mpic"}]
    assert "href=openapi.json" in httpx.get(f"{url}/docs", timeout=60).text


@pytest.mark.parametrize(
    "prefix", ["//evil.example", "/a/../b", "/ui", "/v1/x", "mpic", "/" + "a" * 100, "/a b", "/a\\b"]
)
def test_a_prefix_that_is_no_path_is_refused(fake, prefix):
    answer = httpx.get(fake.base, headers={"x-forwarded-prefix": prefix}, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "X-Forwarded-Prefix"


def test_a_page_alone_shows_another_server_with_the_visitors_key(fake, open_page):
    ann, key = fake.keys.create("ann")
    with serving(standalone(fake.base)) as url:
        page = open_page(f"{url}/", ready=False, expected=("401",))
        page.fill("#key", "mpic_00000000_" + "x" * 43)
        page.press("#key", "Enter")
        page.wait_for_selector("[role=alert]:has-text('not known')")
        log_in(page, ann)
        upload(page, SMALL_SAMPLES / "vera.txt")
        until(page, lambda: page.input_value("#box textarea").strip() == "FILE#VERA")
        ask(page, "FILE#VERA Who?")
        until(page, lambda: len(kept(page)) == 1)
        assert [file.handle for file in fake.library.files.page("ann").files] == ["VERA"]
        cookie = page.context.cookies()[0]
        assert ann not in json.dumps(cookie) and cookie["httpOnly"]
        fake.keys.revoke(key.prefix)
        page.fill("#box textarea", "Still there?")
        page.press("#box textarea", "Enter")
        page.wait_for_selector(
            ".mpic-error:has-text('revoked'), [data-testid=toast-body]:has-text('revoked')"
        )
        page.close()  # before its server


def test_a_page_alone_takes_no_key_for_metrics(fake):
    key, _ = fake.keys.create("prometheus", "metrics")
    with serving(standalone(fake.base)) as url:
        answer = httpx.post(f"{url}/ui/login", data={"key": key}, timeout=60)
    assert answer.status_code == 403 and "metrics only" in answer.text and "set-cookie" not in answer.headers


def test_gradios_client_calls_nothing_and_reads_no_file(fake, tmp_path):
    from gradio_client import Client

    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    client = Client(fake.url, verbose=False, analytics_enabled=False, download_files=str(tmp_path / "down"))
    assert client.view_api(return_format="dict") == {"named_endpoints": {}, "unnamed_endpoints": {}}
    blocks = fake.app.state.page._blocks
    for index, function in blocks.fns.items():
        with pytest.raises(Exception):  # noqa: B017, of whatever kind: nothing may come back
            named = [{"path": str(secret), "meta": {"_type": "gradio.FileData"}} for _ in function.inputs]
            client.predict(*named, fn_index=index)
        with pytest.raises(Exception):  # noqa: B017
            client.predict(*[str(secret) for _ in function.inputs], api_name=f"/{function.name}")
    assert fake.library.files.page("local").files == []


def test_a_page_alone_says_that_its_server_is_away():
    with serving(standalone("http://127.0.0.1:1")) as url:
        for path in ("ui/", "ui/thumbs/file-x"):
            answer = httpx.get(f"{url}/{path}", timeout=60)
            assert answer.status_code == 503 and "127.0.0.1:1" in answer.json()["error"]["message"]
        assert httpx.post(f"{url}/ui/login", data={"key": "mpic_x"}, timeout=60).status_code == 503
