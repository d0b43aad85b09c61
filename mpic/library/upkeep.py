"""Upkeep of a library: verifies that everything is as it was stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from sqlite3 import Row
from typing import NamedTuple

import torch

from mpic.errors import CorruptFile, IntegrityError, OutOfMemory
from mpic.kv.chunk import ChunkKey, KVKey, Recipe
from mpic.kv.file import ChunkFile
from mpic.library.folder.sidecars import Sidecar
from mpic.library.library import Library
from mpic.library.records import SHARED
from mpic.memory import as_errors

Progress = Callable[[int], None]
"""Called with the number of bytes of each file that was read."""
Wanted = Callable[[str], bool]
"""Tells whether the file of this path is to be looked at."""


class Problem(NamedTuple):
    """A file that is not as it should be, and the consequence; ``name`` is its owner's name for it. ``damaged`` is
    False for what a killed process leaves: nothing was lost."""

    path: str
    what: str
    then: str
    name: str = ""
    damaged: bool = True


def size_of(library: Library) -> int:
    """Return the number of bytes that ``check`` reads."""
    row = library.catalog.read("""
        SELECT (SELECT COALESCE(SUM(bytes), 0) FROM files) + (SELECT COALESCE(SUM(bytes), 0) FROM refs)
             + (SELECT COALESCE(SUM(bytes), 0) FROM chunks WHERE state = 'ready')""")
    return row[0][0]


def check(library: Library, contents: bool = True, progress: Progress = lambda done: None) -> list[Problem]:
    """Verify the catalogue, that files and rows agree and, with ``contents``, every byte of every file.

    Damaged chunks are removed, so that they are compiled again on next use. Damaged sidecars are rewritten. Damaged
    originals stay in place until a person replaces them. A library that is open only for reading, beside a server, is
    not changed; what the server has deleted, evicted or written anew meanwhile is not reported.
    """
    problems = _problems(library, contents, progress)
    if library.catalog.read_only:
        for _ in range(LOOKS):
            if problems:
                paths = {problem.path for problem in problems}
                again = {one.path for one in _problems(library, contents, lambda done: None, paths)}
                problems = [problem for problem in problems if problem.path in again]
        problems = [p._replace(then=p.then + BESIDE) if p.then in MENDED else p for p in problems]
    names = names_of(library)
    return [problem._replace(name=names.get(problem.path, "")) for problem in problems]


LOOKS = 2
"""How often a problem is looked at again in a library that a server changes as it is read."""
ANEW, REMOVED = "written anew from the catalogue", "removed; compiled again on next use"
MENDED = (ANEW, REMOVED)
AHEAD = "does not say what the catalogue says"
"""As after a change that a crash undid: the sidecar was written first (``folder.sidecars``)."""
BESIDE = " when the server is stopped and this is run again"


def _problems(
    library: Library, contents: bool, progress: Progress, only: set[str] | None = None
) -> list[Problem]:
    """Return what is wrong in all files, or in those of these paths."""
    problems: list[Problem] = []
    for part in (library.catalog, library.store, library.files, library.references):
        try:
            part.check()
        except IntegrityError as error:
            problems.append(Problem(type(part).__name__, str(error), "look into it before serving from here"))
    if contents:
        wanted = lambda path: only is None or path in only
        problems += _scrub_originals(library, progress, wanted)
        problems += _scrub_sidecars(library, wanted)
        problems += _scrub_chunks(library, progress, wanted)
    return problems


def names_of(library: Library) -> dict[str, str]:
    """Return the names of originals and of the chunks compiled from them, by path: ``alice: EIFFEL2025``."""
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


def _scrub_originals(library: Library, progress: Progress, wanted: Wanted) -> Iterator[Problem]:
    sql = "SELECT path, sha256, bytes FROM files UNION ALL SELECT path, sha256, bytes FROM refs"
    for row in library.catalog.read(sql):
        if not wanted(row["path"]):
            continue
        try:
            with open(library.filesystem.open(library.root / row["path"]), "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            yield Problem(row["path"], f"cannot be read ({error.strerror})", "upload it again")
        else:
            if digest != row["sha256"]:
                yield Problem(row["path"], "is not what was uploaded", "upload it again")
        progress(row["bytes"])


def _scrub_sidecars(library: Library, wanted: Wanted) -> Iterator[Problem]:
    """Compare every sidecar with the catalogue; one that differs is rewritten."""
    for path, sidecar in library.sidecars.expected(library.catalog.read):
        name = str(path.relative_to(library.root))
        what = _sidecar_fault(path, sidecar) if wanted(name) else None
        if what is None:
            continue
        then = ANEW
        if not library.catalog.read_only:
            try:
                library.sidecars.write(path, sidecar)
            except IsADirectoryError:
                then = "remove the folder, and run this again"
        yield Problem(name, what, then, damaged=what != AHEAD)


def _sidecar_fault(path: Path, wanted: Sidecar) -> str | None:
    """Return what is wrong with a sidecar, or None."""
    try:
        return None if Sidecar.read(path) == wanted else AHEAD
    except (CorruptFile, OSError) as error:
        return f"cannot be used ({error})"


def _scrub_chunks(library: Library, progress: Progress, wanted: Wanted) -> Iterator[Problem]:
    changes = not library.catalog.read_only
    for row in library.catalog.read("SELECT * FROM chunks WHERE state = 'ready'"):
        path, key = row["path"], key_of(row)
        if not wanted(path):
            continue
        if key.digest != row["key"]:
            yield Problem(path, "has a row that is not its own", "look into it before serving from here")
            continue
        try:
            _verify_chunk(library.root / path, key)
        except CorruptFile as error:
            if changes:
                library.store.reject(key, error)
            yield Problem(path, str(error), REMOVED)
        except FileNotFoundError:
            if changes:
                library.store.open(key)  # marks the row as missing
            yield Problem(path, "is gone", "compiled again on next use")
        except OSError as error:
            yield Problem(path, f"cannot be read ({error.strerror})", "look into it; it may be good")
        except OutOfMemory:
            yield Problem(path, "cannot be read now (no memory)", "run this again; it may be good")
        progress(row["bytes"])


def key_of(row: Row) -> KVKey:
    """Return the key of a row of the table ``chunks``."""
    recipe = Recipe(**json.loads(row["recipe"]))
    return KVKey(row["owner"], ChunkKey(row["kind"], row["digest"]), row["model"], recipe)


def _verify_chunk(path: Path, key: KVKey) -> None:
    """Read and verify every byte of a chunk file.

    Raises:
        CorruptFile: it is damaged, or holds another chunk.
        OSError, OutOfMemory: it cannot be read now.
    """
    with as_errors(), closing(ChunkFile(path, key)) as file:
        kv = torch.empty(file.shape.extent(file.slots), dtype=file.dtype)
        for _ in file.read_layers(kv):
            pass
