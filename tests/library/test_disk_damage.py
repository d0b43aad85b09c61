"""The disk tier when files are bad or gone, the disk is full or the process is killed: intact chunks are still
found."""

from unittest.mock import patch

import pytest
import torch
from library_tools import (
    FullDisk,
    Unreadable,
    chunks,
    everything,
    flip,
    make_chunk,
    read,
    read_in_parts,
    saved,
    text_key,
)

from mpic.durable import FileSystem
from mpic.errors import CorruptFile, IntegrityError, NotFound, StorageFull
from mpic.kv.chunk import ChunkKV
from mpic.kv.file import ChunkFile


def test_a_chunk_that_is_gone_or_bad_when_it_is_read_raises(library):
    gone, bad = saved(library, *chunks(2))
    found = library.store.find([gone.key, bad.key])
    library.store.path(gone.key).unlink()
    flip(library.store.path(bad.key), 4100)
    with pytest.raises(NotFound):
        read(found[gone.key], gone.kv)
    with pytest.raises(CorruptFile):
        read(found[bad.key], bad.kv)
    assert library.store.find([gone.key, bad.key]) == {}
    assert library.store.missing_reason(bad.key) == "corrupt"


@pytest.mark.parametrize("at", [0, 50, 4096, -1])
def test_a_bad_file_is_removed_counted_and_compiled_again(library, at):
    chunk = saved(library, make_chunk(image=True))
    flip(library.store.path(chunk.key), at)
    stored = library.store.open(chunk.key)
    if stored is not None:
        with pytest.raises(CorruptFile):
            read(stored, chunk.kv)
    assert library.store.open(chunk.key) is None
    assert library.store.missing_reason(chunk.key) == "corrupt"
    assert library.store.stats()["corrupt"] == 1
    assert not everything(library.root)
    library.store.save(chunk)
    assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


def test_a_file_of_another_model_is_removed(library):
    ours, theirs = saved(library, make_chunk(), make_chunk(text_key(model="b2" * 32)))
    library.store.path(ours.key).write_bytes(library.store.path(theirs.key).read_bytes())
    assert library.store.open(ours.key) is None
    assert library.store.missing_reason(ours.key) == "corrupt"
    assert library.store.open(theirs.key)


def test_a_file_that_vanished_is_compiled_again(library):
    chunk = saved(library, make_chunk())
    library.store.path(chunk.key).unlink()
    assert library.store.open(chunk.key) is None
    assert library.store.missing_reason(chunk.key) == "corrupt"
    library.store.save(chunk)
    assert library.store.open(chunk.key)


def test_a_file_that_cannot_be_opened_now_stays_ready(open_library):
    files = FileSystem()
    library = open_library(filesystem=files)
    chunk = saved(library, make_chunk())
    with patch.object(files, "open", side_effect=OSError(24, "too many open files")):
        assert library.store.open(chunk.key) is None
        assert library.store.stats()["unreadable"] == 1
    assert library.store.open(chunk.key)


def test_a_bad_or_lost_file_on_a_full_disk_is_only_not_found(library):
    """Its row cannot be changed then, and the request compiles the chunk for itself."""
    gone, bad = saved(library, *chunks(2))
    library.store.path(gone.key).unlink()
    flip(library.store.path(bad.key), 0)
    with patch.object(library.catalog, "write", side_effect=StorageFull("the disk is full")):
        assert library.store.open(gone.key) is None and library.store.open(bad.key) is None
        assert len(library.store.find([gone.key, bad.key])) == 2
    assert library.store.open(gone.key) is None and library.store.open(bad.key) is None
    assert library.store.find([gone.key, bad.key]) == {}


