"""Uploading, listing, reading and deleting files over HTTP."""

import asyncio
import contextlib
import hashlib
import io
import os
import threading
import time

import pytest
from fake_engine import CHUNK_TOKENS, FakeEngine
from PIL import Image
from server_helpers import fake_server, png, refusal, refused_field, running, wait_until

from mpic.durable import FileSystem
from mpic.errors import CompileFailed, EngineStopped
from mpic.library import Library
from mpic.library.folder.originals import OpenOriginal
from mpic.server.app import create_app


def lifetime(seconds):
    return {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}


async def test_upload_is_compiled_in_the_background(tmp_path, template):
    engine = FakeEngine(hold_compiles=True)
    async with fake_server(tmp_path, template, engine) as server:
        file = (await server.upload(handle="EIFFEL")).json()
        theirs = {"object": "file", "bytes": len(png()), "filename": "red.png", "purpose": "vision"}
        theirs |= {"expires_at": None, "status": "uploaded", "status_details": None}
        ours = {"handle": "EIFFEL", "kind": "image", "tokens": None, "state": "compiling", "tiers": []}
        ours |= {
            "chunk_count": 1,
            "chunks": None,
            "press": None,
            "format": None,
            "pages": None,
            "kv_ttl": None,
            "pinned": False,
            "outcome": "created",
        }
        assert file == {"id": file["id"], "created_at": file["created_at"], **theirs, **ours}
        await wait_until(lambda: engine.pending)
        engine.pending[0].set_result(CHUNK_TOKENS)
        done = await server.settled(file["id"])
        assert (done["state"], done["status"], done["tokens"]) == ("ready", "processed", CHUNK_TOKENS)


async def test_a_document(server):
    file = await server.uploaded("Grüße aus Köln".encode(), "notes.txt", handle="NOTES")
    assert (file["kind"], file["purpose"], file["filename"]) == ("text", "user_data", "notes.txt")
    assert server.engine.compiled[0].token_ids == tuple(server.library.files.tokenize("Grüße aus Köln"))


async def test_a_compile_failure_shows_and_an_unexpected_one_leaks_nothing(server):
    server.engine.compile_error = CompileFailed("the chunk is longer than the model's context")
    file = await server.uploaded()
    assert (file["state"], file["status"]) == ("failed", "error")
    assert file["status_details"] == "the chunk is longer than the model's context"
    server.engine.compile_error = RuntimeError("/secret")
    file = await server.uploaded(png("blue"))
    assert file["state"] == "failed" and "/secret" not in file["status_details"]


@pytest.mark.parametrize("how", ["refused", "still waiting"])
async def test_uncompiled_files_are_compiled_at_the_next_start(tmp_path, template, how):
    engine = FakeEngine(hold_compiles=how == "still waiting")
    engine.compile_error = EngineStopped("stopping")
    async with fake_server(tmp_path, template, engine) as server:
        id = (await server.upload()).json()["id"]
        await wait_until(lambda: engine.compiled)
    async with fake_server(tmp_path, template) as server:
        assert (await server.settled(id))["state"] == "ready"


async def test_list_pages_through_a_cursor(server):
    ids = [(await server.upload(png(size=(8, 8 + i)), f"{i}.png")).json()["id"] for i in range(5)]
    page = (await server.http.get("/v1/files", params={"limit": 2, "order": "asc"})).json()
    assert page["object"] == "list" and page["has_more"]
    assert [f["id"] for f in page["data"]] == ids[:2]
    assert (page["first_id"], page["last_id"]) == (ids[0], ids[1])
    rest = (await server.http.get("/v1/files", params={"after": ids[1], "order": "asc"})).json()
    assert [f["id"] for f in rest["data"]] == ids[2:] and not rest["has_more"]
    newest = (await server.http.get("/v1/files")).json()
    assert [f["id"] for f in newest["data"]] == ids[::-1]


async def test_list_by_purpose_and_empty_list(server):
    empty = (await server.http.get("/v1/files")).json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    await server.upload()
    await server.upload(b"text", "a.txt")
    kinds = {}
    for purpose in ("vision", "user_data", "batch"):
        page = (await server.http.get("/v1/files", params={"purpose": purpose})).json()
        kinds[purpose] = [f["kind"] for f in page["data"]]
    assert kinds == {"vision": ["image"], "user_data": ["text"], "batch": []}


