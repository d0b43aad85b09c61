"""API keys: their storage, and the requests they allow."""

import json
import os
import sqlite3
import stat
from contextlib import closing
from unittest.mock import Mock

import pytest
from library_tools import Connection
from server_helpers import fake_server
from threads_kit import started

from mpic import preflight
from mpic.config import load_config
from mpic.durable import FileSystem
from mpic.errors import BadRequest, DatabaseDamaged, DatabaseFailed, StorageFull
from mpic.keys import (
    LOGIN_SECONDS,
    NEEDED,
    KeyLimits,
    KeyNotFound,
    KeysLost,
    KeyStore,
    any_keys,
    check_not_lost,
)
from mpic.library import Library
from mpic.library.copies.backup import backup
from mpic.library.copies.restore import restore


@pytest.fixture
def keys(tmp_path):
    store = KeyStore(tmp_path)
    yield store
    store.close()


def test_a_key_is_found_by_its_text_alone(keys):
    secret, key = keys.create("alice", "admin", KeyLimits(files=3))
    assert secret.startswith(f"mpic_{key.prefix}_") and len(secret.rsplit("_", 1)[0]) >= 13
    assert keys.find(secret) == key == keys.get(key.prefix)
    assert (key.user, key.role, key.limits) == ("alice", "admin", KeyLimits(files=3))


@pytest.mark.parametrize(
    "change", [lambda s: s[:-1], lambda s: s[:-1] + "!", lambda s: s + "A", lambda s: "", str.upper]
)
def test_nothing_but_the_whole_key_is_accepted(keys, change):
    secret, _ = keys.create("alice")
    assert keys.find(change(secret)) is None
    other = "".join(reversed(secret[14:]))
    assert keys.find(secret[:14] + other) is None


def test_the_secret_of_a_key_is_not_on_disk(keys, tmp_path):
    secret, _ = keys.create("alice")
    for path in tmp_path.iterdir():
        assert secret[14:].encode() not in path.read_bytes()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_revoking_takes_effect_at_once_in_other_processes_too(keys, tmp_path):
    secret, key = keys.create("alice")
    other = KeyStore(tmp_path)
    assert other.find(secret)
    keys.revoke("mpic_" + key.prefix)
    assert other.find(secret) is None
    assert other.exist() and [k.revoked_at is None for k in other.listing()] == [False]
    other.close()


def test_two_keys_of_one_user_are_the_same_user(keys):
    one, two = keys.create("alice")[0], keys.create("alice")[0]
    assert one != two and keys.find(one).user == keys.find(two).user
    keys.revoke(one)
    assert keys.find(one) is None and keys.find(two)


@pytest.mark.parametrize("user", ["", "@shared", "a b", "../x", "x" * 65, ".hidden"])
def test_invalid_user_names(keys, user):
    with pytest.raises(BadRequest, check=lambda error: error.param == "user"):
        keys.create(user)


def test_invalid_roles_and_limits(keys):
    with pytest.raises(BadRequest, match="role"):
        keys.create("alice", "root")
    with pytest.raises(BadRequest, match="concurrent"):
        KeyLimits(concurrent=0)
    with pytest.raises(KeyNotFound):
        keys.revoke("00000000")
    assert not keys.exist()


def test_a_newer_file_is_refused(tmp_path):
    KeyStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "keys.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(Exception, match="version 99"):
        KeyStore(tmp_path)


# ---- logins of the web interface


def test_a_login_ends_by_itself_by_logging_out_and_with_its_key(tmp_path):
    now = [0.0]
    store = KeyStore(tmp_path, clock=lambda: now[0])
    _, key = store.create("ann")
    first, second, third = (store.log_in(key) for _ in range(3))
    assert store.logged_in(first) == key and store.logged_in("guessed") is None
    store.log_out(first)
    assert store.logged_in(first) is None and store.logged_in(second) == key
    now[0] = LOGIN_SECONDS - 1
    assert store.logged_in(second) == key
    now[0] = LOGIN_SECONDS
    assert store.logged_in(second) is None
    fourth = store.log_in(key)  # this forgets the others
    with closing(sqlite3.connect(tmp_path / "keys.sqlite")) as db:
        assert db.execute("SELECT COUNT(*) FROM logins").fetchone() == (1,)
    store.revoke(key.prefix)
    assert store.logged_in(fourth) is None and store.logged_in(third) is None
    store.close()


