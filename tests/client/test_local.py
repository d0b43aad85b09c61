"""The server inside a client's process: its start, and starts that are cancelled or fail."""

import asyncio
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_engine import FakeEngine, FakeStream
from server_helpers import chat_template

import mpic
import mpic.config
from mpic.library import Library
from mpic.library.uploads import UploadLibrary
from mpic.server import background, create_app, run


class Build:
    """Builds servers over an engine that computes nothing, once ``go`` is set."""

    def __init__(self):
        self.began, self.go = threading.Event(), threading.Event()
        self.engines = []

    def __call__(self, config, told):
        library = Library.open(Path(config.library.data_dir), config.library.limits())
        self.began.set()
        assert self.go.wait(60)
        self.engines.append(FakeEngine())
        return create_app(self.engines[-1], library, chat_template(), config)


@pytest.fixture
def build(monkeypatch):
    build = Build()
    monkeypatch.setattr("mpic.local.build", build)
    yield build
    build.go.set()


def assert_free(folder):
    """Assert that nothing holds the folder's library."""
    Library.open(folder, mpic.config.Config().library.limits()).close()


async def cancelled(client, build):
    """Send a first request and cancel it while the model loads."""
    first = asyncio.create_task(client.health())
    await asyncio.to_thread(build.began.wait, 60)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_first_request_that_is_cancelled_leaves_the_start_to_the_next(build, tmp_path):
    client = mpic.AsyncMPIC.local(data_dir=tmp_path)
    await cancelled(client, build)
    build.go.set()
    assert (await client.health()).ready and len(build.engines) == 1
    await client.close()
    assert build.engines[0].closed
    assert_free(tmp_path)


async def test_closing_after_a_cancelled_first_request_waits_for_the_start_and_stops_the_server(
    build, tmp_path
):
    client = mpic.AsyncMPIC.local(data_dir=tmp_path)
    await cancelled(client, build)
    closing = asyncio.create_task(client.close())
    build.go.set()
    await closing
    assert build.engines[0].closed
    assert_free(tmp_path)


async def test_closing_that_is_cancelled_still_stops_the_server(build, tmp_path):
    client = mpic.AsyncMPIC.local(data_dir=tmp_path)
    await cancelled(client, build)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.close(), 0.01)
    build.go.set()
    while asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.sleep(0.01)
    assert build.engines[0].closed
    assert_free(tmp_path)


async def test_a_server_that_failed_to_start_is_started_again_by_the_next_request(
    build, tmp_path, monkeypatch
):
    build.go.set()
    client = mpic.AsyncMPIC.local(data_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(background.BackgroundJobs, "start", fail)
        with pytest.raises(RuntimeError, match="no start"):
            await client.health()
    assert build.engines[0].closed
    assert (await client.health()).ready
    await client.close()
    assert_free(tmp_path)


async def fail(jobs):
    raise RuntimeError("no start")


@pytest.mark.parametrize("own", [True, False], ids=["temporary folder", "folder"])
def test_a_start_that_fails_closes_what_it_opened(build, tmp_path, monkeypatch, own):
    build.go.set()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(background.BackgroundJobs, "start", fail)
    with pytest.raises(RuntimeError, match="no start"):
        mpic.MPIC.local(data_dir=None if own else tmp_path / "data")
    assert build.engines[0].closed
    assert not [thread for thread in threading.enumerate() if thread.name == "mpic-in-process"]
    assert not list(tmp_path.iterdir()) if own else assert_free(tmp_path / "data") is None


def test_ctrl_c_during_the_start_closes_what_it_opened(build, tmp_path, monkeypatch):
    """The interrupt comes while the calling thread waits for the start on the other thread."""
    build.go.set()

    def interrupted(work, loop):
        future = real(work, loop)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", real)
        future.result = Mock(side_effect=KeyboardInterrupt)
        return future

    real = asyncio.run_coroutine_threadsafe
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mpic.MPIC.local(data_dir=tmp_path)
    assert build.engines[0].closed
    assert_free(tmp_path)


def test_a_stream_that_is_open_when_its_server_ends_is_an_error_of_the_client(build, tmp_path):
    build.go.set()
    with mpic.MPIC.local(data_dir=tmp_path) as client:
        stream = client.chat.completions.create("hello", stream=True)
        next(stream)
    with pytest.raises(mpic.client.ClientError, match="has ended"):
        list(stream)
    stream.close()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda client: client.chat.completions.create("hello"),
        lambda client: list(client.chat.completions.create("hello", stream=True)),
        lambda client: client.files.create(("a.txt", b"never ends")),
    ],
    ids=["answer", "stream", "upload"],
)
def test_closing_ends_the_requests_of_other_threads(build, tmp_path, monkeypatch, request_of):
    build.go.set()
    client, began, errors = mpic.MPIC.local(data_dir=tmp_path), threading.Event(), []

    async def stuck(*args, **fields):
        began.set()
        await asyncio.Event().wait()

    async def stuck_stream(stream):
        yield await stuck()

    def ask():
        try:
            request_of(client)
        except mpic.client.ClientError as error:
            errors.append(str(error))

    monkeypatch.setattr(FakeStream, "__aiter__", stuck_stream)
    monkeypatch.setattr(UploadLibrary, "upload", stuck)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert began.wait(60)
    client.close()
    asking.join(60)
    assert len(errors) == 1 and ("has ended" in errors[0] or "was closed" in errors[0])
    assert build.engines[0].closed
    assert_free(tmp_path)


def test_an_application_that_cannot_be_made_closes_engine_and_library(tmp_path, monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr("mpic.engine.load_engine", lambda *given: (engine, None))
    monkeypatch.setattr("mpic.prompt.ChatTemplate", lambda processor: None)
    monkeypatch.setattr("mpic.server.app.create_app", Mock(side_effect=mpic.MPICError("no app")))
    config = mpic.config.load_config(None, {"data_dir": str(tmp_path), "device": "cpu"})
    with pytest.raises(mpic.MPICError, match="no app"):
        run.build(config)
    assert engine.closed
    assert_free(tmp_path)
