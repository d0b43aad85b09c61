"""Makes the catalogue and the originals agree at start-up.

Only files that are known to be useless are deleted: unfinished files with a temporary name of this program, and files
that the catalogue remembers as deleted. An original that the catalogue does not know, but that its sidecar describes,
is adopted: a crash came between the file and its row, or the catalogue is an older copy. So are the quotas of a user
for whom the catalogue has none. An upload that was to replace another file is adopted and the replacement finished:
its sidecar names the file it replaces. Any other file with a name of this program goes to the orphans, and files with
other names are left alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mpic.durable import FileSystem
from mpic.errors import CorruptFile
from mpic.library.catalog.database import Catalog
from mpic.library.folder.layout import SIDECAR, scan
from mpic.library.folder.orphans import Orphans
from mpic.library.folder.sidecars import DESCRIBED, SidecarKind, Sidecars
from mpic.library.repair.adopt import LOST, Adoption, Record, check_original, read_sidecars

NAMED = 20
"""Most files put aside that the log names; their number is in it, too."""
log = logging.getLogger(__name__)


class Reconciliation:
    """The repairs at a start of a library: ``remove_leftovers`` before anything is written, then ``run``, then
    ``without_sidecar`` lists the sidecars that an earlier version did not write.

    Args:
        known: paths of all originals that the catalogue lists, relative to the root.
        now: seconds since the epoch.
    """

    def __init__(self, root: Path, catalog: Catalog, sidecars: Sidecars, known: set[str], now: float) -> None:
        self._root, self._catalog, self._sidecars = root, catalog, sidecars
        self._known, self._now = known, now
        self._found = scan(root)

    def remove_leftovers(self, filesystem: FileSystem) -> None:
        """Removes the files that were never finished, which may be what fills the disk."""
        for name in self._found.leftovers:
            filesystem.try_remove(self._root / name)

    def run(self, orphans: Orphans, filesystem: FileSystem) -> Counter[str]:
        """Makes rows and files agree.

        Returns:
            How many of each: ``lost_files`` have a row and no original, ``adopted_files`` had no row,
            ``replaced_files`` have expired because an adopted one takes their place, ``leftovers`` were removed,
            ``orphans`` were put aside, ``unknown`` have no name of this program and were left alone.
        """
        lost = self._known - self._found.originals
        for table in ("files", "refs"):
            self._mark_lost(table, lost)
        unknown = self._without_row()
        dead = self._catalog.tombstones({_remembered_path(name) for name in unknown})
        gone = {name for name in unknown if _remembered_path(name) in dead}
        rest, adopted, replaced = self._adopt(unknown - gone, lost)
        orphans.take(sorted(rest))
        for name in sorted(rest)[:NAMED]:
            log.warning("%s was put into quarantine/orphans: no row and no sidecar describes it", name)
        for name in sorted(gone):
            filesystem.try_remove(self._root / name)
        done = Counter(
            lost_files=len(lost), adopted_files=adopted, orphans=len(rest), replaced_files=replaced
        )
        done["leftovers"] = len(gone) + len(self._found.leftovers)
        done["unknown"] = len(self._found.unknown)
        return done

    def without_sidecar(self) -> list[tuple[SidecarKind, str]]:
        """Returns the kind and id of every row that has no sidecar yet and whose original is there."""
        found = self._found
        present = found.sidecars | found.caches | found.owners
        rows = self._catalog.read("SELECT cache, path FROM cache_chunks JOIN files USING (id)")
        caches = {row["cache"] for row in rows if row["path"] in found.originals}
        lacking = []
        for kind, row in self._sidecars.described(self._catalog.read):
            if kind == "owner":
                has_original = True
            else:
                has_original = row["id"] in caches if kind == "cache" else row["path"] in found.originals
            if has_original and str(self._sidecars.path(kind, row).relative_to(self._root)) not in present:
                lacking.append((kind, row["id"]))
        return lacking

    def _mark_lost(self, table: str, lost: Iterable[str]) -> None:
        """Marks the rows of ``files`` or ``refs`` whose originals are gone as failed, until the originals are back (a
        disk was not mounted, for example)."""
        sql = f"SELECT path FROM {table} WHERE state = 'failed' AND error = ?"
        back = [row["path"] for row in self._catalog.read(sql, LOST) if row["path"] in self._found.originals]
        with self._catalog.write() as db:
            sql = f"UPDATE {table} SET state = ?, error = ? WHERE path = ?"
            db.executemany(sql, [("failed", LOST, path) for path in lost])
            db.executemany(sql, [("compiling", None, path) for path in back])

    def _without_row(self) -> set[str]:
        """Returns the originals and sidecars that have no row."""
        found = self._found
        unknown = found.originals - self._known
        unknown |= {name for name in found.sidecars if _remembered_path(name) not in self._known}
        rows = self._catalog.read("SELECT id, owner FROM caches")
        known = {str(self._sidecars.path("cache", row).relative_to(self._root)) for row in rows}
        return unknown | (found.caches - known)

    def _without_quotas(self) -> set[str]:
        """Returns the sidecars of users for whom the catalogue has no quotas."""
        rows = self._catalog.read(f"SELECT id FROM users WHERE {DESCRIBED['owner']}")
        known = {str(self._sidecars.path("owner", row).relative_to(self._root)) for row in rows}
        return self._found.owners - known

    def _adopt(self, unknown: set[str], lost: set[str]) -> tuple[set[str], int, int]:
        """Makes rows for the originals and the quotas that sidecars describe; returns the other paths of ``unknown``,
        the number of sidecars of originals used, and that of files that were replaced. Where a sidecar cannot be read
        now, the next start tries again: nothing of its folder is among these paths."""
        names = {name for name in unknown if name.endswith(SIDECAR)} | self._without_quotas()
        unread: set[str] = set()

        def report(name: str, error: Exception) -> None:
            log.warning("%s cannot be used: %s", name, error)
            if isinstance(error, OSError):
                unread.add(name.rpartition("/")[0])

        sidecars = read_sidecars(self._root, names, report)
        unknown = {name for name in unknown if name.rpartition("/")[0] not in unread}
        if not sidecars:
            return unknown, 0, 0
        taken: list[set[str]] = []
        with self._catalog.write() as db:
            adoption = Adoption(db, self._catalog, self._now, lost)
            for name, sidecar in sidecars:
                try:
                    paths = adoption.take(name, sidecar, lambda path, row: self._verify(path, row, unknown))
                except CorruptFile as error:
                    report(name, error)
                    continue
                if sidecar.kind != "owner":
                    taken.append(paths)
            for file_id in adoption.without_handle:
                self._sidecars.rewrite(db, "file", file_id)
        for file_id in adoption.without_handle:
            log.warning("%s is back without its handle, which another file of its owner has", file_id)
        return unknown.difference(*taken), sum(map(bool, taken)), adoption.replaced

    def _verify(self, original: str, record: Record, unknown: set[str]) -> str | None:
        """Checks the size of an original that has no row; its bytes are verified whenever it is read."""
        if original not in unknown:
            return LOST
        try:
            check_original(self._root / original, record, contents=False)
        except (CorruptFile, OSError) as error:
            log.warning("%s is not adopted: %s", original, error)
            return LOST
        return None


def _remembered_path(name: str) -> str:
    """Returns the path under which the catalogue remembers a deletion: that of the original, or of a cache's sidecar
    itself."""
    return name if "/group-" in name else name.removesuffix(SIDECAR)
