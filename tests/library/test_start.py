"""A start of a library reports, puts aside or refuses what it finds, and deletes nothing that it does not know."""

import asyncio
import os
import re
import shutil
import sqlite3
from functools import partial
from unittest.mock import Mock

import pytest
from library_tools import Clock, everything, kill, lose_catalogue, make_chunk, text_key

from mpic.errors import (
    DatabaseBusy,
    DatabaseDamaged,
    DatabaseFailed,
    IntegrityError,
    LibraryGone,
    LinkedFolder,
    ReferenceNotFound,
    StorageFull,
)
from mpic.library import Library
from mpic.library.caches import CachedText
from mpic.library.catalog.database import Catalog
from mpic.library.folder.lock import MARKER
from mpic.library.rebuild import recover
from mpic.library.upkeep import check


def catalogue(root):
    return sorted(root.glob("catalog.sqlite*"))


def empty(root):
    lose_catalogue(root)
    (root / "catalog.sqlite").touch()


def overwrite_a_page(root):
    with (root / "catalog.sqlite").open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"\xa5" * 4096)


def replace_by_another_database(root):
    lose_catalogue(root)
    with sqlite3.connect(root / "catalog.sqlite") as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")
        db.execute("PRAGMA user_version = 3")


DAMAGES = {
    "lost": lose_catalogue,
    "empty": empty,
    "cut": lambda root: os.truncate(root / "catalog.sqlite", (root / "catalog.sqlite").stat().st_size // 2),
    "cut short": lambda root: os.truncate(root / "catalog.sqlite", 50),
    "overwritten": lambda root: (root / "catalog.sqlite").write_bytes(b"\xa5" * 8192),
    "a page overwritten": overwrite_a_page,
    "another database": replace_by_another_database,
}


def contents(root):
    return {name: (root / name).read_bytes() for name in everything(root, sidecars=True)}


# A catalogue that is lost or damaged


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "without a marker"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_start_with_a_lost_or_damaged_catalogue_refuses_and_names_recover(root, clock, damage, marked):
    damage(root)
    if not marked:
        (root / MARKER).unlink()
    before = contents(root), [path.read_bytes() for path in catalogue(root)]
    with pytest.raises(DatabaseDamaged, match=f"mpic library recover --data-dir {root}"):
        Library.open(root, clock=clock)
    assert (contents(root), [path.read_bytes() for path in catalogue(root)]) == before


def test_a_crash_while_a_library_is_created_needs_no_recovery(tmp_path):
    Library.open(tmp_path).close()
    for damage in (lose_catalogue, empty):
        damage(tmp_path)
        with Library.open(tmp_path) as library:
            library.files.add("ann", b"some text", "t.txt")
            library.files.delete("ann", library.files.page("ann").files[0].id)


def test_a_catalogue_of_another_library_is_refused(root, tmp_path, clock):
    Library.open(tmp_path / "other").close()
    shutil.copy(tmp_path / "other" / "catalog.sqlite", root / "catalog.sqlite")
    with pytest.raises(IntegrityError, match="another library's"):
        Library.open(root, clock=clock)


# An older catalogue


def test_a_start_with_an_older_catalogue_reports_newer_files_which_recover_lists_with_no_deleted_ones(
    root, clock
):
    shutil.copy(root / "catalog.sqlite", root.parent / "older.sqlite")
    with Library.open(root, clock=clock) as library:
        new = library.files.add("bob", b"newer", "n.txt", handle="N", metadata={"a": 1})
        library.files.pin("bob", new.id)
        new = library.files.extend("bob", new.id, 1000)
        late = library.caches.create("ann", [CachedText("late", 0, 4)], name="late")
        asyncio.run(library.references.replace("ref_1", b"replaced", title="R 2"))
        asyncio.run(library.references.add(b"another", "x.txt", title="X", id="ref_2"))
        library.store.save(make_chunk(text_key("newer", owner="bob")))
        gone = library.files.by_handle("ann", "H0")
        library.files.delete("ann", gone.id)
        short = library.files.add("bob", b"short", "s.txt")
        library.files.delete("bob", short.id)
        instead = library.files.add("ann", b"instead", "i.txt", handle="h0")
    shutil.copy(root.parent / "older.sqlite", root / "catalog.sqlite")
    there = {name for name in everything(root, sidecars=True) if name.startswith("files/")}
    for chunks in (1, 0):
        with Library.open(root, clock=clock) as library:
            assert library.recovered["unlisted_files"] == 10 and library.recovered["lost_files"] == 1
            assert library.recovered["found_chunks"] == chunks  # a chunk's file says what it is
            assert library.files.get("ann", gone.id).error == "the original is lost"
            assert library.files.page("bob").files == []
            assert library.references.get("ref_1").version == 1
        clock.now += 400 * 86_400  # far longer than deletions are remembered
    clock.now -= 800 * 86_400
    assert there <= everything(root, sidecars=True)
    assert recover(root, force=True, clock=clock).troubles[0].path.startswith("files/")
    with Library.open(root, clock=clock) as library:
        assert library.files.by_handle("bob", "N") == new and library.files.content("bob", new.id) == b"newer"
        assert library.caches.get("ann", late.id) == late
        reference = library.references.get("ref_1")
        assert (reference.version, reference.title) == (2, "R 2")
        assert library.references.content(reference) == b"replaced"
        assert library.references.content(library.references.get("ref_2")) == b"another"
        assert [file.id for file in library.files.page("bob").files] == [new.id]
        assert library.files.by_handle("ann", "H0") == instead
        assert library.recovered["unlisted_files"] == 0
        assert check(library) == []


def test_a_copy_that_is_put_back_as_the_error_says_does_not_get_the_log_of_the_damaged_catalogue(root, clock):
    path, log = root / "catalog.sqlite", root / "catalog.sqlite-wal"
    shutil.copy(path, root.parent / "older.sqlite")
    with Library.open(root, clock=clock) as library:
        new = library.files.add("bob", b"newer", "n.txt", handle="N")
        left = log.read_bytes()
    log.write_bytes(left)  # as a power loss leaves it
    path.write_bytes(b"\xa5" * 8192)
    with pytest.raises(DatabaseDamaged) as refused:
        Library.open(root, clock=clock)
    for name in {"catalog.sqlite", *re.findall(r"catalog\.sqlite-\w+", str(refused.value))}:
        (root / name).unlink(missing_ok=True)
    shutil.copy(root.parent / "older.sqlite", path)
    with Library.open(root, clock=clock) as library:
        assert library.recovered["unlisted_files"] == 2 and check(library) == []
    recover(root, force=True, clock=clock)
    with Library.open(root, clock=clock) as library:
        assert library.files.by_handle("bob", "N") == new and check(library) == []


def test_a_start_with_an_older_catalogue_reports_quotas_that_it_lacks(root, clock):
    quotas = lambda library: {
        row["id"]: (row["quota_files"], row["quota_bytes"], row["quota_disk"])
        for row in library.catalog.read("SELECT * FROM users WHERE quota_files OR quota_bytes OR quota_disk")
    }
    with Library.open(root, clock=clock) as library:
        library.set_quota("dan", files=6)
        library.set_quota("dan")  # he has a sidecar that says that he has none
    shutil.copy(root / "catalog.sqlite", root.parent / "older.sqlite")
    with Library.open(root, clock=clock) as library:
        library.set_quota("ann", disk=7)  # she has a row without quotas
        library.set_quota("bob", bytes=1000)  # he has none
    shutil.copy(root.parent / "older.sqlite", root / "catalog.sqlite")
    for _ in range(2):
        with Library.open(root, clock=clock) as library:
            assert quotas(library) == {} and library.recovered["unlisted_files"] == 2
            assert check(library) == []
    recover(root, force=True, clock=clock)
    with Library.open(root, clock=clock) as library:
        assert quotas(library) == {"ann": (None, None, 7), "bob": (None, 1000, None)}
        assert library.recovered["unlisted_files"] == 0


def forget(root, where):
    """Delete rows of files from the catalogue."""
    with sqlite3.connect(root / "catalog.sqlite") as db:
        db.execute(f"DELETE FROM files WHERE {where}")


def test_originals_that_are_back_are_no_longer_lost_and_chunks_no_longer_missing(root, clock):
    for folder in ("files", "kv"):  # a disk that is not mounted
        (root / folder).rename(root.parent / folder)
    with Library.open(root, clock=clock) as library:
        assert library.recovered["lost_files"] == 6 and library.recovered["missing_chunks"] == 3
        assert library.files.by_handle("ann", "H1").state == "failed"
    for folder in ("files", "kv"):
        (root.parent / folder).rename(root / folder)
    with Library.open(root, clock=clock) as library:
        assert library.recovered["found_chunks"] == 3 and library.files.by_handle("ann", "H1").error is None
        assert library.files.by_handle("ann", "H1").state == "compiling"
        assert check(library) == []


# A deletion that a crash has cut short


def test_files_of_deleted_rows_are_removed_after_a_crash(root, clock):
    saved = {name: (root / name).read_bytes() for name in everything(root, sidecars=True)}
    with Library.open(root, clock=clock) as library:
        library.files.delete_all(library.files.page("ann").files)
        library.caches.delete("ann", library.caches.page("ann").caches[0].id)
        library.references.remove("ref_1")
        left = everything(root, sidecars=True)
        assert not left, "a deletion that is answered leaves nothing, so that nothing comes back"
        kill(library)
    for name, data in saved.items():  # restores the files, as if none had been removed yet
        (root / name).write_bytes(data)
    with Library.open(root, clock=clock) as library:
        assert library.recovered["unlisted_files"] == 0
        assert library.recovered["leftovers"] >= len(saved)
        assert not everything(root, sidecars=True)
        assert library.files.page("ann").files == [] and library.caches.page("ann").caches == []
        with pytest.raises(ReferenceNotFound):
            library.references.get("ref_1")


def test_a_start_on_a_full_disk_removes_its_leftovers_before_it_writes(root, clock, monkeypatch):
    [chunk, *_] = root.glob("kv/*/*/*.safetensors")
    chunk.unlink()  # so that the start has to write
    leftovers = [
        root / "tmp" / f"{'1' * 24}.tmp",
        chunk.with_name(f".{chunk.name}.{'a' * 12}.tmp"),
        *(folder / f".file-{'x' * 24}.json.{'b' * 12}.tmp" for folder in root.glob("files/*")),
    ]
    for path in leftovers:
        path.write_bytes(b"half")
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "write", Mock(side_effect=StorageFull("the disk is full")))
        with pytest.raises(StorageFull):
            Library.open(root, clock=clock)
    assert not [path for path in leftovers if path.exists()]
    with Library.open(root, clock=clock) as library:
        assert library.recovered["missing_chunks"] == 1 and library.recovered["leftovers"] == 0


