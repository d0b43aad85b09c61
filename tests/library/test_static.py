"""The static library: uploads, handles, expiry, and what one user can see of another."""

import asyncio
import io
import threading
import time

import numpy as np
import pytest
from library_tools import FullDisk, Upload, encoded, everything, make_chunk, picture, text_key

from mpic.errors import (
    BadRequest,
    CorruptFile,
    FileNotFound,
    HandleTaken,
    IntegrityError,
    InvalidImage,
    InvalidText,
    InvalidUpload,
    StorageFull,
    TooLarge,
    Unavailable,
    UnknownHandle,
)
from mpic.kv.chunk import ChunkKey
from mpic.library import Library


def test_an_image_comes_back_as_its_user_knows_it(library, clock):
    file = library.files.add("ann", encoded(), "tower.png", handle="EIFFEL2025", expires_after=60)
    assert file.id.startswith("file-") and len(file.id) == 29
    assert (file.kind, file.filename, file.handle) == ("image", "tower.png", "EIFFEL2025")
    assert (file.bytes, file.created_at, file.expires_at) == (len(encoded()), clock.now, clock.now + 60)
    assert (file.state, file.status, file.tokens) == ("compiling", "uploaded", None)
    assert library.files.get("ann", file.id) == library.files.by_handle("ann", "eiffel2025") == file
    assert library.files.content("ann", file.id) == encoded()
    chunk = library.files.chunk("ann", file)
    assert chunk.key == ChunkKey.of_image(picture()) == file.key
    assert (chunk.owner, chunk.label, chunk.file_id) == ("ann", "EIFFEL2025", file.id)
    assert np.array_equal(chunk.load_image(), picture())


def test_a_text_comes_back_as_its_user_knows_it(library):
    file = library.files.add("ann", "\ufeffGrüße".encode(), "t.txt")
    chunk = library.files.chunk("ann", file.id)
    assert file.kind == "text" and chunk.key == ChunkKey.of_text("Grüße")
    assert chunk.token_ids == tuple("Grüße".encode()) and chunk.label == "t.txt"


def test_any_source_will_do(library, tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"same text")
    sources = [b"same text", path, io.BytesIO(b"same text"), iter([b"same ", b"", b"text"])]
    assert len({library.files.add("ann", source, "t").key for source in sources}) == 1


def test_a_text_is_tokenized_once_a_tokenizer(library):
    file = library.files.add("ann", b"abc", "t")
    seen = []

    def tokenize(text):
        seen.append(text)
        return (1, 2)

    for _ in range(3):
        assert library.files.chunk("ann", file, tokenize).token_ids == (1, 2)
    assert seen == ["abc"]
    assert library.files.chunk("ann", file).token_ids == tuple(b"abc")


def test_inline_content_has_the_identity_of_the_same_upload(library):
    image = library.files.add("ann", encoded(), "a.png")
    text = library.files.add("ann", b"text", "a.txt")
    inline = library.files.inline_image("ann", encoded(format="BMP"))
    assert inline.key == image.key and inline.file_id is None
    assert np.array_equal(inline.load_image(), picture())
    assert library.files.inline_text("ann", "text", "x").key == text.key
    assert library.files.inline_text("ann", "text").token_ids == tuple(b"text")
    for bad in ("half \ud800", "", "a\0b"):
        with pytest.raises(InvalidText):
            library.files.inline_text("ann", bad)
    with pytest.raises(InvalidImage):
        library.files.inline_image("ann", b"no image")


def test_what_the_client_says_a_file_is_does_not_matter(library):
    assert library.files.add("ann", encoded(), "notes.txt").kind == "image"
    assert library.files.add("ann", b"text", "photo.png").kind == "text"
    odd = library.files.add("ann", b"text", "../../etc/\x00pass\nwd" + "x" * 999)
    assert odd.filename.startswith("../../etc/passwd") and len(odd.filename) == 255
    assert library.files.add("ann", b"text", "").filename == "upload"
    assert all(name.startswith("files/") and name.count("/") == 2 for name in everything(library.root))


