"""Backups of a library, made while it changes, and restoring them."""

import asyncio
import os
import random
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import Mock

import pytest
from library_tools import chunks, encoded, everything, make_chunk, saved, text_key

from mpic.engine.base import GenerationUsage
from mpic.errors import (
    BadRequest,
    DatabaseBusy,
    DatabaseDamaged,
    ForeignFolder,
    IntegrityError,
    StorageFull,
    Unavailable,
)
from mpic.file_status import is_own_file
from mpic.keys import KeyStore
from mpic.library import SHARED, Library
from mpic.library.caches import CachedText
from mpic.library.copies import backup as copies
from mpic.library.copies.backup import backup
from mpic.library.copies.restore import restore
from mpic.library.rebuild import recover
from mpic.library.upkeep import check
from mpic.server.savings import SavingsLedger


def fill(library):
    library.files.add("ann", b"some text", "t.txt", "T", metadata={"a": 1})
    library.files.add("bob", encoded(), "b.png", "B", expires_after=10**6)
    library.caches.create("ann", [CachedText("one", 0, 3), CachedText("two", 3, 6)], name="C")
    asyncio.run(library.references.add(b"a reference", "r.txt", title="R", id="ref_1"))
    saved(library, *chunks(3), make_chunk(text_key("r", owner=SHARED)))
    library.set_quota("ann", files=7)


def rows(library):
    tables = ("files", "refs", "caches", "cache_chunks", "users", "chunks")
    return {table: [tuple(row) for row in library.catalog.read(f"SELECT * FROM {table}")] for table in tables}


@pytest.mark.parametrize("link", [True, False], ids=["linked", "copied"])
@pytest.mark.parametrize("with_chunks", [True, False], ids=["with chunks", "without"])
def test_a_restored_library_is_the_one_that_was_backed_up(library, tmp_path, clock, link, with_chunks):
    fill(library)
    keys = KeyStore(library.root)
    secret, _ = keys.create("ann")
    progress = []
    done = backup(library.root, tmp_path / "b", with_chunks, link, progress=progress.append)
    assert sum(progress) == copies.size_of(library.root) == copies.size_of(tmp_path / "b")
    assert done.counts["files"] == 4 and done.counts["refs"] == done.counts["keys"] == 1
    assert done.counts["chunks"] == (4 if with_chunks else 0) and not done.lost and not done.damaged
    assert bool(done.counts["linked"]) == link and bool(done.counts["copied"]) == (not link)
    was = rows(library) | ({} if with_chunks else {"chunks": []})
    library.files.delete("ann", library.files.by_handle("ann", "T").id)  # the backup is of before
    again = restore(tmp_path / "b", tmp_path / "r")
    assert not again.damaged and not again.lost
    with Library.open(tmp_path / "r", clock=clock) as other:
        assert rows(other) == was and not any(other.recovered.values())
        assert other.folder.id == library.folder.id
        assert other.files.content("ann", other.files.by_handle("ann", "T").id) == b"some text"
        assert check(other) == []
    with pytest.raises(Unavailable):
        Library.open(library.root)
    restored = KeyStore(tmp_path / "r")
    assert restored.find(secret).user == "ann"
    for store in (keys, restored):
        store.close()


def test_a_backup_holds_nothing_that_the_library_does_not_list(library, tmp_path, clock):
    fill(library)
    gone = library.files.add("ann", b"gone", "g.txt")
    library.files.delete("ann", gone.id)
    (library.root / "files" / "notes.txt").write_text("mine")
    (library.root / "tmp" / "left").write_text("mine")
    backup(library.root, tmp_path / "b")
    names = everything(tmp_path / "b", sidecars=True) - {"mpic-backup.json"}
    known = {n for n in everything(library.root, sidecars=True) if n.startswith("files/")}
    assert names == known - {"files/notes.txt"}


def test_hard_links_cost_nothing_and_survive_the_deletion_of_the_library(library, tmp_path):
    file = library.files.add("ann", b"some text", "t.txt")
    backup(library.root, tmp_path / "b")
    copy = tmp_path / "b" / file.path.relative_to(library.root)
    assert os.path.samefile(copy, file.path)
    library.files.pin("ann", file.id)  # rewrites the sidecar
    assert b'"pinned": false' in copy.with_name(f"{copy.name}.json").read_bytes()
    library.files.delete("ann", file.id)
    assert copy.read_bytes() == b"some text"


