"""Explicit context caching: texts are cut, kept, linked in any order, extended and deleted, by their owner only."""

import time
from unittest.mock import Mock

import pytest
from fake_engine import FakeEngine
from server_helpers import fake_server, refusal

from mpic.errors import DatabaseBusy
from mpic.prompt.split import SplitPiece

TEXT = "First sentence here. Second sentence. " * 8 + "\n\nA last paragraph, short.\n"


async def create(server, **body):
    return await server.http.post("/v1/caches", json=body)


@pytest.mark.parametrize("mode", ["none", "fixed", "sentence", "paragraph", "section"])
async def test_the_chunks_of_a_text_add_up_to_it(server, mode):
    split = {"mode": mode, "tokens": 100}
    made = (await create(server, text=TEXT, split=split, name="manual", ttl=60)).json()
    assert made["object"] == "cache" and made["split"]["mode"] == mode
    assert made["expires_at"] - made["created_at"] in (60, 61)
    spans = [(c["start"], c["end"]) for c in made["chunks"]]
    assert "".join(TEXT[a:b] for a, b in spans) == TEXT
    assert len(spans) == 1 if mode == "none" else len(spans) > 2
    for chunk, (a, b) in zip(made["chunks"], spans, strict=True):
        content = (await server.http.get(f"/v1/files/{chunk['id']}/content")).text
        assert content == TEXT[a:b]
    done = await server.settled(made["id"], "caches")
    assert done["state"] == "ready" and done["tokens"] == 36 * len(spans)
    assert (await server.http.get(f"/v1/caches/{made['chunks'][0]['id']}")).json() == done["chunks"][0]


async def test_chunks_are_linked_in_any_order(server):
    made = (await create(server, chunks=["alpha text", "beta text", "gamma text"], name="greek")).json()
    await server.settled(made["id"], "caches")
    ids = [c["id"] for c in made["chunks"]]
    assert [c["name"] for c in made["chunks"]] == ["greek 1", "greek 2", "greek 3"]
    for asked, linked in ((ids[::-1], ids[::-1]), ([ids[1], ids[1]], [ids[1], ids[1]]), ([made["id"]], ids)):
        content = [{"type": "cache", "cache_id": i} for i in asked]
        answer = await server.ask([*content, {"type": "text", "text": "what?"}])
        assert answer.status_code == 200, answer.text
        chunks = server.engine.requests[-1].prompt.chunks
        assert [c.file_id for c in chunks] == linked
        assert {c.key for c in chunks} <= {c.key for c in server.engine.compiled}


async def test_list_and_pages(server):
    ids = [(await create(server, text=f"text {i}")).json()["id"] for i in range(3)]
    page = (await server.http.get("/v1/caches", params={"limit": 2, "order": "asc"})).json()
    assert [c["id"] for c in page["data"]] == ids[:2] and page["has_more"]
    rest = (await server.http.get("/v1/caches", params={"after": ids[1], "order": "asc"})).json()
    assert [c["id"] for c in rest["data"]] == ids[2:] and not rest["has_more"]
    assert (await server.http.get("/v1/files")).json()["data"] == []  # caches are not uploads


