"""Deleted, expired and damaged uploads; a full disk and a restart lose nothing."""

import contextlib
import os
import socket

import pytest
from library_tools import FullDisk, encoded, everything, make_chunk, picture, text_key

from mpic.errors import CorruptFile, FileNotFound, IntegrityError, StorageFull, UnknownHandle
from mpic.library import upkeep
from mpic.library.folder.layout import sidecar_of

# Deletion and expiry


def test_deleting_removes_everything_of_it(library):
    file = library.files.add("ann", b"some text", "f", handle="H")
    for key in (text_key(), text_key(sink=4), text_key(model="b2" * 32)):
        library.store.save(make_chunk(key))
    removed = library.files.delete("ann", file.id)
    assert removed.file == file and removed.chunks[0].key == file.key and removed.chunks[0].owner == "ann"
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
    assert library.files.delete("ann", a.id).chunks == ()
    assert library.store.open(text_key())
    assert library.files.delete("ann", b.id).chunks
    assert library.store.open(text_key()) is None
    assert library.store.open(text_key(owner="bob"))


def test_expired_files_are_invisible_at_once_and_collected_later(library, clock):
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
    assert removed.file.id == file.id and removed.chunks[0].key == file.key
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
    library = open_library(filesystem=disk)
    old = library.files.add("ann", b"old text", "f", handle="OLD")
    disk.left = 100
    with pytest.raises(StorageFull):
        library.files.add("ann", b"x" * 200, "f", handle="NEW")
    assert library.files.page("ann").files == [old]
    assert library.files.content("ann", old.id) == b"old text"
    assert len(everything(library.root)) == 1
    disk.left = None
    library.files.add("ann", b"x" * 200, "f", handle="NEW")


# No regular file in the place of an original


def _fifo(path):
    os.mkfifo(path)


def _socket(path):
    with (
        socket.socket(socket.AF_UNIX) as made,
        contextlib.chdir(path.parent),
    ):  # a socket's path may not be long
        made.bind(path.name)


IN_PLACE = {
    "pipe": _fifo,
    "socket": _socket,
    "folder": lambda path: path.mkdir(),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("what", IN_PLACE)
def test_what_is_no_file_in_the_place_of_an_original_is_never_waited_for(open_library, what):
    library = open_library(check=False)
    file = library.files.add("ann", b"some text", "f", handle="H")
    sidecar = sidecar_of(file.path)
    for path in (file.path, sidecar):
        path.unlink()
        IN_PLACE[what](path)
    for call in (library.files.content, library.files.open, library.files.chunk):
        with pytest.raises(CorruptFile, match=f"original of {file.id} is lost"):
            call("ann", file.id)
    assert library.files.page("ann").files == [file]
    problems = upkeep.check(library)
    assert {problem.path for problem in problems} > {
        str(path.relative_to(library.root)) for path in (file.path, sidecar)
    }
    library.close()
    again = open_library(check=False)
    assert again.recovered["lost_files"] == 1 and again.files.get("ann", file.id).state == "failed"
    again.close()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("reached", ["before the row", "before the old file is removed"])
def test_a_replace_that_was_killed_counts_for_nothing_after_the_next_start(
    open_library, clock, monkeypatch, reached
):
    library = open_library(user_bytes=100)
    old = library.files.add("ann", b"x" * 40, "f", handle="H")
    clock.now += 1

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        if reached == "before the row":
            patch.setattr(library.files._rows, "insert", die)
            patch.setattr(library.files._originals, "remove", lambda paths: None)
        else:
            patch.setattr(library.files, "_remove", die)
        library.files.add("ann", b"y" * 50, "f", handle="H", replace=True)
    library.close()
    library = open_library(user_bytes=100)
    library.files.collect_expired()
    [left] = library.files.page("ann").files
    assert left.handle == "H" and (left.id == old.id) == (reached == "before the row")
    assert [row.bytes for row in library.usage()] == [left.bytes]
