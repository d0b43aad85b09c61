"""A library as one tar file: export and import."""

import errno
import hashlib
import io
import json
import tarfile
import tracemalloc

import pytest
from library_tools import store_of_each

from mpic.durable import FileSystem
from mpic.errors import BadRequest, CorruptFile, StorageFull
from mpic.library import Library
from mpic.library.caches import CachedText
from mpic.library.copies import archive
from mpic.library.copies.archive import export, restore
from mpic.library.copies.archive import size_of as export_size
from mpic.library.upkeep import check


def test_an_export_can_be_restored_into_another_library(library, tmp_path, clock):
    store_of_each(library)
    library.files.add("bob", b"ann's text", "same content.txt")
    done = []
    assert export(library, tmp_path / "all.tar", progress=done.append) == 4
    assert sum(done) == export_size(library)
    with Library.open(tmp_path / "other", clock=clock) as other:
        results = restore(other, tmp_path / "all.tar")
        assert [r.outcome for r in results] == ["added"] * 4
        file = other.files.by_handle("ann", "A")
        assert file.metadata == {"n": 1} and file.pinned
        assert other.files.content("ann", file.id) == b"ann's text"
        assert [f.expires_at for f in other.files.page("bob", kinds=("image",)).files] == [clock.now + 10**6]
        reference = other.references.get("ref_r")
        assert (reference.title, reference.metadata) == ("R", {"k": "v"})
        assert other.references.text(reference) == "a reference"
        assert check(other) == []
        assert [r.outcome for r in restore(other, tmp_path / "all.tar")] == ["unchanged"] * 4
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("user", [None, "ann"])
def test_progress_of_an_export_ends_at_the_total_of_what_is_exported(library, tmp_path, clock, user):
    store_of_each(library)
    library.caches.create("ann", [CachedText("some text", 0, 9)])
    library.files.add("ann", b"gone soon", "b.txt", expires_after=5)
    clock.now += 10
    done = []
    export(library, tmp_path / "e.tar", user, done.append)
    assert sum(done) == export_size(library, user)


def test_an_export_keeps_how_documents_are_cut_and_compressed(library, tmp_path, clock):
    split = {"mode": "fixed", "tokens": 3, "overlap": 0}
    library.files.add("ann", b"some text", "t.txt", "CUT", split=split, press="snapkv-50")
    library.files.add("ann", b"whole", "w.txt", "WHOLE")
    export(library, tmp_path / "e.tar")
    with Library.open(tmp_path / "other", clock=clock) as other:
        restore(other, tmp_path / "e.tar")
        cut, whole = other.files.by_handle("ann", "CUT"), other.files.by_handle("ann", "WHOLE")
        assert (cut.split, cut.press) == (split, "snapkv-50")
        assert (whole.split, whole.press) == (None, "")


def test_an_export_of_an_earlier_version_is_imported(library, tmp_path, clock, monkeypatch):
    entries = archive._entries

    def earlier(*arguments):
        for entry, path in entries(*arguments):
            yield {name: entry[name] for name in entry.keys() - {"kind", "split", "press"}}, path

    library.files.add("ann", b"some text", "t.txt", "T", split={"mode": "none"})
    with monkeypatch.context() as patch:
        patch.setattr(archive, "_entries", earlier)
        export(library, tmp_path / "e.tar")
    with Library.open(tmp_path / "other", clock=clock) as other:
        assert [result.outcome for result in restore(other, tmp_path / "e.tar")] == ["added"]
        assert other.files.by_handle("ann", "T").split is None


def test_one_users_export_holds_nothing_of_others(library, tmp_path):
    store_of_each(library)
    assert export(library, tmp_path / "ann.tar", user="ann") == 1
    with tarfile.open(tmp_path / "ann.tar") as tar:
        everything = b"".join(tar.extractfile(m).read() for m in tar.getmembers())
    assert b"ann's text" in everything and b"bob" not in everything and b"a reference" not in everything


def test_a_broken_export_is_refused_and_a_damaged_library_is_not_exported(library, tmp_path, clock):
    store_of_each(library)
    export(library, tmp_path / "all.tar")
    with pytest.raises(BadRequest, match="exists"):
        export(library, tmp_path / "all.tar")
    (tmp_path / "no.tar").write_bytes(b"nonsense" * 100)
    with pytest.raises(BadRequest, match="not an export"):
        restore(library, tmp_path / "no.tar")
    whole = bytearray((tmp_path / "all.tar").read_bytes())
    at = whole.rindex(b"ann's text")
    whole[at] ^= 1
    (tmp_path / "flipped.tar").write_bytes(whole)
    with Library.open(tmp_path / "other", clock=clock) as other:
        results = restore(other, tmp_path / "flipped.tar")
        assert sorted(r.outcome for r in results) == ["added", "added", "refused"]
    library.files.by_handle("ann", "A").path.write_bytes(b"something else")
    with pytest.raises(CorruptFile):
        export(library, tmp_path / "again.tar")
    assert not list(tmp_path.glob("*again*"))
    library.files.by_handle("ann", "A").path.write_bytes(b"ann's text")


def test_a_file_with_other_content_is_not_taken_for_one_of_the_export(library, tmp_path, clock):
    library.files.add("ann", b"some text", "a.txt")
    export(library, tmp_path / "e.tar")
    with Library.open(tmp_path / "other", clock=clock) as other:
        other.caches.create("ann", [CachedText("some text", 0, 9)])
        other.files.add("ann", b"some text", "expired.txt", expires_after=5)
        clock.now += 10
        assert [r.outcome for r in restore(other, tmp_path / "e.tar")] == ["added"]
        assert [f.filename for f in other.files.page("ann").files] == ["a.txt"]


