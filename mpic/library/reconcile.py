"""Makes the catalogue and the originals agree at start-up. Only files that are known to be useless are deleted:
unfinished files with a temporary name of this program, and files that the catalogue remembers as deleted.

An original without a row that its sidecar describes gets one (``Adoption``): a crash came between the file and its row,
or the catalogue is an older copy. So do the quotas of a user for whom the catalogue has none. An upload that was to
replace another file is adopted and the replacement finished: its sidecar names the file it replaces. Any other file
with a name of this program goes to the orphans, and files with other names are left alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from mpic.durable import FileSystem
from mpic.errors import CorruptFile, MPICError
from mpic.library.catalog.database import Catalog, insert_row, update_row
from mpic.library.catalog.reference_rows import retire
from mpic.library.folder.layout import SIDECAR, CatalogRow, original_path, owner_folder, scan
from mpic.library.folder.quarantine import Orphans
from mpic.library.folder.sidecars import COLUMNS, CONTENT, DESCRIBED, QUOTAS, Sidecar, Sidecars
from mpic.library.records import SHARED

DAMAGED, LOST = "the original is damaged", "the original is lost"
WITHOUT_HANDLE = "is without its handle, which another file of its owner has"
GAVE_HANDLE = "has expired or is lost, and has given its handle to a file that is there"
REPLACED = "is replaced by an upload that a crash interrupted, and has expired"
NAMED = 20
"""Most files put aside that the log names; their number is in it, too."""
Record = Mapping[str, Any]
Verify = Callable[[str, Record], str | None]
"""Takes the path of an original and its record; returns what is wrong with the original (``LOST``: it is not there, or
must not be adopted), or None."""
log = logging.getLogger(__name__)


def read_sidecars(
    root: Path, paths: Iterable[str], report: Callable[[str, Exception], None]
) -> list[tuple[str, Sidecar]]:
    """Reads sidecars and returns them with their paths in the order in which they are to be adopted: users first,
    because of their quotas, then by age, but the newest version of a reference before older ones.

    Args:
        paths: relative to the library's root.
        report: called with each sidecar that is damaged, describes something in another place, or cannot be read.
    """
    found = []
    for path in sorted(paths):
        try:
            sidecar = Sidecar.read(root / path)
            record, (_, folder, name) = sidecar.record, path.split("/")
            owner = {"reference": SHARED, "owner": record["id"]}.get(sidecar.kind) or record["owner"]
            stem = name.removesuffix(SIDECAR)
            if sidecar.kind == "reference":
                stem = stem.rpartition("@")[0]
            if folder != owner_folder(owner) or stem != (
                "owner" if sidecar.kind == "owner" else record["id"]
            ):
                raise CorruptFile(f"the sidecar {path} describes {record['id']}, which belongs elsewhere")
            found.append((path, sidecar))
        except (CorruptFile, OSError) as error:
            report(path, error)
    return sorted(found, key=lambda entry: _age(entry[1]))


def _age(sidecar: Sidecar) -> tuple[bool, float, int]:
    return sidecar.kind != "owner", sidecar.record["created_at"], -sidecar.record.get("version", 0)


def check_original(path: Path, record: Record, contents: bool) -> None:
    """Checks that an original is the one that its sidecar describes.

    Args:
        contents: also compare the SHA-256, for which the whole file is read.

    Raises:
        CorruptFile: it has another size or, with ``contents``, other bytes.
        OSError: it is not there, or cannot be read.
    """
    if path.stat().st_size != record["bytes"]:
        raise CorruptFile(f"{path.name} has {path.stat().st_size} bytes, its sidecar says {record['bytes']}")
    if contents:
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != record["sha256"]:
                raise CorruptFile(f"{path.name} is not what was uploaded")


class Adoption:
    """Makes rows within one transaction. Adopted files wait for compilation, as after an upload; if the chunk is stored
    already, that takes no time.

    Args:
        now: seconds since the epoch.
        lost: paths of rows whose originals are gone; such a row gives its handle up to a file that is there.

    Attributes:
        notes: id of each file whose row differs from its sidecar by now, and why: ``WITHOUT_HANDLE``, ``GAVE_HANDLE``
            or ``REPLACED``.
    """

    def __init__(
        self, db: Connection, catalog: Catalog, now: float, lost: set[str] | frozenset[str] = frozenset()
    ) -> None:
        self._db, self._catalog, self._now, self._lost = db, catalog, now, lost
        self.notes: list[tuple[str, str]] = []

    def take(self, path: str, sidecar: Sidecar, verify: Verify) -> set[str]:
        """Makes the rows that a sidecar describes, for originals that are there.

        Args:
            path: path of the sidecar, relative to the library's root.

        Returns:
            The paths of the sidecar and of its originals; nothing if the catalogue has these rows already, or if no
            original is there.

        Raises:
            CorruptFile: it describes what no catalogue holds, such as two files of one id; no row was made.
        """
        self._db.execute("SAVEPOINT adoption")
        noted = len(self.notes)
        try:
            return self._take(path, sidecar, verify)
        except sqlite3.IntegrityError as error:
            self._db.execute("ROLLBACK TO adoption")
            del self.notes[noted:]
            raise CorruptFile(f"the sidecar {path} does not fit the catalogue ({error})") from error
        finally:
            self._db.execute("RELEASE adoption")

    def _take(self, path: str, sidecar: Sidecar, verify: Verify) -> set[str]:
        record = sidecar.record
        if sidecar.kind == "owner":
            return {path} if self._owner(record) else set()
        if sidecar.kind == "cache":
            originals = {original_path(record["owner"], chunk["id"]): chunk for chunk in record["chunks"]}
            errors = {original: verify(original, chunk) for original, chunk in originals.items()}
            there = {
                original for original, error in errors.items() if error != LOST
            }  # others may have been deleted
            return {path, *there} if there and self._cache(record, errors) else set()
        original = path.removesuffix(SIDECAR)
        error = verify(original, record)
        if error == LOST:
            return set()
        values = {name: record[name] for name in COLUMNS[sidecar.kind]} | _state(error) | {"path": original}
        values["metadata"] = json.dumps(record["metadata"], sort_keys=True)
        if sidecar.kind == "reference":
            adopted = self._reference(values)
        else:
            adopted = self._file(values, "" if error else sidecar.replaces)
        return {path, original} if adopted else set()

    def _file(self, values: dict[str, Any], replaces: str) -> bool:
        """Makes the row of an upload; False when a file has its id. ``replaces`` is the id of the file whose handle it
        takes, if that file has it still."""
        if self._known("files", values["id"]):
            return False
        self._catalog.add_user(self._db, values["owner"], values["created_at"])
        if values["split"] is not None:
            values["split"] = json.dumps(values["split"], sort_keys=True)
        insert_row(self._db, "files", values | {"handle": self._handle(values, replaces)})
        return True

    def _handle(self, record: Record, replaces: str) -> str | None:
        """Returns the handle of a file, unless another existing file of the user has it and has not expired. The file
        that it replaces gives it up and expires, as at the end of an upload."""
        sql = "SELECT id, path, expires_at FROM files WHERE owner = ? AND handle = ? COLLATE NOCASE"
        row = self._db.execute(sql, (record["owner"], record["handle"])).fetchone()
        if row is None:
            return record["handle"]
        expires_at, why = row["expires_at"], GAVE_HANDLE
        if row["path"] not in self._lost and (expires_at is None or expires_at > self._now):
            if row["id"] != replaces:
                self.notes.append((record["id"], WITHOUT_HANDLE))
                return None
            expires_at, why = self._now, REPLACED
        sql = "UPDATE files SET handle = NULL, expires_at = ? WHERE id = ?"
        self._db.execute(sql, (expires_at, row["id"]))
        self.notes.append((row["id"], why))
        return record["handle"]

    def _reference(self, values: dict[str, Any]) -> bool:
        """Makes the row of a version of a reference and retires an older version that the catalogue has; False when the
        catalogue has this version or a newer one."""
        row = self._db.execute("SELECT version FROM refs WHERE id = ?", (values["id"],)).fetchone()
        if row is None:
            insert_row(self._db, "refs", values)
        elif row["version"] < values["version"]:
            retire(self._db, values["id"], row["version"])
            update_row(self._db, "refs", values)
        return row is None or row["version"] < values["version"]

    def _owner(self, record: Record) -> bool:
        """Make the row of a user with its quotas, or add them to a row without. Return False if the catalogue has
        quotas of this user, or the record has none to add."""
        if not self._known("users", record["id"]):
            insert_row(self._db, "users", {name: record[name] for name in COLUMNS["owner"]})
            return True
        if self._known("users", record["id"], DESCRIBED["owner"]) or all(record[q] is None for q in QUOTAS):
            return False
        update_row(self._db, "users", {name: record[name] for name in ("id", *QUOTAS)})
        return True

    def _cache(self, record: Record, errors: Mapping[str, str | None]) -> bool:
        """Makes the rows of an explicit cache and those of its chunks that are there; False when the catalogue has the
        cache. ``errors`` says by path what is wrong with a chunk's original."""
        if self._known("caches", record["id"]):
            return False
        self._catalog.add_user(self._db, record["owner"], record["created_at"])
        split = {"split": json.dumps(record["split"])}
        insert_row(self._db, "caches", {name: record[name] for name in COLUMNS["cache"]} | split)
        for chunk in record["chunks"]:
            path = original_path(record["owner"], chunk["id"])
            if errors[path] != LOST:
                values = {name: chunk[name] for name in ("id", "pinned", *CONTENT)} | _state(errors[path])
                values |= {name: record[name] for name in ("owner", "created_at", "expires_at")}
                insert_row(self._db, "files", values | {"path": path})
                span = (chunk["id"], record["id"], chunk["position"], chunk["start"], chunk["end"])
                self._db.execute("INSERT INTO cache_chunks VALUES (?, ?, ?, ?, ?)", span)
        return True

    def _known(self, table: str, id: str, where: str = "TRUE") -> bool:
        sql = f"SELECT 1 FROM {table} WHERE id = ? AND ({where})"
        return self._db.execute(sql, (id,)).fetchone() is not None