async def test_content_equals_the_upload(server):
    id = (await server.upload(name='a "b"\né.png')).json()["id"]
    answer = await server.http.get(f"/v1/files/{id}/content")
    assert hashlib.sha256(answer.content).digest() == hashlib.sha256(png()).digest()
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment;")
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("kind", ["files", "references"])
async def test_a_download_is_read_in_pieces_as_it_is_sent_and_outlives_the_file(server, kind):
    """Or each of many slow clients would have the server hold a whole file in memory."""
    stored = io.BytesIO()
    Image.frombytes("RGB", (800, 500), os.urandom(800 * 500 * 3)).save(stored, "PNG")
    content = stored.getvalue()
    made = await server.http.post(f"/v1/{kind}", files={"file": ("noise.png", content)})
    path = f"/v1/{kind}/{made.json()['id']}"
    await server.settled(made.json()["id"], kind)
    sent, read = [], []
    library = server.library.files if kind == "files" else server.library.references
    filesystem = library._originals._filesystem
    before = open_originals(server)

    async def send(message):
        if len(sent) == 1:  # the header has been sent, and the first piece is about to be
            assert len(open_originals(server)) == len(before) + 1
            assert (await server.http.delete(path)).status_code == 200
            filesystem.read = lambda *args: read.append(len(sent)) or type(filesystem).read(filesystem, *args)
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": f"{path}/content", "headers": [(b"host", b"127.0.0.1")]}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "root_path": ""}
    await server.app({**scope, "query_string": b""}, asyncio.Event().wait, send)
    del filesystem.read
    assert (b"content-length", str(len(content)).encode()) in sent[0]["headers"]
    pieces = [message["body"] for message in sent[1:]]
    assert b"".join(pieces) == content and max(map(len, pieces)) <= 256 << 10
    assert sorted(set(read)) == [2, 3, 4, 5]  # each piece after the one before it was sent
    await wait_until(lambda: open_originals(server) == before)


async def test_a_download_that_its_client_leaves_closes_the_file(server):
    id = (await server.upload(b"a line\n" * 60_000, "long.txt")).json()["id"]
    before = open_originals(server)
    async with server.http.stream("GET", f"/v1/files/{id}/content") as answer:
        assert answer.status_code == 200
    await wait_until(lambda: open_originals(server) == before)


RANGES = {
    "bytes=0-0": (206, "0-0"),
    "bytes=2-5": (206, "2-5"),
    "bytes=7-": (206, "7-9"),
    "bytes=7-4711": (206, "7-9"),
    "Bytes = 2-5": (206, "2-5"),
    "bytes=-3": (206, "7-9"),
    "bytes=-4711": (206, "0-9"),
    "bytes=10-": (416, "*/10"),
    "bytes=4711-4712": (416, "*/10"),
    "bytes=-0": (416, "*/10"),
    "bytes=5-2": (200, None),
    "bytes=-": (200, None),
    "bytes=a-b": (200, None),
    "bytes=--3": (200, None),
    "bytes=0-1,4-5": (200, None),
    "bytes=" + "9" * 5000 + "-": (200, None),
    "lines=0-1": (200, None),
    "": (200, None),
}


@pytest.mark.parametrize("kind", ["files", "references"])
@pytest.mark.parametrize("asked", RANGES, ids=range(len(RANGES)))
async def test_a_download_may_be_of_one_range(server, kind, asked):
    """A Range header that is not one range of bytes is ignored (RFC 9110, section 14.2)."""
    made = (await server.http.post(f"/v1/{kind}", files={"file": ("t.txt", b"0123456789")})).json()
    answer = await server.http.get(f"/v1/{kind}/{made['id']}/content", headers={"Range": asked})
    status, span = RANGES[asked]
    assert answer.status_code == status
    if status == 416:
        assert refused_field(answer) == (416, "range_not_satisfiable", "Range")
        assert answer.headers["content-range"] == f"bytes {span}"
    elif status == 206:
        assert answer.headers["content-range"] == f"bytes {span}/10"
        first, last = map(int, span.split("-"))
        assert answer.content == b"0123456789"[first : last + 1]
        assert answer.headers["content-length"] == str(len(answer.content))
    else:
        assert answer.content == b"0123456789" and "content-range" not in answer.headers
    assert status == 416 or answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("kind", ["files", "references"])
