"""The access proxy of the web interface, with plain requests and an engine that computes nothing."""

import asyncio
from itertools import product
from unittest.mock import AsyncMock
from urllib.parse import unquote

import pytest
from fake_engine import FakeEngine
from server_helpers import chat_template, data_url, png, running
from watched import opened

from mpic.config import Config, LibraryConfig
from mpic.keys import KeyLimits, KeyStore
from mpic.library import Library, Limits
from mpic.server import create_app
from mpic.webui.pages import static_files

LIMIT = 200_000


@pytest.fixture
async def server(tmp_path):
    config = Config(library=LibraryConfig(upload_bytes=LIMIT))
    library = Library.open(tmp_path, Limits(upload_bytes=LIMIT))
    async with running(create_app(FakeEngine(), library, chat_template(), config)) as server:
        server.keys = server.app.state.mpic.keys
        yield server


@pytest.fixture
def log_in(server):
    """Makes a user with a key; returns the headers of a browser that is logged in with it."""

    async def logged_in(name, role="user", limits=None):
        key, _ = server.keys.create(name, role, limits)
        answer = await server.http.post("/ui/login", data={"key": key})
        assert answer.status_code == 303
        server.http.cookies.clear()
        return {"cookie": answer.headers["set-cookie"].split(";")[0]}

    return logged_in


def form(data=None, name="red.png", **fields):
    return {"data": {"purpose": "user_data", **fields}, "files": {"file": (name, data or png())}}


def code(answer):
    return answer.json()["error"]["code"]


async def test_without_keys_the_interface_is_open_to_this_machine(server):
    answer = await server.http.get("/ui/", headers={"accept": "text/html"})
    assert answer.status_code == 200 and "/ui/static/app.js" in answer.text
    assert answer.headers["cache-control"] == "no-store"  # the next user gets a page of their own


