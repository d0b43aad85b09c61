"""Makes rows for originals that the catalogue does not know from their sidecars: at a start with an older catalogue,
after a crash between a file and its row, and when a lost catalogue is rebuilt."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from mpic.errors import CorruptFile
from mpic.library.catalog.columns import insert_row, update_row
from mpic.library.catalog.database import Catalog
from mpic.library.catalog.reference_rows import retire
from mpic.library.folder.layout import SIDECAR, original_path, owner_folder
from mpic.library.folder.sidecars import COLUMNS, CONTENT, DESCRIBED, QUOTAS, Sidecar
from mpic.library.records import SHARED

Record = Mapping[str, Any]
DAMAGED, LOST = "the original is damaged", "the original is lost"

Verify = Callable[[str, Record], str | None]
"""Takes the path of an original and its record; returns what is wrong with the original (``LOST``: it is not there, or
must not be adopted), or None."""


def read_sidecars(
    root: Path, paths: Iterable[str], report: Callable[[str, Exception], None]
) -> list[tuple[str, Sidecar]]:
    """Reads sidecars and returns them with their paths in the order in which they are to be adopted: users first,
    because of their quotas, then by age, but the newest version of a reference before older ones.

    Args:
        paths: relative to the library's root.
        report: called with each sidecar that cannot be used, and the reason.
    """
    found = []
    for path in sorted(paths):
        try:
            found.append((path, _read_sidecar(root, path)))
        except (CorruptFile, OSError) as error:
            report(path, error)
    return sorted(found, key=lambda entry: _age(entry[1]))


def _read_sidecar(root: Path, path: str) -> Sidecar:
    """Reads a sidecar and checks that it is in the place that it names. Raises CorruptFile if it is damaged or
    describes something in another place, OSError if it cannot be read."""
    sidecar = Sidecar.read(root / path)
    record, (_, folder, name) = sidecar.record, path.split("/")
    owner = {"reference": SHARED, "owner": record["id"]}.get(sidecar.kind) or record["owner"]
    stem = name.removesuffix(SIDECAR)
    if sidecar.kind == "reference":
        stem = stem.rpartition("@")[0]
    if folder != owner_folder(owner) or stem != ("owner" if sidecar.kind == "owner" else record["id"]):
        raise CorruptFile(f"the sidecar {path} describes {record['id']}, which belongs elsewhere")
    return sidecar


def _age(sidecar: Sidecar) -> tuple[bool, float, int]:
    return sidecar.kind != "owner", sidecar.record["created_at"], -sidecar.record.get("version", 0)


def check_original(path: Path, record: Record, contents: bool) -> None:
    """Checks that an original is the one that its sidecar describes.

    Args:
        contents: also compare the SHA-256, for which the whole file is read.

    Raises:
        FileNotFoundError: it is not there.
        CorruptFile: it has another size or, with ``contents``, other bytes.
        OSError: it cannot be read.
    """
    if path.stat().st_size != record["bytes"]:
        raise CorruptFile(f"{path.name} has {path.stat().st_size} bytes, its sidecar says {record['bytes']}")
    if contents:
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != record["sha256"]:
                raise CorruptFile(f"{path.name} is not what was uploaded")


class Adoption:
    """Makes rows within one transaction. Adopted files wait for compilation, as after an upload; if the chunk is stored
    already, that takes no time.

    Args:
        now: seconds since the epoch.
        lost: paths of rows whose originals are gone; such a row gives its handle up to a file that is there.

    Attributes:
        without_handle: ids of files that lost their handle to another file of the same user.
        replaced: number of files whose replacement a crash had interrupted; they have expired now.
    """

    def __init__(
        self, db: Connection, catalog: Catalog, now: float, lost: set[str] | frozenset[str] = frozenset()
    ) -> None:
        self._db, self._catalog, self._now, self._lost = db, catalog, now, lost
        self.without_handle: list[str] = []
        self.replaced = 0

    def take(self, path: str, sidecar: Sidecar, verify: Verify) -> set[str]:
        """Makes the rows that a sidecar describes, for originals that are there.

        Args:
            path: path of the sidecar, relative to the library's root.

        Returns:
            The paths of the sidecar and of its originals; nothing if the catalogue has these rows already, or if no
            original is there.

        Raises:
            CorruptFile: it describes what no catalogue holds, such as two files of one id; no row was made.
        """
        self._db.execute("SAVEPOINT adoption")
        try:
            return self._take(path, sidecar, verify)
        except sqlite3.IntegrityError as error:
            self._db.execute("ROLLBACK TO adoption")
            raise CorruptFile(f"the sidecar {path} does not fit the catalogue ({error})") from error
        finally:
            self._db.execute("RELEASE adoption")

    def _take(self, path: str, sidecar: Sidecar, verify: Verify) -> set[str]:
        record = sidecar.record
        if sidecar.kind == "owner":
            return {path} if self._owner(record) else set()
        if sidecar.kind == "cache":
            errors = {}
            for chunk in record["chunks"]:  # a missing chunk may have been deleted
                error = verify(original_path(record["owner"], chunk["id"]), chunk)
                if error != LOST:
                    errors[chunk["id"]] = error
            paths = {original_path(record["owner"], id) for id in errors}
            return {path, *paths} if self._cache(record, errors) else set()
        original = path.removesuffix(SIDECAR)
        error = verify(original, record)
        if error == LOST:
            return set()
        if sidecar.kind == "file":
            adopted = self.file(record, original, error, "" if error else sidecar.replaces)
        else:
            adopted = self.reference(record, original, error)
        return {path, original} if adopted else set()

    def file(self, record: Record, path: str, error: str | None = None, replaces: str = "") -> bool:
        """Makes the row of an upload; returns False when a file has its id.

        Args:
            path: path of the original, relative to the root.
            error: the reason, if the original cannot be used.
            replaces: id of the file whose handle it takes, if that file has it still.
        """
        if self._known("files", record["id"]):
            return False
        self._catalog.add_user(self._db, record["owner"], record["created_at"])
        insert_row(
            self._db,
            "files",
            _content("file", record, path, error) | {"handle": self._handle(record, replaces)},
        )
        return True

    def reference(self, record: Record, path: str, error: str | None = None) -> bool:
        """Makes the row of a version of a reference and retires an older version that the catalogue has; False when the
        catalogue has this version or a newer one."""
        row = self._db.execute("SELECT version FROM refs WHERE id = ?", (record["id"],)).fetchone()
        if row is not None and row["version"] >= record["version"]:
            return False
        values = _content("reference", record, path, error)
        if row is None:
            insert_row(self._db, "refs", values)
        else:
            retire(self._db, record["id"], row["version"])
            update_row(self._db, "refs", values)
        return True

    def _owner(self, record: Record) -> bool:
        """Makes the row of a user with its quotas, or gives them to a row that has none; False when the catalogue has
        quotas of the user, or there are none."""
        if not self._known("users", record["id"]):
            insert_row(self._db, "users", {name: record[name] for name in COLUMNS["owner"]})
            return True
        has = self._db.execute(
            f"SELECT 1 FROM users WHERE id = ? AND ({DESCRIBED['owner']})", (record["id"],)
        )
        if has.fetchone() is not None or all(record[quota] is None for quota in QUOTAS):
            return False
        update_row(self._db, "users", {name: record[name] for name in ("id", *QUOTAS)})
        return True

    def _cache(self, record: Record, errors: Mapping[str, str | None]) -> bool:
        """Makes the rows of an explicit cache and those of its chunks that are there; False when the catalogue has the
        cache or when no chunk is there.

        Args:
            errors: for chunks whose original is there, by id: the reason if it cannot be used, else None.
        """
        chunks = [chunk for chunk in record["chunks"] if chunk["id"] in errors]
        if not chunks or self._known("caches", record["id"]):
            return False
        self._catalog.add_user(self._db, record["owner"], record["created_at"])
        split = {"split": json.dumps(record["split"])}
        insert_row(self._db, "caches", {name: record[name] for name in COLUMNS["cache"]} | split)
        for chunk in chunks:
            values = {name: chunk[name] for name in ("id", "pinned", *CONTENT)}
            values |= {name: record[name] for name in ("owner", "created_at", "expires_at")}
            values |= {"path": original_path(record["owner"], chunk["id"])} | _state(errors[chunk["id"]])
            insert_row(self._db, "files", values)
            span = (chunk["id"], record["id"], chunk["position"], chunk["start"], chunk["end"])
            self._db.execute("INSERT INTO cache_chunks VALUES (?, ?, ?, ?, ?)", span)
        return True

    def _handle(self, record: Record, replaces: str) -> str | None:
        """Returns the handle of a file, unless another existing file of the user has it and has not expired. The file
        that it replaces gives it up and expires, as at the end of an upload."""
        if record["handle"] is None:
            return None
        sql = "SELECT id, path, expires_at FROM files WHERE owner = ? AND handle = ? COLLATE NOCASE"
        row = self._db.execute(sql, (record["owner"], record["handle"])).fetchone()
        if row is None:
            return record["handle"]
        if row["path"] in self._lost or (row["expires_at"] is not None and row["expires_at"] <= self._now):
            self._db.execute("UPDATE files SET handle = NULL WHERE id = ?", (row["id"],))
            return record["handle"]
        if row["id"] == replaces:
            sql = "UPDATE files SET handle = NULL, expires_at = ? WHERE id = ?"
            self._db.execute(sql, (self._now, replaces))
            self.replaced += 1
            return record["handle"]
        self.without_handle.append(record["id"])
        return None

    def _known(self, table: str, id: str) -> bool:
        return self._db.execute(f"SELECT 1 FROM {table} WHERE id = ?", (id,)).fetchone() is not None


def _content(kind: str, record: Record, path: str, error: str | None) -> dict[str, Any]:
    """Returns the columns of an upload or a reference."""
    values = {name: record[name] for name in COLUMNS[kind]} | _state(error) | {"path": path}
    if values.get("split") is not None:
        values["split"] = json.dumps(record["split"], sort_keys=True)
    return values | {"metadata": json.dumps(record["metadata"], sort_keys=True)}


def _state(error: str | None) -> dict[str, Any]:
    return {"tokens": None, "state": "failed" if error else "compiling", "error": error}