async def test_the_tag_of_a_download_is_its_hash_and_spares_who_has_it(server, kind):
    made = (await server.http.post(f"/v1/{kind}", files={"file": ("t.txt", b"0123456789")})).json()
    path, tag = f"/v1/{kind}/{made['id']}/content", f'"{hashlib.sha256(b"0123456789").hexdigest()}"'
    ask = lambda method="GET", **headers: server.http.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    whole, head = await ask(), await ask("HEAD", Range="bytes=0-1")
    assert whole.headers["etag"] == head.headers["etag"] == tag
    assert head.status_code == 200 and head.content == b""
    names = ("content-length", "content-type", "content-disposition", "accept-ranges")
    assert [head.headers[name] for name in names] == [whole.headers[name] for name in names]
    for held in (tag, f"W/{tag}", f'"other, {tag[1:]}, "x", {tag}', "*"):
        answer = await ask(If_None_Match=held)
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag), held
    assert (await ask("HEAD", If_None_Match=tag)).status_code == 304
    assert (await ask(If_None_Match='"another"')).content == b"0123456789"
    for held, content in {tag: b"01", f"W/{tag}": b"0123456789", '"another"': b"0123456789"}.items():
        answer = await ask(Range="bytes=0-1", If_Range=held)
        assert (answer.status_code, answer.content) == (206 if content == b"01" else 200, content), held


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_the_rest_of_a_download_is_not_that_of_a_later_version(server, method):
    made = (await server.http.post("/v1/references", files={"file": ("t.txt", b"0123456789")})).json()
    path = f"/v1/references/{made['id']}/content"
    tag = (await server.http.head(path)).headers["etag"]
    ask = lambda held: server.http.request(method, path, headers={"Range": "bytes=5-", "If-Match": held})
    for held in (tag, f'"other", {tag}', "*"):
        assert (await ask(held)).status_code == (206 if method == "GET" else 200), held
    for held in (f"W/{tag}", '"other"', "", tag[1:-1]):  # compared strongly
        assert (await ask(held)).status_code == 412, held
    await server.http.put(f"/v1/references/{made['id']}", files={"file": ("t.txt", b"abcdefghij")})
    answer = await ask(tag)
    assert answer.status_code == 412
    if method == "GET":
        assert refused_field(answer) == (412, "precondition_failed", "If-Match")


async def test_a_damaged_original_is_not_sent_in_ranges_either(server):
    made = (await server.upload(b"0123456789", "t.txt")).json()
    path = server.library.files.get("local", made["id"]).path
    path.write_bytes(b"012345678x")
    answer = await server.http.get(f"/v1/files/{made['id']}/content", headers={"Range": "bytes=0-1"})
    assert refusal(answer) == (500, "corrupt_file")


def open_originals(server):
    """The paths of the originals that this process has open."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in names if name.startswith(f"{server.library.root}/files/")]


async def test_delete(server):
    file = await server.uploaded(handle="GONE")
    answer = await server.http.delete(f"/v1/files/{file['id']}")
    assert answer.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert [c.key for c in server.engine.forgotten] == [server.engine.compiled[0].key]
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = await server.http.request(method, f"/v1/files/{file['id']}{path}")
        assert refusal(answer) == (404, "file_not_found")
        assert file["id"] in answer.json()["error"]["message"]
    assert refusal(await server.ask([{"type": "image", "handle": "GONE"}])) == (404, "unknown_handle")


async def test_expiry(tmp_path, template):
    later = 0.0
    async with fake_server(tmp_path, template, clock=lambda: time.time() + later) as server:
        file = await server.uploaded(handle="SHORT", **lifetime("3600"))
        assert file["expires_at"] - file["created_at"] in (3600, 3601)
        later = 3601
        assert (await server.http.get(f"/v1/files/{file['id']}")).status_code == 404
        answer = await server.ask([{"type": "file", "file": {"file_id": file["id"]}}])
        assert answer.status_code == 404 and file["id"] in answer.json()["error"]["message"]
        server.app.state.background._collect()
        assert len(server.engine.forgotten) == 1


@pytest.mark.parametrize(
    ("data", "form", "code", "param"),
    [
        (png()[:60], {}, "invalid_image", "file"),
        (b"%PDF-1.7", {}, "invalid_document", "file"),
        (b"\xff\xfe\x00", {}, "invalid_text", "file"),
        (b"text", {"handle": "no spaces"}, "bad_request", "handle"),
        (b"text", {"purpose": "fine-tune"}, "unsupported_parameter", "purpose"),
        (b"text", {"kind": "image"}, "unsupported_parameter", "kind"),
        (b"text", {"expires_after[seconds]": "60"}, "bad_request", "expires_after[anchor]"),
        (b"text", {"expires_after[anchor]": "now"}, "bad_request", "expires_after[anchor]"),
        (b"text", lifetime("soon"), "bad_request", "expires_after[seconds]"),
        (b"text", lifetime("0"), "bad_request", "expires_after[seconds]"),
    ],
)
async def test_refused_uploads(server, data, form, code, param):
    assert refused_field(await server.upload(data, "x.png", **form)) == (400, code, param)
    assert (await server.http.get("/v1/files")).json()["data"] == []


async def test_a_handle_names_one_file(server):
    first = await server.uploaded(handle="TOWER")
    assert refusal(await server.upload(b"text", "t.txt", handle="tower")) == (409, "handle_taken")
    again = (await server.upload(handle="tower")).json()
    assert again == {**first, "outcome": "unchanged"}
    assert len(server.engine.compiled) == 1  # it was not compiled again
    new = (await server.upload(b"text", "t.txt", handle="tower", replace="true")).json()
    assert (new["outcome"], new["kind"]) == ("replaced", "text")
    assert [f["id"] for f in (await server.http.get("/v1/files")).json()["data"]] == [new["id"]]
    assert (await server.http.get(f"/v1/files/{first['id']}")).status_code == 404


async def test_a_lifetime_is_called_ttl_and_may_be_called_as_openai_does(server):
    openai = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "100"}
    for form in ({"ttl": "100"}, openai, {"ttl": "100", **openai}):
        file = (await server.upload(**form)).json()
        assert file["expires_at"] - file["created_at"] in (100, 101)
    answer = await server.upload(**{**openai, "ttl": "5"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ttl")


async def test_no_file_at_all(server):
    answer = await server.http.post("/v1/files", data={"purpose": "user_data"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "bad_request", "file")
    answer = await server.http.post("/v1/files", json={"file": "x"})
    assert answer.status_code == 400


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 10_001}, {"limit": "x"}, {"order": "up"}])
async def test_bad_queries(server, query):
    answer = await server.http.get("/v1/files", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in query


async def test_a_file_gets_a_new_lifetime(server):
    file = await server.uploaded(**lifetime("60"))

    async def change(body, id=file["id"]):
        return await server.http.patch(f"/v1/files/{id}", json=body)

    longer = (await change({"ttl": 7200})).json()
    assert longer["id"] == file["id"] and longer["expires_at"] >= file["created_at"] + 7200
    assert (await change({"ttl": None})).json()["expires_at"] is None
    for body in ({}, {"ttl": 0}, {"ttl": "1"}, {"ttl": 1, "name": "X"}):
        assert (await change(body)).status_code == 400
    assert (await change({"ttl": 1}, "file-nobody")).json()["error"]["code"] == "file_not_found"


# ---- the cost of listings


class Counted(FileSystem):
    """Counts the steps of SQLite's machine, which grow with the rows that are read, and the files that are opened."""

    def __init__(self):
        super().__init__()
        self.steps = self.opened = 0

    def database(self, path, create=False):
        db = super().database(path, create)
        db.set_progress_handler(self.step, 10)
        return db

    def step(self):
        self.steps += 1

    def open(self, path):
        self.opened += 1
        return super().open(path)


