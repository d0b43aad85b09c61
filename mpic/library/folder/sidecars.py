"""Sidecars: a small JSON file beside every original repeats its row of the catalogue, so that a lost or an older
catalogue can be made again (``mpic library recover``).

A sidecar is durable before the row it describes is committed, and is removed after that row is gone. It is rewritten
inside the transaction that changes the row, and again when that transaction is undone; so it may be ahead of the
catalogue only by a change that a crash undid. If the two disagree, the catalogue is right. The
chunks of an explicit cache share one sidecar, ``group-<24>.json``; the quotas of a user are in ``owner.json``.

::

    {"format": 1, "kind": "file", "sha256": "<of the record>", "record": {"id": "file-...", "owner": "alice", ...}}
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from sqlite3 import Connection, Row
from stat import S_ISREG
from typing import Annotated, Any, Literal

from mpic import bounded_json
from mpic.durable import FileSystem, read_small, write_durably
from mpic.errors import CorruptFile, MPICError
from mpic.kv.chunk import Kind
from mpic.library.folder.layout import (
    OWNER_SIDECAR,
    SIDECAR,
    CatalogRow,
    original_path,
    owner_folder,
    sidecar_of,
)
from mpic.library.records import SHARED

log = logging.getLogger(__name__)

FORMAT = 1
SidecarKind = Literal["file", "reference", "cache", "owner"]

CONTENT = ("kind", "filename", "bytes", "sha256", "digest")
QUOTAS = ("quota_files", "quota_bytes", "quota_disk")
COLUMNS: dict[str, tuple[str, ...]] = {
    "file": (
        "id",
        "owner",
        "handle",
        *CONTENT,
        "created_at",
        "expires_at",
        "metadata",
        "pinned",
        "split",
        "press",
        "format",
        "pages",
        "kv_ttl",
    ),
    "reference": (
        *("id", "version", "title", "description", "metadata", *CONTENT),
        *("created_at", "updated_at", "pinned", "format", "expires_at", "synced_from"),
    ),
    "cache": ("id", "owner", "name", "split", "created_at", "expires_at"),
    "owner": ("id", "created_at", *QUOTAS),
}
"""Columns of the catalogue that a sidecar holds. State and tokens are not among them: they follow from compiling."""
ADDED: dict[str, dict[str, Any]] = {
    "file": {"split": None, "press": "", "format": "", "pages": None, "kv_ttl": None},
    "reference": {"format": "", "expires_at": None, "synced_from": ""},
}
"""Columns that the sidecars of earlier versions lack, with what that means."""
CACHE_CHUNK = ("id", *CONTENT, "pinned", "kv_ttl", "position", "start", "end")

TABLES = {"file": "files", "reference": "refs", "cache": "caches", "owner": "users"}
DESCRIBED = {
    "file": "id NOT IN (SELECT id FROM cache_chunks)",
    "reference": "TRUE",
    "cache": "id IN (SELECT cache FROM cache_chunks)",  # a cache without chunks is about to be forgotten
    "owner": " OR ".join(f"{quota} IS NOT NULL" for quota in QUOTAS),
}
"""Condition on the rows of each table that have a sidecar of their own."""
CHUNKS_OF_CACHE = "SELECT * FROM files JOIN cache_chunks USING (id) WHERE cache = ? ORDER BY position"

MOST_BYTES = 16 << 20
"""Every sidecar is smaller; the one of a cache of 1,024 chunks has half a megabyte."""

BOUNDS = bounded_json.Bounds(depth=16)

Read = Callable[..., list[Row]]
"""Runs a query on the catalogue and returns its rows (``Catalog.read``)."""
Undone = Callable[[], None]
"""Runs after a transaction was undone (``Catalog.if_undone``)."""


@dataclass(frozen=True)
class Sidecar:
    """The content of a sidecar.

    Args:
        record: columns of the row it describes; a cache also has ``chunks``, a list of rows.
    """

    kind: SidecarKind
    record: dict[str, Any]

    @classmethod
    def of(cls, kind: SidecarKind, row: CatalogRow, chunks: Iterable[CatalogRow] = ()) -> Sidecar:
        """Return the sidecar of a row.

        Args:
            chunks: the columns of a cache's chunks (``files`` joined with ``cache_chunks``).
        """
        record = _plain(row, COLUMNS[kind])
        if kind == "cache":
            record["chunks"] = [_plain(chunk, CACHE_CHUNK) for chunk in chunks]
        return cls(kind, record)

    def encode(self) -> bytes:
        record = json.dumps(self.record, sort_keys=True)
        digest = hashlib.sha256(record.encode()).hexdigest()
        head = f'"format": {FORMAT}, "kind": "{self.kind}", "sha256": "{digest}"'
        return f'{{{head}, "record": {record}}}\n'.encode()

    @classmethod
    def decode(cls, data: bytes, name: str) -> Sidecar:
        """Read the bytes of a sidecar. Raise CorruptFile: it is damaged, or has another format."""
        try:
            whole = bounded_json.read(data, BOUNDS)
            record = json.dumps(whole["record"], sort_keys=True)
            if whole["format"] != FORMAT or not isinstance(whole["record"], dict):
                raise CorruptFile(f"the sidecar {name} has a format that this program does not know")
            if hashlib.sha256(record.encode()).hexdigest() != whole["sha256"]:
                raise CorruptFile(f"the sidecar {name} is damaged")
            whole["record"] = ADDED.get(whole["kind"], {}) | whole["record"]
            for chunk in whole["record"].get("chunks", ()) if whole["kind"] == "cache" else ():
                chunk.setdefault("kv_ttl", None)
            wrong = _wrong_field(whole["kind"], whole["record"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFile(f"the sidecar {name} is damaged ({error!r})") from error
        if wrong:
            raise CorruptFile(f"the sidecar {name} cannot be used: {wrong}")
        return cls(whole["kind"], whole["record"])

    @classmethod
    def read(cls, path: Path) -> Sidecar:
        """Read a sidecar from the disk.

        Raises:
            CorruptFile: it is damaged, or has another format.
            OSError: it cannot be read.
        """
        if not S_ISREG(path.lstat().st_mode):
            raise CorruptFile(f"the sidecar {path.name} is not a file")
        try:
            return cls.decode(read_small(path, MOST_BYTES), path.name)
        except ValueError as error:
            raise CorruptFile(
                f"the sidecar {path.name} is larger than any that this program writes"
            ) from error

    def originals(self, path: str) -> dict[str, dict[str, Any]]:
        """Return the records of the originals that this sidecar describes, by their paths.

        Args:
            path: of the sidecar, relative to the library's root.
        """
        if self.kind == "cache":
            return {original_path(self.record["owner"], one["id"]): one for one in self.record["chunks"]}
        return {} if self.kind == "owner" else {path.removesuffix(SIDECAR): self.record}


def read_sidecars(
    root: Path, paths: Iterable[str], report: Callable[[str, Exception], None]
) -> list[tuple[str, Sidecar]]:
    """Read sidecars, and return them with their paths: users first, then by age, but the newest version of a reference
    before older ones.

    Args:
        paths: relative to the library's root.
        report: called with each sidecar that is damaged, describes something in another place, or cannot be read.
    """
    found = []
    for path in sorted(paths):
        try:
            sidecar = Sidecar.read(root / path)
            record, (_, folder, name) = sidecar.record, path.split("/")
            owner = {"reference": SHARED, "owner": record["id"]}.get(sidecar.kind) or record["owner"]
            stem = name.removesuffix(SIDECAR)
            if sidecar.kind == "reference":
                stem = stem.rpartition("@")[0]
            named = "owner" if sidecar.kind == "owner" else record["id"]
            if folder != owner_folder(owner) or stem != named:
                raise CorruptFile(f"the sidecar {path} describes {record['id']}, which belongs elsewhere")
            found.append((path, sidecar))
        except (CorruptFile, OSError) as error:
            report(path, error)
    return sorted(found, key=lambda entry: _age(entry[1]))


def _age(sidecar: Sidecar) -> tuple[bool, float, int]:
    return sidecar.kind != "owner", sidecar.record["created_at"], -sidecar.record.get("version", 0)


class Sidecars:
    """Writes the sidecars of rows that change.

    Args:
        root: the library's folder.
        if_undone: registers what to do if the present transaction is undone.
    """

    def __init__(
        self, root: Path, filesystem: FileSystem, if_undone: Callable[[Undone], None] = lambda action: None
    ) -> None:
        self._root = root
        self._filesystem = filesystem
        self._if_undone = if_undone

    def path(self, kind: SidecarKind, row: CatalogRow) -> Path:
        """Return the path of a row's sidecar."""
        if kind in ("file", "reference"):
            return sidecar_of(self._root / row["path"])
        owner, name = (
            (row["owner"], f"{row['id']}{SIDECAR}") if kind == "cache" else (row["id"], OWNER_SIDECAR)
        )
        return self._root / "files" / owner_folder(owner) / name

    def write(self, path: Path, sidecar: Sidecar) -> None:
        """Write a sidecar durably. Raise StorageFull: the disk is full."""
        write_durably(self._filesystem, path, [memoryview(sidecar.encode())])

    def rewrite(self, db: Connection, kind: SidecarKind, id: str) -> None:
        """Rewrite the sidecar of a row, within the transaction that changes the row. A row that is gone is left
        out. A chunk of a cache is described by the sidecar of its cache. If the transaction is undone, the sidecar says
        again what it said before."""
        if kind == "file":
            chunk = db.execute("SELECT cache FROM cache_chunks WHERE id = ?", (id,)).fetchone()
            kind, id = ("cache", chunk["cache"]) if chunk is not None else (kind, id)
        row = db.execute(f"SELECT * FROM {TABLES[kind]} WHERE id = ?", (id,)).fetchone()
        if row is not None:
            path = self.path(kind, row)
            self._if_undone(partial(self._put_back, path, _content(path)))
            chunks = db.execute(CHUNKS_OF_CACHE, (row["id"],)).fetchall() if kind == "cache" else ()
            self.write(path, Sidecar.of(kind, row, chunks))

    def _put_back(self, path: Path, before: bytes | None) -> None:
        """Give a sidecar back what it said before a transaction that was undone. One that cannot be written is removed:
        the next start writes a missing sidecar, but does not look into a wrong one."""
        try:
            if before is not None:
                if _content(path) != before:
                    write_durably(self._filesystem, path, [memoryview(before)])
                return
        except (MPICError, OSError) as error:
            log.error("the sidecar %s is removed, the next start writes it again: %s", path.name, error)
        with suppress(OSError):
            self._filesystem.remove(path)
            self._filesystem.sync_folder(path.parent)

    def described(self, read: Read) -> Iterator[tuple[SidecarKind, Row]]:
        """Yield every row that should have a sidecar."""
        kinds: tuple[SidecarKind, ...] = ("file", "reference", "cache", "owner")
        for kind in kinds:
            for row in read(f"SELECT * FROM {TABLES[kind]} WHERE {DESCRIBED[kind]}"):
                yield kind, row

    def expected(self, read: Read) -> Iterator[tuple[Path, Sidecar]]:
        """Yield the path of every sidecar that should exist, with its expected content."""
        for kind, row in self.described(read):
            chunks = read(CHUNKS_OF_CACHE, row["id"]) if kind == "cache" else ()
            yield self.path(kind, row), Sidecar.of(kind, row, chunks)


