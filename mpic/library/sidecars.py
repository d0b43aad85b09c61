"""Sidecars: beside every original a small JSON file says what the catalogue says of it, so that a lost catalogue can be
made again (``mpic library recover``) and an older one brought up to date.

A sidecar is durable before the row it stands for is committed, and removed after that row is gone. It is rewritten
inside the transaction that changes the row, so it may be ahead of the catalogue by a change that a crash undid. Where
the two disagree the catalogue is right. The chunks of an explicit cache share one sidecar, ``group-<24>.json``; the
quotas of a user lie in ``owner.json``.

::

    {"format": 1, "kind": "file", "sha256": "<of the record>", "record": {"id": "file-...", "owner": "alice", ...}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Literal

from mpic.durable import Files, write_durably
from mpic.errors import CorruptFile
from mpic.library.catalog import Catalog
from mpic.library.names import OWNER_SIDECAR, SIDECAR, owner_folder, sidecar_of

FORMAT = 1
Kind = Literal["file", "reference", "cache", "owner"]

CONTENT = ("kind", "filename", "bytes", "sha256", "digest")
FILE = ("id", "owner", "handle", *CONTENT, "created_at", "expires_at", "metadata", "pinned")
WORDS = ("title", "description", "metadata")
REFERENCE = ("id", "version", *WORDS, *CONTENT, "created_at", "updated_at", "pinned")
CACHE = ("id", "owner", "name", "split", "created_at", "expires_at")
CACHE_CHUNK = ("id", *CONTENT, "pinned", "position", "start", "end")
OWNER = ("id", "created_at", "quota_files", "quota_bytes", "quota_disk")
"""Columns of the catalogue that a sidecar holds. State and tokens are not among them: they follow from compiling."""

CHUNKS_OF_CACHE = "SELECT * FROM files JOIN cache_chunks USING (id) WHERE cache = ? ORDER BY position"
USERS_WITH_QUOTAS = """
    SELECT * FROM users WHERE quota_files IS NOT NULL OR quota_bytes IS NOT NULL OR quota_disk IS NOT NULL"""

MOST_BYTES = 16 << 20
"""A sidecar is smaller; the one of a cache of 1,024 chunks has half a megabyte."""


@dataclass(frozen=True)
class Sidecar:
    """What a sidecar says. ``record``: columns of the row it stands for; of a cache with ``chunks``, a list of rows."""

    kind: Kind
    record: dict[str, Any]

    def encode(self) -> bytes:
        record = json.dumps(self.record, sort_keys=True)
        digest = hashlib.sha256(record.encode()).hexdigest()
        return f'{{"format": {FORMAT}, "kind": "{self.kind}", "sha256": "{digest}", "record": {record}}}\n'.encode()

    @classmethod
    def decode(cls, data: bytes, name: str) -> Sidecar:
        """Raises CorruptFile: damaged, or of another format."""
        try:
            whole = json.loads(data)
            record = json.dumps(whole["record"], sort_keys=True)
            if whole["format"] != FORMAT or not isinstance(whole["record"], dict):
                raise CorruptFile(f"the sidecar {name} has a format that this program does not know")
            if hashlib.sha256(record.encode()).hexdigest() != whole["sha256"]:
                raise CorruptFile(f"the sidecar {name} is damaged")
            columns = {"file": FILE, "reference": REFERENCE, "cache": (*CACHE, "chunks"), "owner": OWNER}
            missing = [column for column in columns[whole["kind"]] if column not in whole["record"]]
            if missing:
                raise CorruptFile(f"the sidecar {name} lacks {missing[0]}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptFile(f"the sidecar {name} is damaged ({error!r})") from error
        return cls(whole["kind"], whole["record"])

    @classmethod
    def read(cls, path: Path) -> Sidecar:
        """Raises CorruptFile, OSError."""
        if path.stat().st_size > MOST_BYTES:
            raise CorruptFile(f"the sidecar {path.name} is larger than any that this program writes")
        return cls.decode(path.read_bytes(), path.name)


def of_file(row: Mapping[str, Any]) -> Sidecar:
    """Of an upload, from its columns."""
    return Sidecar("file", _plain(row, FILE))


def of_reference(row: Mapping[str, Any]) -> Sidecar:
    """Of a version of a reference, from its columns."""
    return Sidecar("reference", _plain(row, REFERENCE))


def of_cache(row: Mapping[str, Any], chunks: Iterable[Mapping[str, Any]]) -> Sidecar:
    """Of an explicit cache, from its columns and those of its chunks (``files`` joined with ``cache_chunks``)."""
    return Sidecar("cache", _plain(row, CACHE) | {"chunks": [_plain(c, CACHE_CHUNK) for c in chunks]})


def of_owner(row: Mapping[str, Any]) -> Sidecar:
    """Of a user's quotas, from the columns of ``users``."""
    return Sidecar("owner", _plain(row, OWNER))