async def test_a_page_ends_when_it_has_enough_chunks(server, monkeypatch):
    ids = [(await create(server, chunks=["a", "b", "c"])).json()["id"] for _ in range(5)]
    monkeypatch.setattr("mpic.library.caches.LISTED", 5)
    seen, after = [], None
    while True:
        params = {"order": "asc", "limit": 1_000} | ({"after": after} if after else {})
        page = (await server.http.get("/v1/caches", params=params)).json()
        assert len(page["data"]) <= 2 and page["last_id"] == page["data"][-1]["id"]
        seen += [cache["id"] for cache in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert seen == ids


async def test_ttl_is_extended_and_ends(tmp_path, template):
    later = 0.0
    async with fake_server(tmp_path, template, clock=lambda: time.time() + later) as server:
        cache = (await create(server, chunks=["a", "b"], ttl=100)).json()
        other = (await create(server, text="c", ttl=100)).json()
        longer = (await server.http.patch(f"/v1/caches/{cache['id']}", json={"ttl": 1000})).json()
        assert longer["expires_at"] > cache["expires_at"]
        assert {c["expires_at"] for c in longer["chunks"]} == {longer["expires_at"]}
        later = 101
        assert (await server.http.get(f"/v1/caches/{cache['id']}")).status_code == 200
        assert refusal(await server.http.get(f"/v1/caches/{other['id']}")) == (404, "cache_not_found")
        forever = (await server.http.patch(f"/v1/caches/{cache['id']}", json={"ttl": None})).json()
        assert forever["expires_at"] is None
        server.app.state.background._collect()
        assert [c.file_id for c in server.engine.forgotten] == [other["chunks"][0]["id"]]
        rows = server.library.catalog.read("SELECT id FROM caches")
        assert [row["id"] for row in rows] == [cache["id"]]
        server.library.check()


async def test_a_chunk_cannot_outlive_its_cache_nor_get_a_handle(server):
    cache = (await create(server, text=TEXT)).json()
    chunk = cache["chunks"][0]["id"]
    for change in ({"ttl": None}, {"ttl": 10**6}, {"handle": "MINE"}):
        assert refusal(await server.http.patch(f"/v1/files/{chunk}", json=change)) == (400, "bad_request")
    unknown = await server.http.patch("/v1/files/cache-unknown", json={"ttl": None})
    assert refusal(unknown) == (404, "cache_not_found")


async def test_delete_one_chunk_then_the_rest(server):
    cache = (await create(server, chunks=["a", "b"])).json()
    first, second = (c["id"] for c in cache["chunks"])
    assert (await server.http.delete(f"/v1/caches/{first}")).json()["deleted"]
    left = (await server.http.get(f"/v1/caches/{cache['id']}")).json()
    assert [c["id"] for c in left["chunks"]] == [second]
    assert (await server.http.delete(f"/v1/caches/{cache['id']}")).status_code == 200
    for id in (cache["id"], first, second):
        for method in ("GET", "DELETE"):
            assert refusal(await server.http.request(method, f"/v1/caches/{id}")) == (404, "cache_not_found")
    assert len(server.engine.forgotten) == 2
    assert list((server.library.root / "files").glob("*/*")) == []
    assert server.library.catalog.read("SELECT * FROM caches") == []


async def test_caches_survive_a_restart(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine(hold_compiles=True)) as server:
        cache = (await create(server, text="kept", name="k")).json()
    async with fake_server(tmp_path, template) as server:
        assert (await server.settled(cache["id"], "caches"))["state"] == "ready"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "bad_request", "text"),
        ({"text": "a", "chunks": ["b"]}, "bad_request", "text"),
        ({"text": ""}, "bad_request", "text"),
        ({"text": " \n"}, "invalid_text", "text"),
        ({"text": "a\0b"}, "invalid_text", "text"),
        ({"chunks": []}, "bad_request", "chunks"),
        ({"chunks": ["a", " "]}, "invalid_text", "chunks[1]"),
        ({"chunks": ["a"], "split": {"mode": "fixed"}}, "bad_request", "split"),
        ({"text": "a", "split": {"mode": "words"}}, "bad_request", "split.mode"),
        ({"text": "a", "split": {"mode": "fixed", "tokens": 0}}, "bad_request", "split.tokens"),
        ({"text": "a", "split": {"tokens": 4, "overlap": 4}}, "bad_request", "split.overlap"),
        ({"text": "a", "ttl": 0}, "bad_request", "ttl"),
        ({"text": "a", "ttl": 10**12}, "bad_request", "ttl"),
        ({"text": "x" * 3000, "split": {"mode": "fixed", "tokens": 1}}, "bad_request", "text"),
        ({"text": "a", "colour": "red"}, "unsupported_parameter", "colour"),
    ],
)
async def test_refused_caches_leave_nothing(server, body, code, param):
    answer = await create(server, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    assert error["param"] == param
    assert (await server.http.get("/v1/caches")).json()["data"] == []
    assert [p for p in server.library.root.glob("*/**/*") if p.is_file()] == []


async def test_quotas_count_all_chunks_of_a_cache(server):
    server.http.headers.update(server.key(files=3))
    assert (await create(server, chunks=["a", "b"])).status_code == 200
    assert refusal(await create(server, chunks=["c", "d"])) == (403, "storage_quota_exceeded")
    assert (await create(server, chunks=["e"])).status_code == 200


async def test_far_too_many_chunks_are_refused(server):
    for mode in ("fixed", "sentence", "paragraph", "section"):
        answer = await create(server, text="word " * 2_000, split={"mode": mode, "tokens": 1})
        assert answer.status_code == 400 and "larger pieces" in answer.json()["error"]["message"]


async def test_overlapping_chunks_are_counted_before_they_are_copied(server, monkeypatch):
    pieces = [SplitPiece(i, 1_000 + i) for i in range(1_500)]
    monkeypatch.setattr("mpic.prompt.split._semantic", lambda *_: pieces)
    monkeypatch.setattr("mpic.server.routers.caches.CachedText", None)
    split = {"mode": "section", "tokens": 1_000, "overlap": 500}
    answer = await create(server, text="x" * 3_000, split=split)
    assert answer.status_code == 400 and "1025 or more" in answer.json()["error"]["message"]


async def test_a_cache_that_was_committed_is_returned_although_the_catalogue_cannot_be_read_then(
    server, monkeypatch
):
    caches, catalog = server.library.caches, server.library.catalog
    store = caches._store

    def store_and_lock(*args):
        store(*args)
        monkeypatch.setattr(catalog, "read", Mock(side_effect=DatabaseBusy("locked")))

    monkeypatch.setattr(caches, "_store", store_and_lock)
    answer = await create(server, text="One. Two.", split={"mode": "sentence", "tokens": 5}, name="manual")
    monkeypatch.undo()
    assert answer.status_code == 200, answer.text
    await server.settled(answer.json()["id"], "caches")
    [listed] = (await server.http.get("/v1/caches")).json()["data"]
    same = ("id", "name", "split", "created_at", "expires_at", "bytes")
    assert {name: answer.json()[name] for name in same} == {name: listed[name] for name in same}
    assert [c["id"] for c in answer.json()["chunks"]] == [c["id"] for c in listed["chunks"]]
