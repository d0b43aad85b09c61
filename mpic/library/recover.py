"""Making a lost or damaged catalogue again, from what the files say of themselves: originals by their sidecars,
compiled chunks by their headers.

What was only in the catalogue is not there afterwards: the vectors of references (a server makes them again), and what
was known of deleted files. A deletion that was answered has removed the sidecar, so nothing that was deleted is back.
"""

from __future__ import annotations

import logging
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

from mpic.durable import Files
from mpic.errors import BadRequest, CorruptFile
from mpic.library.adopt import Adoption, check_original, original_of, read_sidecar
from mpic.library.catalog import Catalog
from mpic.library.chunk_rows import ChunkRows, Stored
from mpic.library.folder import look_at
from mpic.library.home import Home
from mpic.library.limits import Limits
from mpic.library.names import CATALOG, Found, scan, scan_chunks
from mpic.library.salvage import salvage
from mpic.library.sidecars import Sidecar
from mpic.library.store.mend import read_stored

NEW = f"{CATALOG}.new"
BESIDE = ("", "-wal", "-shm", "-journal")
DAMAGED, LOST = "the original is damaged", "the original is lost"
log = logging.getLogger(__name__)


class Trouble(NamedTuple):
    """A file that did not come back as it was, and what follows."""

    path: str
    what: str


@dataclass
class Recovery:
    """What a recovery found.

    Args:
        counts: how many ``files``, ``references``, ``caches``, ``chunks`` and ``users`` have rows now.
        troubles: what could not be taken in, or only as failed.
        aside: where the old catalogue lies now, if there was one.
    """

    counts: Counter[str] = field(default_factory=Counter)
    troubles: list[Trouble] = field(default_factory=list)
    aside: Path | None = None


def recover(
    root: Path,
    dry_run: bool = False,
    force: bool = False,
    without_sidecars: bool = False,
    files: Files | None = None,
    clock: Callable[[], float] = time.time,
    progress: Callable[[int], None] = lambda done: None,
) -> Recovery:
    """Make a new catalogue from the files, and put the old one aside. Every original is read and verified.

    Args:
        dry_run: say what would be done; nothing in the folder is changed.
        force: make a new one although the one there is in order.
        without_sidecars: take in originals of versions that wrote no sidecars, under their ids (see ``salvage``).
        progress: called with the bytes of the originals that were just verified.

    Raises:
        Unavailable: another process has the library open, or there is none.
        BadRequest: the catalogue is in order.
        StorageFull: the disk is full; nothing was changed.
    """
    root, files = Path(root).absolute(), files or Files()
    home = Home(root, files).enter_damaged(change=not dry_run)
    try:
        if look_at(root / CATALOG).state == "ours" and not force:
            raise BadRequest(f"the catalogue in {root} is in order; there is nothing to recover")
        with _place(root, files, dry_run) as path:
            with closing(Catalog(path, files)) as catalog:
                recovery = _Rebuilding(root, catalog, files, clock, progress).run(without_sidecars)
                catalog.identify(home.id)
                catalog.check()
            if not dry_run:
                recovery.aside = _swap(root, path, files, clock())
    finally:
        home.close()
    return recovery


def size_of(root: Path) -> int:
    """Bytes that ``recover`` tells ``progress`` of, about."""
    return sum((root / path).stat().st_size for path in scan(root).originals)


