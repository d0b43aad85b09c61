"""A data folder that disappears or that another process uses has its own error codes; a running server can be backed
up."""

import asyncio
import errno
import itertools
import json
import logging
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from unittest.mock import Mock

import pytest
from anyio import to_thread
from fake_engine import FakeEngine
from server_helpers import fake_server, refusal, running, wait_until
from threads_kit import started

from mpic import MPIC, AsyncMPIC
from mpic.client.inprocess import AsyncInProcess
from mpic.durable import FileSystem
from mpic.errors import DatabaseBusy, DatabaseDamaged, DatabaseFailed, FileNotFound, Unavailable
from mpic.library import Library
from mpic.server import background, create_app


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
            await wait_until(lambda: said(" is back."))
    assert said("removed or replaced") == said(" is back.") == 1


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
    """Run a command of ``mpic library`` in this process; return (exit status, output)."""

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


class Failing(FileSystem):
    """A disk that fails from some moment on, in one of its calls."""

    error, call = None, ""

    def _maybe(self, call):
        if self.error and call == self.call:
            raise OSError(self.error, os.strerror(self.error))

    def create(self, path):
        self._maybe("create")
        return super().create(path)

    def write(self, fd, data):
        self._maybe("write")
        return super().write(fd, data)

    def sync(self, fd):
        self._maybe("sync")
        super().sync(fd)

    def read(self, fd, into, offset):
        self._maybe("read")
        return super().read(fd, into, offset)


@pytest.mark.parametrize("call", ["create", "write", "sync", "read"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
async def test_a_server_whose_disk_fails_is_not_ready_and_does_not_advise_a_repair(
    tmp_path, template, call, error
):
    disk = Failing()
    library = Library.open(tmp_path, filesystem=disk)
    async with running(create_app(FakeEngine(), library, template)) as server:
        library._probed = -1e9
        disk.error, disk.call = error, call
        for path in ("/health", "/health/ready"):
            answer = await server.http.get(path)
            assert answer.status_code == 503 and "database_failed" in answer.text
        said = answer.json()["message"]
        assert os.strerror(error) in said and "check the disk" in said and "recover" not in said
        disk.error = errno.ENOSPC  # prompts are still answered
        assert (await server.http.get("/health/ready")).status_code == 200
        disk.error, library._probed = None, -1e9
        assert (await server.http.get("/health/ready")).status_code == 200
        assert not list(tmp_path.glob("probe*"))


async def test_a_server_whose_catalogue_cannot_be_read_is_not_ready(server, monkeypatch):
    async def ready():
        server.library._probed = -1e9
        return await server.http.get("/health/ready")

    assert (await ready()).status_code == 200
    failed = sqlite3.OperationalError("disk I/O error")
    failed.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
    monkeypatch.setattr(server.library.catalog, "_reader", Mock(side_effect=failed))
    answer = await ready()
    assert answer.status_code == 503 and "disk I/O error" in answer.json()["message"]
    assert "recover" not in answer.text


def test_a_marker_that_the_disk_does_not_give_is_no_damaged_library(tmp_path, monkeypatch):
    with closing(Library.open(tmp_path)):
        pass
    monkeypatch.setattr(FileSystem, "open", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(DatabaseFailed, match="check the disk"):
        Library.open(tmp_path)


async def test_probes_are_answered_while_requests_hold_all_threads(server, monkeypatch):
    going, held = threading.Event(), threading.Semaphore(0)

    def hold(*args, **options):
        held.release()
        going.wait(120)
        raise FileNotFound("no file", id="x")

    monkeypatch.setattr(server.library.files, "get", hold)
    threads = int(to_thread.current_default_thread_limiter().total_tokens)
    requests = [asyncio.ensure_future(server.http.get("/v1/files/x")) for _ in range(threads + 20)]
    try:
        await wait_until(lambda: held._value == threads)
        for path in ("/health/live", "/health/ready", "/health/ready"):
            assert (await asyncio.wait_for(server.http.get(path), 60)).status_code == 200
        assert held._value == threads
    finally:
        going.set()
        await asyncio.gather(*requests)


async def test_a_disk_that_does_not_answer_is_told_and_asked_once(server):
    going, asked = threading.Event(), []

    def hang():
        asked.append(1)
        going.wait(120)

    probe = server.app.state.mpic.probe
    probe._check, probe._patience = hang, 0.05
    try:
        answers = await asyncio.gather(*(server.http.get("/health/ready") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {503} and len(asked) == 1
        assert "does not answer" in answers[0].json()["message"]
        assert (await server.http.get("/health/live")).status_code == 200
    finally:
        going.set()
