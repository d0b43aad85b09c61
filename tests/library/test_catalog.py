"""The catalogue's schema: an old data folder opens and answers."""

import sqlite3
from contextlib import closing

import pytest
import torch
from library_tools import encoded, make_chunk, read, text_key

from mpic.library import Library, catalog


def downgrade(root, version, monkeypatch):
    """Rewrite the catalogue of a closed library as a program of this version would have left it."""
    new, old = root / "catalog.sqlite", root / "old.sqlite"
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "MIGRATIONS", catalog.MIGRATIONS[:version])
        catalog.Catalog(old).close()
    with closing(sqlite3.connect(old)) as db:
        db.execute("ATTACH ? AS new", (str(new),))
        for (table,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall():
            if not table.startswith("sqlite_") and table != "usage":  # which triggers fill
                columns = ", ".join(row[1] for row in db.execute(f"PRAGMA main.table_info({table})"))
                db.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
        db.commit()
    old.rename(new)


@pytest.mark.parametrize("version", range(1, len(catalog.MIGRATIONS) + 1))
def test_a_data_folder_of_an_earlier_version_opens_and_answers(tmp_path, monkeypatch, version):
    with Library.open(tmp_path) as library:
        text = library.files.add("ann", b"some text", "t.txt", handle="T")
        image = library.files.add("ann", encoded(), "i.png", expires_after=10**6)
        library.store.save(make_chunk())
    downgrade(tmp_path, version, monkeypatch)
    with Library.open(tmp_path) as library:
        library.check()
        assert library.catalog.one("PRAGMA user_version")[0] == len(catalog.MIGRATIONS)
        assert library.recovered == {"missing_chunks": 0, "lost_files": 0, "orphans": 0}
        assert library.files.by_handle("ann", "t") == text
        assert library.files.get("ann", image.id) == image and image.metadata == {}
        stored = library.store.open(text_key())
        assert torch.equal(read(stored, make_chunk().kv), make_chunk().kv)
        assert library.store.missing_reason(text_key("other")) == "new"
        library.files.delete("ann", text.id)
        library.check()


@pytest.mark.parametrize("version", range(1, len(catalog.MIGRATIONS)))
def test_every_earlier_version_migrates(tmp_path, monkeypatch, version):
    path = tmp_path / "catalog.sqlite"
    with monkeypatch.context() as old:
        old.setattr(catalog, "MIGRATIONS", catalog.MIGRATIONS[:version])
        catalog.Catalog(path).close()
    fresh = catalog.Catalog(tmp_path / "fresh.sqlite")
    migrated = catalog.Catalog(path)
    schema = "SELECT name, sql FROM sqlite_master ORDER BY name"
    assert [tuple(r) for r in migrated.read(schema)] == [tuple(r) for r in fresh.read(schema)]
    migrated.close()
    fresh.close()
