"""What a start does with a folder: it deletes nothing that it does not know, and takes in, puts aside or refuses."""

import asyncio
import os
import shutil
import sqlite3

import pytest
from library_tools import Clock, chunks, downgrade, everything, kill, make_chunk, text_key

from mpic.errors import (
    DatabaseDamaged,
    ForeignFolder,
    IntegrityError,
    LibraryGone,
    ReferenceNotFound,
    Unavailable,
)
from mpic.library import Library, Limits, catalog
from mpic.library.caches import Part
from mpic.library.folder import MARKER
from mpic.library.upkeep import check, collect


def catalogue(root):
    return sorted(root.glob("catalog.sqlite*"))


def lose(root):
    for path in catalogue(root):
        path.unlink()


def empty(root):
    lose(root)
    (root / "catalog.sqlite").touch()


def cut(root):
    os.truncate(root / "catalog.sqlite", (root / "catalog.sqlite").stat().st_size // 2)


def cut_short(root):
    os.truncate(root / "catalog.sqlite", 50)


def overwrite(root):
    (root / "catalog.sqlite").write_bytes(b"\xa5" * 8192)


def overwrite_a_page(root):
    with (root / "catalog.sqlite").open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"\xa5" * 4096)


def replace_by_another_database(root):
    lose(root)
    with sqlite3.connect(root / "catalog.sqlite") as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")
        db.execute("PRAGMA user_version = 3")


DAMAGES = [lose, empty, cut, cut_short, overwrite, overwrite_a_page, replace_by_another_database]


def fill(library):
    """Three uploads with their chunks, a cache and a reference."""
    for number, chunk in enumerate(chunks(3)):
        library.files.add("ann", f"text {number}".encode(), f"{number}.txt", handle=f"H{number}")
        library.store.save(chunk)
    library.caches.create("ann", [Part("one", 0, 3), Part("two", 3, 6)], name="cache")
    asyncio.run(library.references.add(b"a reference", "r.txt", title="R", id="ref_1"))


def contents(root):
    return {name: (root / name).read_bytes() for name in everything(root, sidecars=True)}


@pytest.fixture
def root(tmp_path, clock):
    with Library.open(tmp_path / "library", clock=clock) as library:
        fill(library)
    return tmp_path / "library"


# A catalogue that is lost or damaged


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "without a marker"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_start_without_a_whole_catalogue_refuses_names_the_way_out_and_changes_nothing(
    root, clock, damage, marked
):
    damage(root)
    if not marked:
        (root / MARKER).unlink()
    before = contents(root), [path.read_bytes() for path in catalogue(root)]
    with pytest.raises(DatabaseDamaged, match=f"mpic library recover --data-dir {root}"):
        Library.open(root, clock=clock)
    assert (contents(root), [path.read_bytes() for path in catalogue(root)]) == before


def test_a_crash_while_a_library_is_made_leaves_nothing_that_has_to_be_recovered(tmp_path):
    Library.open(tmp_path).close()
    for damage in (lose, empty):
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


