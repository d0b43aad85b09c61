"""The catalogue's schema: an old data folder opens and answers."""

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
import torch
from library_tools import downgrade, encoded, make_chunk, read, text_key

from mpic.errors import IntegrityError
from mpic.library import Library
from mpic.library.catalog import database


@pytest.mark.parametrize("version", database.MIGRATIONS)
def test_a_data_folder_of_an_earlier_version_opens_and_answers(tmp_path, monkeypatch, version):
    with Library.open(tmp_path) as library:
        text = library.files.add("ann", b"some text", "t.txt", handle="T")
        image = library.files.add("ann", encoded(), "i.png", expires_after=10**6)
        library.store.save(make_chunk())
    downgrade(tmp_path, version, monkeypatch)
    with Library.open(tmp_path) as library:
        library.check()
        assert library.catalog.one("PRAGMA user_version")[0] == database.latest()
        assert not any(library.recovered.values())
        assert library.files.by_handle("ann", "t") == text
        assert library.files.get("ann", image.id) == image and image.metadata == {}
        stored = library.store.open(text_key())
        assert torch.equal(read(stored, make_chunk().kv), make_chunk().kv)
        assert library.store.missing_reason(text_key("other")) == "new"
        library.files.delete("ann", text.id)
        library.check()


def test_the_catalogue_of_0_1_0_gets_the_schema_of_a_new_one(tmp_path):
    with tarfile.open(Path(__file__).parents[1] / "upgrade" / "0.1.0.tar.gz") as tar:
        tar.extract("data/catalog.sqlite", tmp_path, filter="data")
    catalogues = (
        database.Catalog(tmp_path / "data" / "catalog.sqlite"),
        database.Catalog(tmp_path / "new.sqlite"),
    )
    asked = """
        SELECT m.type, m.name, c.name, c.type, c."notnull", c.dflt_value, c.pk
        FROM sqlite_master AS m LEFT JOIN pragma_table_info(m.name) AS c
        WHERE m.name NOT LIKE 'sqlite_%' ORDER BY m.name, c.name"""
    upgraded, new = ([tuple(row) for row in one.read(asked)] for one in catalogues)
    triggers = [
        one.read("SELECT sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name") for one in catalogues
    ]
    assert upgraded == new and [tuple(row) for row in triggers[0]] == [tuple(row) for row in triggers[1]]
    for one in catalogues:
        one.close()


@pytest.mark.parametrize("version", [6, 9])
def test_a_catalogue_of_no_release_of_the_last_two_is_refused_by_its_version_unchanged(tmp_path, version):
    Library.open(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as db:
        db.execute(f"PRAGMA user_version = {version}")
    before = (tmp_path / "catalog.sqlite").read_bytes()
    with pytest.raises(IntegrityError, match=f"version {version}, which no release"):
        Library.open(tmp_path)
    assert (tmp_path / "catalog.sqlite").read_bytes() == before


ASKED_OFTEN = {
    "by id": lambda lib, file: lib.files.get("ann", file.id),
    "by handle": lambda lib, file: lib.files.by_handle("ann", "T"),
    "still there": lambda lib, file: lib.files.check_exist("ann", [file.id]),
    "listing": lambda lib, file: lib.files.page("ann", limit=20),
    "next page": lambda lib, file: lib.files.page("ann", after=file.id, limit=20),
    "pending": lambda lib, file: lib.files.pending(),
    "find": lambda lib, file: lib.store.find([text_key(), text_key("other")]),
    "why not": lambda lib, file: lib.store.missing_reason(text_key("other")),
    "references": lambda lib, file: lib.references.many(["ref_a", "ref_b"]),
    "upload": lambda lib, file: lib.files._rows.check_quota("ann", 5),
    "expired": lambda lib, file: lib.files._rows.expired(),
    "chunks of a document": lambda lib, file: lib.files._rows.pieces(file.id),
    "numbers of chunks": lambda lib, file: lib.files.counts("ann", [file.id]),
    "pinned": lambda lib, file: lib.store.pinned("ann", file.key),
}


@pytest.mark.parametrize("question", ASKED_OFTEN)
def test_frequent_queries_use_an_index(tmp_path, monkeypatch, question):
    with Library.open(tmp_path) as library:
        file = library.files.add("ann", b"some text", "t.txt", handle="T")
        asked, read = [], library.catalog.read

        def recorded(sql, *values, **named):
            asked.append((sql, values, named))
            return read(sql, *values, **named)

        monkeypatch.setattr(library.catalog, "read", recorded)
        ASKED_OFTEN[question](library, file)
        monkeypatch.undo()
        assert asked
        for sql, values, named in asked:
            steps = [row[3] for row in read(f"EXPLAIN QUERY PLAN {sql}", *values, **named)]
            slow = [s for s in steps if "TEMP B-TREE" in s or ("SCAN" in s and "INDEX" not in s)]
            assert not slow, f"{sql}: {steps}"


def test_nobody_else_reads_the_catalogue_even_in_a_folder_that_everybody_may_enter(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    for expected in (("catalog.sqlite",), ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm")):
        with Library.open(folder):
            modes = {path.name: path.stat().st_mode & 0o777 for path in folder.glob("catalog.sqlite*")}
            assert modes.keys() >= set(expected) and set(modes.values()) == {0o600}
            for path in folder.glob("catalog.sqlite*"):
                path.chmod(0o644)  # as an earlier version left it