def test_bytes_are_copied_and_verified_if_hard_links_are_impossible(library, tmp_path, monkeypatch):
    fill(library)
    monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(OSError(18, "another disk")))
    library.files.by_handle("ann", "T").path.write_bytes(b"some tex!")
    done = backup(library.root, tmp_path / "b", chunks=True)
    assert done.counts["linked"] == 0 and done.counts["copied"] == 10 + 4
    path = str(library.files.by_handle("ann", "T").path.relative_to(library.root))
    assert done.damaged == [path]
    assert restore(tmp_path / "b", tmp_path / "r").damaged == [path]


def test_a_backup_names_lost_originals_and_copies_the_rest(library, tmp_path, clock):
    fill(library)
    file = library.files.by_handle("ann", "T")
    file.path.unlink()
    path = str(file.path.relative_to(library.root))
    assert backup(library.root, tmp_path / "b").lost == [path]
    assert restore(tmp_path / "b", tmp_path / "r").lost == [path]
    with Library.open(tmp_path / "r", clock=clock) as other:
        assert other.files.get("ann", file.id).error == "the original is lost"
        assert other.files.by_handle("bob", "B").state == "compiling"
    library.files.delete("ann", file.id)


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize("suffix", ["", ".json"])
def test_a_backup_reads_and_links_no_pipe_folder_or_device(library, tmp_path, suffix, kind, link):
    fill(library)
    file = library.files.by_handle("ann", "T")
    path = file.path
    place = path.with_name(path.name + suffix)
    place.unlink()
    if kind == "device":
        place.symlink_to("/dev/full")
    else:
        os.mkfifo(place) if kind == "pipe" else place.mkdir()
    done = backup(library.root, tmp_path / "b", link=link)
    assert done.lost == ([] if suffix else [str(path.relative_to(library.root))])
    assert all(p.is_dir() or is_own_file(p) for p in (tmp_path / "b").rglob("*"))
    place.rmdir() if kind == "folder" else place.unlink()
    library.files.delete("ann", file.id)


def test_a_backup_of_a_changing_library_is_consistent(open_library, tmp_path, clock):
    """Uploads and deletions go on while backups are made; what one lists is there, whole."""
    library = open_library()
    stop = threading.Event()

    def change(user):
        rng = random.Random(user)
        while not stop.is_set():
            library.files.add(user, rng.randbytes(60).hex().encode(), "t.txt")
            files = library.files.page(user).files
            if len(files) > 4:
                library.files.delete(user, rng.choice(files).id)
            stop.wait(0.01)  # a backup must be able to read a file before it is gone

    with ThreadPoolExecutor(2) as pool:
        changes = pool.map(change, ("ann", "bob"))
        try:
            for number in range(4):
                done = backup(library.root, tmp_path / f"b{number}", link=number % 2 == 0)
                assert not done.lost and not done.damaged
        finally:
            stop.set()
        list(changes)  # raises what one of them raised
    for number in range(4):
        restore(tmp_path / f"b{number}", tmp_path / f"r{number}")
        with Library.open(tmp_path / f"r{number}", clock=clock) as other:
            assert other.recovered["lost_files"] == 0
            assert check(other) == []


def test_a_file_deleted_between_snapshot_and_copy_is_not_in_the_backup(library, tmp_path, monkeypatch):
    files = [library.files.add("ann", f"text {number}".encode(), "t.txt") for number in range(4)]
    taken, deleted = [], []
    take = copies._Backup._take

    def slow(self, path):
        if len(taken) == 2:  # one of those that are copied, and one that is still to come
            names = [os.path.basename(name) for name in taken]
            for id in (names[0], *sorted({f.id for f in files} - set(names))[:1]):
                deleted.append(id)
                library.files.delete("ann", id)
        taken.append(path)
        return take(self, path)

    monkeypatch.setattr(copies._Backup, "_take", slow)
    done = backup(library.root, tmp_path / "b")
    assert done.counts["files"] == 2 and not done.lost
    left = {os.path.basename(name) for name in everything(tmp_path / "b")} - {"mpic-backup.json"}
    assert left == {file.id for file in files} - set(deleted)


# The savings ledger, without which everything else works


def count(root):
    """Has the ledger of a library count one answer."""
    ledger = SavingsLedger(root, "model")
    ledger.answered("ann", GenerationUsage(prompt_tokens=9, ttft_ms=1.0))
    ledger.flush()


