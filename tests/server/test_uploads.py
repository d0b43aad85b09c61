"""Every way in for a file: a form, a body that is the file itself, and parts."""

import asyncio
import gc
import hashlib
import itertools
import logging
import shutil
import tracemalloc

import httpx
import openai
import pytest
from library_tools import Clock
from server_helpers import fake_server, png, post_raw, refusal, refused_field, wait_until

from mpic.library import Library
from mpic.server.uploads import LIFE_SECONDS, MOST_UPLOADS

TEXT = b"A line of words.\n" * 40_000
names = itertools.count()


def parts_of(server):
    return sorted((server.library.root / "tmp").glob("*"))


def under_way(server):
    return dict(server.app.state.mpic.uploads._bytes)


async def begin(server, content=TEXT, headers=None, **fields):
    body = {"filename": "words.txt", "bytes": len(content), "purpose": "user_data", **fields}
    answer = await server.http.post("/v1/uploads", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


async def add(server, id, content, headers=None):
    path, files = f"/v1/uploads/{id}/parts", {"data": ("part", content)}
    return await server.http.post(path, files=files, headers=headers)


async def added(server, id, content):
    answer = await add(server, id, content)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


async def complete(server, id, part_ids, **fields):
    return await server.http.post(f"/v1/uploads/{id}/complete", json={"part_ids": part_ids, **fields})


async def test_every_way_in_comes_to_the_same_file(server):
    form = (await server.upload(TEXT, "words.txt", handle="WORDS")).json()
    body = (await server.http.put("/v1/files/WORDS", content=TEXT)).json()
    id = await begin(server, handle="words")
    part = await added(server, id, TEXT)
    parts = (await complete(server, id, [part])).json()["file"]
    assert [one["outcome"] for one in (form, body, parts)] == ["created", "unchanged", "unchanged"]
    assert {one["id"] for one in (form, body, parts)} == {form["id"]}
    await wait_until(lambda: not parts_of(server))
    assert under_way(server) == {}


# ---- the body itself


async def test_a_file_may_be_the_whole_body_under_the_handle_in_the_path(server):
    put = lambda name, content, **params: server.http.put(f"/v1/files/{name}", content=content, params=params)
    first = await put("notes.txt", b"one")
    assert (first.json()["outcome"], first.json()["handle"], first.json()["filename"]) == (
        *("created", "notes.txt"),
        "notes.txt",
    )
    assert (await put("NOTES.TXT", b"one", ttl=60)).json()["outcome"] == "unchanged"
    assert refusal(await put("notes.txt", b"two", replace="false")) == (409, "handle_taken")
    second = (await put("notes.txt", b"two", filename="other.md", split="none")).json()
    assert (second["outcome"], second["filename"]) == ("replaced", "other.md")
    assert (await server.http.get(f"/v1/files/{first.json()['id']}")).status_code == 404
    assert (await server.http.get(f"/v1/files/{second['id']}/content")).content == b"two"
    assert (await put("图", png())).json()["kind"] == "image"


async def test_a_body_that_was_stored_is_no_error_although_another_has_replaced_it_since(server, monkeypatch):
    first, upload = await server.http.put("/v1/files/A", content=b"one"), server.library.files.upload

    async def replaced(*args, **options):
        outcome = await upload(*args, **options)
        server.library.files.delete("local", outcome.file.id)
        return outcome

    monkeypatch.setattr(server.library.files, "upload", replaced)
    again = await server.http.put("/v1/files/A", content=b"one")
    assert again.status_code == 200 and again.json()["id"] == first.json()["id"]


REFUSED_BODIES = {
    "no handle": ({"path": "a b"}, (400, "bad_request", "handle")),
    "a form": ({"type": "multipart/form-data; boundary=x"}, (400, "bad_request", "Content-Type")),
    "nothing": ({"content": b""}, (400, "empty_upload", "file")),
    "another type": ({"content": b"\x7fELF"}, (400, "unsupported_type", "file")),
    "purpose": ({"params": {"purpose": "batch"}}, (400, "unsupported_parameter", "purpose")),
    "press": ({"params": {"press": "none-at-all"}}, (400, "unknown_press", "press")),
    "an unknown field": ({"params": {"tll": 60}}, (400, "unsupported_parameter", "tll")),
    "ttl": ({"params": {"ttl": 0}}, (400, "bad_request", "ttl")),
}


@pytest.mark.parametrize("what", REFUSED_BODIES)
async def test_a_body_that_is_no_file_is_refused_by_its_field(server, what):
    sent, expected = REFUSED_BODIES[what]
    answer = await server.http.put(
        f"/v1/files/{sent.get('path', 'A')}",
        content=sent.get("content", b"text"),
        params=sent.get("params"),
        headers={"Content-Type": sent.get("type", "text/plain")},
    )
    assert refused_field(answer) == expected
    await wait_until(lambda: not parts_of(server))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Content-Range", "bytes 4-6/7"),  # as `curl -C 4 -T` sends it
        ("If-Match", '"a"'),
        ("If-None-Match", "*"),
        ("If-Unmodified-Since", "Sat, 29 Oct 1994 19:43:31 GMT"),
    ],
)
async def test_a_body_that_is_to_be_written_in_part_or_on_a_condition_replaces_nothing(server, name, value):
    made = (await server.http.put("/v1/files/A", content=b"the end")).json()
    answer = await server.http.put("/v1/files/A", content=b"end", headers={name: value})
    assert refused_field(answer) == (400, "bad_request", name)
    assert (await server.http.get(f"/v1/files/{made['id']}/content")).content == b"the end"


