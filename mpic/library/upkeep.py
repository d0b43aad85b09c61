"""Upkeep of a library: verifies that everything is as it was stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property
from pathlib import Path
from sqlite3 import Row
from typing import NamedTuple

import torch

from mpic.errors import CorruptFile, IntegrityError, OutOfMemory
from mpic.kv.chunk import ChunkKey, KVKey, Recipe
from mpic.kv.file import ChunkFile
from mpic.library.folder.layout import SIDECAR
from mpic.library.folder.sidecars import Sidecar
from mpic.library.library import Library
from mpic.library.records import SHARED
from mpic.memory import as_errors

Progress = Callable[[int], None]
"""Called with the number of bytes of each file that was read."""


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
    if library.catalog.read_only:
        again = _SecondLook(library)
        problems = [p for p in problems if again.confirms(p)]
        problems = [p._replace(then=p.then + BESIDE) if p.then in MENDED else p for p in problems]
    names = names_of(library)
    return [problem._replace(name=names.get(problem.path, "")) for problem in problems]


ANEW, ASIDE, AGAIN = (
    "written anew from the catalogue",
    "removed; compiled again on next use",
    "compiled again on next use",
)
MENDED = (ANEW, ASIDE)
AHEAD = "does not say what the catalogue says"
"""As after a change that a crash undid: the sidecar was written first (``folder.sidecars``)."""
BESIDE = " when the server is stopped and this is run again"


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


class _SecondLook:
    """Looks again at what was found in a library that a server has open, and changes as it is read."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def confirms(self, problem: Problem) -> bool:
        """Return whether a problem is still one."""
        if "/" not in problem.path:
            return True  # it concerns a part of the library, whose check looks again by itself
        if problem.path.endswith(SIDECAR):
            path, wanted = self._library.root / problem.path, self._sidecars.get(problem.path)
            return wanted is not None and _sidecar_fault(path, wanted) is not None
        if problem.path.startswith("kv/"):
            return self._chunk(problem.path)
        sql = "SELECT 1 FROM (SELECT path FROM files UNION ALL SELECT path FROM refs) WHERE path = ?"
        return self._library.catalog.one(sql, problem.path) is not None

    @cached_property
    def _sidecars(self) -> dict[str, Sidecar]:
        root, catalog = self._library.root, self._library.catalog
        expected = self._library.sidecars.expected(catalog.read)
        return {str(path.relative_to(root)): sidecar for path, sidecar in expected}

    def _chunk(self, path: str) -> bool:
        sql = "SELECT * FROM chunks WHERE path = ? AND state = 'ready'"
        row = self._library.catalog.one(sql, path)
        if row is None or _chunk_fault(self._library, row) is None:
            return False
        return self._library.catalog.one(sql, path) is not None  # it may have been evicted before it was read


def _scrub_originals(library: Library, progress: Progress) -> Iterator[Problem]:
    sql = "SELECT path, sha256, bytes FROM files UNION ALL SELECT path, sha256, bytes FROM refs"
    for row in library.catalog.read(sql):
        try:
            with open(library.filesystem.open(library.root / row["path"]), "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            yield Problem(row["path"], f"cannot be read ({error.strerror})", "upload it again")
        else:
            if digest != row["sha256"]:
                yield Problem(row["path"], "is not what was uploaded", "upload it again")
        progress(row["bytes"])


def _scrub_sidecars(library: Library) -> Iterator[Problem]:
    """Compare every sidecar with the catalogue; one that differs is rewritten."""
    for path, sidecar in library.sidecars.expected(library.catalog.read):
        what = _sidecar_fault(path, sidecar)
        if what is None:
            continue
        then = ANEW
        if not library.catalog.read_only:
            try:
                library.sidecars.write(path, sidecar)
            except IsADirectoryError:
                then = "remove the folder, and run this again"
        yield Problem(str(path.relative_to(library.root)), what, then, damaged=what != AHEAD)


def _sidecar_fault(path: Path, wanted: Sidecar) -> str | None:
    """Return what is wrong with a sidecar, or None."""
    try:
        return None if Sidecar.read(path) == wanted else AHEAD
    except (CorruptFile, OSError) as error:
        return f"cannot be used ({error})"


def _scrub_chunks(library: Library, progress: Progress) -> Iterator[Problem]:
    for row in library.catalog.read("SELECT * FROM chunks WHERE state = 'ready'"):
        fault = _chunk_fault(library, row)
        if fault is not None:
            if not library.catalog.read_only:
                if isinstance(fault.error, CorruptFile):
                    library.store.reject(key_of(row), fault.error)
                elif isinstance(fault.error, FileNotFoundError):
                    library.store.open(key_of(row))  # marks the row as missing
            yield Problem(row["path"], fault.what, fault.then)
        progress(row["bytes"])


class _ChunkFault(NamedTuple):
    what: str
    then: str
    error: Exception | None


def _chunk_fault(library: Library, row: Row) -> _ChunkFault | None:
    """Return what is wrong with a chunk that a row says is ready, or None."""
    key = key_of(row)
    if key.digest != row["key"]:
        return _ChunkFault("has a row that is not its own", "look into it before serving from here", None)
    try:
        _verify_chunk(library.root / row["path"], key)
    except CorruptFile as error:
        return _ChunkFault(str(error), ASIDE, error)
    except FileNotFoundError as error:
        return _ChunkFault("is gone", AGAIN, error)
    except OSError as error:
        return _ChunkFault(f"cannot be read ({error.strerror})", "look into it; it may be good", error)
    except OutOfMemory as error:
        return _ChunkFault("cannot be read now (no memory)", "run this again; it may be good", error)
    return None


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