def leave_half_written(root):
    """Make the ledger what a server leaves that is killed while it writes: a part of the change is in the file, and
    its journal says how to take that back."""
    path = root / "savings.sqlite"
    journal = root / "savings.sqlite-journal"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN")
        db.executemany("INSERT INTO days VALUES (?, 'x', 0, 0, 0)", [(f"{i:0200}",) for i in range(1_000)])
        files = {file: file.read_bytes() for file in (path, journal)}
        db.execute("ROLLBACK")
    for file, content in files.items():
        file.write_bytes(content)


def damage(root):
    (root / "savings.sqlite").write_bytes(b"damaged" * 1_000)


def damage_one_page(root):
    """Spoil a page that nobody reads who only opens the ledger."""
    path = root / "savings.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        db.executemany("INSERT INTO days VALUES (?, 'x', 0, 0, 0)", [(f"{i:0200}",) for i in range(1_000)])
    content = path.read_bytes()
    size = int.from_bytes(content[16:18], "big")  # of a page
    path.write_bytes(content[:-size] + b"\xff" * size)


def test_a_backup_holds_what_reuse_has_saved(library, tmp_path):
    count(library.root)
    assert backup(library.root, tmp_path / "b").notes == []
    restore(tmp_path / "b", tmp_path / "r")
    assert [row[1:3] for row in SavingsLedger(tmp_path / "r", "model").days(None, "")] == [(1, 9)]


@pytest.mark.parametrize("spoil", [leave_half_written, damage, damage_one_page])
def test_a_backup_leaves_out_savings_that_cannot_be_read_and_says_so(library, tmp_path, clock, spoil):
    fill(library)
    count(library.root)
    spoil(library.root)
    before = {path: path.read_bytes() for path in library.root.glob("savings*")}
    done = backup(library.root, tmp_path / "b")
    assert done.counts["files"] == 4 and not done.lost and not done.damaged
    [note] = done.notes
    assert note.startswith("the savings ledger ") and "the backup has no savings.sqlite" in note
    assert {path: path.read_bytes() for path in library.root.glob("savings*")} == before
    assert not list((tmp_path / "b").glob("savings*"))
    restore(tmp_path / "b", tmp_path / "r")
    with Library.open(tmp_path / "r", clock=clock) as other:
        assert rows(other) == rows(library) | {"chunks": []} and check(other) == []
        count(tmp_path / "r")
        assert len(SavingsLedger(tmp_path / "r", "model").days(None, "")) == 1


@pytest.mark.parametrize("file", ["savings.sqlite", "keys.sqlite"])
def test_a_backup_ends_when_another_process_keeps_a_database_locked(library, tmp_path, monkeypatch, file):
    count(library.root)
    KeyStore(library.root).close()
    monkeypatch.setattr(copies, "PATIENCE", 0.01)
    with closing(sqlite3.connect(library.root / file, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseBusy, match=f"{copies.NAMES[file]} is locked by another process"):
            backup(library.root, tmp_path / "b")
    with pytest.raises(BadRequest, match="incomplete"):
        restore(tmp_path / "b", tmp_path / "r")


def test_a_backup_of_damaged_keys_fails_and_names_them(library, tmp_path):
    (library.root / "keys.sqlite").write_bytes(b"damaged" * 1_000)
    with pytest.raises(DatabaseDamaged, match="the key store is damaged"):
        backup(library.root, tmp_path / "b")


# Folders that are no backup, or an incomplete one


def test_a_backup_that_was_interrupted_is_not_restored(library, tmp_path, monkeypatch):
    fill(library)

    monkeypatch.setattr(copies._Backup, "chunks", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        backup(library.root, tmp_path / "b")
    with pytest.raises(BadRequest, match="incomplete"):
        restore(tmp_path / "b", tmp_path / "r")
    assert not (tmp_path / "r").exists()
    monkeypatch.undo()
    with pytest.raises(BadRequest, match="not empty"):
        backup(library.root, tmp_path / "b")


def test_no_server_starts_in_a_backup(library, tmp_path):
    backup(library.root, tmp_path / "b")
    with pytest.raises(ForeignFolder, match="mpic library restore"):
        Library.open(tmp_path / "b")


def test_a_folder_that_is_no_backup_or_has_a_damaged_catalogue_is_refused(library, tmp_path):
    (tmp_path / "x").mkdir()
    for source in (tmp_path / "x", tmp_path / "nowhere", library.root):
        with pytest.raises(BadRequest, match="not a backup"):
            restore(source, tmp_path / "r")
    backup(library.root, tmp_path / "b")
    (tmp_path / "b" / "catalog.sqlite").write_bytes(b"damaged")
    with pytest.raises(IntegrityError, match="damaged"):
        restore(tmp_path / "b", tmp_path / "r")
    with pytest.raises(Unavailable, match="no library"):
        backup(tmp_path / "x", tmp_path / "c")
    assert not (tmp_path / "r").exists() and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "keys.sqlite",
            "files/mine.txt",
            "catalog.sqlite",
            "mpic-library.json",
            "savings.sqlite",
            "mine.txt",
        ),
        *(f"{name}-{log}" for name in ("keys.sqlite", "savings.sqlite") for log in ("wal", "journal")),
        "catalog.sqlite-journal",
    ],
)
def test_a_restore_goes_into_a_new_folder_only(library, tmp_path, name):
    fill(library)
    backup(library.root, tmp_path / "b")
    (tmp_path / "r" / name).parent.mkdir(parents=True)
    (tmp_path / "r" / name).write_text("mine")
    with pytest.raises(ForeignFolder, match=name.split("/")[0]):
        restore(tmp_path / "b", tmp_path / "r")
    assert [p.name for p in (tmp_path / "r").rglob("*") if p.is_file()] == [name.split("/")[-1]]


