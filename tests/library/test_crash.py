"""The power fails after any single change to the disk, the database's included, and what was not synced is dropped,
torn or reordered: what was acknowledged is there, what is served is right, and nothing else is left."""

import shutil
import sqlite3
from collections import defaultdict

import pytest
from crash_model import MODES, write_image
from library_life import LIMITS, Life, Unsynced, found, live
from library_tools import Clock, everything

from mpic.errors import DatabaseDamaged, DatabaseFailed, IntegrityError, StorageFull
from mpic.library import Library
from mpic.library.catalog import database
from mpic.library.catalog.database import Catalog
from mpic.library.folder.sidecars import read_sidecars
from mpic.library.rebuild import recover


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    life = Life(tmp_path_factory.mktemp("recorded") / "library")
    life.journal.root.mkdir()
    live(life)
    return life


def assert_allowed(life, library, changes, where, but=()):
    """Everything is found as it was before or after the change that was under way."""
    here = found(library)
    for thing in life.states.keys() - but:
        values = life.allowed(thing, changes)
        assert any(here.get(thing) is v or here.get(thing) == v for v in values), f"{thing} {where}"


def examine(life, root, image, changes, where):
    """Open the result of a crash."""
    write_image(image, root)
    with Library.open(root, LIMITS, filesystem=Unsynced(), clock=Clock()) as library:
        library.check()
        assert_allowed(life, library, changes, where)
        stats = library.stats()
        assert stats["disk"]["bytes"] <= LIMITS.disk_bytes, where
        recovered = stats["recovered"]
        assert recovered["lost_files"] == recovered["missing_chunks"] == stats["disk"]["corrupt"] == 0, where
        names = everything(root)
        listed = library.files.paths() | library.references.paths()
        originals = {n for n in names if n.startswith("files/") and not n.endswith(".json")}
        assert originals >= listed, where
        every = [n for n in everything(root, sidecars=True) if n.startswith("files/") and n not in originals]
        sidecars = read_sidecars(root, every, lambda path, error: None)
        described = {path for name, sidecar in sidecars for path in sidecar.originals(name)}
        undescribed = originals - listed - described  # their sidecar was still to come, and so the answer
        assert len(undescribed) <= 3, where
        assert not originals - listed or recovered["unlisted_files"], where
        assert len([n for n in names if n.startswith("kv/")]) == stats["disk"]["chunks"], where
        assert all(n.startswith(("files/", "kv/")) for n in names), where
        assert library.files.add("ann", b"life goes on", "n.txt").bytes == 12


@pytest.fixture(scope="module")
def examined():
    """For each way of examining, the results of crashes that it has examined: modes often leave the same one."""
    return defaultdict(set)


