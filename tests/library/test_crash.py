"""A crash before every single change to the disk: what was acknowledged is there, what was not leaves no trace."""

import sqlite3

import pytest
import torch
from library_tools import Crash, CrashingFiles, encoded, everything, kill, make_chunk, read, text_key

from mpic.errors import IntegrityError
from mpic.library import Library, Limits
from mpic.library.catalog import MIGRATIONS, Catalog

STEPS = 48


def use(library, done):
    """A piece of a library's life; ``done`` records what was acknowledged."""
    chunk, large = make_chunk(), make_chunk(text_key("large"), n=40)
    file = library.files.add("ann", b"some text", "t.txt", handle="T")
    done["text"] = file.id
    library.store.save(chunk)
    done["chunk"] = chunk
    image = library.files.add("ann", encoded(), "i.png", handle="I")
    done["image"] = image.id
    library.store.save(large)  # evicts
    done["large"], done["chunk"] = large, None
    done["deleting"] = True
    library.files.delete("ann", file.id)
    done["text"] = None


@pytest.mark.parametrize("at", range(STEPS))
def test_a_crash_before_change(tmp_path, at):
    limits = Limits(disk_bytes=20_000)
    files, done = CrashingFiles(at), {}
    library = None
    try:
        library = Library.open(tmp_path, limits, files=files)
        use(library, done)
    except Crash:
        pass
    if library is not None:
        kill(library)
    if at == STEPS - 1:
        assert not files.dead, "raise STEPS"

    library = Library.open(tmp_path, limits)
    library.files.tokenize = lambda text: tuple(text.encode())
    library.check()
    present = {f.id: f for f in library.files.page("ann").files}
    if done.get("image"):
        assert library.files.content("ann", done["image"]) == encoded()
        assert library.files.by_handle("ann", "I").id == done["image"]
    if done.get("text") and not done.get("deleting"):
        assert library.files.chunk("ann", done["text"]).token_ids == tuple(b"some text")
    if done.get("large"):
        assert torch.equal(read(library.store.open(done["large"].key), done["large"].kv), done["large"].kv)
        assert "text" in done
    for file in present.values():
        assert library.files.content("ann", file.id)
    for key, like in ((text_key(), make_chunk()), (text_key("large"), make_chunk(text_key("large"), n=40))):
        stored = library.store.open(key)
        assert stored is None or torch.equal(read(stored, like.kv), like.kv)
    stats = library.stats()
    assert stats["disk"]["corrupt"] == stats["recovered"]["lost_files"] == 0
    names = everything(tmp_path)
    assert len([n for n in names if n.startswith("files/")]) == len(present)
    assert len([n for n in names if n.startswith("kv/")]) == stats["disk"]["chunks"]
    assert all(n.startswith(("files/", "kv/")) for n in names)
    library.close()


def test_a_crash_between_write_and_rename_leaves_nothing_visible(tmp_path):
    class Stops(CrashingFiles):
        def rename(self, source, target):
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
        assert library.recovered["orphans"] == 1 and not everything(tmp_path)


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
    with pytest.raises(sqlite3.OperationalError):
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
