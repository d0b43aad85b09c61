"""Lifetimes, pins and prefetching by REST, SDK and command line, over a fake engine; a sync in a running server."""

import asyncio
import dataclasses
import time

import pytest
from library_tools import make_chunk
from server_helpers import SMALL_POOL, fake_server, real_server, refused_field, wait_until

from mpic.config import Config, ConfigError, LibraryConfig, RetrievalConfig, load_config
from mpic.errors import CompileFailed
from mpic.kv.chunk import ChunkKey, KVKey, Recipe

DAY = 86_400


@pytest.fixture
async def later(tmp_path, template):
    """A server whose files live a day and whose KV an hour, and its clock."""
    clock = [0.0]
    library = LibraryConfig(default_ttl=DAY, kv_ttl=3600)
    config = dataclasses.replace(Config(), library=library)
    async with fake_server(tmp_path, template, config=config, clock=lambda: time.time() + clock[0]) as server:
        yield server, clock


async def patched(server, path, **body):
    answer = await server.http.patch(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_uploads_and_caches_that_say_no_lifetime_have_that_of_the_configuration(later):
    server, _ = later
    life = lambda item: (
        None if item["expires_at"] is None else round(item["expires_at"] - item["created_at"], -1)
    )
    upload = {"filename": "a.txt", "bytes": 3}
    whole = lambda id: server.http.post(f"/v1/uploads/{id}/parts", files={"data": ("a", b"abc")})

    async def in_parts(**fields):
        id = (await server.http.post("/v1/uploads", json=upload | fields)).json()["id"]
        part = (await whole(id)).json()["id"]
        done = await server.http.post(f"/v1/uploads/{id}/complete", json={"part_ids": [part]})
        return done.json()["file"]

    cache = lambda **fields: server.http.post("/v1/caches", json={"text": "text", **fields})
    assert life((await server.upload(b"a", "a.txt")).json()) == DAY
    assert life((await server.upload(b"a", "a.txt", ttl="50")).json()) == 50
    assert life((await server.http.put("/v1/files/PUT", content=b"text")).json()) == DAY
    assert [life(await in_parts()), life(await in_parts(ttl=None)), life(await in_parts(ttl=50))] == [
        DAY,
        None,
        50,
    ]
    assert [life((await cache()).json()), life((await cache(ttl=None)).json())] == [DAY, None]
    file = (await server.upload(b"b", "b.txt")).json()
    assert life(await patched(server, f"files/{file['id']}", ttl=None)) is None


async def test_a_file_a_cache_and_a_reference_are_pinned_and_say_how_long_their_kv_is_kept(later):
    server, _ = later
    file = (await server.upload(b"a", "a.txt", kv_ttl="50")).json()
    assert (file["kv_ttl"], file["pinned"]) == (50, False)
    path = f"files/{file['id']}"
    changed = await patched(server, path, pinned=True, kv_ttl=None)
    assert (changed["kv_ttl"], changed["pinned"], changed["expires_at"]) == (None, True, file["expires_at"])
    [listed] = (await server.http.get("/v1/files")).json()["data"]
    assert listed["pinned"]
    made = (await server.http.post("/v1/caches", json={"chunks": ["a", "b"]})).json()
    cache = await patched(server, f"caches/{made['id']}", pinned=True, kv_ttl=60)
    assert (cache["kv_ttl"], cache["pinned"], cache["expires_at"]) == (60, True, made["expires_at"])
    sent = {"data": {"id": "ref_a", "ttl": "60"}, "files": {"file": ("a.txt", b"words")}}
    added = (await server.http.post("/v1/references", **sent)).json()
    assert added["expires_at"] - added["created_at"] in (60, 61) and not added["pinned"]
    found = await patched(server, "references/ref_a", pinned=True, ttl=None)
    assert (found["pinned"], found["expires_at"], found["synced"]) == (True, None, False)


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("files/ID", {"kv_ttl": 0}, "kv_ttl"),
        ("files/ID", {"kv_ttl": 10**10, "pinned": True}, "kv_ttl"),
        ("files/ID", {"pinned": "yes"}, "pinned"),
        ("files/ID", {"pinned": None}, "pinned"),
        ("caches/CACHE", {"kv_ttl": 10**10, "ttl": 5}, "kv_ttl"),
        ("references/REF", {"kv_ttl": 5}, "kv_ttl"),
        ("references/REF", {"ttl": 10**10}, "ttl"),
    ],
)
async def test_a_wrong_life_is_refused_by_its_field_and_changes_nothing(server, path, body, param):
    file = (await server.upload(b"a", "a.txt")).json()
    cache = (await server.http.post("/v1/caches", json={"text": "a"})).json()
    await server.http.post("/v1/references", data={"id": "ref_a"}, files={"file": ("a.txt", b"words")})
    for name, id in {"ID": file["id"], "CACHE": cache["id"], "REF": "ref_a"}.items():
        path = path.replace(name, id)
    answer = await server.http.patch(f"/v1/{path}", json=body)
    assert answer.status_code == 400 and refused_field(answer)[2] == param, answer.text
    after = (await server.http.get(f"/v1/{path}")).json()
    assert not after["pinned"] and after["expires_at"] is None