@pytest.mark.parametrize(
    "data, error",
    [
        (b"%PDF-1.4 ...", InvalidUpload),
        (b"", InvalidText),
        (b"\xff\xfe\x00", InvalidText),
        (encoded()[:60], InvalidImage),
        (b"x" * 2000, TooLarge),
    ],
)
def test_a_refused_upload_leaves_nothing(open_library, data, error):
    library = open_library(upload_bytes=1500)
    with pytest.raises(error):
        library.files.add("ann", data, "f", handle="H")
    assert not everything(library.root) and not library.files.page("ann").files
    library.files.add("ann", b"good", "f", handle="H")


def test_the_limit_stops_an_endless_upload(open_library):
    library = open_library(upload_bytes=10_000)

    def endless():
        for _ in range(20):
            yield b"x" * 1000
        pytest.fail("read on after the limit")

    with pytest.raises(TooLarge):
        library.files.add("ann", endless(), "f")


@pytest.mark.parametrize("handle", ["", " ", "a b", "a/b", "é", "x" * 65, "a\n", "#A"])
def test_malformed_handles_are_refused(library, handle):
    with pytest.raises(BadRequest, match="handle"):
        library.files.add("ann", b"text", "f", handle=handle)


@pytest.mark.parametrize("seconds", [0, -1, 10**12])
def test_impossible_expiries_are_refused(library, seconds):
    with pytest.raises(BadRequest, match="expires_after"):
        library.files.add("ann", b"text", "f", expires_after=seconds)


def test_handles_are_unique_per_user_ignoring_case(library):
    library.files.add("ann", b"one", "f", handle="Tower_1.a-b")
    with pytest.raises(HandleTaken):
        library.files.add("ann", b"two", "f", handle="TOWER_1.A-B")
    assert library.files.add("bob", b"two", "f", handle="tower_1.a-b")
    assert len(library.files.page("ann").files) == 1


