"""Upkeep of a library: verifies that everything is as it was stored, and removes files that are no longer needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from sqlite3 import Row
from typing import NamedTuple

import torch

from mpic.durable import FileSystem
from mpic.errors import CorruptFile, IntegrityError
from mpic.kv.chunk import ChunkKey, ChunkKV, KVKey, Recipe
from mpic.kv.file import ChunkFile
from mpic.library.folder.layout import SIDECAR, scan, scan_chunks
from mpic.library.folder.quarantine import damaged_files
from mpic.library.folder.sidecars import Sidecar
from mpic.library.library import Library
from mpic.library.records import SHARED

Progress = Callable[[int], None]
"""Called with the number of bytes of each file that was read."""


class Problem(NamedTuple):
    """A file that is not as it should be, and the consequence; ``name`` is its owner's name for it."""

    path: str
    what: str
    then: str
    name: str = ""


class Garbage(NamedTuple):
    """A file or row that is no longer needed. ``why`` is leftover, expired, retired, tombstone, quarantine, or overdue
    (an orphan that has been kept long enough)."""

    path: str
    bytes: int
    why: str
    name: str = ""


def size_of(library: Library) -> int:
    """Returns the number of bytes that ``check`` reads."""
    row = library.catalog.one("""
        SELECT (SELECT COALESCE(SUM(bytes), 0) FROM files) + (SELECT COALESCE(SUM(bytes), 0) FROM refs)
             + (SELECT COALESCE(SUM(bytes), 0) FROM chunks WHERE state = 'ready')""")
    return row[0]


def check(library: Library, contents: bool = True, progress: Progress = lambda done: None) -> list[Problem]:
    """Verifies the catalogue, that files and rows agree and, with ``contents``, every byte of every file.

    Damaged chunks are put aside, so that they are compiled again on next use. Damaged sidecars are rewritten. Damaged
    originals stay in place until a person replaces them. A library that is open only for reading, beside a server, is
    not changed; files that the server has just deleted are not reported.
    """
    library.finish_sidecars()
    problems: list[Problem] = []
    for part in (library.catalog, library.store, library.files, library.references):
        try:
            part.check()
        except IntegrityError as error:
            problems.append(Problem(type(part).__name__, str(error), "look into it before serving from here"))
    if contents:
        problems += _scrub_originals(library, progress)
        problems += _scrub_sidecars(library)
        problems += _scrub_chunks(library, progress)
    names = names_of(library)
    named = [problem._replace(name=names.get(problem.path, "")) for problem in problems]
    if not library.catalog.read_only:
        return named
    return [
        p._replace(then=p.then + BESIDE if p.then in MENDED else p.then) for p in named if _still(library, p)
    ]


ANEW, ASIDE, AGAIN = (
    "written anew from the catalogue",
    "moved to quarantine/; compiled again on next use",
    "compiled again on next use",
)
MENDED = (ANEW, ASIDE)
BESIDE = " when the server is stopped and this is run again"


def names_of(library: Library) -> dict[str, str]:
    """Returns the names of originals and of the chunks compiled from them, by path: ``alice: EIFFEL2025``."""
    sql = """
        SELECT path, owner || ': ' || COALESCE(handle, filename) AS name FROM files
        UNION ALL SELECT path, 'reference: ' || title FROM refs
        UNION ALL
        SELECT chunks.path, f.owner || ': ' || COALESCE(f.handle, f.filename) FROM chunks
        JOIN contents USING (owner, kind, digest) JOIN files AS f ON f.id = contents.id
        UNION ALL
        SELECT chunks.path, 'reference: ' || refs.title FROM chunks
        JOIN refs USING (kind, digest) WHERE chunks.owner = ?"""
    return {row["path"]: row["name"] for row in library.catalog.read(sql, SHARED)}


def _still(library: Library, problem: Problem) -> bool:
    """Returns whether the catalogue still has the file of a problem, which a server may have deleted meanwhile."""
    path = problem.path.removesuffix(SIDECAR)
    if path == problem.path and "/" not in path:
        return True  # the problem concerns a part of the library, not a file
    sql = "SELECT 1 FROM (SELECT path FROM files UNION ALL SELECT path FROM refs UNION ALL SELECT path FROM chunks)"
    cache = library.catalog.one("SELECT 1 FROM caches WHERE id = ?", Path(path).name)
    return bool(cache or library.catalog.one(f"{sql} WHERE path = ?", path))


