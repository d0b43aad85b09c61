"""A library as one tar file: export and import."""

import errno
import io
import tarfile

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
