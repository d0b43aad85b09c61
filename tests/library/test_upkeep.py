"""Upkeep of a library: check, bulk import of references."""

import asyncio
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tools import (
    Crash,
    CrashingFiles,
    encoded,
    everything,
    kill,
    make_chunk,
    no_memory_once,
    read,
    store_of_each,
)
from typer.testing import CliRunner

from mpic import cli
from mpic.errors import BadRequest, CorruptFile, StorageFull, Unavailable
from mpic.library import Library, Limits
from mpic.library.copies.bulk_import import LibraryTarget, import_references
from mpic.library.upkeep import check, size_of


def import_(library, source):
    return asyncio.run(import_references(source, LibraryTarget(library.references)))


# check


def test_progress_ends_at_the_total_while_a_retired_version_is_linked(library):
    library.references.tokenize = lambda text: tuple(text.encode())
    old = asyncio.run(library.references.add(b"old", "r.txt", title="R"))
    held = library.references.chunk(old)
    asyncio.run(library.references.replace(old.id, b"newer"))
    done = []
    assert check(library, progress=done.append) == [] and sum(done) == size_of(library) == len(b"newer")
    assert held.token_ids == tuple(b"old")


def test_a_check_of_an_intact_library_reads_everything_and_finds_nothing(library):
    store_of_each(library)
    done = []
    assert check(library, progress=done.append) == []
    stored = sum((library.root / name).stat().st_size for name in everything(library.root))
    assert sum(done) == size_of(library) == stored


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_any_file_is_found_and_never_served(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("flip") / "library"
    with Library.open(root) as library:
        keys = store_of_each(library)
        name = data.draw(st.sampled_from(sorted(everything(root, sidecars=True))))
        content = bytearray((root / name).read_bytes())
        at = data.draw(st.integers(0, 10**6)) % (len(content) * 8)
        content[at // 8] ^= 1 << at % 8
        (root / name).write_bytes(content)
        (problem,) = check(library)
        assert problem.path == name
        if name.startswith("kv/"):
            (key,) = [key for key in keys if key.digest in name]
            assert library.store.open(key) is None and library.store.missing_reason(key) == "corrupt"
            library.store.save(make_chunk(key, image=True))
            kv = make_chunk(key, image=True).kv
            assert torch.equal(read(library.store.open(key), kv), kv)
        elif name.endswith(".json"):
            assert check(library) == []  # it was written anew
        elif "R" not in name:
            for file in library.files.page("ann").files:
                if file.path.name in name:
                    with pytest.raises(CorruptFile):
                        library.files.content("ann", file.id)


CHANGES = {
    "replace": lambda files, id: files.add("ann", b"new text", "t.txt", "T", replace=True),
    "rename": lambda files, id: files.rename("ann", id, "U"),
    "extend": lambda files, id: files.extend("ann", id, 1000),
    "pin": lambda files, id: files.pin("ann", id),
    "delete": lambda files, id: files.delete("ann", id),
    "add": lambda files, id: files.add("ann", b"other text", "o.txt", "O"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_killed_server_leaves_is_mended_and_is_no_damage(tmp_path, what):
    """Whenever it is killed: a check ends with 0, and a user has the old file or the new one, never both."""
    held, finished, at = set(), False, 0
    while not finished:
        root, files = tmp_path / f"{what}-{at}", CrashingFiles(10**9)
        library = Library.open(root, filesystem=files)
        old = library.files.add("ann", b"some text", "t.txt", "T")
        files.at = files.changes + at
        try:
            CHANGES[what](library.files, old.id)
            finished = True
        except Crash:
            at += 1
        kill(library)
        done = CliRunner().invoke(cli.app, ["library", "check", "--data-dir", str(root)])
        assert done.exit_code == 0 and "everything is as it was stored" in done.output, done.output
        with Library.open(root) as library:
            assert check(library) == []
            kept = {(file.handle, file.bytes) for file in library.files.page("ann").files}
            count = library.catalog.one("SELECT COUNT(*) FROM files")[0]
            used = sum(row.count for row in library.usage() if row.tier == "original")
            assert count == used == len(kept)
            held.add(frozenset(kept))
    before = frozenset({("T", 9)})
    after = {
        "replace": {("T", 8)},
        "rename": {("U", 9)},
        "delete": set(),
        "add": {("T", 9), ("O", 10)},
    }.get(what, before)
    assert at > 1 and held == {before, frozenset(after)} - ({before} if what == "delete" else set())


def test_whenever_the_mending_of_a_damaged_upload_is_killed_the_file_that_has_the_handle_is_the_only_one(
    tmp_path,
):
    held, finished, at = [], False, 0
    while not finished:
        root, files = tmp_path / f"{at}", CrashingFiles(10**9)
        library = Library.open(root, filesystem=files)
        old = library.files.add("ann", b"some text", "t.txt", "T")
        old.path.write_bytes(b"damaged !")
        files.at = files.changes + at
        try:
            library.files.add("ann", b"some text", "t.txt", "T")
            finished = True
        except Crash:
            at += 1
        kill(library)
        with Library.open(root) as library:
            [file] = library.files.page("ann").files
            assert file.handle == "T"
            held.append(file.id != old.id)
    assert held[0] is False and held[-1] is True and held == sorted(held)


def test_a_file_that_is_gone_is_a_problem(library):
    keys = store_of_each(library)
    library.store.path(keys[0]).unlink()
    library.files.by_handle("ann", "A").path.unlink()
    problems = check(library)
    gone = (library.store.path(keys[0]), library.files.by_handle("ann", "A").path)
    assert {p.path for p in problems if "/" in p.path} == {str(p.relative_to(library.root)) for p in gone}
    assert check(library, contents=False)
    (library.files.by_handle("ann", "A").path).write_bytes(b"ann's text")


def test_a_check_goes_on_behind_a_chunk_for_which_there_is_no_memory(library, monkeypatch):
    store_of_each(library)
    monkeypatch.setattr("mpic.library.upkeep.torch", Mock(empty=no_memory_once(torch.empty)))
    [problem] = check(library)
    assert problem.what == "cannot be read now (no memory)" and "may be good" in problem.then
    assert check(library) == []


# ls and show beside a server


def test_a_library_can_be_opened_read_only_beside_a_server(library):
    store_of_each(library)
    with pytest.raises(Unavailable, match="another process"):
        Library.open(library.root)
    other = Library.open_read_only(library.root)
    assert other.usage() == library.usage()
    assert other.files.by_handle("ann", "a") == library.files.by_handle("ann", "A")
    with pytest.raises(Exception, match="readonly"):
        other.set_quota("ann", files=1)
    other.close()
    with pytest.raises(Unavailable, match="no library"):
        Library.open_read_only(library.root / "nowhere")


# Bulk import of references


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "refs"
    (root / "sub").mkdir(parents=True)
    (root / "one.txt").write_text("one")
    (root / "sub" / "two ä.png").write_bytes(encoded())
    (root / "bad.bin").write_bytes(b"\xff\xfe\x00")
    (root / ".hidden").write_text("x")
    return root


def test_a_name_that_is_not_utf8_does_not_stop_the_others(library, tmp_path):
    (tmp_path / "refs").mkdir()
    for name in (b"\xff.txt", b"z.txt"):
        with open(os.fsencode(tmp_path / "refs") + b"/" + name, "wb") as file:
            file.write(name)
    assert sorted(r.outcome for r in import_(library, tmp_path / "refs")) == ["added", "refused"]
    assert [r.title for r in library.references.listing().references] == ["z"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "x", "title": "t", "description": "\\ud800"}',
        b'{"text": "x", "title": "t", "metadata": {"a": "\\ud800"}}',
        b'{"text": "\xff", "title": "t"}',
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_not_utf8_does_not_stop_the_others(line, library, tmp_path):
    source = tmp_path / "a.jsonl"
    first, last = b'\xef\xbb\xbf{"text": "a", "title": "first"}\r\n', b'\n{"text": "b", "title": "last"}'
    source.write_bytes(first + line + last)
    assert [r.outcome for r in import_(library, source)] == ["added", "refused", "added"]


def test_a_folder_is_imported_and_refused_files_are_reported(library, folder):
    results = import_(library, folder)
    assert [(r.where, r.outcome, r.code) for r in results] == [
        ("bad.bin", "refused", "invalid_text"),
        ("one.txt", "added", ""),
        ("sub/two ä.png", "added", ""),
    ]
    assert library.references.get("ref_one.txt").title == "one"
    assert library.references.get(results[2].id).kind == "image"


@pytest.mark.parametrize(("largest", "code"), [(9_999, "too_large"), (None, "out_of_memory")])
def test_a_file_that_fits_into_no_memory_is_refused_and_the_others_are_imported(
    library, folder, largest, code, monkeypatch
):
    read = Path.read_bytes

    def read_bytes(path):
        if path.name == "bad.bin":
            raise MemoryError
        return read(path)

    (folder / "bad.bin").write_bytes(bytes(10_000))
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    target = LibraryTarget(library.references)
    assert target.largest == library.limits.upload_bytes
    target.largest = largest
    results = asyncio.run(import_references(folder, target))
    assert [(r.outcome, r.code) for r in results] == [("refused", code), ("added", ""), ("added", "")]


def test_links_that_lead_out_of_an_imported_folder_are_refused(library, folder):
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "bad.bin").unlink()
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "sub" / "own.txt").symlink_to(folder / "one.txt")
    (folder.parent / "elsewhere").symlink_to(folder)
    results = import_(library, folder.parent / "elsewhere")  # the folder itself may be a link
    assert [(r.where, r.outcome) for r in results] == [
        ("link.txt", "refused"),
        ("one.txt", "added"),
        ("sub/own.txt", "added"),
        ("sub/two ä.png", "added"),
    ]
    assert "link" in results[0].why
    assert library.references.text(library.references.get(results[2].id)) == (folder / "one.txt").read_text()


def test_an_import_is_resumed_and_brings_changes(library, folder):
    class Interrupted(LibraryTarget):
        async def add(self, item, content):
            if item.id == "ref_one.txt":
                raise StorageFull("the disk is full")
            return await super().add(item, content)

    (folder / "a.txt").write_text("a")
    with pytest.raises(StorageFull):
        asyncio.run(import_references(folder, Interrupted(library.references)))
    assert [r.outcome for r in import_(library, folder)] == ["unchanged", "refused", "added", "added"]
    (folder / "one.txt").write_text("one, changed")
    assert [r.outcome for r in import_(library, folder)] == ["unchanged", "refused", "replaced", "unchanged"]
    assert library.references.get("ref_one.txt").version == 2


def test_lines_of_json_are_imported(library, folder):
    picture = {"id": "p-1", "title": "P", "path": "sub/two ä.png", "kind": "image"}
    lines = [
        {**picture, "metadata": {"objects": ["a", "b"]}},
        {"title": "T", "text": "written here", "description": "d"},
        {"id": "k", "title": "K", "path": "one.txt", "kind": "image"},
    ]
    bad = [
        {"title": "no content"},
        {"title": "both", "text": "x", "path": "one.txt"},
        {"title": "outside", "path": "../secret.txt"},
        {"title": "gone", "path": "gone.txt"},
        {"title": "typo", "text": "x", "metdata": {}},
        {"id": "p-1", "title": "twice", "text": "x"},
        {"title": 5, "text": "x"},
        {"title": "deep", "text": "x", "metadata": {"a": {}}},
    ]
    source = folder / "r.jsonl"
    source.write_text("\n".join(map(json.dumps, lines + bad)) + "\n\nnot json\n")
    (folder.parent / "secret.txt").write_text("secret")
    results = import_(library, source)
    assert [r.outcome for r in results] == ["added"] * 3 + ["refused"] * (len(bad) + 1)
    assert all(r.why and r.code for r in results[3:]) and "kind" in results[2].why
    assert library.references.get("ref_p-1").metadata == {"objects": "a, b"}
    assert library.references.text(library.references.get("ref_T")) == "written here"
    assert not [r for r in library.references.listing().references if "secret" in r.title]
    assert [r.outcome for r in import_(library, source)][:3] == ["unchanged"] * 3
    with pytest.raises(BadRequest, match="neither"):
        import_(library, folder / "one.txt")


def test_limits_hold_for_imports_too(open_library, folder):
    library = open_library(upload_bytes=2)
    assert {r.outcome for r in import_(library, folder)} == {"refused"}
    assert Limits(upload_bytes=2) == library.limits
