"""Sidecars say what the catalogue says, and are durable before it."""

import asyncio
import hashlib
import json
import os
import shutil
import sqlite3
from contextlib import closing, suppress
from threading import Lock

import pytest
from library_tools import Connection, CrashingFiles, FullDisk, encoded, everything, picture, text_key

from mpic.durable import FileSystem
from mpic.errors import CorruptFile, HandleTaken, StorageFull, StorageQuotaExceeded
from mpic.library import Library
from mpic.library.caches import CachedText
from mpic.library.folder.sidecars import Sidecar
from mpic.library.rebuild import recover


def sidecars(library):
    return {name for name in everything(library.root, sidecars=True) if name.endswith(".json")}


def agree(library):
    """Check that exactly the expected sidecars exist, and agree with the catalogue."""
    expected = dict(library.sidecars.expected(library.catalog.read))
    assert {str(path.relative_to(library.root)) for path in expected} == sidecars(library)
    for path, sidecar in expected.items():
        assert Sidecar.read(path) == sidecar
    return len(expected)


def test_every_change_reaches_the_sidecar(library, clock):
    ann = library.files.add(
        "ann", b"some text", "t.txt", "T", expires_after=60, metadata={"a": 1, "b": "ü", "c": 0.1, "d": True}
    )
    assert agree(library) == 1
    record = json.loads(ann.path.with_name(f"{ann.id}.json").read_text())["record"]
    assert record["owner"] == "ann" and record["handle"] == "T" and record["metadata"] == ann.metadata
    assert record["sha256"] == ann.sha256 and record["digest"] == ann.key.digest and record["kind"] == "text"
    assert record["expires_at"] == ann.expires_at and record["created_at"] == ann.created_at
    library.files.extend("ann", ann.id, None)
    library.files.pin("ann", ann.id)
    assert agree(library) == 1
    cache = library.caches.create(
        "ann", [CachedText(f"part {i}", i, i + 1) for i in range(40)], name="C", ttl=60
    )
    library.caches.extend("ann", cache.id, 600)
    library.files.pin("ann", cache.chunks[1].file.id)
    assert agree(library) == 2
    library.caches.delete("ann", cache.chunks[0].file.id)
    assert agree(library) == 2
    reference = asyncio.run(library.references.add(encoded(), "r.png", title="R", metadata={"k": "v"}))
    library.references.pin(reference.id)
    asyncio.run(library.references.replace(reference.id, encoded(picture(1)), title="R 2", description="d"))
    library.references.collect_retired()
    assert agree(library) == 3
    library.set_quota("ann", files=99)
    assert agree(library) == 4
    library.files.delete("ann", ann.id)
    library.caches.delete("ann", cache.id)
    library.references.remove(reference.id)
    assert agree(library) == 1 and not [name for name in everything(library.root) if "owner" not in name]


def test_a_sidecar_is_durable_before_its_row_and_gone_after_it(tmp_path):
    """At every commit the sidecars on disk are those of the rows before it, those of the rows after it, or both."""
    library = Library.open(tmp_path)
    seen = []
    write = library.catalog.write

    class Watched:
        def __enter__(self):
            self.inner = write()
            return self.inner.__enter__()

        def __exit__(self, *error):
            seen.append(len(sidecars(library)))
            return self.inner.__exit__(*error)

    library.catalog.write = Watched
    file = library.files.add("ann", b"some text", "t.txt")
    assert seen == [1]
    library.files.delete("ann", file.id)
    assert seen == [1, 1] and not sidecars(library)
    library.close()


class Counting(FileSystem):
    """Counts the syncs of files and folders."""

    def __init__(self):
        super().__init__()
        self.files, self.folders, self._lock = 0, 0, Lock()

    def sync(self, fd):
        with self._lock:
            self.files += 1
        super().sync(fd)

    def sync_folder(self, folder):
        self.folders += 1
        super().sync_folder(folder)

    def taken(self, action):
        self.files = self.folders = 0
        action()
        return self.files, self.folders