async def test_the_page_runs_nothing_that_is_not_a_file_of_this_server(server):
    answer = await server.http.get("/ui/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["frame-ancestors"] == "'none'"
    assert not any(word in answer.headers["content-security-policy"] for word in ("unsafe", "http"))
    assert "http" not in answer.text.replace("http-equiv", "")
    assert "<script>" not in answer.text
    assert "style=" not in answer.text
    assert " on" not in answer.text.split("<body>")[0]
    for name, file in static_files().items():
        text = file.data.decode()
        assert "innerHTML" not in text and "eval(" not in text and "document.write" not in text, name
        assert "https://" not in text and "@import" not in text, name


async def test_files_of_the_page_are_asked_for_again_only_when_they_have_changed(server):
    first = await server.http.get("/ui/static/app.js")
    assert first.status_code == 200 and first.headers["content-type"].startswith("text/javascript")
    again = await server.http.get("/ui/static/app.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content


async def test_without_keys_other_names_and_other_sites_stay_out(server):
    assert (await server.http.get("/ui/", headers={"host": "evil.example"})).status_code == 403
    answer = await server.http.post("/ui/v1/files", **form(), headers={"origin": "https://evil.example"})
    assert answer.status_code == 403


CLOSED = [
    ("GET", "/ui/v1/caches"),
    ("POST", "/ui/v1/caches"),
    ("DELETE", "/ui/v1/files"),
    ("PUT", "/ui/v1/references/ref_a"),
    ("GET", "/ui/v1/references/index"),
    ("POST", "/ui/v1/references/reindex"),
    ("GET", "/ui/v1/models"),
    ("GET", "/ui/metrics"),
    ("GET", "/ui/docs"),
    ("GET", "/ui/openapi.json"),
    ("GET", "/ui/v1/files/file-x/content/"),
    ("GET", "/ui/v1/files/..%2fx"),
    ("POST", "/ui/about"),
    ("POST", "/ui/static/app.js"),
    ("GET", "/ui/static/login.html"),
    ("GET", "/ui/gradio_api/file=/etc/passwd"),
    ("GET", "/ui/robots.txt"),
]


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_routes_that_the_page_does_not_need_are_closed_to_logged_in_visitors_too(
    server, log_in, method, path
):
    who = await log_in("ann", "admin")
    assert (await server.http.request(method, path, headers=who)).status_code == 404


BEHIND = ["/ui/", "/ui/about", "/ui/alive", "/ui/live"]
BEHIND += ["/ui/policy", "/ui/samples/GRACE", "/ui/static/app.js"]
BEHIND += ["/ui/thumbs/file-x", "/ui/plots/ttft.png", "/ui/v1/files", "/ui/v1/references", "/ui/v1/savings"]


@pytest.mark.parametrize("path", BEHIND)
async def test_with_keys_nobody_gets_in_without_one(server, path):
    server.keys.create("ann")
    assert code(await server.http.get(path)) == "unauthorized"
    assert code(await server.http.get(path, headers={"cookie": "mpic_session=guessed"})) == "unauthorized"
    person = await server.http.get(path, headers={"accept": "text/html"})
    assert person.status_code == 303 and person.headers["location"] == "/ui/login"


async def test_an_upload_is_the_apis_own_with_its_owner_its_checks_and_its_limits(server, log_in):
    ann, bob = await log_in("ann"), await log_in("bob", limits=KeyLimits(files=1))
    mine = await server.http.post("/ui/v1/files", **form(handle="RED"), headers=ann)
    assert mine.status_code == 200 and mine.json()["handle"] == "RED"
    id = mine.json()["id"]
    assert server.library.files.get("ann", id).owner == "ann"
    assert (await server.http.get(f"/ui/thumbs/{id}", headers=ann)).headers["content-type"] == "image/png"
    assert code(await server.http.get(f"/ui/thumbs/{id}", headers=bob)) == "file_not_found"
    assert code(await server.http.get(f"/ui/thumbs/{id}")) == "unauthorized"

    post = server.http.post
    assert (await post("/ui/v1/files", **form())).status_code == 401
    assert code(await post("/ui/v1/files", **form(b"\x89PNG\xff"), headers=ann)) == "invalid_image"
    assert code(await post("/ui/v1/files", **form(b"a" * (LIMIT + 1), "a.txt"), headers=ann)) == "too_large"
    assert (
        code(await post("/ui/v1/files", **form(b"a" * (2 * LIMIT + (1 << 20))), headers=ann)) == "too_large"
    )
    assert (await post("/ui/v1/files", **form(), headers=bob)).status_code == 200
    assert code(await post("/ui/v1/files", **form(png("blue")), headers=bob)) == "storage_quota_exceeded"
    smuggled = {**bob, "authorization": "Bearer mpic_00000000_" + "x" * 43}
    assert code(await post("/ui/v1/files", **form(png("blue")), headers=smuggled)) == "storage_quota_exceeded"


async def test_a_deleted_image_has_no_thumbnail_any_more(server):
    id = (await server.http.post("/ui/v1/files", **form())).json()["id"]
    assert (await server.http.get(f"/ui/thumbs/{id}")).status_code == 200
    await server.http.delete(f"/v1/files/{id}")
    assert code(await server.http.get(f"/ui/thumbs/{id}")) == "file_not_found"


async def test_what_the_page_asks_is_asked_with_the_visitors_key(server, log_in):
    ann, bob = await log_in("ann"), await log_in("bob")
    mine = (await server.http.post("/ui/v1/files", **form(handle="RED"), headers=ann)).json()["id"]
    get, patch = server.http.get, server.http.patch
    assert [f["id"] for f in (await get("/ui/v1/files", headers=ann)).json()["data"]] == [mine]
    assert (await get("/ui/v1/files", headers=bob)).json()["data"] == []
    for path in (f"/ui/v1/files/{mine}", f"/ui/v1/files/{mine}/content", f"/ui/thumbs/{mine}"):
        assert (await get(path, headers=ann)).status_code == 200
        assert code(await get(path, headers=bob)) == "file_not_found"
    assert code(await patch(f"/ui/v1/files/{mine}", json={"handle": "X"}, headers=bob)) == "file_not_found"
    assert code(await server.http.delete(f"/ui/v1/files/{mine}", headers=bob)) == "file_not_found"
    assert (
        (await get(f"/ui/v1/files/{mine}/content", headers=ann))
        .headers["content-disposition"]
        .startswith("attach")
    )
    body = {"messages": [{"role": "user", "content": "IMAGE#RED?"}]}
    assert (await server.http.post("/ui/v1/chat/completions", json=body, headers=ann)).status_code == 200
    answer = await server.http.post("/ui/v1/chat/completions", json=body, headers=bob)
    assert answer.json()["usage"]["mpic"]["chunks"] == []
    assert code(await server.http.post("/ui/v1/chat/completions", json=body)) == "unauthorized"


async def test_only_administrators_see_the_servers_figures_and_change_references(server, log_in):
    ann, root = await log_in("ann"), await log_in("root", "admin")
    assert (await server.http.get("/ui/live", headers=ann)).json() == {"admin": False}
    assert (await server.http.get("/ui/live", headers=root)).json()["running"] == 0
    added = await server.http.post("/ui/v1/references", files={"file": ("a.png", png())}, headers=ann)
    assert code(added) == "forbidden"
    assert code(await server.http.get("/ui/v1/savings?scope=all", headers=ann)) == "forbidden"
    about = (await server.http.get("/ui/about", headers=ann)).json()
    assert (about["user"], about["role"], about["keyed"]) == ("ann", "user", True)


async def test_a_page_of_one_user_asks_nothing_in_the_name_of_another(server, log_in):
    bob = await log_in("bob")
    stale = {**bob, "x-mpic-user": "ann"}
    for method, path in (("GET", "/ui/v1/files"), ("POST", "/ui/v1/chat/completions")):
        assert (await server.http.request(method, path, headers=stale)).status_code == 401
    assert (await server.http.get("/ui/alive", headers=stale)).json()["user"] == "bob"
    assert (await server.http.get("/ui/v1/files", headers={**bob, "x-mpic-user": "bob"})).status_code == 200


async def test_the_page_learns_that_the_server_is_not_ready_and_why(server, monkeypatch):
    assert (await server.http.get("/ui/alive")).json() == {"ready": True, "user": "local"}
    server.library.root.rename(server.library.root.with_name("away"))
    answer = (await server.http.get("/ui/alive")).json()
    assert not answer["ready"] and "folder" in answer["message"]
    server.library.root.with_name("away").rename(server.library.root)


OUTSIDE = [
    *("../../../pyproject.toml", "..%2f..%2f..%2fpyproject.toml", "%2e%2e/%2e%2e/pyproject.toml"),
    *("%2fetc%2fhostname", "..\\..\\pyproject.toml", "a/../../../../../../etc/hostname", "%00", "n" * 5000),
]


async def test_names_of_pictures_and_scripts_do_not_lead_out_of_their_folders(server):
    """The paths are sent as raw requests, because a client would normalise them."""
    scope = {"type": "http", "method": "GET", "query_string": b"", "headers": [(b"host", b"127.0.0.1")]}
    scope |= {"root_path": "", "scheme": "http", "http_version": "1.1"}
    scope |= {"client": ("127.0.0.1", 1), "server": None}
    send = AsyncMock()
    receive = AsyncMock(return_value={"type": "http.request", "body": b"", "more_body": False})
    for folder, path in product(("static", "assets", "thumbs", "plots"), OUTSIDE):
        send.reset_mock()
        raw = f"/ui/{folder}/{path}"
        await server.app({**scope, "path": unquote(raw), "raw_path": raw.encode()}, receive, send)
        assert send.await_args_list[0].args[0]["status"] in (403, 404), raw


async def test_no_text_that_a_page_sends_is_opened_as_a_file(server, tmp_path_factory):
    """Every route of the page, with a path in each place for a text."""
    folder = tmp_path_factory.mktemp("probes")
    path = folder / "red.png"
    path.write_bytes(png())
    url = f"file://{path}"
    asked = []
    with opened(folder) as seen:
        for text in (str(path), url):
            words = [{"type": "image_url", "image_url": {"url": text}}, {"type": "text", "text": text}]
            for json in ({"query": text}, {"image": text}):
                asked.append(await server.http.post("/ui/v1/references/search", json=json))
            for content in (text, words, f"IMAGE#{text}"):
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
                asked.append(await server.http.post("/ui/v1/chat/completions", json=body))
            asked.append(await server.http.get("/ui/policy", params={"name": text}))
            asked.append(await server.http.post("/ui/v1/files", **form(b"text", name=text, handle="A")))
            asked.append(await server.http.post("/ui/v1/files", data={"file": text, "purpose": "vision"}))
            asked.append(await server.http.post("/ui/login", data={"key": text}))
            for part in ("thumbs", "samples", "plots", "static", "v1/files", "v1/references"):
                asked.append(await server.http.get(f"/ui/{part}/{text}"))
    assert seen == [] and len(asked) > 20 and all(answer.status_code < 500 for answer in asked)
    private = data_url(png())
    assert (await server.http.post("/ui/v1/references/search", json={"image": private})).status_code < 500


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


async def test_a_wrong_key_and_a_strangers_form_are_refused(server):
    key, _ = server.keys.create("ann")
    assert (await server.http.post("/ui/login", data={"key": "nonsense"})).status_code == 401
    assert (await server.http.post("/ui/login")).status_code == 401
    stranger = await server.http.post(
        "/ui/login", data={"key": key}, headers={"origin": "http://127.0.0.1:1"}
    )
    assert code(stranger) == "forbidden"


async def test_logging_out_and_revoking_end_a_session_at_once(server, log_in):
    ann, bob = await log_in("ann"), await log_in("bob")
    assert (await server.http.get("/ui/", headers=ann)).status_code == 200
    await server.http.post("/ui/logout", headers=ann)
    assert (await server.http.get("/ui/", headers=ann)).status_code == 401
    [key] = [k for k in server.keys.listing() if k.user == "bob"]
    server.keys.revoke(key.prefix)
    assert (await server.http.get("/ui/", headers=bob)).status_code == 401


async def test_a_login_outlasts_the_server_until_its_key_is_revoked(server, log_in, tmp_path):
    ann, bob = await log_in("ann"), await log_in("bob")
    [key] = [k for k in server.keys.listing() if k.user == "bob"]
    later = KeyStore(tmp_path)  # as the next start opens it
    assert later.logged_in(ann["cookie"].split("=")[1]).user == "ann"
    server.keys.revoke(key.prefix)
    assert later.logged_in(bob["cookie"].split("=")[1]) is None
    later.close()
    cookies = {name: who["cookie"].split("=")[1].encode() for name, who in (("ann", ann), ("bob", bob))}
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("keys.sqlite*"))
    assert not any(cookie in stored for cookie in cookies.values())  # only digests


async def test_logins_count_as_requests_of_their_key(server):
    key, _ = server.keys.create("ann", limits=KeyLimits(requests_per_minute=3))
    answers = [await server.http.post("/ui/login", data={"key": key}) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [303, 303, 303, 429]
    assert "Log in again in" in answers[-1].text and "set-cookie" not in answers[-1].headers
    refused = await server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert code(refused) == "rate_limited"


async def test_no_header_of_a_client_stands_for_a_login(server, log_in):
    await log_in("ann", "admin")
    for name in ("login", "state", "mpic-login", "x-login"):
        assert (await server.http.get("/v1/files", headers={name: "ann"})).status_code == 401


async def test_pictures_are_shown_to_a_key_that_allows_one_request_at_a_time(server, log_in):
    ada = await log_in("ada", limits=KeyLimits(concurrent=1))
    ids = [
        (await server.http.post("/ui/v1/files", **form(png(c)), headers=ada)).json()["id"]
        for c in ("red", "green", "blue")
    ]
    shown = await asyncio.gather(*(server.http.get(f"/ui/thumbs/{id}", headers=ada) for id in ids))
    assert [one.status_code for one in shown] == [200] * 3


async def test_bad_origins_and_bodies_are_refused(server, log_in):
    ada = await log_in("ada")
    answer = await server.http.post("/ui/login", data={"key": "x"}, headers={"origin": "http://["})
    assert answer.status_code == 403
    answer = await server.http.post("/ui/v1/references/search", content=b"[" * 100_000, headers=ada)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/ui/logout"), ("PUT", "/ui/login"), ("DELETE", "/ui/logout")]
)
async def test_only_login_and_logout_are_open(server, log_in, method, path):
    ada = await log_in("ada")
    assert (await server.http.request(method, path)).status_code == 401
    assert (await server.http.request(method, path, headers=ada)).status_code == 404


@pytest.mark.parametrize("id", ["ref_lamp.v2", "ref_" + "a" * 124])
async def test_every_reference_has_a_thumbnail_whatever_it_is_called(server, id):
    answer = await server.http.post("/ui/v1/references", data={"id": id}, files={"file": ("red.png", png())})
    assert answer.status_code == 200
    assert (await server.http.get(f"/ui/thumbs/{id}")).headers["content-type"] == "image/png"


async def test_no_cache_keeps_what_a_login_or_a_key_has_opened(server, log_in):
    """But for the page's own files, which are the same for all, and thumbnails, for minutes and by the cookie."""
    ann = await log_in("ann")
    id = (await server.http.post("/ui/v1/files", headers=ann, **form())).json()["id"]
    key = server.keys.create("ann")[0]
    for path in (
        "/v1/files",
        f"/v1/files/{id}",
        f"/v1/files/{id}/content",
        "/v1/savings",
        "/v1/files/nothing",
    ):
        for answer in (
            await server.http.get(f"/ui{path}", headers=ann),
            await server.http.get(path, headers={"Authorization": f"Bearer {key}"}),
        ):
            assert answer.headers["cache-control"] == "private, no-store", path
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    answer = await server.http.post("/ui/v1/chat/completions", headers=ann, json=chat)
    assert answer.headers["cache-control"] == "private, no-store"
    for path in ("/ui/about", "/ui/live", "/ui/"):
        assert "no-store" in (await server.http.get(path, headers=ann)).headers["cache-control"], path
    thumb = await server.http.get(f"/ui/thumbs/{id}", headers=ann)
    assert thumb.headers["cache-control"].startswith("private, ") and thumb.headers["vary"] == "Cookie"