class _Rebuilding:
    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        files: Files,
        clock: Callable[[], float],
        progress: Callable[[int], None],
    ) -> None:
        self._root, self._catalog, self._files = root, catalog, files
        self._clock, self._progress = clock, progress
        self._found, self._used = Found(), set[str]()
        self._done = Recovery()

    def run(self, without_sidecars: bool) -> Recovery:
        self._found = scan(self._root)
        chunks = self._chunks()
        sidecars = sorted(self._sidecars(), key=_age)
        with self._catalog.write() as db:
            adoption = Adoption(db, self._catalog, self._root, self._clock)
            for path, sidecar in sidecars:
                if self._take(adoption, path, sidecar):
                    self._done.counts[f"{sidecar.kind}s"] += 1
            rest = sorted(self._found.originals - self._used)
            if without_sidecars:
                rest = salvage(adoption, self._root, rest, [chunk.key.owner for chunk in chunks], Limits())
                self._done.counts["files"] += len(self._found.originals - self._used) - len(rest)
        self._done.troubles += [Trouble(path, "has no sidecar that says what it is") for path in rest]
        for file_id in adoption.without_handle:
            self._trouble(file_id, "is without its handle, which another file of its owner has")
        ChunkRows(self._catalog, self._clock).put_all(chunks)
        users = self._catalog.one("SELECT COUNT(*) FROM users")
        self._done.counts.update(chunks=len(chunks), users=users[0])
        del self._done.counts["owners"]
        return self._done

    def _sidecars(self) -> Iterator[tuple[str, Sidecar]]:
        for path in sorted(self._found.sidecars | self._found.caches | self._found.owners):
            try:
                yield path, read_sidecar(self._root, path)
            except (CorruptFile, OSError) as error:
                self._trouble(path, f"cannot be used ({error})")

    def _take(self, adoption: Adoption, path: str, sidecar: Sidecar) -> bool:
        record = sidecar.record
        if sidecar.kind == "owner":
            return adoption.owner(record)
        if sidecar.kind == "cache":
            states = {}
            for chunk in record["chunks"]:
                error = self._verify(original_of(record["owner"], chunk["id"]), chunk)
                if error != LOST:  # or deleted, which a cache's sidecar does not tell apart
                    states[chunk["id"]] = error
            return adoption.cache(record, states)
        original = path.removesuffix(".json")
        error = self._verify(original, record)
        if error == LOST:
            self._trouble(path, "describes an original that is gone; it is not taken in")
            return False
        adopt = adoption.file if sidecar.kind == "file" else adoption.reference
        taken = adopt(record, original, error)
        if not taken:
            self._trouble(
                original, "is an earlier version of a reference, or there twice; it is not taken in"
            )
        return taken

    def _verify(self, original: str, record: dict) -> str | None:
        """What is wrong with an original, or None."""
        if original not in self._found.originals:
            return LOST
        self._used.add(original)
        try:
            check_original(self._root / original, record, contents=True)
        except (CorruptFile, OSError) as error:
            self._trouble(original, f"{error}; it is taken in as failed")
            return DAMAGED
        finally:
            self._progress(record["bytes"])
        return None

    def _chunks(self) -> list[Stored]:
        found = []
        for path in sorted(scan_chunks(self._root).sizes):
            stored = read_stored(self._root, path, self._files)
            if stored is None:
                self._trouble(path, "is damaged; it is compiled again on next use")
            else:
                found.append(stored)
        return found

    def _trouble(self, path: str, what: str) -> None:
        self._done.troubles.append(Trouble(path, what))


def _age(entry: tuple[str, Sidecar]) -> tuple[bool, float, int]:
    """Users first, because of their quotas; then by age, and of a reference the newest version before older ones."""
    _, sidecar = entry
    return sidecar.kind != "owner", sidecar.record["created_at"], -sidecar.record.get("version", 0)


@contextmanager
def _place(root: Path, files: Files, elsewhere: bool) -> Iterator[Path]:
    """Where the new catalogue is made; nothing is left there when that fails."""
    if elsewhere:
        with tempfile.TemporaryDirectory(prefix="mpic-recover-") as folder:
            yield Path(folder, CATALOG)
        return
    path = root / NEW
    _remove(path, files)  # of a recovery that was interrupted
    try:
        yield path
    except BaseException:
        with suppress(OSError):
            _remove(path, files)
        raise


def _remove(path: Path, files: Files) -> None:
    for end in BESIDE:
        files.remove(path.with_name(path.name + end))


def _swap(root: Path, new: Path, files: Files, now: float) -> Path | None:
    """Put the old catalogue aside and the new one in its place. A crash in between leaves none, so that the next start
    refuses, as it did before; the old one goes before its log, which must never meet another database."""
    old = root / CATALOG
    aside = root / f"{CATALOG}.damaged-{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}"
    moved = False
    for end in BESIDE:
        path = old.with_name(old.name + end)
        if os.path.lexists(path):
            moved = True
            files.rename(path, aside.with_name(aside.name + end))
    files.sync_folder(root)
    files.rename(new, old)
    files.sync_folder(root)
    return aside if moved else None
