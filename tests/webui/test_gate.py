"""Who comes into the page, and what attacks on it get: Gradio itself, over an engine that computes nothing."""

import asyncio
import json
from itertools import product
from unittest.mock import AsyncMock
from urllib.parse import unquote

import httpx
import pytest
from fake_engine import FakeEngine
from server_helpers import chat_template, png, running
from watched import opened

from mpic.cli.ui import standalone
from mpic.client import AsyncMPIC
from mpic.config import Config, EngineConfig, LibraryConfig, ServerConfig
from mpic.errors import Unauthorized
from mpic.keys import KeyLimits, KeyStore
from mpic.library import Library, Limits
from mpic.server import create_app
from mpic.webui.page import PENDING, SESSIONS
from mpic.webui.visitors import ASK_SECONDS, CLIENTS, LoginsAlone

LIMIT = 200_000
TOKEN = "A" * 32


@pytest.fixture
async def server(tmp_path):
    config = Config(
        engine=EngineConfig(policy="mpic-16"),
        library=LibraryConfig(upload_bytes=LIMIT),
        server=ServerConfig(max_body_bytes=LIMIT),
    )
    library = Library.open(tmp_path, Limits(upload_bytes=LIMIT))
    async with running(create_app(FakeEngine(), library, chat_template(), config)) as server:
        server.keys = server.app.state.mpic.keys
        server.page = server.app.state.page
        yield server


@pytest.fixture
def log_in(server):
    """Make a user with a key; return the headers of a browser that is logged in with it."""

    async def logged_in(name, role="user", limits=None):
        key, _ = server.keys.create(name, role, limits)
        answer = await server.http.post("/ui/login", data={"key": key})
        assert answer.status_code == 303
        server.http.cookies.clear()
        return {"cookie": answer.headers["set-cookie"].split(";")[0]}

    return logged_in


def code(answer):
    return answer.json()["error"]["code"]


def upload(name="red.png", data=None):
    return {"files": {"files": (name, data or png(), "image/png")}}


def file_at(path):
    return {
        "path": path,
        "url": f"http://127.0.0.1/{path}",
        "orig_name": "a",
        "meta": {"_type": "gradio.FileData"},
    }


async def event(server, name, data, session="mine", headers=None, **fields):
    """Send an event of the page by the name of its function, and return the last message about it."""
    await server.http.get("/ui/", headers=headers)
    index = next(i for i, fn in server.page._blocks.fns.items() if fn.name == name)
    body = {"data": data, "fn_index": index, "session_hash": session, **fields}
    sent = await server.http.post("/ui/gradio_api/queue/join", json=body, headers=headers)
    if sent.status_code != 200:
        return sent
    url = f"/ui/gradio_api/queue/data?session_hash={session}"
    async with server.http.stream("GET", url, headers=headers) as answer:
        async for line in answer.aiter_lines():
            message = json.loads(line.removeprefix("data: ")) if line else {}
            if message.get("msg") == "process_completed":
                return message
    raise AssertionError("the event has not ended")


CHAT = {"user": "local", "chat": {"id": "a", "turns": []}}
PICKERS = ["mpic-16", "none", "off", "", 0, 20]


def ask(text, *files, chat=None):
    return [chat or CHAT, {"text": text, "files": list(files)}, *PICKERS]


async def test_without_keys_the_page_is_open_to_this_machine_and_to_nobody_else(server):
    answer = await server.http.get("/ui/", headers={"accept": "text/html"})
    assert answer.status_code == 200 and "gradio" in answer.text
    assert answer.headers["cache-control"] == "no-store"  # the next user gets a page of their own
    assert (await server.http.get("/ui/", headers={"host": "evil.example"})).status_code == 403


