"""While the disk or the engine blocks an upload or a deletion, the server answers other requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from fake_engine import FakeEngine
from server_helpers import fake_server, png, running, wait_until

from mpic.config import Config
from mpic.durable import FileSystem
from mpic.library import Library
from mpic.server import create_app


class StandStill(FileSystem):
    """A file layer in which one kind of call waits until the test releases it on the event loop. If the loop itself
    waited for the disk, that could never happen."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.armed, self.reached, self.go = False, threading.Event(), threading.Event()
        self.stuck = False
        original = getattr(self, call)

        def wait(*args):
            if self.armed:
                self.reached.set()
                self.stuck |= not self.go.wait(60)
            return original(*args)

        setattr(self, call, wait)

    async def answered_meanwhile(self, http, request):
        """Return the response of ``request``, during which the disk blocks and another request is answered."""
        self.armed = True
        task = asyncio.ensure_future(request)
        while not self.reached.is_set():
            assert not task.done(), "the disk was not used"
            await asyncio.sleep(0.001)
        assert (await http.get("/v1/models")).status_code == 200
        assert not task.done()
        self.go.set()
        answer = await task
        assert not self.stuck, "the event loop waited for the disk"
        return answer


@pytest.fixture
def stalling(tmp_path, template):
    """Make a server whose disk blocks at a call, and that disk."""

    @contextlib.asynccontextmanager
    async def make(call: str):
        disk, config = StandStill(call), Config()
        library = Library.open(tmp_path / "library", config.library.limits(), filesystem=disk)
        async with running(create_app(FakeEngine(), library, template, config)) as server:
            await server.upload()  # folders are there now
            yield server, lambda request: disk.answered_meanwhile(server.http, request)

    return make


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename"])
async def test_an_upload_to_a_stalled_disk_blocks_no_other_request(call, stalling):
    async with stalling(call) as (server, answered_meanwhile):
        answer = await answered_meanwhile(server.upload(png("blue"), "blue.png"))
        assert answer.status_code == 200 and answer.json()["bytes"] == len(png("blue"))


@pytest.mark.parametrize("call", ["open", "read"])
async def test_a_download_from_a_stalled_disk_blocks_no_other_request(call, stalling):
    async with stalling(call) as (server, answered_meanwhile):
        file = await server.uploaded()
        answer = await answered_meanwhile(server.http.get(f"/v1/files/{file['id']}/content"))
        assert answer.content == png()


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("references", {"files": {"file": ("tower.txt", b"The tower is tall.")}}),
        ("caches", {"json": {"text": "One sentence. Another sentence. A third one."}}),
    ],
)
async def test_what_is_added_on_a_stalled_disk_blocks_no_other_request(call, path, body, stalling):
    async with stalling(call) as (server, answered_meanwhile):
        answer = await answered_meanwhile(server.http.post(f"/v1/{path}", **body))
        assert answer.status_code == 200, answer.text


class BusyEngine(FakeEngine):
    """An engine that is in a step, and forgets a chunk only when the test ends the step on the event loop."""

    def __init__(self):
        super().__init__()
        self.reached, self.go, self.stuck, self.done = threading.Event(), threading.Event(), False, []

    def forget(self, *chunks):
        if not chunks:
            return
        self.reached.set()
        self.stuck |= not self.go.wait(60)
        self.done += [("forgotten", chunk.key) for chunk in chunks]

    def compile(self, chunk, *asked):
        self.done.append(("compiled", chunk.key))
        return super().compile(chunk, *asked)


async def test_a_replacing_upload_that_waits_for_the_engine_blocks_no_other_request(tmp_path, template):
    engine = BusyEngine()
    async with fake_server(tmp_path, template, engine) as server:
        old = await server.uploaded(handle="TOWER")
        task = asyncio.ensure_future(server.upload(b"text", "t.txt", handle="TOWER", replace="true"))
        await wait_until(engine.reached.is_set)
        assert (await server.http.get("/health/live")).status_code == 200
        assert not task.done()
        engine.go.set()
        answer = await task
        assert answer.json()["outcome"] == "replaced" and not engine.stuck, (
            "the event loop waited for the engine"
        )
        assert (await server.settled(answer.json()["id"]))["state"] == "ready"
        # the other way round, chunks that both have would count as deleted before they were compiled
        image, forgotten, text = engine.done
        assert image == ("compiled", forgotten[1]) and forgotten[0] == "forgotten" and text[0] == "compiled"
        assert (await server.http.get(f"/v1/files/{old['id']}")).status_code == 404


async def test_a_replacing_upload_is_compiled_although_the_engine_cannot_forget_the_old_file(server):
    await server.uploaded(handle="TOWER")
    server.engine.forget = lambda *chunks: 1 / 0
    answer = await server.upload(b"text", "t.txt", handle="TOWER", replace="true")
    assert answer.status_code == 500
    [file] = (await server.http.get("/v1/files")).json()["data"]
    assert file["kind"] == "text"
    assert (await server.settled(file["id"]))["state"] == "ready"