def test_a_restore_goes_into_a_folder_of_empty_volumes(library, tmp_path):
    fill(library)
    backup(library.root, tmp_path / "b")
    for name in ("lost+found", "files/lost+found", "kv"):
        (tmp_path / "r" / name).mkdir(parents=True)
    assert restore(tmp_path / "b", tmp_path / "r").counts["files"] == 4


def test_an_interrupted_restore_is_not_a_library(library, tmp_path, monkeypatch):
    fill(library)
    backup(library.root, tmp_path / "b")
    copy_file, copied = copies.copy_file, []

    def full(source, target):
        copied.append(target)
        if len(copied) == 4:
            raise OSError(28, "full")
        return copy_file(source, target)

    monkeypatch.setattr("mpic.library.copies.restore.copy_file", full)
    with pytest.raises(StorageFull):
        restore(tmp_path / "b", tmp_path / "r")
    monkeypatch.undo()
    with pytest.raises(IntegrityError, match="was interrupted"):
        Library.open(tmp_path / "r")


def test_a_restored_library_whose_catalogue_is_lost_too_is_recovered(library, tmp_path, clock):
    fill(library)
    backup(library.root, tmp_path / "b")
    restore(tmp_path / "b", tmp_path / "r")
    (tmp_path / "r" / "catalog.sqlite").unlink()
    assert recover(tmp_path / "r", clock=clock).troubles == []
    with Library.open(tmp_path / "r", clock=clock) as other:
        assert other.files.by_handle("ann", "T").metadata == {"a": 1}


OUTSIDE = {
    "up": "../../victim.txt",
    "absolute": "{victim}",
    "inside and out": "files/../../../victim.txt",
    "another user's": "files/{bob}",
    "the keys": "keys.sqlite",
}