def examine_all(life, folder, mode, soak, look, examined, without=()):
    """Examine every possible result of a crash after each change, once."""
    seen, crashes = examined[look], 0
    for seed in range(max(1, soak // 5) if mode in ("torn", "reordered") else 1):
        for changes, whole in enumerate(life.journal.images(mode, seed)):
            image = {name: data for name, data in whole.items() if not name.startswith(without)}
            result = hash((*image.items(), *(life.possible(thing, changes) for thing in life.states)))
            if result not in seen:
                seen.add(result)
                look(life, folder / "it", image, changes, f"after {changes} changes, {mode}, seed {seed}")
                shutil.rmtree(folder / "it")
                crashes += 1
    assert crashes > 10


@pytest.mark.parametrize("mode", MODES)
def test_a_crash_after_every_change_to_the_disk_loses_nothing_and_serves_nothing_wrong(
    life, tmp_path, mode, soak, examined
):
    examine_all(life, tmp_path, mode, soak, examine, examined)


def examine_without_catalogue(life, root, image, changes, where):
    """After a crash the catalogue is lost, too: a start refuses, and a recovery finds everything that must be there."""
    write_image(image, root)
    before = everything(root, sidecars=True)
    if any(name.startswith(("files/", "kv/")) and not name.endswith(".tmp") for name in before):
        with pytest.raises(DatabaseDamaged, match="mpic library recover"):
            Library.open(root, LIMITS, filesystem=Unsynced(), clock=Clock())
        recover(root, filesystem=Unsynced(), clock=Clock())
        assert before <= everything(root, sidecars=True) | {n for n in before if "mpic-library" in n}, where
    with Library.open(root, LIMITS, filesystem=Unsynced(), clock=Clock()) as library:
        library.check()
        # an evicted chunk may be back: it is only a cache
        assert_allowed(life, library, changes, where, but={"small"})


@pytest.mark.parametrize("mode", MODES)
def test_a_crash_and_the_loss_of_the_catalogue_lose_nothing_and_bring_nothing_back(
    life, tmp_path, mode, soak, examined
):
    examine_all(life, tmp_path, mode, soak, examine_without_catalogue, examined, without="catalog")


def test_the_crash_model_covers_the_database(life):
    names = {change[1] for change in life.journal.changes if change[0] == "link"}
    assert {"catalog.sqlite", "catalog.sqlite-wal"} <= names
    assert len([change for change in life.journal.changes if change[0] == "write"]) > 150


@pytest.mark.parametrize("lie", ["file", "folder", "database"])
def test_the_crash_model_finds_a_disk_that_lies_about_syncing(tmp_path, life, lie):
    """The tests above can fail: without one kind of sync, something acknowledged is lost or wrong."""
    liar = Life(life.journal.root)
    liar.states = life.states
    inodes = {c[2]: c[1] for c in life.journal.changes if c[0] == "link"}

    def kept(change):
        if change[0] == "sync_folder":
            return lie != "folder"
        if change[0] == "sync":
            return lie != ("database" if "sqlite" in inodes[change[1]] else "file")
        return True

    # a sync that does nothing stays in the journal, so that positions keep their meaning
    liar.journal.changes = [c if kept(c) else ("nothing",) for c in life.journal.changes]
    wrong = 0
    for changes, image in [*enumerate(liar.journal.images("dropped"))][:-1:9]:
        try:
            examine(liar, tmp_path / str(changes), image, changes, lie)
        except Exception:
            wrong += 1
    assert wrong > 0


# The catalogue


def test_migrations_run_once_and_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "MIGRATIONS", {**database.MIGRATIONS})
    before = database.latest()

    path = tmp_path / "catalog.sqlite"
    Catalog(path).close()
    database.MIGRATIONS[before + 1] = lambda db: db.execute("ALTER TABLE users ADD COLUMN quota INTEGER")
    database.MIGRATIONS[before + 2] = lambda db: db.execute("UPDATE users SET quota = 5")
    first = Catalog(path)
    with first.write() as db:
        first.add_user(db, "ann", 0)
    first.close()
    again = Catalog(path)
    assert again.one("SELECT quota FROM users")["quota"] is None
    assert again.one("PRAGMA user_version")[0] == before + 2
    again.close()
    del database.MIGRATIONS[before + 2]
    with pytest.raises(IntegrityError, match="newer"):
        Catalog(path)


def test_a_migration_that_fails_changes_nothing(tmp_path, monkeypatch):
    def broken(db):
        db.execute("CREATE TABLE half (x)")
        raise RuntimeError

    path = tmp_path / "catalog.sqlite"
    Catalog(path).close()
    monkeypatch.setattr(database, "MIGRATIONS", {**database.MIGRATIONS, 99: broken})
    with pytest.raises(RuntimeError):
        Catalog(path)
    monkeypatch.undo()
    catalog = Catalog(path)
    assert catalog.one("SELECT 1 FROM sqlite_master WHERE name = 'half'") is None
    catalog.check()
    catalog.close()


def test_the_catalogue_is_synced_with_every_commit(tmp_path):
    catalog = Catalog(tmp_path / "catalog.sqlite")
    with catalog.write() as db:
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert db.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert db.execute("PRAGMA foreign_keys").fetchone()[0] == 1
    with pytest.raises(sqlite3.IntegrityError), catalog.write() as db:
        catalog.add_user(db, "ann", 0)
        db.execute("INSERT INTO files (id, owner) VALUES ('x', 'nobody')")
    assert catalog.read("SELECT * FROM users") == []
    with pytest.raises(DatabaseFailed, match="readonly"):
        catalog.read("DELETE FROM users")
    catalog.close()


def test_a_full_disk_fails_the_transaction_and_not_the_catalogue(tmp_path):
    catalog = Catalog(tmp_path / "catalog.sqlite")
    with catalog.write() as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
    catalog._writer.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StorageFull), catalog.write() as db:
        for i in range(10_000):
            catalog.add_user(db, f"user {i}" * 20, 0)
    assert catalog.read("SELECT * FROM users") == []
    with catalog.write() as db:
        catalog.add_user(db, "ann", 0)
    catalog.check()
    catalog.close()
