"""Uploads: handles, pages, states. ``test_isolation.py`` tests that users do not see each other's."""

import errno
import io
import os
import threading
import tracemalloc
import zipfile
from functools import partial

import numpy as np
import pytest
from document_kit import docx
from library_tools import encoded, everything, lose_catalogue, picture
from threads_kit import in_threads
from video_kit import animation, pictures

from mpic.durable import FileSystem
from mpic.errors import (
    BadRequest,
    CorruptFile,
    FileNotFound,
    HandleTaken,
    InvalidImage,
    InvalidText,
    InvalidUpload,
    StorageFailed,
    StorageQuotaExceeded,
    TooLarge,
)
from mpic.imaging.stored_file import PIECE
from mpic.kv.chunk import ChunkKey
from mpic.library import thumbnail
from mpic.library.intake.checks import identify
from mpic.library.rebuild import recover


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


async def test_how_a_text_was_written_is_remembered_for_as_long_as_its_original(open_library):
    words, library = "Привет, как дела? Сегодня хорошая погода, и мы пошли гулять.", open_library()
    file = library.files.add("ann", words.encode("utf-32"), "t.txt")
    reference = await library.references.add(words.encode("utf-16"), "t.txt", title="T")
    assert (file.format, reference.format) == ("utf_32", "utf_16")
    library.close()
    lose_catalogue(library.root)
    recover(library.root)
    library = open_library()
    assert library.files.get("ann", file.id) == file and library.references.get(reference.id) == reference
    for chunk in (library.files.chunk("ann", file), library.references.chunk(reference)):
        assert chunk.key == ChunkKey.of_text(words) and chunk.token_ids == tuple(words.encode())


def test_every_kind_of_source_is_accepted(library, tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"same text")
    sources = [b"same text", path, io.BytesIO(b"same text"), iter([b"same ", b"", b"text"])]
    assert len({library.files.add("ann", source, "t").key for source in sources}) == 1


def test_a_text_is_tokenized_once_for_each_tokenizer(library):
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


def test_the_clients_type_of_a_file_is_ignored(library):
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


@pytest.mark.parametrize("handle", ["", " ", "a b", "a/b", ".", "..", "-", "x" * 65, "a\n", "#A"])
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


def test_the_same_bytes_under_the_same_handle_are_no_second_file(library, clock):
    first = library.files.add("ann", b"one", "f", handle="Tower", expires_after=100)
    clock.now += 50
    again = library.files.add("ann", b"one", "other name", handle="TOWER", expires_after=100)
    assert (again.id, again.filename) == (first.id, "f")
    assert again.expires_at == first.expires_at + 50  # the lifetime starts again
    assert library.files.add("ann", b"one", "f", handle="tower").expires_at is None
    assert library.files.add("bob", b"one", "f", handle="tower").id != first.id
    assert library.files.add("ann", b"one", "f").id != first.id  # without a handle there is nothing to keep
    assert len(library.files.page("ann").files) == 2


def test_an_upload_replaces_another_file_of_its_handle_only_when_told_to(library):
    old = library.files.add("ann", b"one", "f", handle="H")
    with pytest.raises(HandleTaken):
        library.files.add("ann", b"two", "f", handle="h")
    assert library.files.content("ann", old.id) == b"one"
    new = library.files.add("ann", b"two", "f", handle="h", replace=True)
    assert library.files.by_handle("ann", "H").id == new.id != old.id
    assert library.files.content("ann", new.id) == b"two"
    with pytest.raises(FileNotFound):
        library.files.get("ann", old.id)
    assert not old.path.exists()
    with pytest.raises(BadRequest, match="handle"):
        library.files.add("ann", b"two", "f", replace=True)


def test_replacing_needs_no_room_for_two_files(tmp_path):
    from mpic.library import Library, Limits

    with Library.open(tmp_path / "small", Limits(user_files=1)) as library:
        library.files.add("ann", b"one", "f", handle="H")
        library.files.add("ann", b"one", "f", handle="H")
        library.files.add("ann", b"two", "f", handle="H", replace=True)
        with pytest.raises(StorageQuotaExceeded):
            library.files.add("ann", b"three", "f", handle="OTHER")


def test_the_same_bytes_take_the_place_of_a_damaged_original(library):
    old = library.files.add("ann", b"one", "f", handle="H")
    old.path.write_bytes(b"ono")
    new = library.files.add("ann", b"one", "f", handle="H")
    assert library.files.content("ann", new.id) == b"one"
    assert [f.id for f in library.files.page("ann").files] == [new.id]


def test_a_file_that_could_not_be_compiled_is_compiled_again_when_it_is_uploaded_again(library):
    file = library.files.add("ann", b"one", "f", handle="H")
    library.files.set_state("ann", file.id, "failed", error="no memory")
    again = library.files.add("ann", b"one", "f", handle="H")
    assert (again.id, again.state, again.error) == (file.id, "compiling", None)
    assert [f.id for f in library.files.pending()] == [file.id]


def test_of_concurrent_uploads_of_the_same_bytes_one_file_is_left(library):
    start = threading.Barrier(4)

    def add(i):
        start.wait()
        return library.files.add("ann", b"same", "f", handle="H").id

    assert len(set(in_threads(add, range(4)))) == 1
    assert len(library.files.page("ann").files) == len(everything(library.root)) == 1