async def test_the_page_runs_only_what_comes_from_this_server(server):
    answer = await server.http.get("/ui/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    nonce = policy["script-src"].split("'nonce-")[1].split("'")[0]
    assert (
        policy["script-src"] == f"'self' 'nonce-{nonce}' 'unsafe-eval'" and policy["default-src"] == "'none'"
    )
    assert policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert answer.text.count("<script") == answer.text.count(f'<script nonce="{nonce}"') > 2
    assert "githubusercontent" not in answer.text and "manifest" not in answer.text.split("gradio_config")[0]
    assert nonce not in (await server.http.get("/ui/")).text


CLOSED = [
    *(
        "GET /ui/gradio_api/file=/etc/passwd",
        "GET /ui/gradio_api/file=https://127.0.0.1/",
        "GET /ui/file=/etc/passwd",
    ),
    *(
        "GET /ui/gradio_api/file/etc/passwd",
        "GET /ui/gradio_api/proxy=https://x.hf.space/",
        "GET /ui/gradio_api/runs",
    ),
    *("POST /ui/gradio_api/run/predict", "POST /ui/gradio_api/api/predict", "POST /ui/gradio_api/run/ask"),
    *("POST /ui/gradio_api/call/ask", "POST /ui/gradio_api/call/v2/ask", "GET /ui/gradio_api/call/ask/x"),
    *(
        "POST /ui/gradio_api/component_server",
        "GET /ui/gradio_api/deep_link",
        "GET /ui/gradio_api/startup-events",
    ),
    *(
        "POST /ui/gradio_api/stream/x",
        "GET /ui/gradio_api/stream/a/b/1/playlist-file",
        "GET /ui/gradio_api/queue/status",
    ),
    *(
        "POST /ui/gradio_api/run-history/connect",
        "GET /ui/gradio_api/openapi.json",
    ),
    *("GET /ui/gradio_api/token", "GET /ui/gradio_api/heartbeat/x", "GET /ui/gradio_api/dev/reload"),
    *(
        "GET /ui/svelte/x.js",
        "GET /ui/monitoring",
        "GET /ui/pwa_icon",
        "GET /ui/manifest.json",
        "GET /ui/docs",
    ),
    *(
        "GET /ui/openapi.json",
        "GET /ui/v1/files",
        "GET /ui/metrics",
        "PUT /ui/gradio_api/upload",
        "GET /ui/theme.css/",
    ),
    *(
        "GET /ui/gradio_api/custom_component/a/client/b/c",
        "GET /ui/mcp",
        "GET /ui/gradio_api/mcp",
        "DELETE /ui/",
    ),
    *("POST /ui/gradio_api/vibe-edit", "POST /ui/gradio_api/undo-vibe-edit", "GET /ui/gradio_api/vibe-code"),
]


@pytest.mark.parametrize("asked", CLOSED)
async def test_routes_of_gradio_that_the_page_does_not_need_are_closed_to_admins_too(server, log_in, asked):
    who = await log_in("ann", "admin")
    method, path = asked.split()
    answer = await server.http.request(method, path, headers=who)
    assert answer.status_code == 404 and code(answer) == "not_found"


BEHIND = ["/ui/", "/ui/config", "/ui/alive", "/ui/theme.css", "/ui/assets/index.js", "/ui/thumbs/file-x"]
BEHIND += [
    "/ui/originals/file-x",
    "/ui/plots/ttft.png",
    "/ui/gradio_api/info",
    f"/ui/gradio_api/file={TOKEN}",
]
BEHIND += ["/ui/gradio_api/queue/data?session_hash=x"]


@pytest.mark.parametrize("path", BEHIND)
async def test_with_keys_nobody_gets_in_without_one(server, path):
    server.keys.create("ann")
    assert code(await server.http.get(path)) == "unauthorized"
    assert code(await server.http.get(path, headers={"cookie": "mpic_session=guessed"})) == "unauthorized"
    person = await server.http.get(path, headers={"accept": "text/html"})
    assert person.status_code == 303 and person.headers["location"] == "/ui/login"


PATHS = [
    *(
        "/etc/passwd",
        "../../../../etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1/v1/files",
        "/proc/self/environ",
    ),
    *(
        "\\\\host\\share",
        "C:\\Windows\\win.ini",
        "",
        ".",
        "\0",
        "x" * 5000,
        TOKEN,
        "A" * 31 + "/",
        "~/.ssh/id_rsa",
    ),
    *("/dev/zero", "{own}", "{upload}"),
]


async def test_no_path_that_an_event_names_is_opened(server, log_in, tmp_path_factory):
    folder = tmp_path_factory.mktemp("probes")
    (folder / "red.png").write_bytes(png())
    ann, bob = await log_in("ann"), await log_in("bob")
    token = (await server.http.post("/ui/gradio_api/upload", **upload(), headers=bob)).json()[0]
    given = {"{own}": str(folder / "red.png"), "{upload}": token}
    refused = 0
    with opened(folder) as seen:
        for path in (given.get(path, path) for path in PATHS):
            for make in (file_at, lambda path: {"path": path}, lambda path: path, lambda path: [path]):
                done = [
                    await event(server, "ask", ask("hello", make(path)), headers=ann),
                    await event(server, "take", [{"text": "", "files": [make(path)]}], headers=ann),
                    await event(server, "add", [make(path)], headers=ann),
                    await event(server, "search", ["", make(path)], headers=ann),
                    await event(server, "add_reference", [make(path), "t", "d"], headers=ann),
                ]
                refused += sum(not one["success"] for one in done)
    # an empty text is no file for a form that may lack one
    assert seen == [] and refused >= 5 * 4 * len(PATHS) - 8
    assert server.library.files.page("ann").files == []
    mine = await event(server, "take", [{"text": "", "files": [file_at(token)]}], headers=bob, session="bobs")
    assert mine["success"] and mine["output"]["data"][0]["text"].startswith("IMAGE#RED")


async def test_a_picture_that_was_sent_is_shown_to_its_sender_only(server, log_in):
    ann, bob = await log_in("ann"), await log_in("bob")
    token = (await server.http.post("/ui/gradio_api/upload", **upload(), headers=ann)).json()[0]
    assert "/" not in token
    mine = await server.http.get(f"/ui/gradio_api/file={token}", headers=ann)
    assert mine.content == png() and mine.headers["content-type"] == "image/png"
    assert code(await server.http.get(f"/ui/gradio_api/file={token}", headers=bob)) == "not_found"


async def test_what_was_sent_is_never_shown_as_a_page(server):
    for name, data in (("a.html", b"<script>alert(1)</script>"), ("a.svg", b"<svg onload='alert(1)'/>")):
        token = (await server.http.post("/ui/gradio_api/upload", **upload(name, data))).json()[0]
        answer = await server.http.get(f"/ui/gradio_api/file={token}")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_uploads_are_bounded_in_size_number_and_time(server):
    answer = await server.http.post(
        "/ui/gradio_api/upload", **upload("a.txt", b"a" * (2 * LIMIT + (1 << 20)))
    )
    assert code(answer) == "too_large"
    many = [("files", (f"{i}.txt", b"a")) for i in range(200)]
    assert (await server.http.post("/ui/gradio_api/upload", files=many)).status_code == 400
    for body in ({"files": {"file": ("a", b"a")}}, {"data": {"files": "/etc/passwd"}}, {"content": b"x"}):
        assert (await server.http.post("/ui/gradio_api/upload", **body)).status_code == 400
    names = [
        (await server.http.post("/ui/gradio_api/upload", **upload("n" * 3000))).json()[0] for _ in range(70)
    ]
    kept = server.page.uploads._sent["local"]
    assert len(kept) == 64 and names[0] not in kept and all(len(sent.name) < 256 for sent in kept.values())
    folder = next(iter(kept.values())).path.parent
    assert len(list(folder.iterdir())) == 64
    for _ in range(3):
        await server.http.post("/ui/gradio_api/upload", **upload("a.txt", b"a" * 150_000))
    assert sum(sent.bytes for sent in kept.values()) <= LIMIT
    server.page.uploads._clock = lambda: 1e12
    await server.http.post("/ui/gradio_api/upload", **upload())
    assert len(list(folder.iterdir())) == 1
    server.page.uploads.close()
    assert not folder.exists()


WRONG = [
    {"fn_index": 10**30},
    {"fn_index": -1},
    {"fn_index": 99_999},
    {"fn_index": "0"},
    {"fn_index": True},
    {"fn_index": None},
    {"fn_index": 1.0},
    {"session_hash": None},
    {"session_hash": "x" * 65},
    {"session_hash": "../../x"},
    {"session_hash": 7},
    {"session_hash": {}},
    {"data": None},
    {"data": "x"},
    {"data": [1] * 10_000},
    {"data": []},
]


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: str(fields)[:40])
async def test_an_absurd_event_is_a_clear_error(server, fields):
    await server.http.get("/ui/")
    index = next(i for i, fn in server.page._blocks.fns.items() if fn.name == "ask")
    body = {"data": ask("hello"), "fn_index": index, "session_hash": "mine", **fields}
    answer = await server.http.post("/ui/gradio_api/queue/join", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"1", b'{"a": 1e999}'], ids=repr)
