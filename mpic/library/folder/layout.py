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
    quarantine/<name>@<time>                        a damaged chunk
    quarantine/orphans/<date>/...                   a file that the catalogue does not know, below its earlier path
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import Row
from stat import S_ISREG
from typing import Any

from mpic.errors import LinkedFolder
from mpic.kv.chunk import KVKey, digest
from mpic.library.records import SHARED

CatalogRow = Row | Mapping[str, Any]
"""A row of a catalogue by column, as SQLite or a sidecar gives it."""

CATALOG, LOCK = "catalog.sqlite", "lock"
SIDECAR = ".json"
OWNER_SIDECAR = f"owner{SIDECAR}"

_ID = r"[A-Za-z0-9]{24}"
ORIGINAL = re.compile(rf"(?:file-|cache-){_ID}|ref_[A-Za-z0-9_.-]{{1,124}}@{_ID}")
ORIGINAL_SIDECAR = re.compile(rf"(?:{ORIGINAL.pattern})\.json")
CACHE_SIDECAR = re.compile(rf"group-{_ID}\.json")
HASH = re.compile(r"[0-9a-f]{64}")
MODEL = re.compile(r"[0-9a-f]{12}")
CHUNK = re.compile(r"[0-9a-f]{64}\.safetensors")
INCOMING = re.compile(r"[0-9a-f]{24}\.tmp")
REWRITTEN = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
"""Temporary names of ``durable.write_durably``."""

DAMAGED = re.compile(r"[0-9a-f]{64}\.safetensors@\d+(?:\.\d+)?")
DATE = re.compile(r"\d{4}-\d\d-\d\d")


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

    It is made of the owner and the id. The path in the row is not followed, because a catalogue may come from anywhere
    (a backup, a copy); only the random end of a reference's name is taken from it, which nothing else holds.
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
    """The files in ``files`` and ``tmp``, by paths relative to the library's folder.

    Args:
        sidecars: sidecars of originals; ``caches`` and ``owners`` are the sidecars of caches and of users with quotas.
        leftovers: temporary files of this program that were never finished.
        unknown: files that have no name of this program.
    """

    originals: set[str] = field(default_factory=set)
    sidecars: set[str] = field(default_factory=set)
    caches: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    leftovers: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def take(self, folder: str, name: str) -> None:
        """Record a file of ``files`` under the kind that its name implies."""
        path = f"{folder}/{name}"
        if ORIGINAL.fullmatch(name):
            self.originals.add(path)
        elif ORIGINAL_SIDECAR.fullmatch(name):
            self.sidecars.add(path)
        elif CACHE_SIDECAR.fullmatch(name):
            self.caches.add(path)
        elif name == OWNER_SIDECAR:
            self.owners.add(path)
        elif _is_temporary(name):
            self.leftovers.append(path)
        else:
            self.unknown.append(path)


def scan(root: Path) -> FoundFiles:
    """List everything in ``files`` and ``tmp``. No symbolic link is followed below these.

    Raises:
        LinkedFolder: a link has the name of a user's folder, or leads to a file and has the name of an original: what
            is behind it would count as lost.
    """
    found = FoundFiles()
    for folder in _entries(root / "files"):
        parent = f"files/{folder.name}"
        if HASH.fullmatch(folder.name):
            _refuse_link(folder)
        if not (folder.is_dir(follow_symlinks=False) and HASH.fullmatch(folder.name)):
            found.unknown.append(parent)
            continue
        for entry in _entries(Path(folder.path)):
            if ORIGINAL.fullmatch(entry.name) and os.path.isfile(entry.path):
                _refuse_link(entry)
            if entry.is_file(follow_symlinks=False):
                found.take(parent, entry.name)
            else:
                found.unknown.append(f"{parent}/{entry.name}")
    for entry in _entries(root / "tmp"):
        ours = INCOMING.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        (found.leftovers if ours else found.unknown).append(f"tmp/{entry.name}")
    return found


@dataclass
class FoundChunks:
    """The files in ``kv``: sizes of chunk files by path relative to the library's folder; see ``FoundFiles``."""

    sizes: dict[str, int] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def scan_chunks(root: Path) -> FoundChunks:
    """List everything in ``kv``. Files that a server removes meanwhile are left out.

    Raises:
        LinkedFolder: a link has the name of a folder of chunks, which would count as missing.
    """
    found = FoundChunks()
    for folder, folders, names in os.walk(root / "kv"):
        parent = os.path.relpath(folder, root)
        parts = parent.split(os.sep)[1:]
        fits = [pattern.fullmatch(part) for pattern, part in zip((MODEL, HASH), parts)]
        if not all(fits) or len(parts) > 2:
            found.unknown.append(parent)
            folders.clear()
            continue
        for name in folders:
            if len(parts) < 2 and (MODEL, HASH)[len(parts)].fullmatch(name):
                _refuse_link(Path(folder, name))
        for name in names:
            path = f"{parent}/{name}"
            if len(parts) == 2 and CHUNK.fullmatch(name):
                with suppress(FileNotFoundError):
                    status = os.lstat(f"{folder}/{name}")
                    if S_ISREG(status.st_mode):
                        found.sizes[path] = status.st_size
                    else:
                        found.unknown.append(path)
            elif len(parts) == 2 and _is_temporary(name):
                found.leftovers.append(path)
            else:
                found.unknown.append(path)
    return found


def holds_library_files(root: Path) -> bool:
    """Return whether a folder holds an original, a sidecar or a compiled chunk of a library."""
    found = scan(root)
    return bool(found.originals or found.sidecars or found.caches or scan_chunks(root).sizes)


def _is_temporary(name: str) -> bool:
    """Return whether this is the temporary name of a sidecar or a chunk."""
    if not REWRITTEN.fullmatch(name):
        return False
    final = name[1:].rsplit(".", 2)[0]
    patterns = (ORIGINAL_SIDECAR, CACHE_SIDECAR, CHUNK)
    return final == OWNER_SIDECAR or any(pattern.fullmatch(final) for pattern in patterns)


def _refuse_link(entry: os.DirEntry[str] | Path) -> None:
    if entry.is_symlink():
        raise LinkedFolder(
            f"{os.fspath(entry)} is a symbolic link, which a library does not follow; nothing was changed. Put what it "
            "leads to in its place (another disk can be mounted there), then start again"
        )


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; none when there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
