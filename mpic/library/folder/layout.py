"""Names of the files in a library's folder. A file that has none of these names does not belong to the library and is
left alone.

::

    catalog.sqlite                                  the catalogue
    files/<hash of owner>/file-<24>                 an upload, unchanged
    files/<hash of owner>/cache-<24>                a text of an explicit cache
    files/<hash of shared>/ref_<id>@<24>            a version of a reference
    files/<hash of owner>/<name of one>.json        its sidecar
    files/<hash of owner>/group-<24>.json           the sidecar of an explicit cache
    files/<hash of owner>/owner.json                the sidecar of a user with quotas
    kv/<model, 12 digits>/<hash of owner>/<digest>.safetensors    a compiled chunk
    calibrations/<model, 16 digits>-<type of KV>.json    what reuse costs a model (``mpic.server.auto``)
    tmp/<24 digits>.tmp                             an upload that is being received
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import Row
from stat import S_ISREG
from typing import Any, Literal

from mpic.errors import LinkedFolder
from mpic.kv.chunk import KVKey, digest
from mpic.library.records import SHARED

CatalogRow = Row | Mapping[str, Any]
"""A row of a catalogue by column, as SQLite or a sidecar gives it."""

CATALOG, LOCK = "catalog.sqlite", "lock"
SIDECAR = ".json"
OWNER_SIDECAR = f"owner{SIDECAR}"

_ID = r"[A-Za-z0-9]{24}"
HASH, MODEL = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{12}")
ORIGINAL = re.compile(rf"(?:file-|cache-){_ID}|ref_[A-Za-z0-9_.-]{{1,124}}@{_ID}")
CACHE_SIDECAR = re.compile(rf"group-{_ID}\.json")

_FILES, _KV = rf"files/{HASH.pattern}", rf"kv/{MODEL.pattern}/{HASH.pattern}"
_SIDECAR, _CHUNK = rf"(?:{ORIGINAL.pattern})\.json", rf"{HASH.pattern}\.safetensors"
_REWRITTEN = rf"\.(?:{_SIDECAR}|{CACHE_SIDECAR.pattern}|owner\.json|{_CHUNK})\.[0-9a-f]{{12}}\.tmp"
FOLDER = re.compile(rf"files|{_FILES}|kv|kv/{MODEL.pattern}|{_KV}|tmp")
KINDS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "originals": rf"{_FILES}/(?:{ORIGINAL.pattern})",
        "sidecars": f"{_FILES}/{_SIDECAR}",
        "caches": f"{_FILES}/{CACHE_SIDECAR.pattern}",
        "owners": rf"{_FILES}/owner\.json",
        "chunks": f"{_KV}/{_CHUNK}",
        # of uploads, and of ``durable.write_durably``
        "leftovers": rf"tmp/[0-9a-f]{{24}}\.tmp|(?:{_FILES}|{_KV})/{_REWRITTEN}",
    }.items()
}
"""The kinds of files that a library has, by their paths."""


def owner_folder(owner: str) -> str:
    """Return the folder name of a user's files; the user's id itself never reaches the file system."""
    return digest("owner", owner)


def original_path(owner: str, file_id: str) -> str:
    """Return the path of an upload or a chunk of a cache, relative to the library's root."""
    return f"files/{owner_folder(owner)}/{file_id}"


def chunk_path(key: KVKey) -> Path:
    """Return the path of a compiled chunk, relative to the library's root."""
    return Path("kv", key.model[:12], owner_folder(key.owner), f"{key.digest}.safetensors")


def path_of_row(table: str, row: CatalogRow) -> str | None:
    """Return the path of the file that a row of ``files``, ``refs``, ``retired_refs`` or ``chunks`` describes,
    relative to the library's root; None if no library gives such an id.

    It is made of the owner and the id; only the random end of a reference's name is taken from the path in the row,
    which nothing else holds.
    """
    if table == "chunks":
        model, owner, name = (str(row[column]) for column in ("model", "owner", "key"))
        fits = MODEL.fullmatch(model[:12]) and HASH.fullmatch(name)
        return f"kv/{model[:12]}/{owner_folder(owner)}/{name}.safetensors" if fits else None
    name = str(row["id"])
    if table != "files":
        name = f"{name}@{str(row['path']).rpartition('@')[2]}"
    owner = str(row["owner"]) if table == "files" else SHARED
    return original_path(owner, name) if ORIGINAL.fullmatch(name) else None


def sidecar_of(original: Path) -> Path:
    """Return the path of an original's sidecar."""
    return original.with_name(original.name + SIDECAR)


@dataclass
class FoundFiles:
    """The files of a library, by paths relative to its folder.

    Args:
        sidecars: sidecars of originals; ``caches`` and ``owners`` are the sidecars of caches and of users with quotas.
        chunks: bytes of chunk files by path.
        leftovers: temporary files of this program that were never finished.
        unknown: files and folders that have no name of this program.
    """

    originals: set[str] = field(default_factory=set)
    sidecars: set[str] = field(default_factory=set)
    caches: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    chunks: dict[str, int] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def scan(root: Path, *tops: Literal["files", "kv", "tmp"]) -> FoundFiles:
    """List everything in these folders of a library. No symbolic link is followed below them. Files that a server
    removes meanwhile are left out.

    Raises:
        LinkedFolder: a link has the name of a user's folder or of a folder of chunks, or leads to a file and has the
            name of an original: what is behind it would count as lost.
        OSError: a folder cannot be read.
    """
    found = FoundFiles()
    for top in tops:
        for folder, folders, names in os.walk(root / top, onerror=_unless_gone):
            parent = os.path.relpath(folder, root)
            if not FOLDER.fullmatch(parent):
                found.unknown.append(parent)
                folders.clear()
                continue
            for name in folders:
                if FOLDER.fullmatch(f"{parent}/{name}"):
                    _refuse_link(Path(folder, name))
                elif os.path.islink(f"{folder}/{name}"):
                    found.unknown.append(f"{parent}/{name}")
            for name in names:
                with suppress(FileNotFoundError):
                    _take(found, root, f"{parent}/{name}")
    return found


def _take(found: FoundFiles, root: Path, path: str) -> None:
    """Record a file under the kind that its path implies. Raise FileNotFoundError: it has gone meanwhile."""
    kind = next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(path)), "unknown")
    if kind == "originals" and os.path.isfile(root / path):
        _refuse_link(root / path)
    status = os.lstat(root / path)
    if not S_ISREG(status.st_mode):
        found.unknown.append(path)
    elif kind == "chunks":
        found.chunks[path] = status.st_size
    elif kind in ("leftovers", "unknown"):
        getattr(found, kind).append(path)
    else:
        getattr(found, kind).add(path)


def holds_library_files(root: Path) -> bool:
    """Return whether a folder holds an original, a sidecar or a compiled chunk of a library."""
    found = scan(root, "files", "kv")
    return bool(found.originals or found.sidecars or found.caches or found.chunks)


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise LinkedFolder(
            f"{path} is a symbolic link, which a library does not follow; nothing was changed. Put what it "
            "leads to in its place (another disk can be mounted there), then start again"
        )