def test_a_start_with_an_older_catalogue_takes_in_what_is_newer_and_what_was_deleted_stays_away(root, clock):
    shutil.copy(root / "catalog.sqlite", root.parent / "older.sqlite")
    with Library.open(root, clock=clock) as library:
        new = library.files.add("bob", b"newer", "n.txt", handle="N", metadata={"a": 1})
        library.files.pin("bob", new.id)
        new = library.files.extend("bob", new.id, 1000)
        late = library.caches.create("ann", [Part("late", 0, 4)], name="late")
        asyncio.run(library.references.replace("ref_1", b"replaced", title="R 2"))
        asyncio.run(library.references.add(b"another", "x.txt", title="X", id="ref_2"))
        library.store.save(make_chunk(text_key("newer", owner="bob")))
        gone = library.files.by_handle("ann", "H0")
        library.files.delete("ann", gone.id)
        short = library.files.add("bob", b"short", "s.txt")
        library.files.delete("bob", short.id)
        instead = library.files.add("ann", b"instead", "i.txt", handle="h0")
    shutil.copy(root.parent / "older.sqlite", root / "catalog.sqlite")
    with Library.open(root, clock=clock) as library:
        assert library.recovered["adopted_files"] == 5 and library.recovered["adopted_chunks"] == 1
        assert library.files.by_handle("bob", "N") == new and library.files.content("bob", new.id) == b"newer"
        assert library.caches.get("ann", late.id) == late
        reference = library.references.get("ref_1")
        assert (reference.version, reference.title) == (2, "R 2")
        assert library.references.content(reference) == b"replaced"
        assert library.references.content(library.references.get("ref_2")) == b"another"
        assert library.store.open(text_key("newer", owner="bob"))
        assert [file.id for file in library.files.page("bob").files] == [new.id]
        assert library.files.get("ann", gone.id).error == "the original is lost"
        assert library.files.by_handle("ann", "H0") == instead
        assert library.recovered["orphans"] == 0 and library.recovered["lost_files"] == 1
        library.files.delete("ann", gone.id)
        assert check(library) == []


def test_a_handle_that_somebody_has_is_not_taken_from_them(root, clock):
    shutil.copy(root / "catalog.sqlite", root.parent / "older.sqlite")
    with Library.open(root, clock=clock) as library:
        late = library.files.add("ann", b"late", "l.txt", handle="LATE")
    shutil.copy(root.parent / "older.sqlite", root / "catalog.sqlite")
    names = late.path, late.path.with_name(f"{late.path.name}.json")
    for path in names:
        path.rename(root.parent / path.name)
    with Library.open(root, clock=clock) as library:
        has = library.files.add("ann", b"has it", "h.txt", handle="late")
    for path in names:
        (root.parent / path.name).rename(path)
    with Library.open(root, clock=clock) as library:
        assert library.files.by_handle("ann", "LATE") == has
        assert library.files.get("ann", late.id).handle is None
        assert library.files.content("ann", late.id) == b"late"


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


def test_what_was_deleted_is_removed_and_not_taken_in_when_a_crash_came_before_its_files(root, clock):
    saved = {name: (root / name).read_bytes() for name in everything(root, sidecars=True)}
    with Library.open(root, clock=clock) as library:
        library.files.delete_all(library.files.page("ann").files)
        library.caches.delete("ann", library.caches.page("ann").caches[0].id)
        library.references.remove("ref_1")
        left = everything(root, sidecars=True)
        assert not left, "a deletion that is answered leaves nothing, so that nothing comes back"
        kill(library)
    for name, data in saved.items():  # as if no file had been removed yet
        (root / name).write_bytes(data)
    with Library.open(root, clock=clock) as library:
        assert library.recovered["adopted_files"] == library.recovered["adopted_chunks"] == 0
        assert library.recovered["orphans"] == 0 and library.recovered["leftovers"] >= len(saved)
        assert not everything(root, sidecars=True)
        assert library.files.page("ann").files == [] and library.caches.page("ann").caches == []
        with pytest.raises(ReferenceNotFound):
            library.references.get("ref_1")


def test_deletions_are_forgotten_when_their_time_is_over(tmp_path):
    clock = Clock()
    with Library.open(tmp_path, clock=clock) as library:
        library.files.delete("ann", library.files.add("ann", b"some text", "t.txt").id)
        assert library.catalog.one("SELECT COUNT(*) FROM deleted")[0] == 1
    for days, left in ((29, 1), (2, 0)):
        clock.now += days * 86_400
        with Library.open(tmp_path, clock=clock) as library:
            assert library.catalog.one("SELECT COUNT(*) FROM deleted")[0] == left


# Files that the catalogue does not know


