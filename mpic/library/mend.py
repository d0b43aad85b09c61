"""Making the catalogue and the originals agree, at start-up.

Nothing is deleted but what is known to serve nothing: unfinished files with a temporary name of ours, and files that
the catalogue remembers as deleted. An original that it does not know, but that its sidecar describes, is taken in: a
crash came between the file and its row, or the catalogue is an older copy. Anything else that carries a name of ours
goes to the orphans, and what carries none is left alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from mpic.errors import CorruptFile
from mpic.library.adopt import Adoption, check_original, original_of, read_sidecar, sidecar_name
from mpic.library.names import OWNER_SIDECAR, SIDECAR, Found, scan
from mpic.library.sidecars import USERS_WITH_QUOTAS, Sidecar
from mpic.library.store.mend import remove

if TYPE_CHECKING:
    from mpic.library import Library

log = logging.getLogger(__name__)


class Mending:
    """One start of a library: first ``run``, then ``without_sidecar`` says what an earlier version has left to do."""

    def __init__(self, library: Library) -> None:
        self._library, self._root, self._catalog = library, library.root, library.catalog
        self._found = Found()
        self._known: set[str] = set()
        self.done: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Make rows and files agree.

        Returns:
            How many of each: ``lost_files`` have a row and no original, ``adopted_files`` had no row, ``leftovers``
            were removed, ``orphans`` were put aside, ``unknown`` are not ours and were left alone.
        """
        library, self._found = self._library, scan(self._root)
        self._known = library.files.paths() | library.references.paths()
        lost = self._known - self._found.originals
        library.files.mark_lost(lost, self._found.originals)
        library.references.mark_lost(lost, self._found.originals)
        unknown = self._unknown()
        dead = self._catalog.deleted(_names(unknown))
        gone = {name for name in unknown if _named(name) in dead}
        strange = sorted(self._adopt(unknown - gone, lost))
        library.orphans.take(strange)
        gone |= set(self._found.leftovers)
        remove(library.files_layer, (self._root / name for name in sorted(gone)))
        self._catalog.forget_deleted(library.clock() - library.limits.tombstone_seconds)
        self.done.update(lost_files=len(lost), leftovers=len(gone), orphans=len(strange))
        self.done.update(unknown=len(self._found.unknown))
        return self.done

    def without_sidecar(self) -> tuple[list[str], list[str], list[str], list[str]]:
        """Ids of uploads, references, caches, and users with quotas that have no sidecar yet."""
        lacking = lambda path: (
            path in self._found.originals and sidecar_name(path) not in self._found.sidecars
        )
        rows = self._catalog.read("SELECT id, path FROM files WHERE id NOT IN (SELECT id FROM cache_chunks)")
        files = [row["id"] for row in rows if lacking(row["path"])]
        rows = self._catalog.read("SELECT id, path FROM refs")
        references = [row["id"] for row in rows if lacking(row["path"])]
        rows = self._catalog.read("SELECT cache, path FROM cache_chunks JOIN files USING (id)")
        there = {row["cache"] for row in rows if row["path"] in self._found.originals}
        caches = [
            cache
            for cache, path in self._caches().items()
            if cache in there and path not in self._found.caches
        ]
        rows = self._catalog.read(USERS_WITH_QUOTAS)
        owners = [
            row["id"] for row in rows if original_of(row["id"], OWNER_SIDECAR) not in self._found.owners
        ]
        return files, references, caches, owners

    def _caches(self) -> dict[str, str]:
        """The caches of the catalogue, and where their sidecars lie."""
        rows = self._catalog.read("SELECT id, owner FROM caches")
        return {row["id"]: sidecar_name(original_of(row["owner"], row["id"])) for row in rows}

    def _unknown(self) -> set[str]:
        """Originals and sidecars without a row."""
        found = self._found
        unknown = found.originals - self._known
        unknown |= {name for name in found.sidecars if _named(name) not in self._known}
        return unknown | (found.caches - set(self._caches().values()))

    def _adopt(self, unknown: set[str], lost: set[str]) -> set[str]:
        """Make rows for what sidecars describe; the rest."""
        sidecars = [self._read(name) for name in sorted(unknown) if name.endswith(SIDECAR)]
        rest, adopted = set(unknown), 0
        readable = [one for one in sidecars if one is not None]
        readable.sort(key=lambda one: (one[1].record.get("created_at", 0), -one[1].record.get("version", 0)))
        if not readable:
            return rest
        with self._catalog.write() as db:
            adoption = Adoption(db, self._catalog, self._root, self._library.clock, lost)
            for name, sidecar in readable:
                taken = self._adopt_one(adoption, name, sidecar, unknown)
                rest -= taken
                adopted += bool(taken)
        self.done.update(adopted_files=adopted)
        for file_id in adoption.without_handle:
            log.warning("%s is back without its handle, which another file of its owner has", file_id)
        return rest

    def _adopt_one(self, adoption: Adoption, name: str, sidecar: Sidecar, unknown: set[str]) -> set[str]:
        """The names that have a row now."""
        record, original = sidecar.record, _named(name)
        if sidecar.kind == "cache":
            chunks = {chunk["id"]: original_of(record["owner"], chunk["id"]) for chunk in record["chunks"]}
            there = {
                chunk["id"]: None
                for chunk in record["chunks"]
                if chunks[chunk["id"]] in unknown and self._whole(chunks[chunk["id"]], chunk)
            }
            return {name, *(chunks[id] for id in there)} if adoption.cache(record, there) else set()
        if original not in unknown or not self._whole(original, record):
            return set()
        adopt = adoption.file if sidecar.kind == "file" else adoption.reference
        return {name, original} if adopt(record, original) else set()

    def _read(self, name: str) -> tuple[str, Sidecar] | None:
        try:
            return name, read_sidecar(self._root, name)
        except (CorruptFile, OSError) as error:
            log.warning("%s cannot be used: %s", name, error)
            return None

    def _whole(self, original: str, record: dict[str, object]) -> bool:
        """Whether an original has the size of its sidecar; its bytes are verified whenever it is read."""
        try:
            check_original(self._root / original, record, contents=False)
        except (CorruptFile, OSError) as error:
            log.warning("%s is not taken into the catalogue: %s", original, error)
            return False
        return True


def _named(name: str) -> str:
    """The path that the catalogue remembers of a deletion: of the original, or of a cache's sidecar itself."""
    return name if "/group-" in name else name.removesuffix(SIDECAR)


def _names(unknown: set[str]) -> set[str]:
    return {_named(name) for name in unknown}