@pytest.mark.parametrize("how", [read, read_in_parts])
def test_a_file_that_cannot_be_read_now_stays_and_is_replaced_by_the_next_save(open_library, how):
    disk = Unreadable(begin=4096)
    library = open_library(filesystem=disk)
    chunk = saved(library, make_chunk())
    path = library.store.path(chunk.key)
    before = path.stat().st_ino
    stored = library.store.find([chunk.key])[chunk.key]
    disk.broken = True
    with pytest.raises(OSError, match="Input/output"):
        how(stored, chunk.kv)
    assert library.store.open(chunk.key) is None  # its inputs cannot be read either
    stats = library.store.stats()
    assert (stats["unreadable"], stats["corrupt"], stats["chunks"]) == (2, 0, 1)
    assert path.stat().st_ino == before and len(everything(library.root)) == 1
    disk.broken = False
    held = path.open("rb")  # so that its number is not used again
    library.store.save(chunk)
    assert path.stat().st_ino != before and library.store.stats()["saved"] == 2
    held.close()
    assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)
    library.store.save(chunk)
    assert library.store.stats()["saved"] == 2


def test_exhausted_memory_leaves_a_file_as_it_is(library):
    chunk = saved(library, make_chunk())
    with patch.object(ChunkFile, "_read_inputs", side_effect=MemoryError()):
        assert library.store.open(chunk.key) is None
    library.store.save(chunk)
    stats = library.store.stats()
    assert (stats["unreadable"], stats["corrupt"], stats["saved"]) == (1, 0, 1)
    assert library.store.open(chunk.key)


def test_a_chunk_without_a_row_is_listed_again_by_a_start_that_can_read_its_header(open_library):
    disk = Unreadable()
    library = open_library(filesystem=disk)
    chunk = saved(library, make_chunk())
    with library.catalog.write() as db:
        db.execute("DELETE FROM chunks")
    library.close()
    for broken in (True, False):
        disk.broken = broken
        library = open_library(filesystem=disk)
        assert (library.recovered["unlisted_files"], library.recovered["found_chunks"]) == (
            broken,
            not broken,
        )
        library.close()
    library = open_library(filesystem=disk)
    assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


def test_starting_up_makes_files_and_rows_agree(open_library):
    library = open_library(check=False)
    gone, cut, good = saved(library, *chunks(3))
    library.store.path(gone.key).unlink()
    with library.store.path(cut.key).open("r+b") as file:
        file.truncate(100)
    folder = library.store.path(good.key).parent
    (folder / f".{'0' * 64}.safetensors.{'a' * 12}.tmp").write_bytes(b"half")
    (folder / f"{'0' * 64}.safetensors").write_bytes(b"no chunk")
    (folder / "notes.txt").write_bytes(b"somebody's")
    with pytest.raises(IntegrityError):
        library.check()
    library.close()
    library = open_library()
    done = {what: count for what, count in library.recovered.items() if count}
    assert done == {"missing_chunks": 2, "leftovers": 2, "unlisted_files": 1, "unknown": 1}
    library.check()
    assert library.store.open(good.key)
    assert library.store.missing_reason(gone.key) == library.store.missing_reason(cut.key) == "corrupt"
    files = [path for path in library.root.rglob("*") if path.is_file()]
    kept = {path.name: path.read_bytes() for path in files}
    assert kept[f"{'0' * 64}.safetensors"] == b"no chunk" and kept["notes.txt"] == b"somebody's"
    assert library.store.path(cut.key).name not in kept


def test_a_full_disk_fails_the_save_and_nothing_else(open_library):
    disk = FullDisk()
    library = open_library(filesystem=disk)
    old, new = chunks(2)
    library.store.save(old)
    disk.left = 5000
    with pytest.raises(StorageFull):
        library.store.save(new)
    assert library.store.open(new.key) is None
    assert torch.equal(read(library.store.open(old.key), old.kv), old.kv)
    assert len(everything(library.root)) == 1
    disk.left = None
    library.store.save(new)
    assert torch.equal(read(library.store.open(new.key), new.kv), new.kv)


def test_a_chunk_that_contradicts_itself_leaves_the_store_working(library):
    good = make_chunk()
    with pytest.raises(ValueError):
        library.store.save(ChunkKV(good.key, good.inputs, good.kv.double()))
    library.store.save(good)
    assert library.store.open(good.key)
