"""Rows for originals that the catalogue does not know, made from their sidecars: at a start beside an older catalogue,
after a crash between a file and its row, and when a lost catalogue is made again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from mpic.errors import CorruptFile
from mpic.library.catalog import Catalog
from mpic.library.names import SIDECAR, owner_folder
from mpic.library.records import SHARED
from mpic.library.rows import insert_row
from mpic.library.sidecars import CACHE, CONTENT, FILE, REFERENCE, Sidecar

PIECE = 8 << 20


def read_sidecar(root: Path, path: str) -> Sidecar:
    """A sidecar that lies where it says it belongs.

    Args:
        path: of the sidecar, relative to the library's root.

    Raises:
        CorruptFile: it is damaged, or stands for something that lies elsewhere.
        OSError: it cannot be read.
    """
    sidecar = Sidecar.read(root / path)
    record, (_, folder, name) = sidecar.record, path.split("/")
    owner = {"reference": SHARED, "owner": record["id"]}.get(sidecar.kind) or record["owner"]
    stem = name.removesuffix(".json")
    fits = {
        "file": stem == record["id"],
        "reference": stem.rpartition("@")[0] == record["id"],
        "cache": stem == record["id"],
        "owner": stem == "owner",
    }
    if folder != owner_folder(owner) or not fits[sidecar.kind]:
        raise CorruptFile(f"the sidecar {path} belongs to {record['id']}, which does not lie there")
    return sidecar


def check_original(path: Path, record: Mapping[str, Any], contents: bool) -> None:
    """Whether an original is what its sidecar says.

    Args:
        contents: compare the SHA-256 too, for which it is read whole.

    Raises:
        FileNotFoundError: it is not there.
        CorruptFile: it has another size or, with ``contents``, other bytes.
        OSError: it cannot be read.
    """
    if path.stat().st_size != record["bytes"]:
        raise CorruptFile(f"{path.name} has {path.stat().st_size} bytes, its sidecar says {record['bytes']}")
    if contents:
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while piece := stream.read(PIECE):
                digest.update(piece)
        if digest.hexdigest() != record["sha256"]:
            raise CorruptFile(f"{path.name} is not what was uploaded")


class Adoption:
    """Makes rows within one transaction. What is made waits for compilation, as after an upload; where its chunk is
    stored already, that takes no time.

    Args:
        lost: paths of rows whose originals are gone; such a row gives its handle up to a file that is there.

    Attributes:
        without_handle: ids of files whose handle another file of the user has.
    """

    def __init__(
        self,
        db: Connection,
        catalog: Catalog,
        root: Path,
        clock: Callable[[], float],
        lost: set[str] = frozenset(),
    ) -> None:
        self._db, self._catalog, self._root, self._now, self._lost = db, catalog, root, clock(), lost
        self.without_handle: list[str] = []

    def owner(self, record: Mapping[str, Any]) -> bool:
        """A user with its quotas; False when the catalogue knows the user."""
        if self._db.execute("SELECT 1 FROM users WHERE id = ?", (record["id"],)).fetchone():
            return False
        insert_row(self._db, "users", dict(record))
        return True

    def file(self, record: Mapping[str, Any], path: str, error: str | None = None) -> bool:
        """An upload; False when there is a file of its id.

        Args:
            path: of the original, relative to the root.
            error: why it cannot be used, if that is so.
        """
        if self._db.execute("SELECT 1 FROM files WHERE id = ?", (record["id"],)).fetchone():
            return False
        values = {name: record[name] for name in FILE} | _state(error) | {"path": path}
        values["metadata"] = json.dumps(record["metadata"], sort_keys=True)
        values["handle"] = self._handle(record)
        self._catalog.add_user(self._db, record["owner"], record["created_at"])
        insert_row(self._db, "files", values)
        return True

    def reference(self, record: Mapping[str, Any], path: str, error: str | None = None) -> bool:
        """A version of a reference; an older one that the catalogue has is retired. False when it has this one or a
        newer one."""
        sql = "SELECT version FROM refs WHERE id = ?"
        row = self._db.execute(sql, (record["id"],)).fetchone()
        if row is not None and row["version"] >= record["version"]:
            return False
        values = {name: record[name] for name in REFERENCE} | _state(error) | {"path": path}
        values["metadata"] = json.dumps(record["metadata"], sort_keys=True)
        if row is None:
            insert_row(self._db, "refs", values)
            return True
        retired = "id, version, " + ", ".join(
            name for name in values if name not in ("id", "version", "pinned")
        )
        where = "WHERE id = ? AND version = ?"
        key = (record["id"], row["version"])
        self._db.execute(f"INSERT INTO retired_refs ({retired}) SELECT {retired} FROM refs {where}", key)
        changes = ", ".join(f"{column} = :{column}" for column in values)
        self._db.execute(f"UPDATE refs SET {changes} WHERE id = :id", values)
        return True

    def cache(self, record: Mapping[str, Any], errors: Mapping[str, str | None]) -> bool:
        """An explicit cache and those of its chunks that are there; False when the catalogue has it or there are none.

        Args:
            errors: ids of the chunks whose originals are there, and why they cannot be used, if that is so.
        """
        chunks = [chunk for chunk in record["chunks"] if chunk["id"] in errors]
        if not chunks or self._db.execute("SELECT 1 FROM caches WHERE id = ?", (record["id"],)).fetchone():
            return False
        self._catalog.add_user(self._db, record["owner"], record["created_at"])
        split = {"split": json.dumps(record["split"])}
        insert_row(self._db, "caches", {name: record[name] for name in CACHE} | split)
        for chunk in chunks:
            values = {name: chunk[name] for name in ("id", "pinned", *CONTENT)} | _state(errors[chunk["id"]])
            values |= {name: record[name] for name in ("owner", "created_at", "expires_at")}
            insert_row(self._db, "files", values | {"path": original_of(record["owner"], chunk["id"])})
            span = (chunk["id"], record["id"], chunk["position"], chunk["start"], chunk["end"])
            self._db.execute("INSERT INTO cache_chunks VALUES (?, ?, ?, ?, ?)", span)
        return True

    def _handle(self, record: Mapping[str, Any]) -> str | None:
        """The handle of a file, unless another file of the user has it that is there and has not expired."""
        if record["handle"] is None:
            return None
        sql = "SELECT id, path, expires_at FROM files WHERE owner = ? AND handle = ? COLLATE NOCASE"
        row = self._db.execute(sql, (record["owner"], record["handle"])).fetchone()
        if row is None:
            return record["handle"]
        if row["path"] in self._lost or (row["expires_at"] is not None and row["expires_at"] <= self._now):
            self._db.execute("UPDATE files SET handle = NULL WHERE id = ?", (row["id"],))
            return record["handle"]
        self.without_handle.append(record["id"])
        return None


def original_of(owner: str, file_id: str) -> str:
    """Where an upload or a cache's chunk lies, relative to the root."""
    return f"files/{owner_folder(owner)}/{file_id}"


def sidecar_name(original: str) -> str:
    """The path of an original's sidecar; both relative to the root."""
    return f"{original}{SIDECAR}"


def _state(error: str | None) -> dict[str, Any]:
    return {"tokens": None, "state": "failed" if error else "compiling", "error": error}
