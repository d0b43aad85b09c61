"""Work in the background: the users' uploads take turns, and what fails is tried again."""

import asyncio
import json
import time
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
from fake_engine import CHUNK_TOKENS, FakeEngine
from server_helpers import fake_server, wait_until

from mpic.errors import (
    CompileFailed,
    DatabaseBusy,
    DatabaseDamaged,
    DeletedMeanwhile,
    LibraryGone,
    StorageFull,
)
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.server import background


@pytest.fixture
async def server(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine(hold_compiles=True)) as server:
        yield server


async def uploads(server, key, count):
    for i in range(count):
        files = {"file": (f"{i}.txt", f"text {i} of {key}".encode())}
        form = {"purpose": "user_data"}
        answer = await server.http.post("/v1/files", data=form, files=files, headers=key)
        assert answer.status_code == 200, answer.text


def owners(server):
    return [chunk.owner for chunk in server.engine.compiled]


async def test_many_uploads_of_one_user_do_not_hold_up_those_of_another(server):
    ann, bob = server.key("ann"), server.key("bob")
    await uploads(server, ann, background.AT_ONCE + 4)
    await wait_until(lambda: len(server.engine.compiled) >= background.PER_USER)
    await uploads(server, bob, 1)
    await wait_until(lambda: "bob" in owners(server))
    assert owners(server).count("ann") == background.PER_USER

    def all_compiled():
        while server.engine.pending:
            server.engine.pending.pop().set_result(CHUNK_TOKENS)
        return len(server.engine.compiled) == background.AT_ONCE + 5

    await wait_until(all_compiled)


async def test_clips_hold_up_neither_the_documents_of_their_user_nor_the_clips_of_others(server):
    ann, bob = server.key("ann"), server.key("bob")
    await uploads(server, ann, 1)
    await wait_until(lambda: server.engine.compiled)
    [file] = server.library.files.page("ann").files
    server.library.files.chunks = lambda user, file: [
        Chunk(ChunkKey("video", "0" * 64), user, load_clip=lambda sample: None)
    ]
    server.library.files.get = lambda user, id: file  # bob has it, too
    for owner in ["ann"] * (background.AT_ONCE + 4) + ["bob"]:
        server.app.state.background.compile(replace(file, owner=owner, kind="video"))
    await wait_until(lambda: owners(server).count("bob") == 1)
    del server.library.files.chunks, server.library.files.get
    await uploads(server, ann, 1)
    await uploads(server, bob, 1)
    await wait_until(lambda: owners(server).count("ann") == 2 + background.CLIPS_PER_USER)
    await wait_until(lambda: owners(server).count("bob") == 2)


@pytest.mark.parametrize("end", ["deleted", "expired", "replaced"])
async def test_a_document_that_is_gone_is_not_compiled_further(server, end):
    tasks = server.app.state.background._tasks
    idle = len(tasks)
    split = json.dumps({"mode": "sentence", "tokens": 40, "overlap": 0})
    text = " ".join(f"Sentence number {i} is here." for i in range(20)).encode()
    id = (await server.upload(text, "long.txt", handle="LONG", split=split)).json()["id"]
    await wait_until(lambda: server.engine.pending)
    assert len(server.library.files.borders("local", id)) > 2
    if end == "deleted":
        assert (await server.http.delete(f"/v1/files/{id}")).status_code == 200
    elif end == "expired":
        server.library.files._rows.set_column("local", id, "expires_at", time.time())
    else:
        again = await server.upload(b"another text", "other.txt", handle="LONG", replace="true")
        assert again.json()["outcome"] == "replaced"

    def settled():
        while server.engine.pending:
            server.engine.pending.pop().set_result(CHUNK_TOKENS)
        return len(tasks) == idle

    await wait_until(settled)
    assert [chunk.file_id for chunk in server.engine.compiled].count(id) == 1


@pytest.mark.parametrize("fault", [StorageFull, LibraryGone, DatabaseBusy, DatabaseDamaged])
@pytest.mark.parametrize(("compile_error", "state"), [(None, "ready"), (CompileFailed("no"), "failed")])
async def test_an_outcome_is_recorded_once_the_disk_and_the_library_allow_it(
    tmp_path, template, monkeypatch, fault, compile_error, state
):
    monkeypatch.setattr(background, "PAUSES", (0.01, 0.01))
    async with fake_server(tmp_path, template) as server:
        server.engine.compile_error = compile_error
        set_state = server.library.files.set_state
        server.library.files.set_state = refused = Mock(side_effect=fault("for now"))
        id = (await server.upload()).json()["id"]
        await wait_until(lambda: refused.call_count > 8)
        refused.side_effect = set_state
        assert (await server.settled(id))["state"] == state
        assert len(server.engine.compiled) == 1