def test_of_two_uploads_at_once_one_gets_the_handle(library):
    start, results = threading.Barrier(4), []

    def add(i):
        start.wait()
        try:
            results.append(library.files.add("ann", f"text {i}".encode(), "f", handle="H").id)
        except HandleTaken:
            results.append(None)

    threads = [threading.Thread(target=add, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and results.count(None) == 3
    assert len(everything(library.root)) == 1


def test_pages_list_all_files_once(library):
    ids = [library.files.add("ann", f"text {i}".encode(), "f").id for i in range(5)]
    image = library.files.add("ann", encoded(), "i").id
    library.files.add("bob", b"text", "f")
    assert [f.id for f in library.files.page("ann", order="asc").files] == [*ids, image]
    assert [f.id for f in library.files.page("ann", kind="image").files] == [image]
    seen, after = [], None
    while True:
        page = library.files.page("ann", after=after, limit=2)
        seen += [f.id for f in page.files]
        if not page.has_more:
            break
        after = seen[-1]
    assert seen == [image, *reversed(ids)]
    for wrong in ({"order": "up"}, {"limit": 0}):
        with pytest.raises(BadRequest):
            library.files.page("ann", **wrong)
    with pytest.raises(FileNotFound):
        library.files.page("bob", after=ids[0])


def test_states_are_recorded_and_survive(open_library):
    library = open_library()
    ready, failed, waiting = (library.files.add("ann", f"{i}".encode(), "f") for i in range(3))
    library.files.set_state("ann", ready.id, "ready", tokens=7)
    library.files.set_state("ann", failed.id, "failed", error="no")
    library.files.set_state("bob", waiting.id, "failed", error="not his")
    library.close()
    library = open_library()
    assert library.files.get("ann", ready.id).tokens == 7
    assert library.files.get("ann", ready.id).status == "processed"
    assert (library.files.get("ann", failed.id).status, library.files.get("ann", failed.id).error) == (
        "error",
        "no",
    )
    assert library.files.pending() == [waiting]


# Isolation: the same user hits, another does not


def test_another_users_file_does_not_exist(library):
    file = library.files.add("ann", b"secret", "f", handle="H")
    assert library.files.get("ann", file.id) and library.files.by_handle("ann", "H")
    for user in ("bob", "ANN", "ann ", "a%", ""):
        for call in (library.files.get, library.files.content, library.files.delete, library.files.chunk):
            with pytest.raises(FileNotFound):
                call(user, file.id)
        with pytest.raises(FileNotFound):
            library.files.chunk(user, file)
        with pytest.raises(UnknownHandle):
            library.files.by_handle(user, "H")
        assert library.files.page(user).files == []
    assert library.files.content("ann", file.id) == b"secret"


def test_errors_do_not_tell_whether_a_file_exists(library):
    file = library.files.add("ann", b"secret", "f", handle="H")
    gone = library.files.delete("ann", library.files.add("ann", b"other", "f").id).file

    def message(user, file_id):
        with pytest.raises(FileNotFound) as error:
            library.files.get(user, file_id)
        return error.value.message.replace(file_id, "ID")

    assert message("bob", file.id) == message("bob", gone.id) == message("ann", gone.id)


def test_equal_content_is_stored_once_a_user(library):
    a, b = (library.files.add("ann", b"some text", name) for name in "ab")
    c = library.files.add("bob", b"some text", "c")
    assert a.id != b.id and a.key == b.key == c.key
    library.store.save(make_chunk(text_key(owner="ann")))
    assert library.store.open(text_key(owner="ann"))
    assert library.store.open(text_key(owner="bob")) is None
    assert library.store.missing_reason(text_key(owner="bob")) == "new"
    library.store.save(make_chunk(text_key(owner="bob")))
    names = everything(library.root)
    assert len([n for n in names if n.startswith("kv/")]) == 2
    assert len([n for n in names if n.startswith("files/")]) == 3


# Deletion and expiry


def test_deleting_removes_everything_of_it(library):
    file = library.files.add("ann", b"some text", "f", handle="H")
    for key in (text_key(), text_key(sink=4), text_key(model="b2" * 32)):
        library.store.save(make_chunk(key))
    removed = library.files.delete("ann", file.id)
    assert removed.file == file and removed.chunk.key == file.key and removed.chunk.owner == "ann"
    assert not everything(library.root)
    assert library.store.open(text_key()) is None
    assert library.store.missing_reason(text_key()) == "new"
    with pytest.raises(FileNotFound):
        library.files.delete("ann", file.id)
    with pytest.raises(UnknownHandle):
        library.files.by_handle("ann", "H")
    library.files.add("ann", b"some text", "f", handle="H")


def test_the_compiled_chunk_stays_while_another_file_holds_its_content(library):
    a, b = (library.files.add("ann", b"some text", name) for name in "ab")
    library.files.add("bob", b"some text", "c")
    for owner in ("ann", "bob"):
        library.store.save(make_chunk(text_key(owner=owner)))
    assert library.files.delete("ann", a.id).chunk is None
    assert library.store.open(text_key())
    assert library.files.delete("ann", b.id).chunk is not None
    assert library.store.open(text_key()) is None
    assert library.store.open(text_key(owner="bob"))


def test_what_has_expired_is_invisible_at_once_and_collected_later(library, clock):
    file = library.files.add("ann", b"some text", "f", handle="H", expires_after=10)
    kept = library.files.add("ann", b"kept", "f", expires_after=11)
    library.store.save(make_chunk())
    clock.now += 9.5
    assert library.files.get("ann", file.id) and library.files.collect_expired() == []
    clock.now += 0.5
    for call in (library.files.get, library.files.content, library.files.chunk, library.files.delete):
        with pytest.raises(FileNotFound):
            call("ann", file.id)
    with pytest.raises(UnknownHandle):
        library.files.by_handle("ann", "H")
    assert library.files.page("ann").files == library.files.pending() == [kept]
    again = library.files.add("ann", b"another", "f", handle="h")
    (removed,) = library.files.collect_expired()
    assert removed.file.id == file.id and removed.chunk.key == file.key
    assert library.store.open(text_key()) is None
    assert library.store.missing_reason(text_key()) == "expired"
    assert library.files.by_handle("ann", "H") == again
    assert len(everything(library.root)) == 2


# Damage, full disks, restarts


def test_a_damaged_original_is_not_served(open_library):
    library = open_library(check=False)
    image, text = library.files.add("ann", encoded(), "i"), library.files.add("ann", b"text", "t")
    image.path.write_bytes(encoded(picture(1)))
    text.path.unlink()
    for file in (image, text):
        with pytest.raises(CorruptFile):
            library.files.content("ann", file.id)
    with pytest.raises(CorruptFile):
        library.files.chunk("ann", image).load_image()
    with pytest.raises(IntegrityError):
        library.check()
    library.close()
    library = open_library(check=False)
    assert library.recovered["lost_files"] == 1
    assert library.files.get("ann", text.id).state == "failed"


def test_a_full_disk_fails_the_upload_and_nothing_else(open_library):
    disk = FullDisk()
    library = open_library(files=disk)
    old = library.files.add("ann", b"old text", "f", handle="OLD")
    disk.left = 100
    with pytest.raises(StorageFull):
        library.files.add("ann", b"x" * 200, "f", handle="NEW")
    assert library.files.page("ann").files == [old]
    assert library.files.content("ann", old.id) == b"old text"
    assert len(everything(library.root)) == 1
    disk.left = None
    library.files.add("ann", b"x" * 200, "f", handle="NEW")


def test_everything_is_there_after_a_restart(open_library):
    library = open_library()
    files = [
        library.files.add(
            "ann", encoded(picture(i)), f"{i}.png", handle=f"H{i}", expires_after=i * 100 or None
        )
        for i in range(4)
    ]
    library.close()
    library = open_library()
    assert library.recovered == {"missing_chunks": 0, "lost_files": 0, "orphans": 0}
    assert library.files.page("ann", order="asc").files == files
    for i, file in enumerate(files):
        assert np.array_equal(library.files.chunk("ann", file).load_image(), picture(i))


def test_one_process_at_a_time(open_library):
    library = open_library()
    with pytest.raises(Unavailable):
        Library.open(library.root)
    library.close()
    library.close()
    open_library()


# Async


async def test_async_uploads_and_downloads(library):
    data = b"word " * 500_000
    file = await library.files.upload("ann", Upload(data), "t.txt", handle="H")
    assert file == library.files.by_handle("ann", "H") and file.bytes == len(data)
    assert await library.files.download("ann", file.id) == data


async def test_the_event_loop_is_not_blocked_by_a_slow_disk(open_library):
    class Slow(FullDisk):
        def write(self, fd, data):
            time.sleep(0.3)
            return super().write(fd, data)

        def sync(self, fd):
            time.sleep(0.3)
            super().sync(fd)

    library = open_library(files=Slow())
    worst, done = 0.0, False

    async def heartbeat():
        nonlocal worst
        while not done:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            worst = max(worst, time.perf_counter() - before)

    beat = asyncio.create_task(heartbeat())
    await library.files.upload("ann", Upload(b"text"), "t")
    done = True
    await beat
    assert worst < 0.2


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
    for _ in range(100):
        if not everything(library.root):
            break
        await asyncio.sleep(0.02)
    assert not everything(library.root) and not library.files.page("ann").files
    await library.files.upload("ann", Upload(b"text"), "t", handle="H")


async def test_refusals_come_before_the_first_byte(library):
    await library.files.upload("ann", Upload(b"text"), "t", handle="H")

    async def never():
        pytest.fail("read")

    with pytest.raises(HandleTaken):
        await library.files.upload("ann", Upload(b"text", never), "t", handle="h")


def test_metadata_is_kept_and_checked(open_library):
    library = open_library()
    file = library.files.add("ann", b"text", "f", metadata={"page": 3, "draft": True, "by": "Bö"})
    library.close()
    library = open_library()
    assert library.files.get("ann", file.id).metadata == {"page": 3, "draft": True, "by": "Bö"}
    assert library.files.get("ann", library.files.add("ann", b"text", "f").id).metadata == {}
    for bad in ({"a": None}, {"a": {}}, {1: "a"}, {"a": float("inf")}, {"a": 1 << 64}):
        with pytest.raises(BadRequest, match="metadata"):
            library.files.add("ann", b"text", "f", metadata=bad)
