"""A copy of a library, or of what one user has, is added to another library; so are exports of earlier versions."""

import asyncio
import hashlib
import io
import json
import sqlite3
import tarfile
import tracemalloc
from contextlib import closing

import pytest
from library_tools import store_of_each

from mpic.errors import BadRequest, LinkedFolder
from mpic.library import Library
from mpic.library.caches import CachedText
from mpic.library.copies.backup import backup, size_of
from mpic.library.copies.restore import add, restore
from mpic.library.folder.layout import sidecar_of
from mpic.library.upkeep import check


def test_a_backup_can_be_added_to_another_library(library, tmp_path, clock):
    store_of_each(library)
    library.files.add("bob", b"ann's text", "same content.txt")
    library.caches.create("ann", [CachedText("some text", 0, 9)])
    backup(library.root, tmp_path / "all")
    with Library.open(tmp_path / "other", clock=clock) as other:
        mine = other.files.add("ann", b"mine", "m.txt", "MINE")
        results = add(other, tmp_path / "all")
        assert [r.outcome for r in results] == ["added"] * 4
        file = other.files.by_handle("ann", "A")
        assert file.metadata == {"n": 1} and file.pinned
        assert other.files.content("ann", file.id) == b"ann's text"
        assert [f.expires_at for f in other.files.page("bob", kinds=("image",)).files] == [clock.now + 10**6]
        reference = other.references.get("ref_r")
        assert (reference.title, reference.metadata) == ("R", {"k": "v"})
        assert other.references.text(reference) == "a reference"
        assert other.files.by_handle("ann", "MINE") == mine and check(other) == []
        assert [r.outcome for r in add(other, tmp_path / "all")] == ["unchanged"] * 4


def test_the_uploads_of_a_backup_can_go_to_another_user(library, tmp_path):
    file = library.files.add("ann", b"text", "t.txt", handle="T", metadata={"n": 1})
    library.files.pin("ann", file.id)
    library.files.add("ann", b"other", "o.txt")
    backup(library.root, tmp_path / "b", user="ann")
    for outcome in ("added", "unchanged"):
        assert [r.outcome for r in add(library, tmp_path / "b", "bob")] == [outcome] * 2
    copied = library.files.by_handle("bob", "T")
    assert copied.pinned and copied.metadata == {"n": 1} and copied.id != file.id
    assert [f.filename for f in library.files.page("bob").files] == ["o.txt", "t.txt"]
    assert [r.code for r in add(library, tmp_path / "b", "../x")] == ["bad_request"] * 2


@pytest.mark.parametrize("user", [None, "ann"])
def test_progress_of_a_backup_ends_at_the_total_of_what_is_copied(library, tmp_path, user):
    store_of_each(library)
    library.caches.create("ann", [CachedText("some text", 0, 9)])
    done = []
    backup(library.root, tmp_path / "b", user=user, progress=done.append)
    assert sum(done) == size_of(library.root, user) == size_of(tmp_path / "b")


def test_a_backup_that_is_added_keeps_how_documents_are_cut_and_compressed(library, tmp_path, clock):
    split = {"mode": "fixed", "tokens": 3, "overlap": 0}
    library.files.add("ann", b"some text", "t.txt", "CUT", split=split, press="snapkv-50")
    library.files.add("ann", b"whole", "w.txt", "WHOLE")
    backup(library.root, tmp_path / "b")
    with Library.open(tmp_path / "other", clock=clock) as other:
        add(other, tmp_path / "b")
        cut, whole = other.files.by_handle("ann", "CUT"), other.files.by_handle("ann", "WHOLE")
        assert (cut.split, cut.press) == (split, "snapkv-50")
        assert (whole.split, whole.press) == (None, "")


def test_one_users_backup_holds_nothing_of_others_and_is_a_library_when_restored(library, tmp_path, clock):
    store_of_each(library)
    library.caches.create("bob", [CachedText("bob's secret", 0, 9)], name="bob's cache")
    kept = library.caches.create("ann", [CachedText("kept", 0, 4)])
    library.set_quota("bob", files=7)
    for number in range(4):  # long enough for pages of their own, which are free once their rows are left out
        asyncio.run(
            library.references.add(b"a fact", "r.txt", title="R", description=f"{number} secret" * 400)
        )
    done = backup(library.root, tmp_path / "ann", chunks=True, link=False, user="ann")
    assert (done.counts["files"], done.counts["refs"], done.counts["chunks"]) == (2, 0, 1)
    everything = b"".join(path.read_bytes() for path in (tmp_path / "ann").rglob("*") if path.is_file())
    assert b"ann's text" in everything and b"bob" not in everything and b"a reference" not in everything
    assert b"ref_r" not in everything and b"secret" not in everything
    with closing(sqlite3.connect(tmp_path / "ann" / "catalog.sqlite")) as db:
        assert db.execute("PRAGMA freelist_count").fetchone() == (0,)
    restore(tmp_path / "ann", tmp_path / "restored")
    with Library.open(tmp_path / "restored", clock=clock) as restored:
        assert restored.files.by_handle("ann", "A") and restored.caches.get("ann", kept.id).chunks
        assert check(restored) == [] and not any(restored.recovered.values())