async def test_a_body_that_is_no_event_is_a_clear_error(server, body):
    for path in ("queue/join", "cancel"):
        answer = await server.http.post(f"/ui/gradio_api/{path}", content=body)
        assert answer.status_code in (400, 413) and "error" in answer.json()


@pytest.mark.parametrize(
    "chat",
    [
        *(None, 7, "x", [], {}, {"chat": 1}, {"chat": {"id": "../x"}}, {"chat": {"id": "a", "turns": [1]}}),
        {"chat": {"id": "a", "turns": [{"id": "b", "answer": {"state": "no"}}]}},
        {"chat": {"id": "a", "turns": [{"id": "b", "answer": {"wishes": {"length": -1}}}]}},
    ],
    ids=str,
)
async def test_a_chat_that_cannot_be_read_is_a_clear_error(server, chat):
    done = await event(server, "ask", [chat, {"text": "hello", "files": []}, *PICKERS])
    assert not done["success"] and "bad_request" in done["output"]["error"]


async def test_answers_stream_through_the_api_with_the_visitors_key(server, log_in):
    ann, bob = await log_in("ann"), await log_in("bob")
    token = (await server.http.post("/ui/gradio_api/upload", **upload(), headers=ann)).json()[0]
    done = await event(server, "take", [{"text": "", "files": [file_at(token)]}], headers=ann, session="anns")
    assert done["output"]["data"][0]["text"].split() == ["IMAGE#RED"]
    assert [file.handle for file in server.library.files.page("ann").files] == ["RED"]

    for who, session, linked in ((ann, "a2", True), (bob, "b2", False)):  # to Bob it is a text like any other
        done = await event(server, "ask", ask("IMAGE#RED What is it?"), session, who)
        # the last message has all of it: of those before, a slow browser may have seen nothing
        shown, store = done["output"]["data"]
        answer = store["props"]["page"]["chat"]["turns"][0]["answer"]
        assert answer["state"] == "done" and answer["facts"]
        assert [one["role"] for one in shown] == ["user", "assistant"]
        [request] = server.engine.requests[-1:]
        assert bool(request.prompt.chunks) is linked


