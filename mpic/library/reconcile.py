"""Makes the catalogue and the originals agree at start-up. No file gets a row here: ``mpic library recover`` does that.
Only files that are known to be useless are deleted: unfinished ones with a temporary name of this program, and those
that the catalogue remembers as deleted.

An original that its sidecar describes and the catalogue does not list stays where it is and is reported: a crash came
between the file and its row, or the catalogue is an older copy. Any other file with a name of this program goes to the
orphans, and files with other names are left alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mpic.durable import FileSystem
from mpic.errors import MPICError
from mpic.library.catalog.database import Catalog
from mpic.library.folder.layout import SIDECAR, CatalogRow, scan
from mpic.library.folder.quarantine import Orphans
from mpic.library.folder.sidecars import DESCRIBED, QUOTAS, Sidecar, SidecarKind, Sidecars, read_sidecars

LOST = "the original is lost"
NAMED = 20
"""Most files put aside that the log names; their number is in it, too."""
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
        self._found = scan(root)

    def remove_leftovers(self) -> None:
        """Remove the files that were never finished, which may be what fills the disk."""
        for name in self._found.leftovers:
            self._filesystem.try_remove(self._root / name)

    def run(self, orphans: Orphans) -> Counter[str]:
        """Make rows and files agree; return counts as ``Library.reconcile`` does."""
        found = self._found
        lost = self._known - found.originals
        for table in ("files", "refs"):
            self._mark_lost(table, lost)
        unknown = self._without_row()
        dead = self._catalog.tombstones({_remembered_path(name) for name in unknown})
        gone = {name for name in unknown if _remembered_path(name) in dead}
        unlisted, kept = self._unlisted(unknown - gone)
        rest = sorted(unknown - gone - kept)
        orphans.take(rest)
        for name in rest[:NAMED]:
            log.warning("%s was put into quarantine/orphans: no row and no sidecar describes it", name)
        for name in sorted(gone):
            self._filesystem.try_remove(self._root / name)
        done = Counter(lost_files=len(lost), unlisted_files=unlisted, orphans=len(rest))
        done.update(leftovers=len(gone) + len(found.leftovers), unknown=len(found.unknown))
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
        caches = self._catalog.read("SELECT id, owner FROM caches")
        return unknown | (found.caches - {self._sidecar("cache", row) for row in caches})

    def _sidecar(self, kind: SidecarKind, row: CatalogRow) -> str:
        return str(self._sidecars.path(kind, row).relative_to(self._root))

    def _unlisted(self, unknown: set[str]) -> tuple[int, set[str]]:
        """Return how many of the unknown sidecars describe originals that are there, or quotas, and the files that
        stay where they are: these, and everything beside a sidecar that cannot be read now."""
        unread: set[str] = set()

        def report(name: str, error: Exception) -> None:
            log.warning("%s cannot be used: %s", name, error)
            if isinstance(error, OSError):
                unread.add(name.rpartition("/")[0])

        count, kept = 0, set()
        names = {name for name in unknown if name.endswith(SIDECAR)}
        owners = self._catalog.read(f"SELECT id FROM users WHERE {DESCRIBED['owner']}")
        names |= self._found.owners - {self._sidecar("owner", row) for row in owners}
        for name, sidecar in read_sidecars(self._root, names, report):
            if sidecar.kind == "owner":
                count += any(sidecar.record[quota] is not None for quota in QUOTAS)
                continue
            whole = {
                path for path, record in sidecar.originals(name).items() if self._fits(path, record["bytes"])
            }
            if whole & unknown and not self._is_replaced(sidecar):
                count += 1
                kept |= {name, *whole}
        return count, kept | {name for name in unknown if name.rpartition("/")[0] in unread}

    def _fits(self, path: str, size: int) -> bool:
        return path in self._found.originals and (self._root / path).stat().st_size == size

    def _is_replaced(self, sidecar: Sidecar) -> bool:
        """Return whether the catalogue has this version of a reference, or a newer one."""
        if sidecar.kind != "reference":
            return False
        sql = "SELECT 1 FROM refs WHERE id = ? AND version >= ?"
        return self._catalog.one(sql, sidecar.record["id"], sidecar.record["version"]) is not None


def _remembered_path(name: str) -> str:
    """Return the path under which the catalogue remembers a deletion: that of the original, or of a cache's sidecar
    itself."""
    return name if "/group-" in name else name.removesuffix(SIDECAR)