def test_what_is_lost_or_damaged_in_a_backup_is_refused_by_name_and_the_rest_added(library, tmp_path, clock):
    files = [library.files.add("ann", f"text {number}".encode(), f"{number}.txt") for number in range(5)]
    backup(library.root, tmp_path / "b", link=False)
    lost, damaged, undescribed, misdescribed = (
        tmp_path / "b" / file.path.relative_to(library.root) for file in files[:4]
    )
    lost.unlink()
    damaged.write_bytes(b"something else")
    sidecar_of(undescribed).unlink()
    sidecar_of(misdescribed).write_bytes(b"{}")
    with Library.open(tmp_path / "other", clock=clock) as other:
        results = add(other, tmp_path / "b")
        assert [file.filename for file in other.files.page("ann").files] == ["4.txt"]
    refused = {result.id: result.why for result in results if result.outcome == "refused"}
    assert refused.keys() == {file.id for file in files[:4]}
    words = ("lost", "damaged", "no sidecar", "damaged")
    assert all(word in refused[file.id] for file, word in zip(files, words))


def test_a_backup_with_a_link_for_a_folder_and_one_that_is_incomplete_are_not_added(library, tmp_path):
    file = library.files.add("ann", b"some text", "a.txt")
    backup(library.root, tmp_path / "b", link=False)
    folder = (tmp_path / "b" / file.path.relative_to(library.root)).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkedFolder, match=str(folder)):
        add(library, tmp_path / "b")
    (tmp_path / "b" / "mpic-backup.json").unlink()
    with pytest.raises(BadRequest, match="not a backup"):
        add(library, tmp_path / "b")


def test_a_file_with_other_content_is_not_taken_for_one_of_the_backup(library, tmp_path, clock):
    library.files.add("ann", b"some text", "a.txt")
    backup(library.root, tmp_path / "b")
    with Library.open(tmp_path / "other", clock=clock) as other:
        other.caches.create("ann", [CachedText("some text", 0, 9)])
        other.files.add("ann", b"some text", "expired.txt", expires_after=5)
        clock.now += 10
        assert [r.outcome for r in add(other, tmp_path / "b")] == ["added"]
        assert [f.filename for f in other.files.page("ann").files] == ["a.txt"]


# Exports of earlier versions


def test_an_export_is_added_also_without_the_fields_of_later_versions(library, tmp_path):
    entry = ENTRY | {"split": {"mode": "none"}, "press": "snapkv-50"}
    for number, drop in enumerate(((), ("kind", "split", "press"))):
        entry = {name: entry[name] for name in entry if name not in drop} | {"handle": f"T{number}"}
        assert [r.outcome for r in add(library, hostile(tmp_path / "e.tar", entry))] == ["added"]
    first, second = (library.files.by_handle("ann", f"T{number}") for number in (0, 1))
    assert (first.split, first.press, second.split, second.press) == ({"mode": "none"}, "snapkv-50", None, "")


def test_a_broken_export_is_refused_and_a_damaged_original_in_it_too(library, tmp_path):
    (tmp_path / "no.tar").write_bytes(b"nonsense" * 100)
    with pytest.raises(BadRequest, match="not an export"):
        add(library, tmp_path / "no.tar")
    [result] = add(library, hostile(tmp_path / "flipped.tar", content=b"sOme text"))
    assert (result.outcome, result.why) == ("refused", "its content is damaged")


@pytest.mark.parametrize("manifest", [b"[]", b"1", b'{"format": 1}\n[1]', b'{"format": 1}\n"file"', b"\xff"])
def test_a_manifest_of_another_program_is_refused(manifest, library, tmp_path):
    with tarfile.open(tmp_path / "e.tar", "w") as tar:
        info = tarfile.TarInfo("manifest.jsonl")
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest))
    with pytest.raises(BadRequest, match="not an export"):
        add(library, tmp_path / "e.tar")


TEXT = b"some text"
SHA = hashlib.sha256(TEXT).hexdigest()
ENTRY = {"what": "file", "id": "file-1", "owner": "ann", "handle": "T", "expires_at": None, "metadata": {}}
ENTRY |= {"kind": "text", "split": None, "press": "", "filename": "t.txt", "sha256": SHA, "pinned": False}