class Sidecars:
    """Writes the sidecars of what changes; the methods ``rewrite_...`` run within the transaction that changes it.

    Args:
        root: of the library.
    """

    def __init__(self, root: Path, files: Files) -> None:
        self._root = root
        self._files = files

    def cache_path(self, owner: str, cache: str) -> Path:
        """Where the sidecar of a cache lies."""
        return self._root / "files" / owner_folder(owner) / f"{cache}{SIDECAR}"

    def owner_path(self, owner: str) -> Path:
        """Where the sidecar of a user with quotas lies."""
        return self._root / "files" / owner_folder(owner) / OWNER_SIDECAR

    def write(self, path: Path, sidecar: Sidecar) -> None:
        """Durably. Raises StorageFull."""
        write_durably(self._files, path, [memoryview(sidecar.encode())])

    def rewrite_files(self, db: Connection, ids: Iterable[str]) -> None:
        """Of uploads, or of the caches that these files are chunks of; those that are gone are left out."""
        for file_id in ids:
            row = db.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
            chunk = db.execute("SELECT cache FROM cache_chunks WHERE id = ?", (file_id,)).fetchone()
            if chunk is not None:
                self.rewrite_cache(db, chunk["cache"])
            elif row is not None:
                self.write(sidecar_of(self._root / row["path"]), of_file(row))

    def rewrite_reference(self, db: Connection, reference: str) -> None:
        row = db.execute("SELECT * FROM refs WHERE id = ?", (reference,)).fetchone()
        if row is not None:
            self.write(sidecar_of(self._root / row["path"]), of_reference(row))

    def rewrite_cache(self, db: Connection, cache: str) -> None:
        row = db.execute("SELECT * FROM caches WHERE id = ?", (cache,)).fetchone()
        if row is not None:
            chunks = db.execute(CHUNKS_OF_CACHE, (cache,)).fetchall()
            self.write(self.cache_path(row["owner"], cache), of_cache(row, chunks))

    def rewrite_owner(self, db: Connection, owner: str) -> None:
        row = db.execute("SELECT * FROM users WHERE id = ?", (owner,)).fetchone()
        if row is not None:
            self.write(self.owner_path(owner), of_owner(row))

    def expected(self, catalog: Catalog) -> Iterator[tuple[Path, Sidecar]]:
        """Every sidecar that there should be, and what it should say. While nothing is changed."""
        for row in catalog.read("SELECT * FROM files WHERE id NOT IN (SELECT id FROM cache_chunks)"):
            yield sidecar_of(self._root / row["path"]), of_file(row)
        for row in catalog.read("SELECT * FROM refs"):
            yield sidecar_of(self._root / row["path"]), of_reference(row)
        for row in catalog.read("SELECT * FROM caches"):
            chunks = catalog.read(CHUNKS_OF_CACHE, row["id"])
            if chunks:  # one without any is about to be forgotten
                yield self.cache_path(row["owner"], row["id"]), of_cache(row, chunks)
        for row in catalog.read(USERS_WITH_QUOTAS):
            yield self.owner_path(row["id"]), of_owner(row)


def _plain(row: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """Columns of a row as JSON holds them: metadata and splits, which the catalogue keeps as JSON, are parsed."""
    values = {column: row[column] for column in columns}
    for column in ("metadata", "split"):
        if isinstance(values.get(column), str):
            values[column] = json.loads(values[column])
    if "pinned" in values:
        values["pinned"] = bool(values["pinned"])
    return values
