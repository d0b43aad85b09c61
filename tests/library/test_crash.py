"""The power fails after any single change to the disk, the database's included, and what was not synced is dropped,
torn or reordered: what was acknowledged is there, what is served is right, and nothing else is left."""

import asyncio
import shutil
import sqlite3

import pytest
import torch
from crash_model import MODES, Journal, RecordingFiles, write_image
from library_tools import Clock, Crash, CrashingFiles, encoded, everything, kill, make_chunk, read, text_key

from mpic.durable import Files
from mpic.errors import DatabaseFailed, IntegrityError
from mpic.library import SHARED, Library, Limits
from mpic.library.catalog import MIGRATIONS, Catalog

LIMITS = Limits(disk_bytes=22_000)
SMALL, LARGE = make_chunk(n=30), make_chunk(text_key("large"), n=40)
SHARED_CHUNK = make_chunk(text_key("new reference", owner=SHARED), n=6)


class Life:
    """A piece of a library's life, recorded. What must be found after a crash, and what may be, follows from when each
    step began and when it was acknowledged.

    ``states[thing]`` lists (begun, acknowledged, value) in changes made to the disk so far; None means gone.
    """

    def __init__(self, root):
        self.journal = Journal(root)
        self.states = {}

    def step(self, values, action):
        """Run a step that gives things new values."""
        begun = len(self.journal)
        result = action()
        for thing, value in values.items():
            self.states.setdefault(thing, [(0, 0, None)]).append((begun, len(self.journal), value))
        return result

    def allowed(self, thing, changes):
        """The values that may be found when the power fails after so many changes."""
        states = [state for state in self.states[thing] if state[0] <= changes]
        certain = max(i for i, state in enumerate(states) if state[1] <= changes)
        return [value for _, _, value in states[certain:]]


def live(life):
    """Everything the library can do to its disk, twice opened."""
    root, files, clock = life.journal.root, RecordingFiles(life.journal), Clock()
    library = Library.open(root, LIMITS, files=files, clock=clock)
    add = library.files.add
    text = life.step({"T": (b"some text", None)}, lambda: add("ann", b"some text", "t.txt", handle="T"))
    life.step({"small": SMALL}, lambda: library.store.save(SMALL))
    image = life.step(
        {"I": (encoded(), clock.now + 60)},
        lambda: add("ann", encoded(), "i.png", handle="I", expires_after=60, metadata={"a": 1}),
    )
    life.step({"small": None, "large": LARGE}, lambda: library.store.save(LARGE))  # evicts
    life.step(
        {"ref_1": b"old reference"},
        lambda: asyncio.run(library.references.add(b"old reference", "r", title="R", id="ref_1")),
    )
    life.step({"I": (encoded(), None)}, lambda: library.files.extend("ann", image.id, None))
    life.step({"T": None}, lambda: library.files.delete("ann", text.id))
    life.step({}, library.close)
    library = Library.open(root, LIMITS, files=files, clock=clock)
    held = library.references.chunk(library.references.get("ref_1"), lambda text: (1,))
    life.step(
        {"ref_1": b"new reference"},
        lambda: asyncio.run(library.references.replace("ref_1", b"new reference")),
    )
    life.step({"shared": SHARED_CHUNK}, lambda: library.store.save(SHARED_CHUNK))
    del held
    life.step({}, library.references.collect_retired)
    life.step({"E": (b"short", clock.now + 5)}, lambda: library.files.add("ann", b"short", "e", "E", 5))
    clock.now += 5
    life.step({"E": None}, library.files.collect_expired)
    life.step({"ref_1": None, "shared": None}, lambda: library.references.remove("ref_1"))
    life.step({}, library.close)
    life.end = clock.now


class Unsynced(Files):
    """For looking at an image: there is no second crash."""

    def sync(self, fd):
        pass

    def sync_folder(self, folder):
        pass

    def database(self, path, create=False):
        db = super().database(path, create)
        db.execute("PRAGMA synchronous = OFF")
        return Quick(db)


class Quick:
    """A connection that ignores the wish for durability."""

    def __init__(self, db):
        self.__dict__["_db"] = db

    def execute(self, sql, *values):
        return self._db.execute("SELECT 1" if sql == "PRAGMA synchronous = FULL" else sql, *values)

    def __getattr__(self, name):
        return getattr(self._db, name)

    def __setattr__(self, name, value):
        setattr(self._db, name, value)


def found(library):
    """What a library answers; whatever it serves is compared with what was stored."""
    here = {}
    for file in library.files.page("ann").files:
        expires = {"E": 1_000_005.0}.get(file.handle, file.expires_at)
        here[file.handle] = (library.files.content("ann", file.id), expires)
    for reference in library.references.listing().references:
        here[reference.id] = library.references.content(reference)
    for name, chunk in (("small", SMALL), ("large", LARGE), ("shared", SHARED_CHUNK)):
        stored = library.store.open(chunk.key)
        if stored is not None:
            assert torch.equal(read(stored, chunk.kv), chunk.kv), "a wrong byte was served"
            here[name] = chunk
    return here


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    life = Life(tmp_path_factory.mktemp("recorded") / "library")
    life.journal.root.mkdir()
    live(life)
    return life


