"""A lost catalogue is made again from the files, completely or as far as the files are intact."""

import asyncio
import errno
import os
import sqlite3
from pathlib import Path

import pytest
from library_tools import (
    Crash,
    CrashingFiles,
    chunks,
    encoded,
    everything,
    lose_catalogue,
    make_chunk,
    no_memory_once,
    saved,
    text_key,
)

from mpic.durable import FileSystem
from mpic.errors import (
    BadRequest,
    DatabaseBusy,
    DatabaseDamaged,
    DatabaseFailed,
    FileNotFound,
    StorageFull,
    Unavailable,
)
from mpic.kv.file import ChunkFile
from mpic.library import SHARED, Library
from mpic.library.caches import CachedText
from mpic.library.folder.layout import sidecar_of
from mpic.library.folder.lock import MARKER
from mpic.library.folder.sidecars import Sidecar
from mpic.library.rebuild import WITHOUT_HANDLE, recover
from mpic.library.upkeep import check

FOUND_OUT = {"tokens", "state", "error", "path"}
"""Columns that compiling fills in, and columns that nobody sees."""


def facts(library):
    """Return everything that users see of a library."""
    seen = lambda thing: {name: value for name, value in vars(thing).items() if name not in FOUND_OUT}
    return {
        "files": [seen(file) for user in ("ann", "bob") for file in library.files.page(user).files],
        "caches": [
            seen(cache) | {"chunks": [(seen(chunk.file), chunk.start, chunk.end) for chunk in cache.chunks]}
            for cache in library.caches.page("ann").caches
        ],
        "references": [seen(reference) for reference in library.references.listing().references],
        "usage": library.usage(),
    }


def fill(library, clock):
    library.files.add("ann", b"some text", "t.txt", "T", metadata={"a": 1})
    clock.now += 1
    image = library.files.add("bob", encoded(), "ü.png", "I", expires_after=10**6, kv_ttl=7)
    clock.now += 1
    library.files.pin("bob", image.id)
    library.files.add("ann", b"another", "a.txt", "A", split={"mode": "fixed", "tokens": 3, "overlap": 0})
    split = {"mode": "none"}
    cache = library.caches.create(
        "ann", [CachedText("one", 0, 3), CachedText("two", 3, 6)], name="C", split=split, ttl=60
    )
    library.caches.keep_kv("ann", cache.id, 8)
    clock.now += 1
    more = {"metadata": {"k": "v"}, "id": "ref_1", "expires_after": 10**6, "synced_from": "/srv"}
    asyncio.run(library.references.add(b"old", "r.txt", title="R", **more))
    library.references.pin("ref_1")
    asyncio.run(library.references.replace("ref_1", b"new", title="R 2", description="d"))
    library.references.collect_retired()
    saved(library, *chunks(2), make_chunk(text_key("new", owner=SHARED)))
    library.set_quota("ann", files=7, disk=10**6)


@pytest.fixture
def before(tmp_path, clock):
    """A library at ``library`` that has lost its catalogue, and its answers before that."""
    with Library.open(tmp_path / "library", clock=clock) as library:
        fill(library, clock)
        was = facts(library)
    lose_catalogue(tmp_path / "library")
    return was


@pytest.fixture
def root(tmp_path, before):
    return tmp_path / "library"


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "without a marker"])
def test_a_recovered_library_is_as_it_was(root, before, clock, marked):
    if not marked:
        (root / MARKER).unlink()
    done = recover(root, clock=clock)
    counts = {"files": 3, "references": 1, "caches": 1, "chunks": 3, "users": 3}
    assert done.counts == counts and done.troubles == [] and done.aside is None
    with Library.open(root, clock=clock) as library:
        assert facts(library) == before and not any(library.recovered.values())
        assert library.files.content("ann", library.files.by_handle("ann", "t").id) == b"some text"
        assert library.references.text(library.references.get("ref_1")) == "new"
        assert check(library) == []


def test_the_damaged_catalogue_and_its_log_are_kept_aside(root, before, clock):
    (root / "catalog.sqlite").write_bytes(b"damaged")
    (root / "catalog.sqlite-wal").write_bytes(b"its log")
    aside = recover(root, clock=clock).aside
    assert aside.read_bytes() == b"damaged" and aside.parent == root
    assert aside.with_name(f"{aside.name}-wal").read_bytes() == b"its log"
    with Library.open(root, clock=clock) as library:
        assert facts(library) == before


def test_an_interrupted_recovery_can_be_repeated(root, before, clock):
    (root / "catalog.sqlite").write_bytes(b"damaged")
    at = 0
    while True:
        files = CrashingFiles(at)
        try:
            recover(root, filesystem=files, clock=clock)
        except Crash:
            at += 1
            continue
        except BadRequest:  # the new catalogue had its name already when the crash came
            break
        assert files.changes <= at
        break
    assert at >= 3
    with Library.open(root, clock=clock) as library:
        assert facts(library) == before and check(library) == []


