"""A database that another process has locked, or that cannot be used, is an error with a code of its own."""

import sqlite3
import time
from contextlib import closing

import pytest
from library_tools import everything
from threads_kit import in_threads

from mpic.database import translation
from mpic.errors import DatabaseBusy, DatabaseDamaged, DatabaseFailed, StorageFull
from mpic.keys import KeyStore, any_keys
from mpic.library.caches import CachedText

CODES = {
    sqlite3.SQLITE_BUSY: DatabaseBusy,
    sqlite3.SQLITE_BUSY_SNAPSHOT: DatabaseBusy,
    sqlite3.SQLITE_LOCKED: DatabaseBusy,
    sqlite3.SQLITE_FULL: StorageFull,
    sqlite3.SQLITE_CORRUPT: DatabaseDamaged,
    sqlite3.SQLITE_NOTADB: DatabaseDamaged,
    sqlite3.SQLITE_IOERR: DatabaseFailed,
    sqlite3.SQLITE_IOERR_READ: DatabaseFailed,
    sqlite3.SQLITE_CANTOPEN: DatabaseFailed,
    sqlite3.SQLITE_READONLY: DatabaseFailed,
    sqlite3.SQLITE_READONLY_DBMOVED: DatabaseFailed,
}


def failing(code):
    error = sqlite3.OperationalError("what SQLite says")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize("code", CODES)
def test_every_failure_of_the_disk_or_of_another_process_has_its_class(code):
    error = translation(failing(code), "the catalogue")
    assert type(error) is CODES[code] and "the catalogue" in error.message


def test_an_error_in_a_statement_is_not_translated(library):
    assert translation(failing(sqlite3.SQLITE_CONSTRAINT), "the catalogue") is None
    assert translation(sqlite3.ProgrammingError("closed"), "the catalogue") is None
    with pytest.raises(sqlite3.OperationalError, match="syntax"):
        library.catalog.read("SELEKT")
    with pytest.raises(sqlite3.IntegrityError), library.catalog.write() as db:
        db.execute("INSERT INTO users VALUES (NULL, 0, 0, 0, 0)")


class Broken:
    """A connection whose statements all fail."""

    in_transaction = False

    def __init__(self, code):
        self.code = code

    def execute(self, *statement):
        raise failing(self.code)

    def close(self):
        pass


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT])
def test_reading_and_writing_raise_the_same_errors(library, code, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(library.catalog, "_idle", [Broken(code)])
        with pytest.raises(CODES[code]):
            library.files.page("ann")
        patch.setattr(library.catalog, "_writer", Broken(code))
        with pytest.raises(CODES[code]):
            library.set_quota("ann", files=1)
    assert library.files.page("ann").files == []


@pytest.fixture
def locked(library):
    """Lock the catalogue, for SQLite as if by another process, until the test ends."""
    library.files.add("ann", b"before", "b.txt")
    with closing(sqlite3.connect(library.root / "catalog.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


def test_a_locked_catalogue_refuses_changes_and_nothing_is_stored(library, locked, monkeypatch):
    monkeypatch.setattr("mpic.library.catalog.database.PATIENCE", 0.05)
    before = everything(library.root, sidecars=True)
    file = library.files.page("ann").files[0]  # reading goes on
    for change in (
        lambda: library.files.add("ann", b"some text", "t.txt"),
        lambda: library.caches.create("ann", [CachedText("some text", 0, 9)]),
        lambda: library.files.delete("ann", file.id),
        lambda: library.files.set_state("ann", file.id, "ready", 3),
    ):
        with pytest.raises(DatabaseBusy) as caught:
            change()
        assert caught.value.retry_after and caught.value.status == 503
    assert everything(library.root, sidecars=True) == before
    locked.execute("ROLLBACK")
    assert library.files.add("ann", b"some text", "t.txt")


def test_writers_wait_for_a_locked_catalogue_at_the_same_time(library, locked, monkeypatch):
    monkeypatch.setattr("mpic.library.catalog.database.PATIENCE", 1.0)

    def wait(files):
        with pytest.raises(DatabaseBusy):
            library.set_quota("ann", files=files)

    begun = time.monotonic()
    in_threads(wait, range(20))
    assert time.monotonic() - begun < 15  # one after the other it is 20


# The key store


def test_a_locked_or_damaged_key_store_raises_its_own_error(tmp_path):
    keys = KeyStore(tmp_path, patience=0.05)
    secret, key = keys.create("ann")
    with closing(sqlite3.connect(keys.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert keys.find(secret) == key
        for change in (lambda: keys.create("bob"), lambda: keys.revoke(key.prefix)):
            with pytest.raises(DatabaseBusy, match="key store"):
                change()
    keys.close()
    keys.path.write_bytes(b"damaged" * 1000)
    with pytest.raises(DatabaseDamaged, match=r"keys\.sqlite-wal and keys\.sqlite-shm away .* make new keys"):
        KeyStore(tmp_path)


def test_asking_whether_there_are_keys_makes_nothing(tmp_path):
    assert not any_keys(tmp_path / "nowhere") and not (tmp_path / "nowhere").exists()
    assert not any_keys(tmp_path) and list(tmp_path.iterdir()) == []
    keys = KeyStore(tmp_path)
    assert not any_keys(tmp_path)
    keys.create("ann")
    assert any_keys(tmp_path)
    keys.close()