@pytest.mark.parametrize("way", OUTSIDE)
@pytest.mark.parametrize("table", ["files", "refs", "retired_refs", "chunks"])
def test_a_path_in_a_restored_catalogue_leads_nowhere(tmp_path, way, table):
    """What a catalogue says of where a file is, is neither read nor deleted."""
    victim = tmp_path / "victim.txt"
    victim.write_bytes(b"some text")  # as the row's hash says
    with Library.open(tmp_path / "library") as library:
        fill(library)
        ann, bob = library.files.by_handle("ann", "T"), library.files.by_handle("bob", "B")
        asyncio.run(library.references.add(b"some text", "r.txt", title="R", id="ref_p"))
        library.store.save(make_chunk(text_key("some text", owner="ann")))
    backup(tmp_path / "library", tmp_path / "backup", chunks=True)
    path = OUTSIDE[way].format(victim=victim, bob=bob.path.relative_to(bob.path.parent.parent))
    with closing(sqlite3.connect(tmp_path / "backup" / "catalog.sqlite")) as db:
        if table == "retired_refs":
            names = "id, version, kind, title, description, metadata, filename, path, bytes, sha256, digest, "
            names += "created_at, updated_at, tokens, state, error"
            db.execute(f"INSERT INTO retired_refs ({names}) SELECT {names} FROM refs WHERE id = 'ref_p'")
        db.execute(f"UPDATE {table} SET path = ?", (path,))
        db.commit()
    restore(tmp_path / "backup", tmp_path / "restored")
    (tmp_path / "restored" / "keys.sqlite").touch()
    kept = (bob.sha256, (tmp_path / "restored" / "keys.sqlite").stat().st_size)
    for opened in (Library.open, Library.open_read_only):
        with pytest.raises(IntegrityError, match="recover --force"):
            opened(tmp_path / "restored")
    recover(tmp_path / "restored", force=True)
    with Library.open(tmp_path / "restored") as library:
        assert library.files.by_handle("ann", "T").path == library.root / ann.path.relative_to(
            tmp_path / "library"
        )
        for file in library.files.page("ann").files:
            library.files.delete("ann", file.id)
        library.check()
        assert library.files.by_handle("bob", "B").sha256 == kept[0]
    assert victim.read_bytes() == b"some text" and (tmp_path / "restored" / "keys.sqlite").exists()


@pytest.mark.parametrize("id", ["../../../victim.txt", "file-short", "", b"blob", "file-" + "a" * 23 + "/"])
@pytest.mark.parametrize("table", ["files", "refs", "caches"])
def test_a_catalogue_with_an_id_that_no_library_gives_is_refused(tmp_path, table, id):
    victim = tmp_path / "victim.txt.json"
    victim.write_text("mine")
    with Library.open(tmp_path / "library") as library:
        fill(library)
        library.references.tokenize = library.files.tokenize = lambda text: tuple(text.encode())
        asyncio.run(library.references.add(b"some text", "r.txt", title="R", id="ref_p"))
    with closing(sqlite3.connect(tmp_path / "library" / "catalog.sqlite")) as db:
        db.execute(f"UPDATE {table} SET id = ? WHERE rowid = (SELECT MIN(rowid) FROM {table})", (id,))
        if table == "caches":
            db.execute("UPDATE cache_chunks SET cache = ?", (id,))
        db.commit()
    with pytest.raises(IntegrityError, match="recover --force"):
        Library.open(tmp_path / "library")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("what", ["original", "folder", "catalogue", "savings", "pipe"])
def test_what_a_link_in_a_backup_leads_to_is_not_restored(tmp_path, what):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "shadow").write_bytes(b"some text")
    with Library.open(tmp_path / "library") as library:
        fill(library)
        file = library.files.by_handle("ann", "T")
    backup(tmp_path / "library", tmp_path / "backup", link=False)
    inside = tmp_path / "backup" / file.path.relative_to(tmp_path / "library")
    if what == "folder":
        inside.parent.rename(secret / "moved")
        inside.parent.symlink_to(secret / "moved")
    elif what in ("catalogue", "savings"):
        path = tmp_path / "backup" / ("catalog.sqlite" if what == "catalogue" else "savings.sqlite")
        (path if path.exists() else secret / "shadow").replace(secret / "db")
        path.symlink_to(secret / "db")
    else:
        inside.unlink()
        inside.symlink_to(secret / "shadow") if what == "original" else os.mkfifo(inside)
    if what == "catalogue":
        with pytest.raises(IntegrityError):
            restore(tmp_path / "backup", tmp_path / "restored")
        return
    done = restore(tmp_path / "backup", tmp_path / "restored")
    assert bool(done.lost) == (what != "savings")
    assert not [path for path in (tmp_path / "restored").rglob("*") if path.is_symlink()]
    assert not (tmp_path / "restored" / "savings.sqlite").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "7",
        "null",
        '"x"',
        "[" * 10_000,
        '{"counts": 5}',
        '{"counts": {"files": "x"}}',
        '{"counts": []}',
        "\xff",
    ],
)
def test_a_manifest_of_a_wrong_type_is_no_backup(tmp_path, text):
    (tmp_path / "mpic-backup.json").write_bytes(
        text.replace("{", '{"library": "x", "created_at": 1, "state": "complete", ', 1).encode("latin-1")
    )
    with pytest.raises(BadRequest, match="not a backup"):
        copies.Manifest.read(tmp_path)
