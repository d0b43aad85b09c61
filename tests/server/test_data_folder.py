"""A data folder that disappears or that another process uses has its own error codes; a running server can be backed
up."""

import itertools
import json
import logging
import shutil
import sqlite3
import threading
from contextlib import closing
from unittest.mock import Mock

import pytest
from server_helpers import fake_server, refusal, wait_until
from threads_kit import started

from mpic import MPIC, AsyncMPIC
from mpic.client.inprocess import AsyncInProcess
from mpic.errors import DatabaseBusy, DatabaseDamaged, DatabaseFailed, Unavailable
from mpic.library import Library
from mpic.server import background


@pytest.mark.parametrize("made_again", [False, True], ids=["removed", "made again by somebody"])
async def test_a_removed_folder_is_noticed_and_uploads_are_refused(server, made_again):
    file = await server.uploaded(b"some text", "t.txt")
    root = server.library.root
    shutil.rmtree(root)
    if made_again:
        root.mkdir()
        (root / "mine.txt").write_text("mine")
    answer = await server.upload(b"late", "l.txt")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "library_gone"
    assert answer.headers["retry-after"] and str(root) not in answer.text
    for method, path, body in (
        ("POST", "/v1/caches", {"text": "late"}),
        ("PATCH", f"/v1/files/{file['id']}", {"ttl": 60}),
        ("DELETE", f"/v1/files/{file['id']}", None),
        ("GET", f"/v1/files/{file['id']}/content", None),
    ):
        assert refusal(await server.http.request(method, path, json=body)) == (503, "library_gone"), path
    for path in ("/health", "/health/ready"):
        answer = await server.http.get(path)
        assert answer.status_code == 503 and "library_gone" in answer.text
    assert (await server.http.get("/health/ready")).json()["message"]
    assert (await server.http.get("/health/live")).status_code == 200
    assert (await server.http.get("/v1/files")).status_code == 200
    assert [path.name for path in root.rglob("*")] == (["mine.txt"] if made_again else [])


async def test_the_log_has_one_line_when_the_folder_goes_and_one_when_it_is_back(
    tmp_path, template, monkeypatch, caplog
):
    monkeypatch.setattr(background, "WATCH_SECONDS", 0.01)
    said = lambda word: sum(word in record.message for record in caplog.records)
    async with fake_server(tmp_path, template) as server:
        root = server.library.root
        with caplog.at_level(logging.WARNING, "mpic.server"):
            root.rename(root.with_name("away"))
            await wait_until(lambda: said("removed or replaced"))
            root.with_name("away").rename(root)
            await wait_until(lambda: said("is back"))
    assert said("removed or replaced") == said("is back") == 1


@pytest.mark.parametrize("error", [DatabaseBusy, DatabaseFailed, DatabaseDamaged])
async def test_a_database_failure_has_its_own_code(server, monkeypatch, error):
    fails = Mock(side_effect=error("what happened"))
    monkeypatch.setattr(server.library.catalog, "write", fails)
    answer = await server.upload(b"some text", "t.txt")
    assert refusal(answer) == (error.status, error.code)
    assert ("retry-after" in answer.headers) == issubclass(error, Unavailable)
    monkeypatch.undo()
    monkeypatch.setattr(server.app.state.mpic.keys, "exist", fails)
    for path in ("/v1/files", "/ui/"):
        assert refusal(await server.http.get(path)) == (error.status, error.code)


@pytest.fixture
def locked(server, monkeypatch):
    """The catalogue as another process has it locked, until it is rolled back."""
    monkeypatch.setattr("mpic.library.catalog.database.PATIENCE", 0.05)
    path = server.library.root / "catalog.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


async def test_a_locked_catalogue_refuses_uploads_with_its_own_code_while_listings_work(server, locked):
    answer = await server.upload(b"some text", "t.txt")
    assert refusal(answer) == (503, "database_busy")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await server.http.get("/v1/files")).json()["data"] == []
    locked.execute("ROLLBACK")
    assert (await server.upload(b"some text", "t.txt")).status_code == 200


async def test_the_sdk_repeats_an_upload_after_the_catalogue_was_locked(server, locked, monkeypatch):
    monkeypatch.setattr(DatabaseBusy, "retry_after", 0.1)
    statuses = []

    class LettingGo(AsyncInProcess):
        async def handle_async_request(self, request):
            response = await super().handle_async_request(request)
            statuses.append(response.status_code)
            if response.status_code == 503:
                locked.execute("ROLLBACK")
            return response

    async with AsyncMPIC("http://127.0.0.1", transport=LettingGo(server.app)) as client:
        assert (await client.files.create(("t.txt", b"some text"), "T")).handle == "T"
    assert statuses == [503, 200]


# A server that is a process of its own


@pytest.fixture
def mpic_library(mpic):
    """Runs a command of ``mpic library`` in this process; returns (exit status, output)."""

    def run(*words):
        status, out, err = mpic("library", *words, "--json")
        return status, err if status else out

    return run


def test_a_backup_of_a_running_server_holds_everything_acknowledged_and_can_be_served(
    url, served_folder, tiny_model, tmp_path, mpic_library
):
    acknowledged, stop = {}, threading.Event()

    def upload():
        with MPIC(url) as client:
            for number in itertools.count():
                content = f"Text number {number} of a backup. ".encode()
                acknowledged[client.files.create((f"{number}.txt", content), f"B{number}").id] = content
                if stop.wait(0.01):
                    break

    worker = started(upload)
    try:
        while len(acknowledged) < 3:
            stop.wait(0.01)
        before = dict(acknowledged)
        status, said = mpic_library("backup", tmp_path / "b", "--data-dir", served_folder)
    finally:
        stop.set()
        worker.join()
    assert status == 0, said
    status, refused = mpic_library("restore", tmp_path / "b", "--data-dir", served_folder)
    assert status == 1 and "another process" in refused  # the folder of the running server
    status, said = mpic_library("restore", tmp_path / "b", "--data-dir", tmp_path / "r")
    assert status == 0 and not json.loads(said)["damaged"]
    with MPIC(url) as first, MPIC.local(tiny_model, tmp_path / "r", pool_bytes=64 * 12_288) as client:
        found = {file.id for file in client.files.list()} & acknowledged.keys()
        assert before.keys() <= found
        assert all(client.files.content(id) == acknowledged[id] for id in found)
        answers = {c.chat.completions.create("FILE#B1 What?", max_tokens=4).text for c in (client, first)}
        assert len(answers) == 1
        for id in acknowledged:
            first.files.delete(id)


def test_a_second_server_is_kept_out_although_the_lock_was_removed(url, served_folder):
    (served_folder / "lock").unlink()
    with pytest.raises(Unavailable, match="another process"):
        Library.open(served_folder)


def test_a_server_that_refuses_its_folder_leaves_it_as_it_was(tmp_path, mpic):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "report.doc").write_text("mine")
    status, _, err = mpic("serve", "--port", "0", "--data-dir", tmp_path)
    assert status and "[foreign_folder]" in err
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["report.doc"]
