"""The disk tier under concurrent saves, deletions and readers: nothing deleted comes back, nothing wrong is read."""

import threading

import pytest
import torch
from library_tools import (
    chunks,
    drop,
    everything,
    flip,
    make_chunk,
    read,
    read_in_parts,
    saved,
    size_of,
    text_key,
)
from threads_kit import in_threads, started

from mpic.durable import FileSystem
from mpic.errors import CorruptFile, NotFound
from mpic.library.store.tombstones import DeletedContents


class Gate(FileSystem):
    """Makes renames wait for permission once it is ``closed``."""

    def __init__(self):
        super().__init__()
        self.closed = False
        self.reached = threading.Event()
        self.go = threading.Event()

    def rename(self, source, target):
        if self.closed:
            self.reached.set()
            assert self.go.wait(60)
        super().rename(source, target)


@pytest.mark.parametrize("how", ["one", "content"])
def test_a_chunk_deleted_while_it_is_saved_does_not_come_back(open_library, how):
    gate = Gate()
    library = open_library(filesystem=gate)
    file = library.files.add("ann", b"some text", "t.txt")
    chunk = make_chunk(text_key("some text"))
    gate.closed = True
    saving = started(library.store.save, chunk)
    assert gate.reached.wait(60)
    if how == "one":
        drop(library.store, chunk.key, library.catalog)
    else:
        library.files.delete("ann", file.id)
    gate.go.set()
    saving.join()
    assert library.store.open(chunk.key) is None
    assert not any(name.startswith("kv/") for name in everything(library.root))
    library.store.save(chunk)
    assert library.store.open(chunk.key)


def test_a_chunk_deleted_before_it_is_saved_does_not_come_back(library):
    """A request opens (and misses) a chunk, compiles it, and saves it in the background: too late."""
    chunk = make_chunk(text_key("some text"))
    file = library.files.add("ann", b"some text", "t.txt")
    assert library.store.open(chunk.key) is None
    library.files.delete("ann", file.id)
    library.store.save(chunk)
    assert not everything(library.root)
    library.store.save(make_chunk(text_key("some text", owner="bob")))
    assert library.store.open(chunk.key) is None  # a new request for the same content
    library.store.save(chunk)
    assert library.store.open(chunk.key)


def test_a_bounded_number_of_deletions_is_remembered_and_nothing_deleted_comes_back(library):
    deleted = library.store._deleted = DeletedContents(capacity=4)
    late = [make_chunk(text_key(f"text {i}")) for i in range(12)]
    files = [library.files.add("ann", f"text {i}".encode(), "t.txt") for i in range(12)]
    assert not library.store.find([chunk.key for chunk in late])
    for file in files:
        library.files.delete("ann", file.id)
    assert len(deleted) <= 8
    saved(library, *late)
    assert not everything(library.root)
    # the oldest deletion, and a new request for the same content
    assert library.store.open(late[0].key) is None
    library.store.save(late[0])
    assert library.store.open(late[0].key)


def test_a_forgotten_deletion_refuses_only_saves_that_were_looked_up_too_long_ago():
    deleted = DeletedContents(capacity=2)
    a, b, c, d = (text_key(name) for name in "abcd")
    assert deleted.allows(a)  # nothing was ever deleted
    deleted.add("ann", b.chunk)
    deleted.look_up([a, b, c])
    assert deleted.allows(a) and deleted.allows(b)
    for name in "xyz":
        deleted.add("ann", text_key(name).chunk)
    assert deleted.allows(b) and deleted.allows(c)
    assert not deleted.allows(a) and not deleted.allows(d) and not deleted.allows(text_key("x"))
    deleted.look_up([a])
    assert deleted.allows(a) and len(deleted) <= 4


def damaged(library, chunk):
    """Save a chunk, open it and then damage a byte of its KV; return the open chunk."""
    library.store.save(chunk)
    stored = library.store.open(chunk.key)
    flip(library.store.path(chunk.key), 4096)
    return stored


