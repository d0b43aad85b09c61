"""A copy of a library, or of what one user has, is added to another library."""

import asyncio
import sqlite3
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
    assert {f.filename for f in library.files.page("bob").files} == {"o.txt", "t.txt"}
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