def _content(path: Path) -> bytes | None:
    """Return the bytes of a sidecar; None if there is none that can be read."""
    try:
        return read_small(path, MOST_BYTES)
    except (OSError, ValueError):
        return None


def _wrong_field(kind: str, record: Any) -> str:
    """Return the first field of a record whose type is wrong, and why; empty if there is none."""
    from pydantic import ValidationError  # here, as in _model

    try:
        _model(kind).model_validate(record)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""


@cache
def _model(kind: str) -> Any:
    """Return the type of a record. It comes from a disk, so nothing in it is believed before this check."""
    # here, because a GPU is measured on machines without pydantic (`make report-gpu`)
    from pydantic import ConfigDict, Field, create_model

    text = Annotated[str, Field(min_length=1)]
    whole = Annotated[int, Field(ge=0, lt=1 << 63)]
    time = Annotated[
        float, Field(ge=0, lt=253_402_300_800, allow_inf_nan=False)
    ]  # before the year 10000, as dates
    scalar = str | bool | int | Annotated[float, Field(allow_inf_nan=False)]
    types: dict[str, Any] = {
        **dict.fromkeys(("id", "owner", "name"), text),
        **dict.fromkeys(("filename", "title", "description", "press", "format", "synced_from"), str),
        **dict.fromkeys(("sha256", "digest"), Annotated[str, Field(pattern="^[0-9a-f]{64}$")]),
        **dict.fromkeys(("bytes", "version", "position", "start", "end"), whole),
        **dict.fromkeys(QUOTAS, whole | None),
        **dict.fromkeys(("created_at", "updated_at"), time),
        "expires_at": time | None,
        "handle": text | None,
        "kind": Kind,
        "metadata": dict[str, scalar],
        "pinned": bool,
        **dict.fromkeys(("pages", "kv_ttl"), whole | None),
        "split": dict[str, scalar | None] | None,
    }

    def model(columns: Iterable[str], **more: Any) -> Any:
        fields: Any = {column: (types[column], ...) for column in columns} | more
        return create_model("record", __config__=ConfigDict(strict=True), **fields)

    if kind == "cache":
        return model(COLUMNS[kind], chunks=(list[model(CACHE_CHUNK)], ...))  # ty: ignore[invalid-type-form] (made at run time)
    return model(COLUMNS[kind])


def _plain(row: CatalogRow, columns: Iterable[str]) -> dict[str, Any]:
    """Return columns of a row as JSON values. Metadata and splits, which the catalogue stores as JSON text, are
    parsed."""
    values = {column: row[column] for column in columns}
    for column in ("metadata", "split"):
        if isinstance(values.get(column), str):
            values[column] = json.loads(values[column])
    if "pinned" in values:
        values["pinned"] = bool(values["pinned"])
    return values
