"""While the disk blocks an upload or a deletion, the server answers other requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from fake_engine import FakeEngine
from server_helpers import png, running

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
                self.stuck |= not self.go.wait(20)
            return original(*args)

        setattr(self, call, wait)

    async def answered_meanwhile(self, http, request):
        """Returns the response of ``request``, during which the disk blocks and another request is answered."""
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
    """Makes a server whose disk blocks at a call, and that disk."""

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