async def test_a_body_whose_client_leaves_is_no_error_of_the_server_and_leaves_nothing(server, caplog):
    with caplog.at_level(logging.INFO, "mpic.server"):
        sent, scope = [], {"method": "PUT"}
        await put_raw(server.app, "/v1/files/A", [b"a" * 600_000] * 2, sent, scope)
    assert [message.get("status") for message in sent][:1] == [499] and not caplog.records
    await wait_until(lambda: not parts_of(server))
    assert under_way(server) == {} and not server.library.files.page("local").files


async def put_raw(app, path, incoming, sent, scope):
    await post_raw(lambda s, r, w: app({**s, **scope}, r, w), path, incoming, sent)


@pytest.mark.parametrize("way", ["form", "body", "part"])
async def test_an_upload_is_never_in_memory_as_a_whole(server, way):
    """It is refused in the end, for its size as a text, before all of it is read back."""
    size, piece = 32 << 20, b"words of a text " * 4096

    async def body():
        if way != "body":
            yield b'--x\r\nContent-Disposition: form-data; name="%s"; filename="a.txt"\r\n\r\n' % field
        for _ in range(size // len(piece)):
            yield piece
        if way != "body":
            yield b"\r\n--x--\r\n"

    field = b"data" if way == "part" else b"file"
    id = await begin(server, b"x", bytes=size) if way == "part" else ""
    path = {"form": "/v1/files", "body": "/v1/files/A", "part": f"/v1/uploads/{id}/parts"}[way]
    kind = "text/plain" if way == "body" else "multipart/form-data; boundary=x"
    await server.upload(b"text", "warm.txt")
    tracemalloc.start()
    answer = await server.http.request(
        "PUT" if way == "body" else "POST", path, content=body(), headers={"Content-Type": kind}
    )
    if way == "part":
        answer = await complete(server, id, [answer.json()["id"]])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refusal(answer) == (413, "too_large") and "the text has" in answer.text
    assert peak < size // 4


# ---- parts


async def test_parts_in_any_order_make_a_file_in_the_order_of_their_ids(server):
    id = await begin(server, handle="WORDS", ttl=600, split={"mode": "paragraph", "tokens": 64})
    second = await added(server, id, TEXT[300_000:])
    again = await added(server, id, TEXT[300_000:])
    first = await added(server, id, TEXT[:300_000])
    shown = (await server.http.get(f"/v1/uploads/{id}")).json()
    assert (shown["status"], shown["object"]) == ("pending", "upload")
    assert [(one["id"], one["bytes"]) for one in shown["parts"]][1:] == [
        *[(again, len(TEXT) - 300_000)],
        (first, 300_000),
    ]
    assert under_way(server) == {"local": 2 * len(TEXT) - 300_000} and len(parts_of(server)) == 3
    done = await complete(server, id, [first, second], md5=hashlib.md5(TEXT).hexdigest().upper())
    made = done.json()
    assert (made["status"], made["parts"], made["file"]["handle"]) == ("completed", [], "WORDS")
    assert (await server.http.get(f"/v1/files/{made['file']['id']}/content")).content == TEXT
    assert (await complete(server, id, [first, second])).json()["file"] == made["file"]
    await wait_until(lambda: not parts_of(server))
    assert under_way(server) == {}


REFUSED_COMPLETIONS = {
    "no parts": ({"part_ids": []}, (400, "bad_request", "part_ids")),
    "unknown": ({"part_ids": ["a", "x"]}, (400, "bad_request", "part_ids[1]")),
    "twice": ({"part_ids": ["a", "b", "a"]}, (400, "bad_request", "part_ids[2]")),
    "fewer": ({"part_ids": ["b"]}, (400, "upload_incomplete", "part_ids")),
    "other bytes": ({"part_ids": ["b", "a"], "md5": "a" * 32}, (400, "checksum_mismatch", "md5")),
    "no md5": ({"part_ids": ["a", "b"], "md5": "abc"}, (400, "bad_request", "md5")),
    "unknown field": ({"part_ids": ["a"], "sha1": "b"}, (400, "unsupported_parameter", "sha1")),
}


@pytest.mark.parametrize("what", REFUSED_COMPLETIONS)
async def test_a_completion_that_is_refused_leaves_the_parts_as_they_are(server, what):
    id = await begin(server)
    ids = {"a": await added(server, id, TEXT[:1000]), "b": await added(server, id, TEXT[1000:])}
    sent, expected = REFUSED_COMPLETIONS[what]
    body = {**sent, "part_ids": [ids.get(one, one) for one in sent["part_ids"]]}
    answer = await server.http.post(f"/v1/uploads/{id}/complete", json=body)
    assert refused_field(answer) == expected
    assert under_way(server) == {"local": len(TEXT)}
    assert (await complete(server, id, [*ids.values()])).status_code == 200


async def test_an_upload_that_cannot_be_stored_yet_can_be_completed_later(server):
    taken = (await server.upload(b"other", "a.txt", handle="H")).json()["id"]
    id = await begin(server, handle="H")
    part = await added(server, id, TEXT)
    assert refusal(await complete(server, id, [part])) == (409, "handle_taken")
    await server.http.delete(f"/v1/files/{taken}")
    assert (await complete(server, id, [part])).json()["file"]["outcome"] == "created"


REFUSED_BEGINNINGS = {
    "bytes": ({"bytes": 1 << 40}, (413, "too_large", "bytes")),
    "none": ({"bytes": 0}, (400, "bad_request", "bytes")),
    "handle": ({"handle": "a b"}, (400, "bad_request", "handle")),
    "replace": ({"replace": True}, (400, "bad_request", "replace")),
    "purpose": ({"purpose": "batch"}, (400, "unsupported_parameter", "purpose")),
    "split": ({"split": "words"}, (400, "bad_request", "split")),
    "press": ({"press": "x"}, (400, "unknown_press", "press")),
    "anchor": (
        {"expires_after": {"anchor": "x", "seconds": 9}},
        (400, "bad_request", "expires_after.anchor"),
    ),
    "life": (
        {"expires_after": {"anchor": "created_at", "seconds": 10**10}},
        (400, "bad_request", "expires_after.seconds"),
    ),
}


@pytest.mark.parametrize("what", REFUSED_BEGINNINGS)
async def test_what_can_be_known_before_the_first_byte_is_refused_before_it(server, what):
    fields, expected = REFUSED_BEGINNINGS[what]
    answer = await server.http.post("/v1/uploads", json={"filename": "a.txt", "bytes": 9, **fields})
    assert refused_field(answer) == expected


async def test_a_quota_that_the_upload_would_exceed_is_told_before_the_first_byte(tmp_path, template):
    async with fake_server(tmp_path, template) as server:
        server.library.set_quota("local", bytes=1000)
        answer = await server.http.post("/v1/uploads", json={"filename": "a.txt", "bytes": 1001})
        assert refusal(answer) == (403, "storage_quota_exceeded")


async def test_parts_that_no_upload_can_have_are_refused_and_removed(server):
    id = await begin(server, b"12345")
    assert refused_field(await add(server, id, b"")) == (400, "bad_request", "data")
    assert refused_field(await add(server, id, b"123456")) == (400, "upload_incomplete", "data")
    wrong = await server.http.post(f"/v1/uploads/{id}/parts", files={"file": ("a", b"1")})
    assert refused_field(wrong) == (400, "unsupported_parameter", "file")
    no_form = await server.http.post(f"/v1/uploads/{id}/parts", data={"data": "12345"})
    assert refused_field(no_form) == (400, "bad_request", "data") and "multipart" in no_form.text
    await wait_until(lambda: not parts_of(server))
    assert under_way(server) == {}


async def test_a_cancelled_upload_is_gone_at_once_and_takes_nothing_more(server):
    id = await begin(server)
    part = await added(server, id, TEXT)
    [path] = parts_of(server)
    cancelled = await server.http.post(f"/v1/uploads/{id}/cancel")
    assert (cancelled.json()["status"], cancelled.json()["parts"]) == ("cancelled", [])
    await wait_until(lambda: not path.exists())
    assert under_way(server) == {}
    assert (await server.http.post(f"/v1/uploads/{id}/cancel")).status_code == 200
    assert refusal(await add(server, id, TEXT)) == (409, "upload_ended")
    assert refusal(await complete(server, id, [part])) == (409, "upload_ended")
    done = await begin(server, b"text")
    await complete(server, done, [await added(server, done, b"text")])
    assert refusal(await server.http.post(f"/v1/uploads/{done}/cancel")) == (409, "upload_ended")
    await wait_until(lambda: not parts_of(server))


@pytest.mark.parametrize("how", ["removed", "cut off"])
async def test_a_part_that_is_lost_on_the_disk_is_named_and_can_be_sent_again(server, how):
    id = await begin(server)
    first, second = await added(server, id, TEXT[:9]), await added(server, id, TEXT[9:])
    [lost] = [path for path in parts_of(server) if path.stat().st_size > 9]
    if how == "removed":
        lost.unlink()
    else:
        lost.write_bytes(b"less")
    answer = await complete(server, id, [first, second])
    assert refused_field(answer) == (400, "upload_incomplete", "part_ids[1]")
    again = await added(server, id, TEXT[9:])
    assert (await complete(server, id, [first, again])).json()["file"]["bytes"] == len(TEXT)
    await wait_until(lambda: not parts_of(server))


async def test_an_upload_expires_an_hour_after_its_last_part(tmp_path, template):
    clock = Clock()
    async with fake_server(tmp_path, template, clock=clock) as server:
        id = await begin(server)
        clock.now += LIFE_SECONDS - 1
        part = await added(server, id, TEXT)
        clock.now += LIFE_SECONDS - 1
        assert (await server.http.get(f"/v1/uploads/{id}")).json()["status"] == "pending"
        clock.now += 1
        shown = (await server.http.get(f"/v1/uploads/{id}")).json()
        assert (shown["status"], shown["parts"]) == ("expired", [])
        assert refusal(await complete(server, id, [part])) == (409, "upload_ended")
        await wait_until(lambda: not parts_of(server))
        assert under_way(server) == {}
        clock.now += LIFE_SECONDS
        assert refusal(await server.http.get(f"/v1/uploads/{id}")) == (404, "upload_not_found")


async def test_the_uploads_in_parts_of_a_user_are_bounded_in_number_and_bytes(server):
    ids = [await begin(server, b"x") for _ in range(MOST_UPLOADS)]
    body = {"filename": "a.txt", "bytes": 1}
    assert refusal(await server.http.post("/v1/uploads", json=body)) == (429, "too_many_uploads")
    for id in ids:
        await server.http.post(f"/v1/uploads/{id}/cancel")
    server.app.state.mpic.uploads.most = 100_000
    id = await begin(server, TEXT[:90_000])
    assert refusal(await server.http.post("/v1/uploads", json=body | {"bytes": 10_001})) == (
        *(429, "too_many_bytes"),
    )
    await added(server, id, TEXT[:60_000])
    assert refusal(await add(server, id, TEXT[:60_000])) == (429, "too_many_bytes")  # what is kept counts
    assert refusal(await server.upload(TEXT[:60_000], "b.txt")) == (429, "too_many_bytes")
    remembered = server.app.state.mpic.parted._uploads
    for _ in range(2 * MOST_UPLOADS):
        await server.http.post(f"/v1/uploads/{await begin(server, b'x')}/cancel")
    assert len(remembered) <= 2 * MOST_UPLOADS + 1


async def test_parts_that_come_at_the_same_time_are_no_more_than_there_may_be(server, monkeypatch):
    monkeypatch.setattr("mpic.server.uploads.MOST_PARTS", 3)
    id = await begin(server)
    answers = await asyncio.gather(*(add(server, id, b"x") for _ in range(8)))
    assert sorted(one.status_code for one in answers) == [200] * 3 + [429] * 5
    await wait_until(lambda: len(parts_of(server)) == 3)
    assert under_way(server) == {"local": 3}


async def test_what_is_remembered_of_an_upload_is_short_whatever_its_request_holds(server):
    await begin(server)
    tracemalloc.start()
    for _ in range(4):
        await begin(server, mime_type="x" * 1_000_000)
    gc.collect()
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert left < 1_000_000


async def test_nobody_else_sees_or_changes_an_upload(server):
    ann, bob = server.key("ann"), server.key("bob")
    id = await begin(server, headers=ann)
    for method, path in (("GET", ""), ("POST", "/cancel"), ("POST", "/complete")):
        body = {"part_ids": ["x"]} if path == "/complete" else None
        answer = await server.http.request(method, f"/v1/uploads/{id}{path}", json=body, headers=bob)
        assert refusal(answer) == (404, "upload_not_found")
    assert refusal(await add(server, id, b"x", bob)) == (404, "upload_not_found")
    assert (await add(server, id, TEXT, ann)).status_code == 200
    assert under_way(server) == {"ann": len(TEXT)}


async def test_no_part_and_no_cancelling_comes_between_while_an_upload_is_completed(server, monkeypatch):
    """Nor a second completing, which waits for the first and then says the same."""
    id = await begin(server)
    part = await added(server, id, TEXT)
    going, store = asyncio.Event(), server.library.files.upload

    async def slow(*args, **options):
        await going.wait()
        return await store(*args, **options)

    monkeypatch.setattr(server.library.files, "upload", slow)
    first = [asyncio.ensure_future(complete(server, id, [part])) for _ in range(2)]
    await wait_until(lambda: server.app.state.mpic.parted._uploads[id].lock.locked())
    assert refusal(await add(server, id, b"x")) == (409, "upload_ended")
    cancelling = asyncio.ensure_future(server.http.post(f"/v1/uploads/{id}/cancel"))
    going.set()
    assert len({(await one).json()["file"]["id"] for one in first}) == 1
    assert refusal(await cancelling) == (409, "upload_ended")


async def test_a_server_that_ends_or_starts_removes_parts_and_nothing_else(tmp_path, template):
    kept = tmp_path / "kept"
    async with fake_server(tmp_path / "library", template) as server:
        id = await begin(server)
        await added(server, id, TEXT)
        [path] = parts_of(server)
        (path.parent / "notes.txt").write_text("somebody's")
        shutil.copy(path, kept)
    assert not path.exists()
    shutil.copy(kept, path)  # as a kill leaves it
    with Library.open(tmp_path / "library"):
        assert [one.name for one in path.parent.iterdir()] == ["notes.txt"]


# ---- over a socket


def test_the_stock_client_of_openai_uploads_in_parts(keyed):
    url, keys = keyed
    secret, _ = keys.create(f"parts-{next(names)}")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0) as client:
        done = client.uploads.upload_file_chunked(
            file=TEXT[:500_000], filename="w.txt", bytes=500_000, mime_type="text/plain", purpose="user_data",
            part_size=128 << 10, md5=hashlib.md5(TEXT[:500_000]).hexdigest(),
        )  # fmt: skip
        assert done.status == "completed" and done.file.bytes == 500_000
        assert client.files.content(done.file.id).content == TEXT[:500_000]
        begun = client.uploads.create(filename="w.txt", bytes=5, mime_type="text/plain", purpose="user_data")
        assert client.uploads.cancel(begun.id).status == "cancelled"
        with pytest.raises(openai.ConflictError) as refused:
            client.uploads.parts.create(begun.id, data=b"12345")
        assert refused.value.code == "upload_ended"


def test_a_file_over_a_socket_comes_in_as_a_body_and_goes_out_in_ranges(keyed, tmp_path):
    url, keys = keyed
    secret, _ = keys.create(f"parts-{next(names)}")
    path = tmp_path / "words.txt"
    path.write_bytes(TEXT)
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}, timeout=60) as http:
        with path.open("rb") as file:
            made = http.put("/v1/files/WORDS", content=file).json()
        where = f"/v1/files/{made['id']}/content"
        head = http.head(where)
        assert (head.headers["content-length"], head.content) == (str(len(TEXT)), b"")
        got, size = bytearray(), 100_000
        while len(got) < len(TEXT):
            headers = {"Range": f"bytes={len(got)}-{len(got) + size - 1}", "If-Range": head.headers["etag"]}
            answer = http.get(where, headers=headers)
            assert answer.status_code == 206
            got += answer.content
        assert bytes(got) == TEXT
        assert http.get(where, headers={"If-None-Match": head.headers["etag"]}).status_code == 304
        assert http.get(where, headers={"Range": f"bytes={len(TEXT)}-"}).status_code == 416
        assert http.get(where).content == TEXT  # the connection is as good as before
