"""Long documents are cut into several chunks behind one handle."""

import json

import pytest
from fake_engine import CHUNK_TOKENS, FakeEngine
from server_helpers import fake_server, png

from mpic.config import Config, LibraryConfig
from mpic.kv.chunk import ChunkKey

SENTENCES = [f"Sentence number {i} says that the answer is {i * 7}." for i in range(120)]
LONG = "\n\n".join(" ".join(SENTENCES[i : i + 6]) for i in range(0, 120, 6))


@pytest.fixture
async def server(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine(context=2000, pool=10**6)) as server:
        yield server


async def test_a_document_longer_than_the_context_is_cut(server):
    file = await server.uploaded(LONG.encode(), "long.txt", handle="LONG")
    assert file["state"] == "ready" and file["chunk_count"] == len(server.engine.compiled) > 2
    ids = [chunk.token_ids for chunk in server.engine.compiled]
    spans = [(chunk["start"], chunk["end"]) for chunk in file["chunks"]]
    assert "".join(LONG[start:end] for start, end in spans) == LONG
    assert ids == [tuple(server.library.files.tokenize(LONG[start:end])) for start, end in spans]
    assert max(map(len, ids)) <= 512
    assert file["tokens"] == CHUNK_TOKENS * file["chunk_count"]
    [listed] = (await server.http.get("/v1/files")).json()["data"]
    assert (listed["chunk_count"], listed["chunks"]) == (file["chunk_count"], None)


async def test_a_document_that_fits_stays_whole(server):
    file = await server.uploaded(LONG[:1500].encode(), "short.txt")
    assert (file["chunk_count"], len(server.engine.compiled)) == (1, 1)
    assert server.engine.compiled[0].key == ChunkKey.of_text(LONG[:1500])


async def test_a_set_length_cuts_shorter_documents(tmp_path, template):
    config = Config(library=LibraryConfig(split_tokens=600))
    async with fake_server(tmp_path, template, FakeEngine(context=2000, pool=10**6), config) as server:
        file = await server.uploaded(LONG[:1500].encode(), "long.txt")
        assert file["chunk_count"] > 1


async def test_an_upload_says_how_it_is_cut(server):
    split = json.dumps({"mode": "sentence", "tokens": 120, "overlap": 0})
    file = await server.uploaded(LONG[:1500].encode(), "short.txt", handle="CUT", split=split)
    assert file["chunk_count"] > 10 and all(len(c.token_ids) <= 120 for c in server.engine.compiled)
    again = (await server.upload(LONG[:1500].encode(), "short.txt", handle="CUT")).json()
    assert (again["outcome"], again["chunk_count"]) == ("unchanged", file["chunk_count"])
    other = await server.upload(LONG[:1500].encode(), "short.txt", handle="CUT", split="fixed")
    assert other.json()["error"]["code"] == "handle_taken"
    long = '{"mode": "fixed"}' + " " * 1000
    for wrong in ("words", '{"mode": "fixed", "tokens": 0}', "{", '{"mode": "fixed", "more": 1}', long):
        answer = await server.upload(LONG.encode(), "x.txt", split=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "split")
    answer = await server.upload(png(), "x.png", split="sentence")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "split")


@pytest.mark.parametrize("depth", [300, 600, 50_000])
async def test_how_to_cut_a_document_may_be_nested_as_deeply_as_it_likes_and_is_refused(server, depth):
    split = '{"a":' * depth + "1" + "}" * depth
    answer = await server.upload(LONG.encode(), "long.txt", split=split)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "bad_request", "split")


async def test_one_handle_links_all_chunks_in_order(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine(context=10**5, pool=10**6)) as server:
        split = json.dumps({"mode": "paragraph", "tokens": 400})
        file = await server.uploaded(LONG.encode(), "long.txt", handle="LONG", split=split)
        for content in (
            "Before FILE#LONG after: what does FILE#LONG say?",
            [{"type": "file", "file": {"file_id": file["id"]}}, {"type": "text", "text": "What?"}],
            [{"type": "file", "handle": "LONG"}, {"type": "text", "text": "What does FILE#LONG say?"}],
        ):
            answer = await server.ask(content)
            assert answer.status_code == 200, answer.text
            chunks = [s.chunk for s in server.engine.requests[-1].prompt.segments if hasattr(s, "chunk")]
            assert [c.key for c in chunks] == [c.key for c in server.engine.compiled]
            assert chunks[0].label == f"LONG 1/{file['chunk_count']}"


async def test_a_document_that_no_prompt_can_hold_says_so_when_it_is_uploaded_and_when_it_is_asked_about(
    tmp_path, template
):
    async with fake_server(tmp_path, template, FakeEngine(context=1000, pool=10**6)) as server:
        split = json.dumps({"mode": "sentence", "tokens": 120})
        fits = await server.uploaded(LONG[:300].encode(), "short.txt", handle="SHORT")
        file = await server.uploaded(LONG.encode(), "long.txt", handle="LONG", split=split)
        assert (file["state"], fits["status_details"]) == ("ready", None)
        size = f"FILE#LONG has {file['tokens']:,} tokens, and this model reads at most 1,000"
        assert file["status_details"].startswith(size) and "upload the parts" in file["status_details"]
        [listed] = [f for f in (await server.http.get("/v1/files")).json()["data"] if f["handle"] == "LONG"]
        assert listed["status_details"] == file["status_details"]
        for content in ("What does FILE#LONG say?", [{"type": "file", "file": {"file_id": file["id"]}}]):
            error = (await server.ask(content)).json()["error"]
            assert (error["code"], error["message"]) == ("document_too_long", file["status_details"])


async def test_deleting_it_forgets_all_of_its_chunks(server):
    file = await server.uploaded(LONG.encode(), "long.txt")
    compiled = {chunk.key for chunk in server.engine.compiled}
    await server.http.delete(f"/v1/files/{file['id']}")
    assert compiled <= {chunk.key for chunk in server.engine.forgotten}
    assert server.library.catalog.one("SELECT 1 FROM pieces") is None


async def test_a_document_of_too_many_chunks_fails_with_the_reason(server):
    split = json.dumps({"mode": "fixed", "tokens": 1})
    file = await server.uploaded(LONG.encode(), "long.txt", split=split)
    assert file["state"] == "failed" and "more than 1024 chunks" in file["status_details"]