def hostile(path, entry=ENTRY, change=lambda member: None, content=TEXT, more=(), **options):
    """Write an export whose original is a member that ``change`` has changed."""
    with tarfile.open(path, "w", **options) as tar:
        lines = b"\n".join(json.dumps(line).encode() for line in ({"format": 1}, entry))
        for name, data in (("manifest.jsonl", lines), (f"originals/{SHA}", content)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if name != "manifest.jsonl":
                change(member)
            tar.addfile(member, io.BytesIO(data))
        for member, data in more:
            tar.addfile(member, io.BytesIO(data))
    return path


def sparse(path, size):
    """Write an export of a few kilobytes whose original is a sparse file of ``size`` bytes, in the form of PAX."""
    headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": f"originals/{SHA}"}
    headers |= {"GNU.sparse.size": str(size), "GNU.sparse.numblocks": "1", "GNU.sparse.map": f"{size - 9},9"}
    return hostile(
        path, change=lambda member: setattr(member, "pax_headers", headers), format=tarfile.PAX_FORMAT
    )


def old_sparse(path, size):
    """Do the same in GNU tar's own form."""
    hostile(path, format=tarfile.GNU_FORMAT)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"originals/")
    raw[at + 156 : at + 157] = b"S"
    raw[at + 386 : at + 410] = b"%011o\0" % (size - 9) + b"%011o\0" % 9
    raw[at + 483 : at + 495] = b"%011o\0" % size
    raw[at + 148 : at + 156] = b" " * 8
    raw[at + 148 : at + 156] = b"%06o\0 " % sum(raw[at : at + 512])
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("make", [sparse, old_sparse])
def test_a_sparse_member_takes_no_memory(library, tmp_path, make):
    path = make(tmp_path / "s.tar", 3 << 30)
    assert path.stat().st_size < 32 << 10
    with tarfile.open(path) as tar:
        assert tar.getmembers()[1].size == 3 << 30  # it is what it should be
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="not what an export has"):
            add(library, path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_original_that_no_upload_may_have_is_refused_before_it_is_read(open_library, tmp_path):
    library = open_library(upload_bytes=1000)
    [result] = add(library, hostile(tmp_path / "b.tar", content=b"x" * 1001))
    assert (result.outcome, result.code) == ("refused", "too_large")


@pytest.mark.parametrize("type", [b"1", b"2", b"3", b"4", b"5", b"6"])
@pytest.mark.parametrize("to", ["manifest.jsonl", "/etc/hostname", "../../victim"])
def test_links_devices_and_pipes_are_refused(library, tmp_path, type, to):
    def change(member):
        member.type, member.linkname, member.size = type, to, 0

    with pytest.raises(BadRequest, match="not what an export has"):
        add(library, hostile(tmp_path / "l.tar", change=change))
    assert library.files.page("ann").files == []


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../victim", "originals/../x", f"originals/{SHA}", "manifest.jsonl"]
)
def test_paths_and_names_that_are_there_twice_are_refused(library, tmp_path, name):
    member = tarfile.TarInfo(name)
    member.size = 5
    with pytest.raises(BadRequest, match="not what an export has"):
        add(library, hostile(tmp_path / "p.tar", more=[(member, b"other")]))


@pytest.mark.parametrize(
    "headers",
    [{"size": "-512"}, {"size": str(1 << 62)}, {"size": "x"}, {"path": "../../victim"}, {"linkpath": "/x"}],
)
def test_headers_of_pax_change_nothing(library, tmp_path, headers):
    """They may name another size, so that a reader goes in circles, or another path."""
    path = hostile(
        tmp_path / "h.tar",
        change=lambda member: setattr(member, "pax_headers", headers),
        format=tarfile.PAX_FORMAT,
    )
    try:
        [result] = add(library, path)
    except BadRequest:
        return
    assert result.outcome == "refused" or library.files.content("ann", result.id) == TEXT


def test_a_header_that_says_it_is_huge_is_not_read(library, tmp_path):
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 4 << 30
    with (tmp_path / "x.tar").open("wb") as file:
        file.write(header.tobuf())
        file.truncate(5 << 30)  # a sparse file on the disk
    with pytest.raises(BadRequest):
        add(library, tmp_path / "x.tar")


WRONG = [None, 7, [], {}, "x" * 99, "../../victim", float("nan"), 1e300, True, "@shared", "\ud800"]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", ENTRY)
def test_a_field_of_a_wrong_type_is_refused_by_its_name_or_harmless(library, tmp_path, name, value):
    try:
        [result] = add(library, hostile(tmp_path / "e.tar", ENTRY | {name: value}))
    except BadRequest as error:
        assert name in error.message or "not an export" in error.message
        return
    assert result.outcome in ("added", "refused")
    owners = {row["owner"] for row in library.catalog.read("SELECT owner FROM files")}
    assert owners <= {"ann", "x" * 99} and "@shared" not in owners


@pytest.mark.parametrize(
    "line", [b"[]", b"7", b"null", b"[" * 10_000, b"\xff\xfe", b"{}", b'{"format": 1}\n"x"']
)
def test_a_manifest_of_a_wrong_type_is_refused(library, tmp_path, line):
    with tarfile.open(tmp_path / "m.tar", "w") as tar:
        member = tarfile.TarInfo("manifest.jsonl")
        member.size = len(line)
        tar.addfile(member, io.BytesIO(line))
    with pytest.raises(BadRequest):
        add(library, tmp_path / "m.tar")