async def test_a_compilation_for_which_the_disk_is_full_is_tried_again(tmp_path, template, monkeypatch):
    monkeypatch.setattr(background, "PAUSES", (0.01, 0.01))
    async with fake_server(tmp_path, template) as server:
        server.engine.compile_error = StorageFull("the disk is full")
        file = await server.uploaded()
        assert (file["state"], file["status_details"]) == ("failed", "the disk is full")
        assert len(server.engine.compiled) == 3
        monkeypatch.setattr(background, "PAUSES", (0.01,) * 1000)
        id = (await server.upload(b"text", "t.txt")).json()["id"]
        await wait_until(lambda: len(server.engine.compiled) > 5)
        server.engine.compile_error = None
        assert (await server.settled(id))["state"] == "ready"


async def test_content_uploaded_again_while_its_old_file_is_forgotten_is_compiled(
    tmp_path, template, monkeypatch
):
    monkeypatch.setattr(background, "PAUSES", (0.01,) * 1000)
    async with fake_server(tmp_path, template) as server:
        server.engine.compile_error = DeletedMeanwhile("the chunk was deleted before it was compiled")
        id = (await server.upload()).json()["id"]
        await wait_until(lambda: server.engine.compiled)
        server.engine.compile_error = None
        assert (await server.settled(id))["state"] == "ready"


@pytest.mark.parametrize(("error", "times"), [(DeletedMeanwhile("deleted"), 3), (CompileFailed("no"), 1)])
async def test_a_file_whose_compiling_always_fails_is_failed_after_a_few_tries(
    tmp_path, template, monkeypatch, error, times
):
    monkeypatch.setattr(background, "PAUSES", (0.01, 0.01))
    async with fake_server(tmp_path, template) as server:
        server.engine.compile_error = error
        file = await server.uploaded()
        assert (file["state"], file["status_details"]) == ("failed", error.message)
        assert len(server.engine.compiled) == times


async def test_a_file_that_is_itself_deleted_as_it_is_compiled_is_not_tried_again(server, monkeypatch):
    monkeypatch.setattr(background, "PAUSES", (0.01, 0.01))
    tasks = server.app.state.background._tasks
    idle = len(tasks)
    id = (await server.upload()).json()["id"]
    await wait_until(lambda: server.engine.pending)
    with patch.object(background.log, "warning") as warned:
        await server.http.delete(f"/v1/files/{id}")
        server.engine.pending.pop().set_exception(DeletedMeanwhile("deleted"))
        await wait_until(lambda: len(tasks) == idle)
    assert len(server.engine.compiled) == 1 and not warned.called


async def test_a_server_stops_while_an_outcome_cannot_be_recorded(tmp_path, template):
    async with fake_server(tmp_path, template) as server:
        server.library.files.set_state = Mock(side_effect=StorageFull("the disk is full"))
        id = (await server.upload()).json()["id"]
        await wait_until(lambda: server.library.files.set_state.called)
    async with fake_server(tmp_path, template) as server:
        assert (await server.settled(id))["state"] == "ready"


async def test_old_deletions_are_forgotten_while_the_server_runs(tmp_path, template, monkeypatch):
    monkeypatch.setattr(background, "FORGET_SECONDS", 0.01)
    async with fake_server(tmp_path, template) as server:
        forget = Mock(side_effect=DatabaseBusy("not now"))
        monkeypatch.setattr(server.library, "forget_gone", forget)
        await wait_until(lambda: forget.call_count >= 2)  # although it failed


async def test_an_upload_that_nobody_compiles_is_compiled_when_it_is_repeated(server):
    with patch.object(
        server.app.state.background, "compile", side_effect=RuntimeError("the request ends here")
    ):
        assert (await server.upload(handle="TOWER")).status_code == 500
    again = (await server.upload(handle="TOWER")).json()
    assert (again["outcome"], again["state"]) == ("unchanged", "compiling")
    await wait_until(lambda: server.engine.pending)
    server.engine.pending.pop().set_result(CHUNK_TOKENS)
    assert (await server.settled(again["id"]))["state"] == "ready"


async def test_savings_that_the_disk_refuses_are_written_later(tmp_path, template, monkeypatch):
    monkeypatch.setattr(background, "SAVE_SECONDS", 0.01)
    async with fake_server(tmp_path, template) as server:
        ledger = server.app.state.mpic.savings
        with patch.object(ledger, "_open", side_effect=OSError(30, "Read-only file system")) as refused:
            assert (await server.ask()).status_code == 200
            await wait_until(lambda: refused.call_count > 1)
        await wait_until(lambda: not ledger._days)
        assert (await asyncio.to_thread(ledger.days, None, ""))[0][1] == 1


async def test_a_disk_that_fails_for_a_while_does_not_end_the_removal_of_what_has_expired(
    server, monkeypatch
):
    monkeypatch.setattr(background, "EXPIRY_SECONDS", 0.0)
    failures, expired, jobs = [OSError("the disk fails")] * 3, asyncio.Event(), server.app.state.background

    def expire():
        if failures:
            raise failures.pop()
        expired.set()

    monkeypatch.setattr(jobs._parted, "expire", expire)
    jobs._spawn(jobs._expire())
    await asyncio.wait_for(expired.wait(), 60)