def _state(error: str | None) -> dict[str, Any]:
    return {"tokens": None, "state": "failed" if error else "compiling", "error": error}


class Reconciliation:
    """The repairs at a start of a library: ``remove_leftovers`` before anything is written, then ``run``.

    Args:
        known: paths of all originals that the catalogue lists, relative to the root.
        now: seconds since the epoch.

    Raises:
        LinkedFolder: see ``scan``; nothing was changed.
    """

    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        sidecars: Sidecars,
        filesystem: FileSystem,
        known: set[str],
        now: float,
    ) -> None:
        self._root, self._catalog, self._sidecars = root, catalog, sidecars
        self._filesystem, self._known, self._now = filesystem, known, now
        self._found = scan(root)

    def remove_leftovers(self) -> None:
        """Removes the files that were never finished, which may be what fills the disk."""
        for name in self._found.leftovers:
            self._filesystem.try_remove(self._root / name)

    def run(self, orphans: Orphans) -> Counter[str]:
        """Makes rows and files agree; returns counts as ``Library.reconcile`` does."""
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
            self._filesystem.try_remove(self._root / name)
        done = Counter(
            lost_files=len(lost), adopted_files=adopted, orphans=len(rest), replaced_files=replaced
        )
        done.update(leftovers=len(gone) + len(self._found.leftovers), unknown=len(self._found.unknown))
        return done

    def write_missing_sidecars(self) -> None:
        """Writes the sidecars of rows that have none and whose originals are there. The next start writes those that
        cannot be written now."""
        found = self._found
        present = found.sidecars | found.caches | found.owners
        rows = self._catalog.read("SELECT cache, path FROM cache_chunks JOIN files USING (id)")
        there = {row["cache"] for row in rows if row["path"] in found.originals}
        for kind, row in self._sidecars.described(self._catalog.read):
            if self._relative(kind, row) in present:
                continue
            if kind == "owner" or (row["id"] in there if kind == "cache" else row["path"] in found.originals):
                try:
                    with self._catalog.write() as db:
                        self._sidecars.rewrite(db, kind, row["id"])
                except (MPICError, OSError) as error:
                    log.error(
                        "the sidecar of %s cannot be written; the next start tries again: %s",
                        row["id"],
                        error,
                    )

    def _relative(self, kind: Any, row: CatalogRow) -> str:
        return str(self._sidecars.path(kind, row).relative_to(self._root))

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
        return unknown | (found.caches - {self._relative("cache", row) for row in rows})

    def _adopt(self, unknown: set[str], lost: set[str]) -> tuple[set[str], int, int]:
        """Makes rows for the originals and the quotas that sidecars describe; returns the other paths of ``unknown``,
        the number of sidecars of originals used, and that of files that were replaced. Where a sidecar cannot be read
        now, the next start tries again: nothing of its folder is among these paths."""
        owners = self._catalog.read(f"SELECT id FROM users WHERE {DESCRIBED['owner']}")
        names = {name for name in unknown if name.endswith(SIDECAR)}
        names |= self._found.owners - {self._relative("owner", row) for row in owners}
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
            for file_id in dict(adoption.notes):
                self._sidecars.rewrite(db, "file", file_id)
        for note in adoption.notes:
            log.warning("%s %s", *note)
        replaced = sum(why == REPLACED for _, why in adoption.notes)
        return unknown.difference(*taken), sum(map(bool, taken)), replaced

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