def test_a_start_that_fails_closes_the_catalogue(root, clock, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Library, "reconcile", Mock(side_effect=StorageFull("the disk is full")))
        with pytest.raises(StorageFull) as error:  # which holds the frames that hold the library
            Library.open(root, clock=clock)
        assert catalogue(root) == [root / "catalog.sqlite"] and error
    Library.open(root, clock=clock).close()


@pytest.mark.parametrize("error", [StorageFull, DatabaseBusy, DatabaseFailed, LibraryGone, OSError])
def test_a_library_that_cannot_write_its_last_uses_is_closed_nevertheless(root, clock, monkeypatch, error):
    library = Library.open(root, clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(library.catalog, "write", Mock(side_effect=error("not now")))
        if error is OSError:
            with pytest.raises(OSError, match="not now"):
                library.close()
        else:
            library.close()
    assert catalogue(root) == [root / "catalog.sqlite"]
    Library.open(root, clock=clock).close()


def test_tombstones_are_dropped_after_their_time(tmp_path):
    clock = Clock()
    with Library.open(tmp_path, clock=clock) as library:
        library.files.delete("ann", library.files.add("ann", b"some text", "t.txt").id)
        assert library.catalog.one("SELECT COUNT(*) FROM deleted")[0] == 1
    for days, left in ((29, 1), (2, 0)):
        clock.now += days * 86_400
        with Library.open(tmp_path, clock=clock) as library:
            assert library.catalog.one("SELECT COUNT(*) FROM deleted")[0] == left


def test_the_tombstone_of_a_file_that_cannot_be_looked_at_is_kept(tmp_path, monkeypatch):
    """Its folder cannot be entered now, and what is in it would come back later."""
    clock, stat = Clock(), os.stat

    def refused(path, *args, **options):
        if "/file-" in str(path):
            raise PermissionError(13, "Permission denied")
        return stat(path, *args, **options)

    with Library.open(tmp_path, clock=clock) as library:
        library.files.delete("ann", library.files.add("ann", b"some text", "t.txt").id)
        clock.now += 31 * 86_400
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", refused)
            library.forget_gone()
        assert library.catalog.one("SELECT COUNT(*) FROM deleted")[0] == 1
        library.forget_gone()
        assert library.catalog.one("SELECT COUNT(*) FROM deleted")[0] == 0


# Files that the catalogue does not know


def without_sidecar(path):
    path.unlink()


def of_another_user(path):
    path.write_text(path.read_text().replace('"owner": "ann"', '"owner": "bob"'))


@pytest.mark.parametrize(("change", "files"), [(without_sidecar, 1), (of_another_user, 2)])
def test_files_without_a_row_and_a_good_sidecar_are_named_and_stay(root, clock, caplog, change, files):
    (sidecar, *_) = root.glob("files/*/file-*.json")
    change(sidecar)
    forget(root, f"id = '{sidecar.stem}'")
    before = contents(root)
    for _ in range(2):
        with Library.open(root, clock=clock) as library:
            assert library.recovered["unlisted_files"] == files and check(library) == []
            assert library.files.page("bob").files == []
        clock.now += 10_000 * 86_400
    assert (
        contents(root) == before
        and f"does not list files/{sidecar.parent.name}/{sidecar.stem}" in caplog.text
    )
    troubles = {trouble.path for trouble in recover(root, force=True, clock=clock).troubles}
    assert f"files/{sidecar.parent.name}/{sidecar.stem}" in troubles and contents(root) == before


# Links in the place of folders


USES = {"start": Library.open, "recover": partial(recover, force=True)}


@pytest.mark.parametrize("what", ["files/*", "files/*/file-*[!n]", "kv/*", "kv/*/*"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_link_to_a_folder_or_an_original_is_refused_by_name_and_loses_nothing(root, tmp_path, what, use):
    path = min(path for path in root.glob(what) if not path.name.endswith(".json"))
    moved = path.rename(tmp_path / "other disk")
    path.symlink_to(moved)
    before = contents(root)
    with pytest.raises(LinkedFolder, match=f"{path} is a symbolic link"):
        use(root)
    assert contents(root) == before
    path.unlink()
    moved.rename(path)
    with Library.open(root) as library:
        assert not any(library.recovered.values()) and check(library) == []
        assert library.files.by_handle("ann", "H0").state != "failed"


FOREIGN = [
    "files/report.doc",
    "tmp/left.tmp",
    "tmp/x",
    "kv/a/b",
    "notes.txt",
    "quarantine/orphans/2026-01-01/mine",
]
FOREIGN += [f"files/{'0' * 64}/mine.txt", f"kv/{'0' * 12}/{'0' * 64}/photo.jpg"]


def test_files_with_other_names_are_left_alone_and_counted(root, clock):
    for name in FOREIGN:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")
    for _ in range(2):
        with Library.open(root, clock=clock) as library:
            assert library.recovered["unknown"] == 6 and library.recovered["leftovers"] == 0
    assert all((root / name).read_text() == "mine" for name in FOREIGN)