async def test_the_page_leaves_the_policy_to_the_server_where_that_chooses_it(tmp_path):
    app = create_app(FakeEngine(), Library.open(tmp_path), chat_template(), Config())
    async with running(app) as server:
        server.page = app.state.page
        done = await event(server, "load", [{}])
        policy = done["output"]["data"][2]
        assert policy["value"] == "auto" and "not calibrated" in policy["choices"][0][0]
        done = await event(server, "ask", [CHAT, {"text": "What?", "files": []}, "auto", *PICKERS[1:]])
        [turn] = done["output"]["data"][1]["props"]["page"]["chat"]["turns"]
        assert turn["answer"]["state"] == "done" and server.engine.requests[0].policy.name == "prefix"


async def test_an_open_page_belongs_to_the_user_who_has_opened_it(server, log_in):
    ann, bob = await log_in("ann"), await log_in("bob")
    assert (await event(server, "refresh", [], session="anns", headers=ann))["success"]
    answers = [
        await event(server, "refresh", [], session="anns", headers=bob),
        await server.http.get("/ui/gradio_api/queue/data?session_hash=anns", headers=bob),
        await server.http.post(
            "/ui/gradio_api/cancel",
            json={"session_hash": "anns", "fn_index": 0, "event_id": "x"},
            headers=bob,
        ),
    ]
    assert [code(answer) for answer in answers] == ["forbidden"] * 3