def test_an_export_is_readable_by_its_owner_only_and_leaves_files_of_others_alone(library, tmp_path):
    library.files.add("ann", b"some text", "a.txt")
    (tmp_path / "e.tar.tmp").write_bytes(b"another program's")
    while_written = set()
    seen = lambda size: while_written.update(
        path.stat().st_mode & 0o777 for path in tmp_path.glob(".e.tar.*")
    )
    assert export(library, tmp_path / "e.tar", progress=seen) == 1 and while_written == {0o600}
    assert (tmp_path / "e.tar").stat().st_mode & 0o777 == 0o600
    assert [path.read_bytes() for path in tmp_path.glob("*.tmp")] == [b"another program's"]


def test_an_export_names_a_lost_original_and_leaves_nothing(library, tmp_path):
    file = library.files.add("ann", b"some text", "a.txt")
    file.path.unlink()
    with pytest.raises(CorruptFile, match=file.id):
        export(library, tmp_path / "e.tar")
    assert not list(tmp_path.glob("*e.tar*"))
    library.files.delete("ann", file.id)


@pytest.mark.parametrize("manifest", [b"[]", b"1", b'{"format": 1}\n[1]', b'{"format": 1}\n"file"', b"\xff"])
def test_a_manifest_of_another_program_is_refused(manifest, library, tmp_path):
    with tarfile.open(tmp_path / "e.tar", "w") as tar:
        info = tarfile.TarInfo("manifest.jsonl")
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest))
    with pytest.raises(BadRequest, match="not an export"):
        restore(library, tmp_path / "e.tar")


def test_an_export_is_durable_and_leaves_nothing_on_failure(open_library, tmp_path):
    class Watching(FileSystem):
        synced, failing = [], False

        def sync_folder(self, folder):
            if self.failing and folder == tmp_path:
                raise OSError(errno.ENOSPC, "full")
            self.synced.append((folder, sorted(path.name for path in tmp_path.glob("*.tar*"))))
            super().sync_folder(folder)

    files = Watching()
    library = open_library(filesystem=files)
    library.files.add("ann", b"some text", "a.txt")
    export(library, tmp_path / "e.tar")
    assert files.synced[-1] == (tmp_path, ["e.tar"])  # the folder, after the name was given
    files.failing = True
    with pytest.raises(StorageFull):
        export(library, tmp_path / "again.tar")
    assert [path.name for path in tmp_path.glob("*.tar*")] == ["e.tar"]


TEXT = b"some text"
SHA = hashlib.sha256(TEXT).hexdigest()
ENTRY = {"what": "file", "id": "file-1", "owner": "ann", "handle": "T", "expires_at": None, "metadata": {}}
ENTRY |= {"kind": "text", "split": None, "press": "", "filename": "t.txt", "sha256": SHA, "pinned": False}


def hostile(path, entry=ENTRY, change=lambda member: None, content=TEXT, more=(), **options):
    """Writes an export whose original is a member that ``change`` has changed."""
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
    """Writes an export of a few kilobytes whose original is a sparse file of ``size`` bytes, in the form of PAX."""
    headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": f"originals/{SHA}"}
    headers |= {"GNU.sparse.size": str(size), "GNU.sparse.numblocks": "1", "GNU.sparse.map": f"{size - 9},9"}
    return hostile(
        path, change=lambda member: setattr(member, "pax_headers", headers), format=tarfile.PAX_FORMAT
    )


def old_sparse(path, size):
    """Does the same in GNU tar's own form."""
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
            restore(library, path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_original_that_no_upload_may_have_is_refused_before_it_is_read(open_library, tmp_path):
    library = open_library(upload_bytes=1000)
    [result] = restore(library, hostile(tmp_path / "b.tar", content=b"x" * 1001))
    assert (result.outcome, result.code) == ("refused", "too_large")


@pytest.mark.parametrize("type", [b"1", b"2", b"3", b"4", b"5", b"6"])
@pytest.mark.parametrize("to", ["manifest.jsonl", "/etc/hostname", "../../victim"])
def test_links_devices_and_pipes_are_refused(library, tmp_path, type, to):
    def change(member):
        member.type, member.linkname, member.size = type, to, 0

    with pytest.raises(BadRequest, match="not what an export has"):
        restore(library, hostile(tmp_path / "l.tar", change=change))
    assert library.files.page("ann").files == []


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../victim", "originals/../x", f"originals/{SHA}", "manifest.jsonl"]
)
def test_paths_and_names_that_are_there_twice_are_refused(library, tmp_path, name):
    member = tarfile.TarInfo(name)
    member.size = 5
    with pytest.raises(BadRequest, match="not what an export has"):
        restore(library, hostile(tmp_path / "p.tar", more=[(member, b"other")]))


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
        [result] = restore(library, path)
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
        restore(library, tmp_path / "x.tar")


WRONG = [None, 7, [], {}, "x" * 99, "../../victim", float("nan"), 1e300, True, "@shared", "\ud800"]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", ENTRY)
def test_a_field_of_a_wrong_type_is_refused_by_its_name_or_harmless(library, tmp_path, name, value):
    try:
        [result] = restore(library, hostile(tmp_path / "e.tar", ENTRY | {name: value}))
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
        restore(library, tmp_path / "m.tar")
