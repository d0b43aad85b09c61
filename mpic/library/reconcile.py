"""Makes the catalogue and the originals agree at start-up. No file gets a row here: ``mpic library recover`` does that.
Only files that are known to be useless are deleted: unfinished ones with a temporary name of this program, and those
that the catalogue remembers as deleted.

A file with a name of this program that the catalogue does not list stays where it is and is reported: a crash came
between the file and its row, or the catalogue is an older copy. Files with other names are left alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from mpic.durable import FileSystem
from mpic.errors import MPICError
from mpic.library.catalog.database import Catalog
from mpic.library.folder.layout import SIDECAR, scan
from mpic.library.folder.sidecars import DESCRIBED, QUOTAS, Sidecars, read_sidecars

LOST = "the original is lost"
NAMED = 20
"""Most unlisted files that the log names; their number is in it, too."""
log = logging.getLogger(__name__)


class Reconciliation:
    """The repairs at a start of a library: ``remove_leftovers`` before anything is written, then ``run``.

    Args:
        known: paths of all originals that the catalogue lists, relative to the root.

    Raises:
        LinkedFolder: see ``scan``; nothing was changed.
    """

    def __init__(
        self, root: Path, catalog: Catalog, sidecars: Sidecars, filesystem: FileSystem, known: set[str]
    ) -> None:
        self._root, self._catalog, self._sidecars = root, catalog, sidecars
        self._filesystem, self._known = filesystem, known
        self._found = scan(root, "files", "tmp")

    def remove_leftovers(self) -> None:
        """Remove the files that were never finished, which may be what fills the disk."""
        for name in self._found.leftovers:
            self._filesystem.try_remove(self._root / name)

    def run(self) -> Counter[str]:
        """Make rows and files agree; return counts as ``Library.reconcile`` does."""
        found = self._found
        lost = self._known - found.originals
        for table in ("files", "refs"):
            self._mark_lost(table, lost)
        unknown = self._without_row()
        dead = self._catalog.tombstones({_remembered_path(name) for name in unknown})
        gone = sorted(name for name in unknown if _remembered_path(name) in dead)
        for name in gone:
            self._filesystem.try_remove(self._root / name)
        unlisted = sorted(unknown.difference(gone)) + self._unlisted_quotas()
        for name in unlisted[:NAMED]:
            log.warning("the catalogue does not list %s", name)
        done = Counter(lost_files=len(lost), unlisted_files=len(unlisted), unknown=len(found.unknown))
        done.update(leftovers=len(gone) + len(found.leftovers))
        return done

    def write_missing_sidecars(self) -> None:
        """Write the sidecars of rows that have none and whose originals are there. The next start writes those that
        cannot be written now."""
        found = self._found
        present = found.sidecars | found.caches | found.owners
        for path, sidecar in self._sidecars.expected(self._catalog.read):
            name = str(path.relative_to(self._root))
            if name in present or not (
                sidecar.kind == "owner" or found.originals & {*sidecar.originals(name)}
            ):
                continue
            try:
                with self._catalog.write() as db:
                    self._sidecars.rewrite(db, sidecar.kind, sidecar.record["id"])
            except (MPICError, OSError) as error:
                log.error("%s cannot be written; the next start tries again: %s", name, error)

    def _mark_lost(self, table: str, lost: Iterable[str]) -> None:
        """Mark the rows of ``files`` or ``refs`` whose originals are gone as failed, until the originals are back (a
        disk was not mounted, for example)."""
        sql = f"SELECT path FROM {table} WHERE state = 'failed' AND error = ?"
        back = [row["path"] for row in self._catalog.read(sql, LOST) if row["path"] in self._found.originals]
        with self._catalog.write() as db:
            sql = f"UPDATE {table} SET state = ?, error = ? WHERE path = ?"
            db.executemany(sql, [("failed", LOST, path) for path in lost])
            db.executemany(sql, [("compiling", None, path) for path in back])

    def _without_row(self) -> set[str]:
        """Return the originals and sidecars that have no row."""
        found = self._found
        unknown = found.originals - self._known
        unknown |= {name for name in found.sidecars if _remembered_path(name) not in self._known}
        return unknown | (found.caches - self._listed("cache", "SELECT id, owner FROM caches"))

    def _unlisted_quotas(self) -> list[str]:
        """Return the sidecars of users who have quotas that the catalogue lacks."""
        names = self._found.owners - self._listed("owner", f"SELECT id FROM users WHERE {DESCRIBED['owner']}")
        report = lambda name, error: log.warning("%s cannot be used: %s", name, error)
        sidecars = read_sidecars(self._root, names, report)
        return [name for name, one in sidecars if any(one.record[quota] is not None for quota in QUOTAS)]

    def _listed(self, kind: Literal["cache", "owner"], sql: str) -> set[str]:
        """Return the paths of the sidecars of these rows."""
        rows = self._catalog.read(sql)
        return {str(self._sidecars.path(kind, row).relative_to(self._root)) for row in rows}


def _remembered_path(name: str) -> str:
    """Return the path under which the catalogue remembers a deletion: that of the original, or of a cache's sidecar
    itself."""
    return name if "/group-" in name else name.removesuffix(SIDECAR)