def garbage(library: Library) -> list[Garbage]:
    """Lists what ``collect`` removes, without removing it."""
    catalog, now = library.catalog, library.clock()
    found = [
        Garbage(row["path"], row["bytes"], "expired")
        for row in catalog.read("SELECT path, bytes FROM files WHERE expires_at <= ?", now)
    ]
    found += [Garbage(r["path"], r["bytes"], "retired") for r in catalog.read("SELECT * FROM retired_refs")]
    found += [Garbage(path, _size(library, path), "leftover") for path in _leftovers(library)]
    aside = [str(orphan.path.relative_to(library.root)) for orphan in library.orphans.overdue()]
    found += [Garbage(path, _size(library, path), "overdue") for path in aside]
    damaged = [f"quarantine/{name}" for name in damaged_files(library.root / "quarantine")]
    found += [Garbage(path, _size(library, path), "quarantine") for path in damaged]
    before = now - library.limits.tombstone_seconds
    gone = catalog.one("SELECT COUNT(*) FROM chunks WHERE state != 'ready' AND last_used < ?", before)[0]
    names = names_of(library)
    found = [item._replace(name=names.get(item.path, "")) for item in found]
    return [*found, *[Garbage("catalog.sqlite", 0, "tombstone")] * gone]


def collect(library: Library) -> list[Garbage]:
    """Removes everything that is no longer needed, and lists it. The library must not be in use."""
    found = garbage(library)
    library.files.collect_expired()
    library.references.collect_retired()
    library.caches.sweep()
    library.reconcile()
    for item in found:
        if item.why == "quarantine":
            library.filesystem.remove(library.root / item.path)
    return found


def _leftovers(library: Library) -> list[str]:
    """Lists files whose removal a crash prevented, and files that never got their names."""
    catalog, files, kv = library.catalog, scan(library.root), scan_chunks(library.root)
    gone = {
        row["path"] for row in catalog.read("SELECT path FROM chunks WHERE state NOT IN ('ready', 'missing')")
    }
    gone |= catalog.tombstones({*files.originals, *files.caches, *kv.sizes})
    deleted = [path for path in sorted({*files.originals, *files.caches, *kv.sizes}) if path in gone]
    return [*files.leftovers, *kv.leftovers, *deleted]


def _size(library: Library, path: str) -> int:
    return (library.root / path).stat().st_size


def _scrub_originals(library: Library, progress: Progress) -> Iterator[Problem]:
    sql = "SELECT path, sha256, bytes FROM files UNION ALL SELECT path, sha256, bytes FROM refs"
    for row in library.catalog.read(sql):
        try:
            with (library.root / row["path"]).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            yield Problem(row["path"], f"cannot be read ({error.strerror})", "upload it again")
        else:
            if digest != row["sha256"]:
                yield Problem(row["path"], "is not what was uploaded", "upload it again")
        progress(row["bytes"])


def _scrub_sidecars(library: Library) -> Iterator[Problem]:
    """Compares every sidecar with the catalogue; one that differs is rewritten."""
    for path, sidecar in library.sidecars.expected(library.catalog.read):
        name = str(path.relative_to(library.root))
        try:
            if Sidecar.read(path) == sidecar:
                continue
            what = "does not say what the catalogue says"
        except (CorruptFile, OSError) as error:
            what = f"cannot be used ({error})"
        if not library.catalog.read_only:
            library.sidecars.write(path, sidecar)
        yield Problem(name, what, ANEW)


def _scrub_chunks(library: Library, progress: Progress) -> Iterator[Problem]:
    for row in library.catalog.read("SELECT * FROM chunks WHERE state = 'ready'"):
        key = key_of(row)
        if key.digest != row["key"]:
            yield Problem(
                row["path"], "has a row that is not its own", "look into it before serving from here"
            )
            continue
        try:
            read_chunk(library.root / row["path"], key)
        except CorruptFile as error:
            if not library.catalog.read_only:
                library.store.set_aside(key, error)
            yield Problem(row["path"], str(error), ASIDE)
        except FileNotFoundError:
            if not library.catalog.read_only:
                library.store.open(key)  # marks the row as missing
            yield Problem(row["path"], "is gone", AGAIN)
        except OSError as error:
            yield Problem(row["path"], f"cannot be read ({error.strerror})", "look into it; it may be good")
        progress(row["bytes"])


def key_of(row: Row) -> KVKey:
    """Returns the key of a row of the table ``chunks``."""
    recipe = Recipe(**json.loads(row["recipe"]))
    return KVKey(row["owner"], ChunkKey(row["kind"], row["digest"]), row["model"], recipe)


def read_chunk(path: Path, key: KVKey, files: FileSystem | None = None) -> ChunkKV:
    """Reads and verifies every byte of a chunk file and returns the chunk, in host memory.

    Raises:
        CorruptFile: it is damaged, or holds another chunk.
        OSError, OutOfMemory: it cannot be read now.
    """
    with closing(ChunkFile(path, key, files)) as file:
        kv = torch.empty(file.shape.extent(file.slots), dtype=file.dtype)
        for _ in file.read_layers(kv):
            pass
        return ChunkKV(key, file.inputs, kv)