def grow(library, numbers):
    """Give the user "local" many more files and caches of two chunks, of the same contents as those that are there."""
    file = (
        "INSERT INTO files (id, owner, filename, path, bytes, sha256, digest, created_at, state, kind) SELECT"
    )
    rest = "owner, filename, path, bytes, sha256, digest, created_at, state, kind FROM files WHERE id = ?"
    [sample] = library.files.page("local", limit=1).files
    with library.catalog.write() as db:
        for n in numbers:
            db.execute(f"{file} 'file-{n:024}', {rest}", (sample.id,))
            cache = "INSERT INTO caches (id, owner, name, split, created_at) VALUES"
            db.execute(f"{cache} ('group-{n:024}', 'local', '', 'null', 0)")
            for i in range(2):
                db.execute(f"{file} 'cache-{2 * n + i:024}', {rest}", (sample.id,))
                db.execute(
                    f"INSERT INTO cache_chunks VALUES ('cache-{2 * n + i:024}', 'group-{n:024}', {i}, 0, 1)"
                )


async def test_a_page_costs_what_its_rows_cost_however_many_there_are(tmp_path, template):
    counted = Counted()
    library = Library.open(tmp_path, filesystem=counted)
    async with running(create_app(FakeEngine(), library, template)) as server:
        await server.uploaded(b"some text", "a.txt")
        paths = [
            f"/v1/{what}?limit=20&order={order}" for what in ("files", "caches") for order in ("asc", "desc")
        ]
        counted.opened, costs, done = 0, [], 0
        for more in (50, 5_000):
            grow(library, range(done, more))
            done = more
            costs.append([])
            for path in paths:
                before = counted.steps
                answer = await server.http.get(path)
                assert answer.status_code == 200 and len(answer.json()["data"]) == 20
                costs[-1].append(counted.steps - before)
        assert counted.opened == 0
    assert all(many <= 1.5 * few + 10 for few, many in zip(*costs)), costs


async def test_the_disk_that_a_download_was_read_from_may_hang_as_it_is_closed(server, monkeypatch):
    """Only a thread waits for it."""
    id = (await server.upload(b"a line", "a.txt")).json()["id"]
    go, close, closers = threading.Event(), OpenOriginal.close, []

    def hang(self):
        closers.append(threading.current_thread())
        if closers[-1] is not threading.main_thread():
            go.wait(60)
        close(self)

    monkeypatch.setattr(OpenOriginal, "close", hang)
    try:
        assert (await server.http.get(f"/v1/files/{id}/content")).content == b"a line"
        await wait_until(lambda: closers)
        assert (await server.http.get(f"/v1/files/{id}")).status_code == 200
        assert threading.main_thread() not in closers
    finally:
        go.set()
