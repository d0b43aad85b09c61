"""Rebuilds a lost or damaged catalogue from the files (``mpic library recover``): originals are described by their
sidecars, compiled chunks by their headers.

Data that was only in the catalogue is lost: the vectors of references (a server makes them again), and the record of
deleted files. A confirmed deletion has removed the sidecar, so no deleted file comes back.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from mpic.durable import FileSystem
from mpic.errors import BadRequest, CorruptFile, MPICError, OutOfMemory
from mpic.library.catalog.database import Catalog
from mpic.library.folder.layout import CATALOG, SIDECAR, scan, scan_chunks
from mpic.library.folder.lock import FolderLock, inspect_catalog
from mpic.library.folder.sidecars import Sidecar, Sidecars
from mpic.library.reconcile import DAMAGED, GAVE_HANDLE, LOST, Adoption, Record, check_original, read_sidecars
from mpic.library.store.chunk_rows import ChunkRows, DurableChunk
from mpic.library.store.reconcile import read_stored

NEW = f"{CATALOG}.new"
SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Suffixes that SQLite appends to the name of a database for the files that belong to it."""


class Trouble(NamedTuple):
    """A file that was not fully recovered, and the consequence."""

    path: str
    what: str


@dataclass
class Recovery:
    """The outcome of a recovery.

    Args:
        counts: numbers of ``files``, ``references``, ``caches``, ``chunks`` and ``users`` that have rows now.
        troubles: files that could not be adopted, or not as their sidecars say.
        aside: new path of the old catalogue, if there was one.
    """

    counts: Counter[str] = field(default_factory=Counter)
    troubles: list[Trouble] = field(default_factory=list)
    aside: Path | None = None


def recover(
    root: Path,
    dry_run: bool = False,
    force: bool = False,
    filesystem: FileSystem | None = None,
    clock: Callable[[], float] = time.time,
    progress: Callable[[int], None] = lambda done: None,
) -> Recovery:
    """Makes a new catalogue from the files and puts the old one aside. Every original is read and verified.

    Args:
        dry_run: only report what would be done; nothing in the folder is changed.
        force: make a new catalogue although the present one is in order.
        progress: called with the bytes of each original that was verified.

    Raises:
        Unavailable: another process has the library open, or there is no library.
        BadRequest: the catalogue is in order.
        StorageFull: the disk is full; nothing was changed.
        DatabaseBusy, DatabaseFailed: the new catalogue could not be written; nothing was changed.
        LinkedFolder: see ``scan``; nothing was changed.
    """
    root, filesystem = Path(root).absolute(), filesystem or FileSystem()
    folder = FolderLock(root, filesystem).acquire_damaged(change=not dry_run)
    try:
        if inspect_catalog(root / CATALOG).state == "ours" and not force:
            raise BadRequest(f"the catalogue in {root} is in order; there is nothing to recover")
        with _workplace(root, filesystem, dry_run) as path:
            with closing(Catalog(path, filesystem)) as catalog:
                rebuilding = _Rebuilding(root, catalog, filesystem, clock, progress)
                recovery = rebuilding.run()
                catalog.identify(folder.id)
                catalog.check()
                catalog.fold()  # only the file itself gets the catalogue's name
            if not dry_run:
                recovery.aside = _swap(root, path, filesystem, clock())
                rebuilding.rewrite_sidecars()
    finally:
        folder.release()
    return recovery


def size_of(root: Path) -> int:
    """Returns the approximate number of bytes that ``recover`` reports to ``progress``."""
    return sum((root / path).stat().st_size for path in scan(root).originals)


