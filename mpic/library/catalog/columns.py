"""Converts between records (``File``, ``Reference``) and rows of the catalogue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from mpic.errors import CorruptFile
from mpic.kv.chunk import ChunkKey
from mpic.library.folder.layout import path_of_row
from mpic.library.records import File, Reference


def to_row(record: File | Reference, root: Path) -> dict[str, Any]:
    """Returns the columns of a record: the digest in place of the key, the path relative to the library's root,
    metadata as JSON."""
    values = {name: value for name, value in vars(record).items() if name != "key"}
    if values.get("split") is not None:
        values["split"] = json.dumps(values["split"], sort_keys=True)
    return values | {
        "digest": record.key.digest,
        "path": relative_path(record, root),
        "metadata": json.dumps(record.metadata, sort_keys=True),
    }


def from_row(row: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Returns the fields of the record that a row holds; the inverse of ``to_row``. Raises CorruptFile: no library
    gives such an id."""
    values = dict(row)
    values.pop("seq", None)
    path = path_of_row("files" if "owner" in values else "refs", values)
    if path is None:
        raise CorruptFile(f"the row of {str(values['id'])[:100]!r} is not one that this program writes")
    values["key"] = ChunkKey(values["kind"], values.pop("digest"))
    values["path"] = root / path
    values["metadata"] = json.loads(values["metadata"])
    if values.get("split") is not None:
        values["split"] = json.loads(values["split"])
    values["pinned"] = bool(values.get("pinned", False))
    return values


def relative_path(record: File | Reference, root: Path) -> str:
    """Returns the path of an original as the catalogue holds it."""
    return str(record.path.relative_to(root))


def insert_row(db: Connection, table: str, values: Mapping[str, Any]) -> None:
    """Inserts one row, given by column."""
    columns, placeholders = ", ".join(values), ", ".join(f":{name}" for name in values)
    db.execute(f"INSERT INTO {table} ({columns}) VALUES ({placeholders})", dict(values))


def update_row(db: Connection, table: str, values: Mapping[str, Any]) -> None:
    """Updates the row of the same ``id`` with these values, given by column."""
    changes = ", ".join(f"{column} = :{column}" for column in values)
    db.execute(f"UPDATE {table} SET {changes} WHERE id = :id", dict(values))


def page_of(table: str, order: str, where: str) -> str:
    """Returns the query of a page of a listing by age, after the row with the id ``:after`` if that is not None, of at
    most ``:limit`` rows; ``order`` is ``asc`` or ``desc``."""
    beyond = ">" if order == "asc" else "<"
    return f"""
        SELECT * FROM {table} WHERE {where}
        AND (:after IS NULL OR seq {beyond} (SELECT seq FROM {table} WHERE id = :after))
        ORDER BY seq {"ASC" if order == "asc" else "DESC"} LIMIT :limit"""