def test_a_sidecar_costs_one_more_sync_and_a_cache_one_for_all_chunks(open_library):
    files = Counting()
    library = open_library(filesystem=files)
    add = lambda: library.files.add("ann", b"some text", "t.txt")
    add()  # makes the folders
    assert files.taken(add) == (2, 1)
    parts = [CachedText(f"part {i}", i, i + 1) for i in range(50)]
    assert files.taken(lambda: library.caches.create("ann", parts)) == (51, 2)
    asyncio.run(library.references.add(b"0", "r.txt", title="R"))
    assert files.taken(lambda: asyncio.run(library.references.add(b"1", "r.txt", title="R"))) == (2, 1)
    file = library.files.page("ann").files[0]
    assert files.taken(lambda: library.files.delete("ann", file.id)) == (0, 1)
    library.caches.delete("ann", library.caches.page("ann").caches[0].id)


@pytest.mark.parametrize("room", range(0, 1300, 100))
def test_a_disk_that_is_full_anywhere_on_the_way_leaves_neither_original_nor_sidecar(open_library, room):
    disk = FullDisk()
    library = open_library(filesystem=disk)
    kept = library.files.add("ann", b"kept", "k.txt", "K")
    before = everything(library.root, sidecars=True)
    disk.left = room
    refused = 0
    for store in (
        lambda: library.files.add("ann", b"x" * 300, "x.txt"),
        lambda: library.caches.create("ann", [CachedText("y" * 200, 0, 1), CachedText("z" * 200, 1, 2)]),
    ):
        try:
            store()
        except StorageFull:
            refused += 1
    assert refused or room >= 1000
    disk.left = None
    for file in library.files.page("ann").files:
        assert library.files.content("ann", file.id)
    assert agree(library) == 3 - refused and before <= everything(library.root, sidecars=True)
    assert library.files.by_handle("ann", "K") == kept


def test_a_change_whose_sidecar_cannot_be_written_is_not_made(open_library):
    disk = FullDisk()
    library = open_library(filesystem=disk)
    file = library.files.add("ann", b"some text", "t.txt")
    disk.left = 10
    for change in (
        lambda: library.files.extend("ann", file.id, 60),
        lambda: library.files.pin("ann", file.id),
        lambda: library.set_quota("ann", files=1),
    ):
        with pytest.raises(StorageFull):
            change()
    disk.left = None
    assert library.files.get("ann", file.id) == file and agree(library) == 1


def test_an_upload_that_is_refused_leaves_no_sidecar(open_library):
    library = open_library(user_files=2)
    library.files.add("ann", b"some text", "t.txt", "T")
    insert = library.files._rows.insert

    def raced(*file):  # another upload takes the handle while the file is received
        library.files._rows.insert = insert
        library.files.add("ann", b"first", "f.txt", "SAME")
        insert(*file)

    library.files._rows.insert = raced
    with pytest.raises(HandleTaken):
        library.files.add("ann", b"second", "s.txt", "SAME")
    with pytest.raises(StorageQuotaExceeded):
        library.files.add("ann", b"third", "s.txt")
    assert agree(library) == 2


def test_a_replacement_that_is_refused_leaves_the_old_file_recoverable(tmp_path):
    with Library.open(tmp_path) as library:
        library.set_quota("ann", bytes=10)
        old = library.files.add("ann", b"6bytes", "t.txt", "H")
        with pytest.raises(StorageQuotaExceeded):
            library.files.add("ann", b"x" * 20, "t.txt", "H", replace=True)
        assert agree(library) == 2
    (tmp_path / "catalog.sqlite").unlink()
    recover(tmp_path)
    with Library.open(tmp_path) as library:
        library.files.collect_expired()
        again = library.files.by_handle("ann", "H")
        assert again.id == old.id and library.files.content("ann", again.id) == b"6bytes"