class _Rebuilding:
    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        filesystem: FileSystem,
        clock: Callable[[], float],
        progress: Callable[[int], None],
    ) -> None:
        self._root, self._catalog, self._filesystem = root, catalog, filesystem
        self._clock, self._progress = clock, progress
        self._found = scan(root)
        self._described: set[str] = set()  # originals that a sidecar describes
        self._changed: list[tuple[Path, Sidecar]] = []
        self._sidecars = Sidecars(root, filesystem)
        self._done = Recovery()

    def run(self) -> Recovery:
        """Makes the rows."""
        found = self._found
        chunks = self._chunks()
        sidecars = read_sidecars(
            self._root,
            found.sidecars | found.caches | found.owners,
            lambda path, error: self._trouble(path, f"cannot be used ({error})"),
        )
        with self._catalog.write() as db:
            adoption = Adoption(db, self._catalog, self._clock())
            for path, sidecar in sidecars:
                try:
                    self._adopt(adoption, path, sidecar)
                except CorruptFile as error:
                    self._trouble(path, f"cannot be used ({error})")
            for file_id in dict(adoption.notes):
                row = db.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
                self._changed.append((self._sidecars.path("file", row), Sidecar.of("file", row)))
        for path in sorted(found.originals - self._described):
            self._trouble(path, "has no sidecar that describes it")
        self._done.troubles += [Trouble(*note) for note in adoption.notes if note[1] != GAVE_HANDLE]
        ChunkRows(self._catalog, self._clock).put_all(chunks)
        users = self._catalog.read("SELECT COUNT(*) FROM users")[0]
        self._done.counts.update(chunks=len(chunks), users=users[0])
        return self._done

    def rewrite_sidecars(self) -> None:
        """Makes the sidecars of rows that differ from them say what these rows say, once the new catalogue is there."""
        for path, sidecar in self._changed:
            try:
                self._sidecars.write(path, sidecar)
            except (MPICError, OSError) as error:
                self._trouble(
                    path.name, f"cannot be written anew ({error}); `mpic library check` does it later"
                )

    def _adopt(self, adoption: Adoption, path: str, sidecar: Sidecar) -> None:
        if adoption.take(path, sidecar, self._verify):
            if sidecar.kind != "owner":
                self._done.counts[f"{sidecar.kind}s"] += 1
        elif sidecar.kind in ("file", "reference"):
            original = path.removesuffix(SIDECAR)
            if original in self._found.originals:
                self._trouble(
                    original, "is an earlier version of a reference, or there twice; it is not adopted"
                )
            else:
                self._trouble(path, "describes an original that is gone; it is not adopted")

    def _verify(self, original: str, record: Record) -> str | None:
        """Returns the defect of an original, or None."""
        if original not in self._found.originals:
            return LOST
        self._described.add(original)
        try:
            check_original(self._root / original, record, contents=True)
        except (CorruptFile, OSError) as error:
            self._trouble(original, f"{error}; it is adopted as failed")
            return DAMAGED
        finally:
            self._progress(record["bytes"])
        return None

    def _chunks(self) -> list[DurableChunk]:
        found = []
        for path in sorted(scan_chunks(self._root).sizes):
            try:
                stored = read_stored(self._root, path, self._filesystem)
            except (OSError, OutOfMemory) as error:
                self._trouble(path, f"cannot be read ({error}); the next start tries again")
                continue
            if stored is None:
                self._trouble(path, "is damaged; it is compiled again on next use")
            else:
                found.append(stored)
        return found

    def _trouble(self, path: str, what: str) -> None:
        self._done.troubles.append(Trouble(path, what))


@contextmanager
def _workplace(root: Path, filesystem: FileSystem, elsewhere: bool) -> Iterator[Path]:
    """Yields the path of the new catalogue while it is made (``elsewhere``: in a temporary folder, not the library's);
    nothing is left there on failure."""
    if elsewhere:
        with tempfile.TemporaryDirectory(prefix="mpic-recover-") as folder:
            yield Path(folder, CATALOG)
        return
    path = root / NEW
    _remove(path, filesystem)  # removes the files of an interrupted recovery
    try:
        yield path
    except BaseException:
        with suppress(OSError):
            _remove(path, filesystem)
        raise


def _remove(path: Path, filesystem: FileSystem) -> None:
    for suffix in SUFFIXES:
        filesystem.remove(path.with_name(path.name + suffix))


def _swap(root: Path, new: Path, filesystem: FileSystem, now: float) -> Path | None:
    """Puts the old catalogue aside and the new one in its place; returns the new path of the old one. A crash in
    between leaves no catalogue, so that the next start refuses, as it did before. The old database is moved before its
    log, which must never meet another database."""
    old = root / CATALOG
    aside = root / f"{CATALOG}.damaged-{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}"
    moved = False
    for suffix in SUFFIXES:
        path = old.with_name(old.name + suffix)
        if os.path.lexists(path):
            moved = True
            filesystem.rename(path, aside.with_name(aside.name + suffix))
    filesystem.sync_folder(root)
    filesystem.rename(new, old)
    filesystem.sync_folder(root)
    return aside if moved else None
