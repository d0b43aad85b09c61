"""Uploads on an event loop: it is never blocked, and a client that goes away leaves nothing."""

import asyncio
from unittest.mock import Mock

import pytest
from library_tools import Upload, everything
from server_helpers import wait_until

from mpic.errors import DatabaseFailed, HandleTaken, StorageQuotaExceeded


async def test_async_uploads_and_downloads(library):
    data = b"word " * 500_000
    file, outcome, removed, compile = await library.files.upload("ann", Upload(data), "t.txt", handle="H")
    assert (outcome, removed, compile) == ("created", (), True)
    assert file == library.files.by_handle("ann", "H") and file.bytes == len(data)
    assert library.files.content("ann", file.id) == data


async def test_a_client_that_goes_away_leaves_nothing(library):
    reached = asyncio.Event()

    async def before():
        if reached.is_set():
            await asyncio.sleep(60)
        reached.set()

    task = asyncio.create_task(library.files.upload("ann", Upload(b"x" * 3_000_000, before), "t", handle="H"))
    await reached.wait()
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: not everything(library.root))
    assert not library.files.page("ann").files
    await library.files.upload("ann", Upload(b"text"), "t", handle="H")


async def test_refusals_come_before_the_first_byte(open_library):
    library = open_library(user_files=1)
    await library.files.upload("ann", Upload(b"text"), "t", handle="H")

    async def never():
        pytest.fail("read")

    with pytest.raises(StorageQuotaExceeded):
        await library.files.upload("ann", Upload(b"text", never), "t", handle="other")
    with pytest.raises(HandleTaken):
        await library.files.upload("ann", Upload(b"words"), "t", handle="h")
    again = await library.files.upload("ann", Upload(b"text"), "t", handle="h")
    assert again.outcome == "unchanged"


@pytest.mark.parametrize(("state", "compile"), [("compiling", True), ("failed", True), ("ready", False)])
async def test_the_same_upload_again_is_compiled_unless_it_is_ready(library, state, compile):
    first = await library.files.upload("ann", Upload(b"text"), "t", handle="H")
    library.files.set_state("ann", first.file.id, state)
    again = await library.files.upload("ann", Upload(b"text"), "t", handle="H")
    assert (again.outcome, again.compile, again.file.id) == ("unchanged", compile, first.file.id)


async def test_an_upload_whose_predecessor_cannot_be_removed_is_stored_and_the_other_is_collected_later(
    library, monkeypatch, caplog
):
    old = await library.files.upload("ann", Upload(b"old text"), "t", handle="H")
    with monkeypatch.context() as patch:
        patch.setattr(library.store, "drop", Mock(side_effect=DatabaseFailed("for now")))
        new = await library.files.upload("ann", Upload(b"new text"), "t", handle="H", replace=True)
    assert (new.outcome, new.removed, new.compile) == ("replaced", (), True)
    assert old.file.id in caplog.text
    assert library.files.page("ann").files == [library.files.by_handle("ann", "H")] == [new.file]
    (removed,) = library.files.collect_expired()
    assert removed.file.id == old.file.id and [chunk.key for chunk in removed.chunks] == [old.file.key]
    assert len(everything(library.root)) == 1