def examine(life, root, changes, mode, seed):
    """Open what a crash left behind; True if this image had to be looked at."""
    image = life.journal.image(changes, mode, seed)
    allowed = {thing: life.allowed(thing, changes) for thing in life.states}
    write_image(image, root)
    where = f"after {changes} changes, {mode}, seed {seed}"
    with Library.open(root, LIMITS, files=Unsynced(), clock=Clock()) as library:
        library.check()
        here = found(library)
        for thing, values in allowed.items():
            assert any(here.get(thing) is v or here.get(thing) == v for v in values), f"{thing} {where}"
        stats = library.stats()
        assert stats["disk"]["bytes"] <= LIMITS.disk_bytes, where
        lost = (
            stats["recovered"]["lost_files"],
            stats["recovered"]["missing_chunks"],
            stats["disk"]["corrupt"],
        )
        assert lost == (0, 0, 0), where
        names = everything(root)
        uploads = stats["files"] + stats["references"]["references"] + stats["references"]["retired"]
        assert len([n for n in names if n.startswith("files/")]) == uploads, where
        assert len([n for n in names if n.startswith("kv/")]) == stats["disk"]["chunks"], where
        aside = [n for n in names if n.startswith("quarantine/orphans/")]
        assert len(aside) <= 1, (
            where
        )  # an original whose sidecar, and so its acknowledgement, was still to come
        assert all(n.startswith(("files/", "kv/")) or n in aside for n in names), where
        assert library.files.add("ann", b"life goes on", "n.txt").bytes == 12


@pytest.mark.parametrize("mode", MODES)
def test_a_crash_after_every_change_to_the_disk_loses_nothing_and_serves_nothing_wrong(
    life, tmp_path, mode, soak
):
    seen = set()
    for seed in range(max(1, soak // 5) if mode in ("torn", "reordered") else 1):
        for changes in range(len(life.journal) + 1):
            image = life.journal.image(changes, mode, seed)
            allowed = [[repr(v)[:80] for v in life.allowed(thing, changes)] for thing in sorted(life.states)]
            digest = hash((tuple(sorted(image.items())), repr(allowed)))
            if digest not in seen:
                seen.add(digest)
                examine(life, tmp_path / f"{seed}-{changes}", changes, mode, seed)
                shutil.rmtree(tmp_path / f"{seed}-{changes}")
    assert len(seen) > 10


def test_the_crash_model_covers_the_database(life):
    names = {change[1] for change in life.journal.changes if change[0] == "link"}
    assert {"catalog.sqlite", "catalog.sqlite-wal"} <= names
    writes = [change for change in life.journal.changes if change[0] == "write"]
    database = {
        life.journal.changes.index(c) for c in life.journal.changes if c[0] == "link" and "sqlite" in c[1]
    }
    assert len(writes) > 150 and len(database) >= 2


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
    for changes in range(0, len(liar.journal), 9):
        try:
            examine(liar, tmp_path / str(changes), changes, "dropped", 0)
        except Exception:
            wrong += 1
    assert wrong > 0


def test_a_crash_between_write_and_rename_leaves_nothing_visible(tmp_path):
    class Stops(CrashingFiles):
        def rename(self, source, target):
            if "kv" not in target.parts:
                return super().rename(source, target)
            assert source.read_bytes() and not target.exists()
            self.dead = True
            raise Crash

    library = Library.open(tmp_path, files=Stops(10**9))
    with pytest.raises(Crash):
        library.store.save(make_chunk())
    kill(library)
    (left,) = everything(tmp_path)
    assert left.endswith(".tmp")
    with Library.open(tmp_path) as library:
        assert library.store.open(make_chunk().key) is None
        assert library.recovered["leftovers"] == 1 and not everything(tmp_path)


# The catalogue


def test_migrations_run_once_and_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("mpic.library.catalog.MIGRATIONS", [*MIGRATIONS])
    from mpic.library import catalog

    path = tmp_path / "catalog.sqlite"
    Catalog(path).close()
    catalog.MIGRATIONS += [
        lambda db: db.execute("ALTER TABLE users ADD COLUMN quota INTEGER"),
        lambda db: db.execute("UPDATE users SET quota = 5"),
    ]
    first = Catalog(path)
    with first.write() as db:
        first.add_user(db, "ann", 0)
    first.close()
    again = Catalog(path)
    assert again.one("SELECT quota FROM users")["quota"] is None
    assert again.one("PRAGMA user_version")[0] == len(MIGRATIONS) + 2
    again.close()
    catalog.MIGRATIONS.pop()
    with pytest.raises(IntegrityError, match="newer"):
        Catalog(path)


def test_a_migration_that_fails_changes_nothing(tmp_path, monkeypatch):
    def broken(db):
        db.execute("CREATE TABLE half (x)")
        raise RuntimeError

    path = tmp_path / "catalog.sqlite"
    Catalog(path).close()
    monkeypatch.setattr("mpic.library.catalog.MIGRATIONS", [*MIGRATIONS, broken])
    with pytest.raises(RuntimeError):
        Catalog(path)
    monkeypatch.undo()
    catalog = Catalog(path)
    assert catalog.one("SELECT 1 FROM sqlite_master WHERE name = 'half'") is None
    catalog.check()
    catalog.close()


def test_the_catalogue_is_as_durable_as_it_must_be(tmp_path):
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
    from mpic.errors import StorageFull

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