def test_an_intact_catalogue_is_replaced_only_with_force(tmp_path, clock):
    with Library.open(tmp_path, clock=clock) as library:
        library.files.add("ann", b"some text", "t.txt", "T")
        with pytest.raises(Unavailable, match="another process"):
            recover(tmp_path)
    with pytest.raises(BadRequest, match="in order"):
        recover(tmp_path)
    assert recover(tmp_path, force=True, clock=clock).aside.is_file()
    with Library.open(tmp_path, clock=clock) as library:
        assert library.files.by_handle("ann", "T")


def test_a_folder_without_a_library_is_refused_and_stays_as_it_was(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine.txt").write_text("mine")
    with pytest.raises(Unavailable, match="no library"):
        recover(tmp_path)
    assert everything(tmp_path) == {"files/mine.txt"}
    with pytest.raises(Unavailable, match="no library"):
        recover(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_changes_nothing(root, before, clock):
    class Full(FileSystem):
        def rename(self, source, target):
            if target.name == "catalog.sqlite":
                raise StorageFull("the disk is full")
            super().rename(source, target)

    with pytest.raises(StorageFull):
        recover(root, filesystem=Full(), clock=clock)
    assert not list(root.glob("catalog.sqlite.new*"))


def test_a_catalogue_that_cannot_be_written_to_its_file_is_not_installed(root, before, clock):
    class Watched(FileSystem):
        """Another connection reads, so that what is written stays in the log."""

        other = None

        def database(self, path, create=False):
            made = super().database(path, create)
            if self.other is None:
                made.execute("PRAGMA journal_mode = WAL")
                self.other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                self.other.execute("BEGIN")
                self.other.execute("SELECT * FROM sqlite_master").fetchall()
            return made

    files = Watched()
    there = everything(root, sidecars=True)
    with pytest.raises(DatabaseBusy):
        recover(root, filesystem=files, clock=clock)
    files.other.close()
    assert everything(root, sidecars=True) == there and not list(root.glob("catalog.sqlite*"))
    assert recover(root, clock=clock).counts["files"] == 3
    with Library.open(root, clock=clock) as library:
        assert facts(library) == before


# Damaged and missing parts


def test_damaged_originals_come_back_as_failed_and_are_named(root, before, clock):
    with_sidecar = {name for name in everything(root, sidecars=True) if name.endswith(".json")}
    (text,) = (path for path in root.glob("files/*/file-*") if path.read_bytes() == b"some text")
    text.write_bytes(b"some tex!")
    (part,) = (path for path in root.glob("files/*/cache-*") if path.read_bytes() == b"two")
    part.write_bytes(b"tw!")
    done = recover(root, clock=clock)
    assert {trouble.path for trouble in done.troubles} == {str(p.relative_to(root)) for p in (text, part)}
    with Library.open(root, clock=clock) as library:
        file = library.files.by_handle("ann", "T")
        assert (file.state, file.error) == ("failed", "the original is damaged")
        assert library.caches.page("ann").caches[0].state == "failed"
        assert with_sidecar <= everything(root, sidecars=True)


def test_a_chunk_for_which_there_is_no_memory_is_named_and_listed_by_the_next_start(
    root, before, clock, monkeypatch
):
    reading = no_memory_once(ChunkFile._read_inputs)
    with monkeypatch.context() as patch:
        patch.setattr(ChunkFile, "_read_inputs", lambda self, *args: reading(self, *args))
        [trouble] = recover(root, clock=clock).troubles
    assert "cannot be read" in trouble.what
    with Library.open(root, clock=clock) as library:
        assert library.recovered["found_chunks"] == 1 and check(library) == []


def test_missing_originals_and_originals_without_sidecars_are_named(root, before, clock):
    lost, undescribed, damaged = sorted(path for path in root.glob("files/*/file-*") if path.suffix == "")
    lost.unlink()
    undescribed.with_name(f"{undescribed.name}.json").unlink()
    damaged.with_name(f"{damaged.name}.json").write_text("{}")
    (chunk, *_) = sorted(root.glob("kv/*/*/*"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    done = recover(root, clock=clock)
    assert len(done.troubles) == 5 and done.counts["files"] == 0 and done.counts["chunks"] == 2
    assert done.counts["caches"] == done.counts["references"] == 1
    with Library.open(root, clock=clock) as library:
        with pytest.raises(FileNotFound):
            library.files.get("ann", lost.name)
        assert undescribed.exists() and damaged.exists() and library.recovered["unlisted_files"] == 5
        assert check(library) == []


def test_deleted_files_do_not_come_back(tmp_path, clock):
    with Library.open(tmp_path, clock=clock) as library:
        fill(library, clock)
        held = library.references.chunk(library.references.get("ref_1"), lambda text: (1,))
        library.files.delete("ann", library.files.by_handle("ann", "T").id)
        library.caches.delete("ann", library.caches.page("ann").caches[0].chunks[0].file.id)
        library.references.remove("ref_1")  # its original stays while a request links it
        assert len(list(tmp_path.glob("files/*/ref_1@*"))) == 1
        assert held.token_ids
    lose_catalogue(tmp_path)
    recover(tmp_path, clock=clock)
    with Library.open(tmp_path, clock=clock) as library:
        assert [file.handle for file in library.files.page("ann").files] == ["A"]
        (cache,) = library.caches.page("ann").caches
        assert [library.files.content("ann", chunk.file.id) for chunk in cache.chunks] == [b"two"]
        assert library.references.listing().references == []


def test_the_newer_version_of_an_interrupted_replacement_is_recovered(tmp_path, clock):
    with Library.open(tmp_path, clock=clock) as library:
        old = asyncio.run(library.references.add(b"old", "r.txt", title="old", id="ref_1"))
        sidecar = old.path.with_name(f"{old.path.name}.json")
        saved = old.path.read_bytes(), sidecar.read_bytes()
        asyncio.run(library.references.replace("ref_1", b"new", title="new"))
        library.references.collect_retired()
    old.path.write_bytes(saved[0])
    sidecar.write_bytes(saved[1])
    lose_catalogue(tmp_path)
    done = recover(tmp_path, clock=clock)
    assert len(done.troubles) == 1 and "earlier version" in done.troubles[0].what
    with Library.open(tmp_path, clock=clock) as library:
        assert library.references.get("ref_1").title == "new"
        assert library.recovered["leftovers"] == 2 and not old.path.exists()


def test_the_file_that_has_not_expired_keeps_the_handle_of_two(tmp_path, clock):
    with Library.open(tmp_path, clock=clock) as library:
        old = library.files.add("ann", b"old", "o.txt", "H", expires_after=5)
        clock.now += 6
        new = library.files.add("ann", b"new", "n.txt", "h")
    lose_catalogue(tmp_path)
    assert recover(tmp_path, clock=clock).troubles == []
    with Library.open(tmp_path, clock=clock) as library:
        assert library.files.by_handle("ann", "H").id == new.id
        assert [problem.damaged for problem in check(library)] == [
            False
        ]  # the old one's sidecar claims it still
        assert check(library) == []
        assert [removed.file.id for removed in library.files.collect_expired()] == [old.id]


def test_a_sidecar_that_does_not_fit_is_named_and_leaves_no_trace(tmp_path, clock):
    with Library.open(tmp_path, clock=clock) as library:
        file = library.files.add("ann", b"text", "t.txt")
        clock.now += 1
        old = library.files.add("bob", b"old", "o.txt", "H", expires_after=5)
        clock.now += 6
        record = Sidecar.read(sidecar_of(file.path)).record
    twin = old.path.with_name(file.id)  # the same id in the folder of another owner
    twin.write_bytes(b"text")
    record |= {"owner": "bob", "handle": "h", "created_at": clock.now}
    sidecar_of(twin).write_bytes(Sidecar("file", record).encode())
    lose_catalogue(tmp_path)
    [trouble] = recover(tmp_path, clock=clock).troubles
    assert trouble.path == str(sidecar_of(twin).relative_to(tmp_path)) and "there twice" in trouble.what
    with Library.open(tmp_path, clock=clock) as library:
        assert library.files.get("ann", file.id).owner == "ann"
        assert [row["handle"] for row in library.catalog.read("SELECT handle FROM files")] == [None, None]


def test_the_older_of_two_files_keeps_the_handle_and_the_other_is_named(tmp_path, clock):
    with Library.open(tmp_path, clock=clock) as library:
        library.files.add("ann", b"old", "o.txt", "H")
        clock.now += 1
        new = library.files.add("ann", b"new", "n.txt")
        path = sidecar_of(new.path)
        record = Sidecar.read(path).record
        path.write_bytes(Sidecar("file", record | {"handle": "H"}).encode())
    lose_catalogue(tmp_path)
    assert recover(tmp_path, clock=clock).troubles == [(new.id, WITHOUT_HANDLE)]
    with Library.open(tmp_path, clock=clock) as library:
        assert [problem.damaged for problem in check(library)] == [False] and check(library) == []


def test_a_disk_that_does_not_give_a_page_is_not_a_damaged_catalogue(tmp_path, monkeypatch):
    """SQLite reports such a page as damage. A new catalogue would not help, and would lose what only this one has."""
    root = tmp_path / "library"
    with Library.open(root) as library:
        library.files.add("ann", b"some text", "t.txt")
    path, opened = root / "catalog.sqlite", Path.open
    raw = bytearray(path.read_bytes())
    raw[4096 : 4096 + 512] = b"x" * 512
    path.write_bytes(raw)

    def failing(self, *args, **options):
        if self == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing)
        for use in (Library.open, recover):
            with pytest.raises(DatabaseFailed, match="look at the disk") as refused:
                use(root)
            assert "recover" not in refused.value.message
    with pytest.raises(DatabaseDamaged, match="mpic library recover"):
        Library.open(root)