def test_an_original_that_nothing_describes_is_put_aside_with_a_date_counted_and_deleted_only_after_days(
    root, clock
):
    (sidecar, *_) = root.glob("files/*/file-*.json")
    with sqlite3.connect(root / "catalog.sqlite") as db:
        db.execute("DELETE FROM files WHERE id = ?", (sidecar.stem,))
    sidecar.unlink()
    data = sidecar.with_suffix("").read_bytes()
    with Library.open(root, clock=clock) as library:
        assert library.recovered["orphans"] == 1
        (orphan,) = library.orphans.kept()
        assert orphan.path.read_bytes() == data and orphan.since == "1970-01-12"
        assert str(orphan.path).endswith(
            f"quarantine/orphans/1970-01-12/{sidecar.with_suffix('').relative_to(root)}"
        )
        assert check(library) == []
    for days, kept in ((30, 1), (1, 0)):
        clock.now += days * 86_400
        with Library.open(root, Limits(orphan_days=30), clock=clock) as library:
            assert len(library.orphans.kept()) == kept and library.recovered["expired_orphans"] == 1 - kept
    assert not (root / "quarantine" / "orphans" / "1970-01-12").exists()


def test_orphans_are_kept_for_ever_where_their_days_are_0(root, clock):
    for sidecar in root.glob("files/*/file-*.json"):
        sidecar.unlink()
    shutil.copy(root / "catalog.sqlite", root.parent / "saved.sqlite")
    with sqlite3.connect(root / "catalog.sqlite") as db:
        db.execute("DELETE FROM files WHERE id LIKE 'file-%'")
    for _ in range(2):
        with Library.open(root, Limits(orphan_days=0), clock=clock) as library:
            assert len(library.orphans.kept()) == 3
        clock.now += 10_000 * 86_400


def test_a_sidecar_that_was_tampered_with_takes_nothing_in(root, clock):
    (sidecar, *_) = root.glob("files/*/file-*.json")
    sidecar.write_text(sidecar.read_text().replace('"owner": "ann"', '"owner": "bob"'))
    with sqlite3.connect(root / "catalog.sqlite") as db:
        db.execute("DELETE FROM files WHERE id = ?", (sidecar.stem,))
    with Library.open(root, clock=clock) as library:
        assert library.recovered["adopted_files"] == 0 and library.recovered["orphans"] == 2
        assert library.files.page("bob").files == []


FOREIGN = [
    "files/report.doc",
    f"files/{'0' * 64}/mine.txt",
    "tmp/left.tmp",
    "tmp/x",
    "kv/a/b",
    "notes.txt",
    "quarantine/mine@1",
    f"kv/{'0' * 12}/{'0' * 64}/photo.jpg",
]


def test_what_has_no_name_of_ours_is_left_alone_and_counted(root, clock):
    for name in FOREIGN:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")
    for _ in range(2):
        with Library.open(root, clock=clock) as library:
            assert library.recovered["unknown"] == 6 and library.recovered["leftovers"] == 0
    with Library.open(root, clock=clock) as library:
        collect(library)
    assert all((root / name).read_text() == "mine" for name in FOREIGN)


# Folders that are somebody else's


@pytest.mark.parametrize(
    "name", ["files/a.txt", "kv/x/y", "tmp/a.tmp", "quarantine/a", "index/a", "spool/a", "catalog.sqlite"]
)
def test_a_folder_where_a_name_of_ours_is_taken_is_refused_and_left_as_it_was(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ForeignFolder, match=name.split("/")[0]):
        Library.open(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [name]


def test_a_new_library_is_made_where_its_names_are_free(tmp_path):
    (tmp_path / "mpic.toml").write_text("")
    (tmp_path / "server.log").write_text("")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "files" / "lost+found").mkdir(parents=True)  # a volume of its own
    (tmp_path / "kv").mkdir()
    with Library.open(tmp_path) as library:
        assert library.home.fresh and library.files.add("ann", b"some text", "t.txt")
    with Library.open(tmp_path) as library:
        assert not library.home.fresh and library.recovered["unknown"] == 1