class FailingCommit(Connection):
    """The connection of a catalogue whose next commit fails."""

    def execute(self, sql, *values):
        if sql == "COMMIT":
            raise sqlite3.OperationalError("the disk does not answer")
        return self.inner.execute(sql, *values)


CHANGES = {
    "extend": lambda lib, file, cache: lib.files.extend("ann", file.id, 60),
    "pin": lambda lib, file, cache: lib.files.pin("ann", file.id),
    "rename": lambda lib, file, cache: lib.files.rename("ann", file.id, "OTHER"),
    "replace": lambda lib, file, cache: lib.files.add("ann", b"new", "t.txt", "H", replace=True),
    "extend a cache": lambda lib, file, cache: lib.caches.extend("ann", cache.id, 60),
    "delete a chunk": lambda lib, file, cache: lib.caches.delete("ann", cache.chunks[0].file.id),
    "set a quota": lambda lib, file, cache: lib.set_quota("ann", files=9),
    "set a first quota": lambda lib, file, cache: lib.set_quota("bob", files=9),
    "pin a reference": lambda lib, file, cache: lib.references.pin("ref_1"),
}


def filled(library):
    asyncio.run(library.references.add(b"r", "r.txt", title="R", id="ref_1"))
    library.set_quota("ann", files=8)
    file = library.files.add("ann", b"some text", "t.txt", "H")
    return file, library.caches.create("ann", [CachedText("one", 0, 3), CachedText("two", 3, 6)])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_sidecars_follow_a_transaction_that_fails_to_commit_back(library, change):
    file, cache = filled(library)
    before = dict(library.sidecars.expected(library.catalog.read))
    writer = library.catalog._writer
    library.catalog._writer = FailingCommit(writer)
    with pytest.raises(sqlite3.OperationalError):
        change(library, file, cache)
    library.catalog._writer = writer
    assert dict(library.sidecars.expected(library.catalog.read)) == before and agree(library) == 4


def test_a_sidecar_that_cannot_be_put_back_is_removed_and_the_next_start_writes_it(open_library):
    disk = FullDisk()
    library = open_library(filesystem=disk)
    file = library.files.add("ann", b"some text", "t.txt", "H")
    with pytest.raises(KeyError), library.catalog.write() as db:
        db.execute("UPDATE files SET handle = 'OTHER'")
        library.sidecars.rewrite(db, "file", file.id)
        disk.left = 0
        raise KeyError
    disk.left = None
    assert not sidecars(library)
    library.close()
    library = open_library()
    assert agree(library) == 1


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\xff", b'{"format": 2, "kind": "file"}', b"[" * 10_000]
)
def test_bytes_that_are_no_sidecar_raise_corrupt_file(data):
    with pytest.raises(CorruptFile):
        Sidecar.decode(data, "x.json")


def test_any_flipped_bit_of_a_sidecar_is_detected_or_harmless():
    quotas = dict.fromkeys(("quota_files", "quota_bytes", "quota_disk"), 3)
    whole = Sidecar("owner", {"id": "ann", "created_at": 1.5, **quotas})
    data = whole.encode()
    for at in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with suppress(CorruptFile):
            assert Sidecar.decode(bytes(flipped), "x.json") == whole


def test_writing_missing_sidecars_continues_after_a_crash(tmp_path):
    with Library.open(tmp_path) as library:
        for number in range(6):
            library.files.add("ann", f"text {number}".encode(), f"{number}.txt")
        expected = sidecars(library)
    for name in expected:
        (tmp_path / name).unlink()
    files = CrashingFiles(10**9)
    library = Library.open(tmp_path, filesystem=files, reconcile=False)
    files.at = files.changes + 10  # in the middle of the third one
    with pytest.raises(BaseException):  # noqa: B017  the machine stops
        for number in sorted(file.id for file in library.files.page("ann").files):
            with library.catalog.write() as db:
                library.sidecars.rewrite(db, "file", number)
    files.dead = False
    files.at = 10**9
    library.close()
    assert 0 < len(expected & {name for name in everything(tmp_path, sidecars=True)}) < 6
    with Library.open(tmp_path) as library:
        assert agree(library) == 6
        assert library.store.missing_reason(text_key()) == "new"