async def test_expired_kv_is_forgotten_by_the_engine_and_compiled_again_by_a_prefetch(later):
    server, clock = later
    file = await server.uploaded(b"words", "a.txt", handle="A", ttl=str(9 * DAY))
    content = ChunkKey.of_text("words")
    key = KVKey("local", content, server.engine.info.digest, Recipe("float32"))
    server.library.store.save(make_chunk(key))
    tiers = lambda: server.http.get(f"/v1/files/{file['id']}")
    assert (await tiers()).json()["tiers"] == ["disk"]
    clock[0] = 3601.0
    server.app.state.background._collect()
    assert [chunk.key for chunk in server.engine.forgotten] == [content]
    found = (await tiers()).json()
    assert (found["tiers"], found["state"]) == ([], "ready")
    before, hinted = len(server.engine.compiled), []
    server.engine.prefetch = lambda chunk, wrapping: hinted.append(chunk.key)
    answer = await server.http.post(f"/v1/files/{file['id']}/prefetch")
    assert answer.status_code == 202 and answer.json()["id"] == file["id"]
    await wait_until(lambda: hinted == [content])
    assert len(server.engine.compiled) == before + 1
    assert (await server.http.get(f"/v1/files/{file['id']}")).json()["state"] == "ready"


async def test_a_prefetch_that_fails_leaves_a_file_ready_and_many_are_one(server):
    file = await server.uploaded(b"words", "a.txt")
    before = len(server.engine.compiled)
    server.engine.hold_compiles = True
    for _ in range(5):
        assert (await server.http.post(f"/v1/files/{file['id']}/prefetch")).status_code == 202
    await wait_until(lambda: server.engine.pending)
    assert len(server.engine.compiled) == before + 1
    server.engine.pending.pop().set_exception(CompileFailed("no"))
    await wait_until(lambda: not server.app.state.background._prefetching)
    assert (await server.http.get(f"/v1/files/{file['id']}")).json()["state"] == "ready"


async def test_what_is_not_there_is_not_prefetched(server):
    for path in ("files/file-x", "caches/group-x", "references/ref_x"):
        assert (await server.http.post(f"/v1/{path}/prefetch")).status_code == 404


async def test_a_user_changes_no_reference(tmp_path, template):
    async with fake_server(tmp_path, template) as server:
        server.http.headers.update(server.key("root", "admin"))
        await server.http.post("/v1/references", data={"id": "ref_a"}, files={"file": ("a.txt", b"words")})
        server.http.headers.update(server.key("alice"))
        for method, path in (
            ("PATCH", "ref_a"),
            ("POST", "ref_a/prefetch"),
            ("POST", "sync"),
            ("GET", "sync"),
        ):
            answer = await server.http.request(method, f"/v1/references/{path}", json={"pinned": True})
            assert answer.status_code == 403, (path, answer.text)


async def test_a_server_keeps_its_references_in_step_with_a_folder(tmp_path, template):
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "a.txt").write_text("The code of the lamp is 123.")
    (folder / "bad.png").write_bytes(b"\x89PNG nothing")
    config = dataclasses.replace(Config(), retrieval=RetrievalConfig(sync_references=str(folder)))
    async with fake_server(tmp_path / "library", template, config=config) as server:

        async def synced(*ids):
            listed = (await server.http.get("/v1/references")).json()["data"]
            state = (await server.http.get("/v1/references/sync")).json()
            done = {one["id"] for one in listed} == set(ids) and not state["running"]
            return state if done else None

        state = await wait_until(lambda: synced("ref_a.txt"))
        assert [(note["where"], note["code"]) for note in state["notes"]] == [("bad.png", "invalid_image")]
        assert (await server.settled("ref_a.txt", "references"))["synced"]
        await wait_until(lambda: len(server.engine.compiled) == 1)
        (folder / "b.txt").write_text("b")
        (folder / "a.txt").unlink()
        await server.http.post("/v1/references/sync")
        await wait_until(lambda: synced("ref_b.txt"))
        assert [chunk.owner for chunk in server.engine.forgotten] == ["@shared"]


async def test_without_a_folder_there_is_no_sync(server):
    for method in ("GET", "POST"):
        answer = await server.http.request(method, "/v1/references/sync")
        assert refused_field(answer)[:2] == (404, "not_found")


@pytest.mark.parametrize("key, value", [("default_ttl", 10**10), ("kv_ttl", -1), ("sync_seconds", 0)])
def test_lives_that_cannot_be_meant_are_refused_by_their_keys(key, value):
    with pytest.raises(ConfigError, match=key):
        load_config(None, {key: value})


async def test_expired_kv_is_compiled_again_by_the_next_use_and_by_a_prefetch(tmp_path, tiny_model):
    async with real_server(tmp_path, tiny_model, pool_bytes=SMALL_POOL["pool_bytes"]) as server:
        file = await server.uploaded(b"The lamp's code is 123.", "a.txt", handle="A", kv_ttl="60")
        path = f"/v1/files/{file['id']}"
        tiers = lambda: server.http.get(path)
        stored = lambda: server.library.catalog.read("SELECT 1 FROM chunks WHERE state = 'ready'")

        async def expire():
            await wait_until(stored)
            server.library.store.flush()  # the uses that it has kept in memory
            with server.library.catalog.write() as db:
                db.execute("UPDATE chunks SET last_used = 1")
            await asyncio.to_thread(server.app.state.background._collect)
            assert (await tiers()).json()["tiers"] == []

        async def asked():
            answer = await server.ask("FILE#A What?", max_tokens=1, mpic={"policy": "reuse"})
            [chunk] = answer.json()["usage"]["mpic"]["chunks"]
            return chunk["tier"], chunk["reason"]

        assert await asked() == ("device", None)
        await expire()
        assert await asked() == ("compiled", "expired")
        await expire()
        assert (await server.http.post(f"{path}/prefetch")).status_code == 202
        await wait_until(stored)
        assert await asked() == ("device", None)
