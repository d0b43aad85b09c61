"""The folder of a library: taken only if it is free, held by one process, and noticed when it goes away."""

import asyncio
import os
import shutil

import pytest
from library_tools import downgrade, everything, fill, lose_catalogue, make_chunk, text_key

from mpic.errors import DatabaseDamaged, ForeignFolder, LibraryGone, Unavailable
from mpic.library import Library
from mpic.library.caches import CachedText
from mpic.library.catalog import database
from mpic.library.folder.layout import CATALOG
from mpic.library.folder.lock import MARKER
from mpic.library.upkeep import check

# Folders that are somebody else's


@pytest.mark.parametrize(
    "name", ["files/a.txt", "kv/x/y", "tmp/a.tmp", "quarantine/a", "index/a", "spool/a", "catalog.sqlite"]
)
def test_a_folder_in_which_a_name_of_the_library_is_taken_is_refused_unchanged(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ForeignFolder, match=name.split("/")[0]):
        Library.open(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [name]


@pytest.mark.parametrize("kind", ["pipe", "link to nothing"])
@pytest.mark.parametrize("name", [MARKER, CATALOG])
def test_a_start_waits_for_no_pipe_in_place_of_the_marker_or_the_catalogue(root, clock, name, kind):
    (root / name).unlink()
    os.mkfifo(root / name) if kind == "pipe" else (root / name).symlink_to("/nowhere")
    if name == MARKER:  # it is made again
        Library.open(root, clock=clock).close()
        assert (root / name).is_file() and not (root / name).is_symlink()
    else:
        with pytest.raises(DatabaseDamaged, match="it is not a file"):
            Library.open(root, clock=clock)


def test_a_new_library_is_made_where_its_names_are_free(tmp_path):
    (tmp_path / "mpic.toml").write_text("")
    (tmp_path / "server.log").write_text("")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "files" / "lost+found").mkdir(parents=True)  # a volume of its own
    (tmp_path / "kv").mkdir()
    with Library.open(tmp_path) as library:
        assert library.files.add("ann", b"some text", "t.txt")
    with Library.open(tmp_path) as library:
        assert library.recovered["unknown"] == 1


def test_a_library_that_has_lost_its_marker_and_its_sidecars_gets_them_back(root, clock, monkeypatch):
    sidecars = {name for name in everything(root, sidecars=True) if name.endswith(".json")}
    assert len(sidecars) == 5
    for name in sidecars:
        (root / name).unlink()
    (root / MARKER).unlink()
    downgrade(root, 7, monkeypatch)
    with Library.open(root, clock=clock) as library:
        assert not any(library.recovered.values())
        assert {name for name in everything(root, sidecars=True) if name.endswith(".json")} == sidecars
        assert check(library) == [] and (root / MARKER).exists()
        assert library.catalog.one("PRAGMA user_version")[0] == database.latest()


# One process at a time, and a folder that goes away


@pytest.mark.parametrize("name", ["lock", MARKER])
def test_removing_a_lock_file_does_not_unlock_the_folder(library, name):
    (library.root / name).unlink()
    with pytest.raises(Unavailable, match="another process"):
        Library.open(library.root)


def test_a_library_that_an_earlier_version_has_open_cannot_be_opened(root, clock):
    import fcntl

    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another process"):
            Library.open(root, clock=clock)
    Library.open(root, clock=clock).close()


def replace(root):
    root.rename(root.with_name("away"))
    root.mkdir()


def replace_the_marker(root):
    data = (root / MARKER).read_bytes()
    (root / MARKER).unlink()
    (root / MARKER).write_bytes(data)


@pytest.mark.parametrize("go", [shutil.rmtree, replace, lose_catalogue, replace_the_marker])
def test_a_library_whose_folder_is_gone_stores_and_creates_nothing(open_library, go):
    library = open_library(check=False)
    fill(library)
    file = library.files.by_handle("ann", "H0")
    go(library.root)
    before = everything(library.root) if library.root.exists() else None
    writes = [
        lambda: library.files.add("ann", b"late", "l.txt"),
        lambda: library.files.delete("ann", file.id),
        lambda: library.files.extend("ann", file.id, 10),
        lambda: library.files.pin("ann", file.id),
        lambda: library.caches.create("ann", [CachedText("late", 0, 4)]),
        lambda: asyncio.run(library.references.add(b"late", "l.txt", title="L")),
        lambda: library.references.remove("ref_1"),
        lambda: library.store.save(make_chunk(text_key("late"))),
        lambda: library.set_quota("ann", files=1),
        library.folder.check,
    ]
    for write in writes:
        with pytest.raises(LibraryGone):
            write()
    assert (everything(library.root) if library.root.exists() else None) == before
    library.close()
    assert library.root.exists() == (before is not None)


def test_a_folder_that_is_back_is_used_again(open_library):
    library = open_library()
    library.root.rename(library.root.with_name("away"))
    with pytest.raises(LibraryGone):
        library.files.add("ann", b"late", "l.txt")
    library.root.with_name("away").rename(library.root)
    assert library.files.add("ann", b"in time", "l.txt")


def test_a_commit_during_the_loss_of_the_folder_is_not_acknowledged(open_library):
    """The folder goes between the check and the commit: SQLite commits to files without a name."""
    library = open_library(check=False)
    insert = library.files._rows.insert_in

    def slow(db, *file):
        insert(db, *file)
        shutil.rmtree(library.root)

    library.files._rows.insert_in = slow
    with pytest.raises(LibraryGone):
        library.files.add("ann", b"some text", "t.txt")