def sealed(kind, record):
    """Return the bytes of a sidecar with a right hash, whatever its record is."""
    return Sidecar(kind, record).encode()


WRONG = [
    None,
    7,
    -1,
    1 << 70,
    1.5,
    float("nan"),
    float("inf"),
    1e300,
    True,
    "",
    "x",
    "\ud800",
    [],
    [[]],
    {},
    {"a": {}},
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A library of one row of each kind, and the records of its sidecars by path."""
    root = tmp_path_factory.mktemp("stored")
    with Library.open(root) as library:
        library.files.add(
            "ann", b"some text", "t.txt", "T", expires_after=10**6, metadata={"a": 1}, split={"mode": "none"}
        )
        library.caches.create("ann", [CachedText("part", 0, 4), CachedText("more", 4, 8)], name="C")
        asyncio.run(library.references.add(b"a reference", "r.txt", title="R", id="ref_1"))
        library.set_quota("ann", files=99)
        found = {path: sidecar for path, sidecar in library.sidecars.expected(library.catalog.read)}
    assert {sidecar.kind for sidecar in found.values()} == {"file", "cache", "reference", "owner"}
    return root, {path.relative_to(root): sidecar for path, sidecar in found.items()}


def without_rows(stored, tmp_path):
    """Copy the library, without the rows that its sidecars describe."""
    shutil.copytree(stored[0], tmp_path / "library")
    with closing(sqlite3.connect(tmp_path / "library" / "catalog.sqlite")) as db:
        for table in ("cache_chunks", "caches", "files", "refs", "users"):
            db.execute(f"DELETE FROM {table}")
        db.execute("DELETE FROM deleted")
        db.commit()
    return tmp_path / "library"


@pytest.mark.parametrize("kind", ["file", "cache", "reference", "owner"])
def test_one_sidecar_with_a_field_of_a_wrong_type_stops_no_start_and_no_recovery_and_is_named(
    stored, tmp_path, caplog, kind
):
    [(path, sidecar)] = [(path, one) for path, one in stored[1].items() if one.kind == kind]
    whole = without_rows(stored, tmp_path)
    fields = [(name, None) for name in sidecar.record]
    fields += [("chunks", name) for name in (sidecar.record.get("chunks") or [{}])[0]]
    for name, inner in fields:
        for number, value in enumerate(WRONG):
            record = json.loads(json.dumps(sidecar.record))
            (record if inner is None else record["chunks"][0])[inner or name] = value
            root = tmp_path / f"{name}-{inner}-{number}"
            shutil.copytree(whole, root)
            (root / path).write_bytes(sealed(kind, record))
            caplog.clear()
            Library.open(root).close()
            recover(root, force=True)
            with Library.open(root) as library:
                kinds = {one.kind for _, one in library.sidecars.expected(library.catalog.read)}
                assert kinds >= {"file", "cache", "reference", "owner"} - {kind}
                if kind not in kinds and not (kind == "owner" and value is None):  # no quota is one, too
                    assert str(path).removesuffix(".json") in caplog.text, (name, inner, value)
                for file in library.files.page("ann").files:
                    library.files.content("ann", file.id)
                library.files.pending(), library.references.pending()
                library.files.collect_expired()
                library.check()
            shutil.rmtree(root)


@pytest.mark.parametrize("kind", ["file", "cache", "reference", "owner"])
def test_a_name_in_a_sidecar_that_is_no_column_never_reaches_the_catalogue(stored, tmp_path, kind):
    [(path, sidecar)] = [(path, one) for path, one in stored[1].items() if one.kind == kind]
    root = without_rows(stored, tmp_path)
    extra = {"from_a_later_version": 1, "id) VALUES ('x'); --": 1}
    (root / path).write_bytes(sealed(kind, {**sidecar.record, **extra}))
    recover(root, force=True)
    with Library.open(root) as library:
        found = {one.kind: one for _, one in library.sidecars.expected(library.catalog.read)}
        assert found[kind].record == sidecar.record


NO_SIDECARS = {
    "a list": b"[]",
    "a number": b"7",
    "nothing": b"null",
    "a text": b'"x"',
    "deep": b"[" * 100_000,
    "deep and whole": b'{"record": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "many": b"[" + b"0," * (1 << 20) + b"0]",
    "too long": b" " * (17 << 20),
    "utf-16": '{"kind": "file"}'.encode("utf-16"),
    "latin": b'{"kind": "\xe9"}',
    "empty": b"",
    "nan": b'{"format": NaN, "record": {}, "kind": "file", "sha256": ""}',
    "a list as kind": b'{"format": 1, "record": {}, "kind": [], "sha256": "%s"}'
    % hashlib.sha256(b"{}").hexdigest().encode(),
    "no kind": b'{"format": 1, "record": {}, "kind": "x", "sha256": "%s"}'
    % hashlib.sha256(b"{}").hexdigest().encode(),
}


@pytest.mark.parametrize("what", [*NO_SIDECARS, "a folder", "a link", "a link to nothing", "a pipe"])
@pytest.mark.parametrize("lost", [False, True], ids=["start", "recover"])
def test_what_is_no_sidecar_stops_neither_a_start_nor_a_recovery(stored, tmp_path, caplog, what, lost):
    root = without_rows(stored, tmp_path)
    for path, sidecar in stored[1].items():
        if sidecar.kind == "owner":
            continue
        (root / path).unlink()
        if what in NO_SIDECARS:
            (root / path).write_bytes(NO_SIDECARS[what])
        elif what == "a folder":
            (root / path).mkdir()
        elif what == "a pipe":
            os.mkfifo(root / path)
        else:
            (root / path).symlink_to("/dev/zero" if what == "a link" else "/nowhere/at/all")
    if lost:
        (root / "catalog.sqlite").unlink()
        troubles = {trouble.path for trouble in recover(root).troubles}
    with Library.open(root) as library:
        assert library.files.page("ann").files == [] and library.usage() == []
        if what in NO_SIDECARS:
            named = [str(path) for path, one in stored[1].items() if one.kind != "owner"]
            assert all(name in caplog.text or (lost and name in troubles) for name in named)
        library.check()


def test_two_sidecars_that_claim_one_original_leave_it_to_the_first(stored, tmp_path):
    root = without_rows(stored, tmp_path)
    [(path, sidecar)] = [(path, one) for path, one in stored[1].items() if one.kind == "cache"]
    other = f"group-{'Z' * 24}"
    record = sidecar.record | {"id": other, "created_at": sidecar.record["created_at"] + 1}
    (root / path).with_name(f"{other}.json").write_bytes(sealed("cache", record))
    [trouble] = recover(root, force=True).troubles
    with Library.open(root) as library:
        assert [cache.id for cache in library.caches.page("ann").caches] == [path.stem]
        assert len(library.files.page("ann").files) == 1 and other in trouble.path
        library.check()


def test_a_folder_in_place_of_a_missing_sidecar_does_not_keep_the_others_from_theirs(tmp_path, caplog):
    with Library.open(tmp_path) as library:
        files = [library.files.add("ann", f"text {number}".encode(), f"{number}.txt") for number in range(3)]
    for file in files:
        file.path.with_name(f"{file.id}.json").unlink()
    files[0].path.with_name(f"{files[0].id}.json").mkdir()
    with Library.open(tmp_path) as library:
        assert [file.path.with_name(f"{file.id}.json").is_file() for file in files] == [False, True, True]
        assert files[0].id in caplog.text