async def test_a_flood_of_pages_and_events_keeps_the_server_small(server):
    await server.http.get("/ui/")
    for number in range(SESSIONS + 40):
        assert (await event(server, "refresh", [], session=f"s{number}"))["success"]
    page = server.page
    assert len(page._sessions) == SESSIONS
    assert len(page._blocks._queue.pending_messages_per_session) <= SESSIONS
    assert len(page._blocks.state_holder.session_data) <= SESSIONS
    index = next(i for i, fn in page._blocks.fns.items() if fn.name == "refresh")
    body = {"data": [], "fn_index": index, "session_hash": "unread"}
    answers = [await server.http.post("/ui/gradio_api/queue/join", json=body) for _ in range(PENDING + 5)]
    assert [one.status_code for one in answers] == [200] * PENDING + [429] * 5


OTHERS = [{"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}]
OTHERS += [{"origin": "http://127.0.0.1:1"}, {"sec-fetch-site": "same-site"}]


@pytest.mark.parametrize("headers", OTHERS, ids=str)
async def test_a_page_of_another_site_cannot_act(server, headers):
    for path in ("login", "logout", "gradio_api/upload", "gradio_api/queue/join", "gradio_api/cancel"):
        assert (await server.http.post(f"/ui/{path}", headers=headers)).status_code == 403


OUTSIDE = [
    *(
        "../../../pyproject.toml",
        "..%2f..%2f..%2fpyproject.toml",
        "%2e%2e/%2e%2e/pyproject.toml",
        ".%2e/x",
        "a/../b",
    ),
    *(
        "%2fetc%2fhostname",
        "..\\..\\pyproject.toml",
        "a/../../../../../../etc/hostname",
        "%00",
        "n" * 5000,
        ".env",
    ),
]
PLACES = ("static", "assets", "thumbs", "originals", "plots", "gradio_api/file=", "svelte")


async def test_names_of_files_do_not_lead_out_of_their_folders(server):
    """The paths are sent as raw requests, because a client would normalise them."""
    scope = {"type": "http", "method": "GET", "query_string": b"", "headers": [(b"host", b"127.0.0.1")]}
    scope |= {
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "client": ("127.0.0.1", 1),
        "server": None,
    }
    send = AsyncMock()
    receive = AsyncMock(return_value={"type": "http.request", "body": b"", "more_body": False})
    for folder, path in product(PLACES, OUTSIDE):
        send.reset_mock()
        raw = f"/ui/{folder}/{path}".replace("=/", "=")
        await server.app({**scope, "path": unquote(raw), "raw_path": raw.encode()}, receive, send)
        assert send.await_args_list[0].args[0]["status"] in (403, 404), raw


async def test_another_user_sees_neither_thumbnails_nor_originals(server, log_in):
    ann, bob = await log_in("ann"), await log_in("bob")
    file = server.library.files.add("ann", png(), "a.png", handle="A")
    for place in ("thumbs", "originals"):
        mine = await server.http.get(f"/ui/{place}/{file.id}", headers=ann)
        assert mine.headers["content-type"] == "image/png" and "private" in mine.headers["cache-control"]
        assert code(await server.http.get(f"/ui/{place}/{file.id}", headers=bob)) == "file_not_found"
        assert code(await server.http.get(f"/ui/{place}/{file.id}")) == "unauthorized"


async def test_pictures_are_shown_to_a_key_that_allows_one_request_at_a_time(server, log_in):
    ada = await log_in("ada", limits=KeyLimits(concurrent=1))
    ids = [server.library.files.add("ada", png(c), f"{c}.png").id for c in ("red", "green", "blue")]
    shown = await asyncio.gather(*(server.http.get(f"/ui/thumbs/{id}", headers=ada) for id in ids))
    assert [one.status_code for one in shown] == [200] * 3


async def test_only_administrators_see_the_servers_figures_and_change_references(server, log_in):
    ann = await log_in("ann")
    token = (await server.http.post("/ui/gradio_api/upload", **upload(), headers=ann)).json()[0]
    for name, data in (
        ("figures", []),
        ("add_reference", [file_at(token), "t", ""]),
        ("savings", [30, "all", 0]),
    ):
        done = await event(server, name, data, headers=ann)
        assert not done["success"] and "forbidden" in done["output"]["error"]
    wanted = {"do": "remove", "id": "ref_x"}
    done = await event(server, "act_reference", [], headers=ann, event_data=wanted)
    assert not done["success"] and "forbidden" in done["output"]["error"]


async def test_gradios_client_finds_no_function_to_call(server):
    info = (await server.http.get("/ui/gradio_api/info")).json()
    assert info == {"named_endpoints": {}, "unnamed_endpoints": {}}


async def test_the_cookie_is_for_this_site_only_and_no_script_reads_it(server):
    key, _ = server.keys.create("ann")
    answer = await server.http.post("/ui/login", data={"key": f" {key} "})
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/ui" in cookie
    assert key.lower() not in cookie
    over_tls = await server.http.post("https://127.0.0.1/ui/login", data={"key": key})
    assert "; secure" in over_tls.headers["set-cookie"].lower()


async def test_a_key_does_not_cross_a_network_in_the_clear(server):
    key, _ = server.keys.create("ann")
    answer = await server.http.post("http://192.0.2.7/ui/login", data={"key": key})
    assert answer.status_code == 403 and "https" in answer.text and "set-cookie" not in answer.headers


async def test_a_wrong_key_is_refused_and_logins_count_as_requests_of_their_key(server):
    key, _ = server.keys.create("ann", limits=KeyLimits(requests_per_minute=3))
    assert (await server.http.post("/ui/login", data={"key": "nonsense"})).status_code == 401
    assert (await server.http.post("/ui/login")).status_code == 401
    answers = [await server.http.post("/ui/login", data={"key": key}) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [303, 303, 303, 429]
    assert "Log in again in" in answers[-1].text and "set-cookie" not in answers[-1].headers


async def test_logging_out_and_revoking_end_a_session_at_once(server, log_in):
    ann, bob = await log_in("ann"), await log_in("bob")
    assert (await server.http.get("/ui/alive", headers=ann)).json() == {"user": "ann"}
    await server.http.post("/ui/logout", headers=ann)
    assert (await server.http.get("/ui/", headers=ann)).status_code == 401
    [key] = [k for k in server.keys.listing() if k.user == "bob"]
    server.keys.revoke(key.prefix)
    assert code(await server.http.post("/ui/gradio_api/queue/join", json={}, headers=bob)) == "unauthorized"


async def test_a_login_outlasts_the_server_until_its_key_is_revoked(server, log_in, tmp_path):
    ann, bob = await log_in("ann"), await log_in("bob")
    [key] = [k for k in server.keys.listing() if k.user == "bob"]
    later = KeyStore(tmp_path)  # as the next start opens it
    assert later.logged_in(ann["cookie"].split("=")[1]).user == "ann"
    server.keys.revoke(key.prefix)
    assert later.logged_in(bob["cookie"].split("=")[1]) is None
    later.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("keys.sqlite*"))
    assert not any(who["cookie"].split("=")[1].encode() in stored for who in (ann, bob))  # only digests


async def test_no_header_of_a_client_stands_for_a_login(server, log_in):
    await log_in("ann", "admin")
    for name in ("login", "state", "mpic-login", "x-login"):
        assert (await server.http.get("/v1/files", headers={name: "ann"})).status_code == 401


async def test_an_event_that_has_begun_makes_no_further_call_after_its_key_is_revoked(server):
    secret, key = server.keys.create("ann")
    logins = server.page.logins
    cookie = await logins.log_in(secret)
    visitor = await logins.visitor(cookie)  # as the gate finds it for an event
    await visitor.client.files.list()
    server.keys.revoke(key.prefix)
    with pytest.raises(Unauthorized, match="revoked"):
        await visitor.client.files.list()


class Elsewhere:
    """A server that ``LoginsAlone`` asks; it needs a key or none, or is away. Records the clients that ask it."""

    def __init__(self, monkeypatch):
        self.closed = self.away = False
        self.asked = 0
        self.clients = clients = []
        elsewhere = self

        class Recorded(AsyncMPIC):
            def __init__(self, *args, **options):
                super().__init__(
                    *args, **options, max_retries=0, transport=httpx.MockTransport(elsewhere.answer)
                )
                clients.append(self)

        monkeypatch.setattr("mpic.client.AsyncMPIC", Recorded)

    def answer(self, request):
        self.asked += 1
        if self.away:
            raise httpx.ConnectError("away")
        if self.closed and "key_" not in request.headers.get("authorization", ""):
            error = {"message": "a key is needed", "code": "unauthorized", "type": "authentication_error"}
            return httpx.Response(401, json={"error": error})
        if request.url.path == "/v1/references/index":
            error = {"message": "for administrators", "code": "forbidden", "type": "permission_error"}
            return httpx.Response(403, json={"error": error})
        return httpx.Response(200, json={"object": "list", "data": []})

    def still_open(self):
        return [client for client in self.clients if not client._closed]


@pytest.fixture
def elsewhere(monkeypatch):
    return Elsewhere(monkeypatch)


async def test_a_page_alone_notices_that_its_server_needs_a_key_now(elsewhere):
    now = [0.0]
    logins = LoginsAlone("http://127.0.0.1:1", lambda: now[0])
    assert (await logins.visitor(None)).role == "user"
    elsewhere.closed, asked = True, elsewhere.asked
    now[0] = ASK_SECONDS - 1
    assert await logins.visitor(None) and elsewhere.asked == asked
    now[0] = ASK_SECONDS
    assert await logins.visitor(None) is None
    elsewhere.closed = False
    assert await logins.visitor(None)
    elsewhere.away, now[0] = True, 10 * ASK_SECONDS
    assert await logins.visitor(None)  # a page whose server is away stays, and says so itself
    await logins.close()


async def test_a_page_alone_has_one_client_for_everybody_without_a_key_and_closes_all(elsewhere):
    elsewhere.closed = True
    logins = LoginsAlone("http://127.0.0.1:1")
    for _ in range(5):
        assert await logins.visitor(None) is None
        assert await logins.visitor("guessed") is None
    assert len(elsewhere.clients) == 1
    with pytest.raises(Unauthorized):
        await logins.log_in("nonsense")
    assert len(elsewhere.still_open()) == 1
    cookies = [await logins.log_in(f"key_{number}") for number in range(CLIENTS + 3)]
    assert len(elsewhere.still_open()) == 1 + CLIENTS and await logins.visitor(cookies[0]) is None
    await logins.log_out(cookies[-1])
    assert len(elsewhere.still_open()) == CLIENTS
    await logins.close()
    assert elsewhere.still_open() == []


async def test_the_end_of_a_page_closes_the_clients_of_its_visitors(elsewhere):
    alone = standalone("http://127.0.0.1:1")
    async with alone.router.lifespan_context(alone):
        transport = httpx.ASGITransport(alone)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            assert (await http.get("/ui/alive")).json() == {"user": "local"}
        assert len(elsewhere.still_open()) == 1
    assert elsewhere.still_open() == []