@pytest.mark.parametrize("read_again", [read, read_in_parts])
def test_a_reader_of_a_bad_file_leaves_the_file_alone_that_has_taken_its_place(library, read_again):
    chunk = make_chunk()
    first = damaged(library, chunk)
    with pytest.raises(CorruptFile):
        read(library.store.find([chunk.key])[chunk.key], chunk.kv)  # and remove it
    library.store.save(chunk)
    with pytest.raises(CorruptFile):
        read_again(first, chunk.kv)
    assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


class Gap:
    """A lock that does something once, right after it is released."""

    def __init__(self, lock):
        self.lock, self.depth, self.action = lock, 0, None

    def __enter__(self):
        self.lock.acquire()
        self.depth += 1

    def __exit__(self, *error):
        self.depth -= 1
        self.lock.release()
        if not self.depth and self.action is not None:
            action, self.action = self.action, None
            action()


def test_a_save_right_after_another_one_does_not_count_its_bytes_twice(open_library, monkeypatch):
    first, second = chunks(2)
    library = open_library(disk_bytes=2 * size_of(first))
    library.store.lock = gap = Gap(library.store.lock)
    put_all = library.store._rows.put_all

    def put(*args):
        put_all(*args)
        monkeypatch.undo()
        gap.action = lambda: library.store.save(second)

    monkeypatch.setattr(library.store._rows, "put_all", put)
    library.store.save(first)
    assert library.store.open(first.key) and library.store.open(second.key)
    assert library.store.stats()["evicted"] == 0 and not +library.store._reserved


class Meanwhile(FileSystem):
    """Does something once before a file of chunks is opened, or right after it was opened."""

    def __init__(self):
        super().__init__()
        self.before = self.after = None

    def _do(self, name):
        action = getattr(self, name)
        setattr(self, name, None)
        if action is not None:
            action()

    def open(self, path):
        if path.suffix != ".safetensors":
            return super().open(path)
        try:
            self._do("before")
            return super().open(path)
        finally:
            self._do("after")


def test_a_reader_that_finds_no_file_leaves_the_row_alone_that_was_saved_since(open_library):
    chunk, other = chunks(2)
    files = Meanwhile()
    library = open_library(filesystem=files, disk_bytes=size_of(chunk))
    library.store.save(chunk)
    stored = library.store.find([chunk.key])[chunk.key]
    files.before = lambda: library.store.save(other)  # evicts the chunk
    files.after = lambda: library.store.save(chunk)
    with pytest.raises(NotFound):
        read(stored, chunk.kv)
    assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


def test_a_bad_header_condemns_only_the_file_that_was_opened(open_library):
    files = Meanwhile()
    library = open_library(filesystem=files)
    chunk = saved(library, make_chunk())
    path = library.store.path(chunk.key)
    path.write_bytes(b"damaged")
    stored = library.store.find([chunk.key])[chunk.key]

    def replaced():
        assert library.store.open(chunk.key) is None  # another reader removes it
        library.store.save(chunk)

    files.after = replaced
    with pytest.raises(CorruptFile):
        read(stored, chunk.kv)
    assert torch.equal(read(library.store.open(chunk.key), chunk.kv), chunk.kv)


def test_many_threads_on_a_small_budget(open_library):
    known = chunks(8)
    library = open_library(disk_bytes=6 * size_of(known[0]))

    def work(seed):
        g = torch.Generator().manual_seed(seed)
        for _ in range(25):
            chunk = known[int(torch.randint(8, (1,), generator=g))]
            stored = library.store.open(chunk.key)
            if stored is None:
                library.store.missing_reason(chunk.key)
                library.store.save(chunk)
            else:
                assert torch.equal(read(stored, chunk.kv), chunk.kv)
            if int(torch.randint(6, (1,), generator=g)) == 0:
                drop(library.store, chunk.key, library.catalog)

    in_threads(work, range(4))
    library.check()
    assert len(everything(library.root)) == library.store.stats()["chunks"]
    assert library.store.stats()["corrupt"] == 0