def test_the_oldest_logins_of_a_key_end_first_when_it_has_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr("mpic.keys.MOST_LOGINS", 2)
    store = KeyStore(tmp_path)
    _, key = store.create("ann")
    _, other = store.create("bob")
    kept = store.log_in(other)
    cookies = [store.log_in(key) for _ in range(3)]
    assert [store.logged_in(cookie) is not None for cookie in cookies] == [False, True, True]
    assert store.logged_in(kept) == other
    store.close()


def test_a_request_finds_its_key_while_a_login_waits_for_the_disk(keys, tmp_path):
    secret, key = keys.create("ann")
    cookies = []
    with closing(sqlite3.connect(tmp_path / "keys.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # a login must now wait, as it waits for a slow disk
        login = started(lambda: cookies.append(keys.log_in(key)))
        login.join(0.2)
        assert keys.find(secret) == key and login.is_alive()
        other.execute("ROLLBACK")
    login.join()
    assert keys.logged_in(cookies[0]) == key


def test_a_file_from_before_logins_were_kept_still_has_its_keys(tmp_path):
    store = KeyStore(tmp_path)
    secret, key = store.create("ann")
    store.close()
    with closing(sqlite3.connect(tmp_path / "keys.sqlite")) as db:
        db.executescript("DROP TABLE logins; PRAGMA user_version = 1;")
    store = KeyStore(tmp_path)
    assert store.find(secret) == key == store.logged_in(store.log_in(key))
    store.close()


# ---- a file that is removed or replaced


def stored(folder, *users):
    """Make a key store in a folder; return its path and the keys of these users."""
    with closing(KeyStore(folder)) as store:
        return store.path, [store.create(user)[0] for user in users]


def test_keys_and_logins_of_a_file_that_was_replaced_end_at_once(keys, tmp_path):
    secret, key = keys.create("ann")
    cookie = keys.log_in(key)
    assert keys.exist() and keys.find(secret) and keys.logged_in(cookie)
    path, [other] = stored(tmp_path / "copy", "bob")
    path.replace(keys.path)  # the log of the old file stays
    assert keys.logged_in(cookie) is None and keys.find(secret) is None
    assert keys.find(other).user == "bob" and keys.logged_in(keys.log_in(keys.find(other))).user == "bob"
    assert [key.user for key in keys.listing()] == ["bob"] and keys.exist()
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    with closing(KeyStore(tmp_path)) as later:
        assert later.find(secret) is None and later.find(other)


def test_a_removed_file_refuses_every_key_until_it_is_back(keys, tmp_path, caplog):
    secret, key = keys.create("ann")
    assert keys.exist()
    keys.path.rename(tmp_path / "away")
    for _ in range(2):
        for ask in (lambda: keys.find(secret), lambda: keys.logged_in("guessed"), lambda: keys.log_in(key)):
            with pytest.raises(DatabaseFailed, match="was removed"):
                ask()
        assert keys.exist(), "the server must not open"
    assert sum("was removed" in record.message for record in caplog.records) == 1
    assert not keys.path.exists()
    (tmp_path / "away").rename(keys.path)
    assert keys.find(secret) == key


def test_a_file_without_keys_in_place_of_one_with_keys_does_not_open_the_server(keys, tmp_path):
    secret, _ = keys.create("ann")
    assert keys.exist()
    keys.path.unlink()
    keys.path.touch()  # as a copy begins
    with pytest.raises(DatabaseFailed):
        keys.find(secret)
    assert keys.exist() and keys.path.read_bytes() == b""
    path, _ = stored(tmp_path / "new")
    path.replace(keys.path)
    assert keys.find(secret) is None and keys.exist()


def test_keys_of_a_new_file_are_seen_by_a_server_that_had_none(keys, tmp_path):
    assert not keys.exist()
    keys.path.unlink()
    assert not keys.exist()
    path, [secret] = stored(tmp_path / "new", "ann")
    path.replace(keys.path)
    assert keys.exist() and keys.find(secret).user == "ann"


def test_a_damaged_file_in_place_of_another_refuses_every_key_until_it_is_replaced(keys, tmp_path):
    secret, _ = keys.create("ann")
    path, [other] = stored(tmp_path / "copy", "bob")
    (tmp_path / "damaged").write_bytes(b"damaged" * 1000)
    (tmp_path / "damaged").replace(keys.path)
    for _ in range(2):
        with pytest.raises(DatabaseDamaged):
            keys.find(secret)
    path.replace(keys.path)
    assert keys.find(secret) is None and keys.find(other).user == "bob"


def test_a_log_that_another_process_still_reads_does_not_meet_the_file_that_replaces_its_own(tmp_path):
    with closing(KeyStore(tmp_path, patience=0.05)) as keys:
        secret, _ = keys.create("ann")
        path, [other] = stored(tmp_path / "copy", "bob")
        with closing(sqlite3.connect(keys.path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM keys").fetchall()
            keys.create("ann")
            path.replace(keys.path)
            with pytest.raises(DatabaseFailed, match=r"move keys\.sqlite-wal and keys\.sqlite-shm away"):
                keys.find(secret)
        assert keys.find(secret) is None and keys.find(other).user == "bob"
        assert [key.user for key in keys.listing()] == ["bob"]


# ---- mpic keys


@pytest.fixture
def mpic(tmp_path):
    from typer.testing import CliRunner

    from mpic.cli.keys import app

    return lambda *words: CliRunner().invoke(app, [*words, "--data-dir", str(tmp_path)])


def test_keys_made_and_revoked_on_the_command_line(mpic, keys):
    made = mpic("create", "alice", "--role", "admin", "--files", "7")
    [secret] = made.stdout.split()
    key = keys.find(secret)
    assert (key.user, key.role, key.limits) == ("alice", "admin", KeyLimits(files=7))
    [shown] = json.loads(mpic("list", "--json").stdout)
    assert shown["prefix"] == f"mpic_{key.prefix}" and shown["limits"]["files"] == 7
    assert secret not in mpic("list").stdout and key.prefix in mpic("list").stdout
    assert mpic("revoke", shown["prefix"]).exit_code == 0
    assert keys.find(secret) is None
    assert "revoked" in mpic("list").stdout


def test_mistakes_on_the_command_line(mpic, keys):
    assert mpic("create", "alice", "--files", "0").exit_code == 2
    assert isinstance(mpic("create", "alice", "--role", "king").exception, BadRequest)
    assert isinstance(mpic("revoke", "mpic_00000000").exception, KeyNotFound)
    assert json.loads(mpic("list", "--json").stdout) == []


def test_a_login_on_a_full_disk_says_so_and_later_ones_work(keys):
    class FullDisk(Connection):
        """A connection whose transaction SQLite undoes itself when the disk is full."""

        def execute(self, sql, *values):
            if sql == "COMMIT":
                self.inner.execute("ROLLBACK")
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            return self.inner.execute(sql, *values)

    _, key = keys.create("ann")
    writer = keys._file._writer
    keys._file._writer = FullDisk(writer)
    with pytest.raises(StorageFull):
        keys.log_in(key)
    keys._file._writer = writer
    assert keys.logged_in(keys.log_in(key)) == key


# ---- keys that were lost


def remove(folder):
    for file in folder.glob("keys.sqlite*"):
        file.unlink()


def truncate(folder):
    remove(folder)
    (folder / "keys.sqlite").touch()


def empty(folder):
    with closing(sqlite3.connect(folder / "keys.sqlite")) as db, db:
        db.execute("DELETE FROM keys")


def replace_by_new(folder):
    remove(folder)
    KeyStore(folder / "new").close()
    (folder / "new" / "keys.sqlite").rename(folder / "keys.sqlite")


def forget_mark(folder):
    """As an earlier version left it."""
    (folder / NEEDED).unlink()


@pytest.mark.parametrize("lose", [remove, truncate, empty, replace_by_new])
def test_a_folder_that_has_lost_its_keys_is_not_served_without_any(tmp_path, lose):
    check_not_lost(tmp_path / "new folder")
    stored(tmp_path, "ann")
    forget_mark(tmp_path)
    check_not_lost(tmp_path)  # which makes the mark again
    lose(tmp_path)
    with pytest.raises(KeysLost, match=r"has had API keys.*mpic keys create.*remove keys.needed"):
        preflight.check(load_config(None, {"data_dir": str(tmp_path), "port": 0}))
    with closing(KeyStore(tmp_path)) as keys:
        assert keys.exist(), "nobody is the local admin"
    with pytest.raises(KeysLost):
        check_not_lost(tmp_path)
    stored(tmp_path, "bob")
    check_not_lost(tmp_path)
    remove(tmp_path)
    forget_mark(tmp_path)
    check_not_lost(tmp_path)
    assert not any_keys(tmp_path)


@pytest.mark.parametrize("lose", [remove, truncate, empty, replace_by_new])
async def test_a_running_server_without_keys_does_not_open_again_when_a_first_key_is_lost(
    tmp_path, template, lose
):
    async with fake_server(tmp_path, template) as server:
        assert (await server.http.get("/v1/files")).status_code == 200
        stored(tmp_path, "ann")
        lose(tmp_path)
        assert (await server.http.get("/v1/files")).status_code in (401, 503)


PLACES = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to nothing": lambda path: os.symlink("/nowhere", path),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", ["keys.sqlite", NEEDED])
def test_what_is_no_file_in_place_of_keys_or_mark_does_not_open_the_server(tmp_path, name, place):
    stored(tmp_path, "ann")
    remove(tmp_path)
    forget_mark(tmp_path)
    place(tmp_path / name)
    config = load_config(None, {"data_dir": str(tmp_path), "port": 0})
    with pytest.raises(KeysLost if name == NEEDED else DatabaseFailed, match=r"keys\.(needed|sqlite)"):
        preflight.check(config)


FOREIGN = {
    "no table": "DROP TABLE keys",
    "a table of other columns": "DROP TABLE keys; CREATE TABLE keys (key TEXT)",
    "the version of a new file": "PRAGMA user_version = 0",
    "a limit that is a word": "UPDATE keys SET concurrent = 'few'",
    "a limit below 1": "UPDATE keys SET files = -1",
    "a user that is a path": "UPDATE keys SET user = '../bob'",
    "a user that is no text": "UPDATE keys SET user = x'00ff'",
    "a time that is a word": "UPDATE keys SET created_at = 'today'",
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_keys_that_this_program_does_not_write_are_refused(tmp_path, mpic, change):
    stored(tmp_path, "ann")
    with closing(sqlite3.connect(tmp_path / "keys.sqlite")) as db, db:
        db.executescript(change)
    with pytest.raises(DatabaseDamaged, match=r"keys\.sqlite.*put a copy of keys\.sqlite there"):
        check_not_lost(tmp_path)
    assert isinstance(mpic("list").exception, DatabaseDamaged)


def test_a_restored_backup_still_needs_keys(tmp_path):
    with closing(Library.open(tmp_path / "a")):
        stored(tmp_path / "a", "ann")
    backup(tmp_path / "a", tmp_path / "b")
    restore(tmp_path / "b", tmp_path / "c")
    check_not_lost(tmp_path / "c")
    remove(tmp_path / "c")
    with pytest.raises(KeysLost):
        check_not_lost(tmp_path / "c")


def test_a_full_disk_does_not_open_a_server_whose_keys_are_not_marked_yet(tmp_path, monkeypatch):
    stored(tmp_path, "ann")
    forget_mark(tmp_path)
    monkeypatch.setattr(FileSystem, "create", Mock(side_effect=OSError(28, "No space left on device")))
    with closing(KeyStore(tmp_path)) as keys:
        with pytest.raises(DatabaseFailed, match=r"keys\.needed cannot be written"):
            keys.exist()
        assert keys.exist()