@pytest.mark.parametrize("version", [1, 4, 6])
def test_a_library_of_an_earlier_version_is_marked_and_gets_its_sidecars(root, clock, monkeypatch, version):
    with Library.open(root, clock=clock) as library:
        if version < 4:  # there were no caches
            library.caches.delete("ann", library.caches.page("ann").caches[0].id)
        if version < 2:
            library.references.remove("ref_1")
    sidecars = {name for name in everything(root, sidecars=True) if name.endswith(".json")}
    assert len(sidecars) == {1: 3, 4: 5, 6: 5}[version]
    for name in sidecars:
        (root / name).unlink()
    (root / MARKER).unlink()
    downgrade(root, version, monkeypatch)
    with Library.open(root, clock=clock) as library:
        assert not any(library.recovered.values())
        library.finish_sidecars()
        assert {name for name in everything(root, sidecars=True) if name.endswith(".json")} == sidecars
        assert check(library) == [] and (root / MARKER).exists()
        assert library.catalog.one("PRAGMA user_version")[0] == len(catalog.MIGRATIONS)


# One process at a time, and a folder that goes away


@pytest.mark.parametrize("name", ["lock", MARKER])
def test_removing_a_file_of_the_lock_lets_nobody_else_in(library, name):
    (library.root / name).unlink()
    with pytest.raises(Unavailable, match="another process"):
        Library.open(library.root)


def test_an_earlier_version_that_has_the_library_open_keeps_us_out(root, clock):
    import fcntl

    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another process"):
            Library.open(root, clock=clock)
    Library.open(root, clock=clock).close()


def remove(root):
    shutil.rmtree(root)


def replace(root):
    root.rename(root.with_name("away"))
    root.mkdir()


def remove_the_catalogue(root):
    lose(root)


def replace_the_marker(root):
    data = (root / MARKER).read_bytes()
    (root / MARKER).unlink()
    (root / MARKER).write_bytes(data)


@pytest.mark.parametrize("go", [remove, replace, remove_the_catalogue, replace_the_marker])
def test_a_library_whose_folder_went_away_stores_nothing_and_makes_nothing(open_library, go):
    library = open_library(check=False)
    library.references.tokenize = library.files.tokenize
    fill(library)
    file = library.files.by_handle("ann", "H0")
    go(library.root)
    before = everything(library.root) if library.root.exists() else None
    writes = [
        lambda: library.files.add("ann", b"late", "l.txt"),
        lambda: library.files.delete("ann", file.id),
        lambda: library.files.extend("ann", file.id, 10),
        lambda: library.files.pin("ann", file.id),
        lambda: library.caches.create("ann", [Part("late", 0, 4)]),
        lambda: asyncio.run(library.references.add(b"late", "l.txt", title="L")),
        lambda: library.references.remove("ref_1"),
        lambda: library.store.save(make_chunk(text_key("late"))),
        lambda: library.set_quota("ann", files=1),
        library.home.check,
    ]
    for write in writes:
        with pytest.raises(LibraryGone):
            write()
    assert (everything(library.root) if library.root.exists() else None) == before
    assert library.home.gone()
    library.close()
    assert library.root.exists() == (before is not None)


def test_a_folder_that_is_back_is_used_again(open_library):
    library = open_library()
    library.root.rename(library.root.with_name("away"))
    with pytest.raises(LibraryGone):
        library.files.add("ann", b"late", "l.txt")
    library.root.with_name("away").rename(library.root)
    assert library.files.add("ann", b"in time", "l.txt")


def test_what_is_committed_while_the_folder_goes_away_is_not_acknowledged(open_library):
    """The folder goes between the check and the commit: SQLite commits to files without a name."""
    library = open_library(check=False)
    insert = library.files._rows.insert_in

    def slow(db, file):
        insert(db, file)
        shutil.rmtree(library.root)

    library.files._rows.insert_in = slow
    with pytest.raises(LibraryGone):
        library.files.add("ann", b"some text", "t.txt")