def test_a_file_that_is_to_be_replaced_stays_if_it_was_stored_meanwhile(library):
    publish, first = library.files._originals.publish, []

    def raced(*args):  # another request uploads the same while this one is received
        library.files._originals.publish = publish
        first.append(library.files.add("ann", b"same text", "t", handle="H", replace=True))
        publish(*args)

    library.files._originals.publish = raced
    again = library.files.add("ann", b"same text", "t", handle="H", replace=True)
    assert again.id == first[0].id == library.files.by_handle("ann", "H").id
    assert len(library.files.page("ann").files) == 1


def test_one_of_two_concurrent_uploads_gets_the_handle(library):
    start = threading.Barrier(4)

    def add(i):
        start.wait()
        try:
            return library.files.add("ann", f"text {i}".encode(), "f", handle="H").id
        except HandleTaken:
            return None

    assert in_threads(add, range(4)).count(None) == 3
    assert len(everything(library.root)) == 1


def test_pages_list_all_files_once(library):
    ids = [library.files.add("ann", f"text {i}".encode(), "f").id for i in range(5)]
    image = library.files.add("ann", encoded(), "i").id
    library.files.add("bob", b"text", "f")
    assert [f.id for f in library.files.page("ann", order="asc").files] == [*ids, image]
    assert [f.id for f in library.files.page("ann", kinds=("image",)).files] == [image]
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
    ready, failed = (library.files.get("ann", file.id) for file in (ready, failed))
    assert (ready.tokens, ready.status) == (7, "processed")
    assert (failed.status, failed.error) == ("error", "no")
    assert library.files.pending() == [waiting]


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


def test_what_keeps_one_users_expired_files_keeps_nobody_elses(library, clock, monkeypatch):
    for user in ("ann", "bob"):
        library.files.add(user, b"some text", "t.txt", expires_after=10)
    clock.now += 11
    remove = library.files._remove

    def failing(files, state):
        if any(file.owner == "ann" for file in files):
            raise OSError(5, "Input/output error")
        return remove(files, state)

    with monkeypatch.context() as patch:
        patch.setattr(library.files, "_remove", failing)
        assert [removed.file.owner for removed in library.files.collect_expired()] == ["bob"]
        with pytest.raises(OSError, match="Input/output"):
            library.files.collect_expired()
    assert [removed.file.owner for removed in library.files.collect_expired()] == ["ann"]


class Pieces(FileSystem):
    """Records the most bytes that are read at a time, and fails while it is ``broken``."""

    most, broken = 0, False

    def read(self, fd, into, offset):
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.most = max(self.most, len(into))
        return super().read(fd, into, offset)


def with_attachment(document, size):
    """A document of Word with a file of ``size`` bytes inside."""
    whole = io.BytesIO(document)
    with zipfile.ZipFile(whole, "a") as archive:
        archive.writestr("word/media/film.bin", bytes(size))
    return whole.getvalue()


def use(library, file):
    """Do what linking and looking at a file do."""
    chunk = library.files.chunk("ann", file)
    if file.kind == "image":
        with library.files.open("ann", file.id) as original:
            thumbnail(original.content(), side=8)
        return chunk.load_image()
    return chunk.load_clip(lambda facts: (0,)) if file.kind == "video" else chunk.token_ids


SIZE = 64 << 20
LARGE = {
    "jpeg": lambda: encoded(format="JPEG").ljust(SIZE, b"\0"),
    "png": lambda: encoded().ljust(SIZE, b"\0"),
    "gif": lambda: animation(pictures(1, 3)).ljust(SIZE, b"\0"),
    "docx": lambda: with_attachment(docx(["words"]), SIZE),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_file_is_never_as_a_whole_in_this_process(open_library, name):
    disk, data = Pieces(), LARGE[name]()
    library = open_library(filesystem=disk, upload_bytes=2 * SIZE)
    library.files.no_clips = None
    tracemalloc.start()
    file = library.files.add("ann", data, name)
    use(library, file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert file.bytes == len(data) and disk.most <= PIECE and peak < 4 << 20


def test_an_original_that_is_asked_for_is_in_memory_once(library):
    size = 8 << 20
    file = library.files.add("ann", encoded().ljust(size, b"\0"), "a.png")
    tracemalloc.start()
    assert len(library.files.content("ann", file.id)) == size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * size


def test_an_upload_of_which_bytes_are_lost_before_it_is_looked_at_is_not_accepted(library):
    with library.files._originals.incoming(100) as incoming:
        incoming.write(b"some text")
        os.truncate(incoming.path, 4)
        with pytest.raises(StorageFailed, match="4 of 9 bytes"):
            identify(incoming, library.limits)


def test_an_original_that_the_disk_does_not_give_is_no_invalid_image(open_library, monkeypatch):
    disk = Pieces()
    library = open_library(filesystem=disk)
    file = library.files.add("ann", encoded().ljust(8 << 20, b"\0"), "a.png")
    disk.broken = True
    for read in (library.files.chunk("ann", file).load_image, partial(library.files.content, "ann", file.id)):
        with pytest.raises(StorageFailed, match="Input/output error"):
            read()
    disk.broken = False
    with open("/proc/self/mem", "rb") as unreadable, monkeypatch.context() as patch:
        patch.setattr(FileSystem, "lend", lambda *_: unreadable.fileno())
        with pytest.raises(StorageFailed, match="Input/output error"):
            library.files.chunk("ann", file).load_image()
    assert library.files.chunk("ann", file).load_image().size == picture().size
    with open(file.path, "r+b") as original:
        original.truncate(100)
    with pytest.raises(CorruptFile):
        library.files.chunk("ann", file).load_image()
