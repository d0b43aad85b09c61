"""Keeps references in step with a folder or a JSONL file (``bulk_import`` describes both): new entries are added,
changed ones replaced, and those that a sync has added and that are gone are removed. Nothing else is touched: a
reference that somebody has added keeps its id.

Nothing is removed while the source has no entries, as a folder has whose disk is not mounted, nor while a part of it
cannot be read.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpic.errors import MPICError, ReferenceNotFound, Unavailable
from mpic.library.copies.bulk_import import (
    ImportItem,
    ImportResult,
    LibraryTarget,
    read_and_import,
    read_items,
)
from mpic.library.records import Reference, Removed
from mpic.library.references import ReferenceLibrary


@dataclass
class SyncResult:
    """The outcome of a run.

    Args:
        counts: numbers of entries that were ``added``, ``replaced``, ``removed``, ``unchanged`` and ``refused``.
        notes: the entries that were refused.
        problem: reason why nothing was removed, or the run ended early.
    """

    counts: Counter[str] = field(default_factory=Counter)
    notes: list[ImportResult] = field(default_factory=list)
    problem: str | None = None


class ReferenceSync:
    """A source with which references are kept in step; see the module. One run at a time, on a thread of its own.

    Args:
        source: a folder or a JSONL file.
        changed: called with each version that was added or replaced.
        removed: called with each reference that was removed.
    """

    def __init__(
        self,
        references: ReferenceLibrary,
        source: Path,
        changed: Callable[[Reference], None],
        removed: Callable[[Removed], None],
    ) -> None:
        self._references, self._source, self._removed = references, source.absolute(), removed
        self._target = LibraryTarget(references, str(self._source), changed)
        # what was read of each, so that it is not read again
        self._imported: dict[str, tuple[ImportItem, Any, str]] = {}

    def run(self, stopped: Callable[[], bool] = lambda: False) -> SyncResult:
        """Bring the references in step with the source as it is now.

        Args:
            stopped: asked before each entry; True ends the run.
        """
        result = SyncResult()
        try:
            asyncio.run(self._run(result, stopped))
        except (MPICError, OSError) as error:
            result.problem = error.message if isinstance(error, MPICError) else str(error)
        return result

    async def _run(self, result: SyncResult, stopped: Callable[[], bool]) -> None:
        known, seen = self._references.synced_from(str(self._source)), set[str]()
        unsure = self._unreadable()
        for item in read_items(self._source):
            if stopped():
                return
            if item.error is None and item.id in seen:
                item = ImportItem(item.where, error=f"the id {item.id!r} was used before")
            seen.add(item.id)
            one = await self._import(item, known.get(item.id))
            result.counts[one.outcome] += 1
            if one.outcome == "refused":
                result.notes.append(one)
            if item.error is not None and not self._source.is_dir():
                unsure = f"{item.where} cannot be read"
        if not seen:
            unsure = f"there is nothing in {self._source}"
        gone = [id for id in known if id not in seen]
        if gone and unsure:
            raise Unavailable(f"{unsure}, so no reference was removed")
        for id in gone:
            with suppress(ReferenceNotFound):  # an administrator has removed it meanwhile
                self._removed(self._references.remove(id))
                result.counts["removed"] += 1
            self._imported.pop(id, None)

    def _unreadable(self) -> str | None:
        """Return a sentence about a folder in the source that cannot be read, and so looks empty; None: there is
        none. Those that are not imported from do not count, nor does a file system's own."""
        wrong: list[OSError] = []
        for _, folders, _ in os.walk(self._source, onerror=wrong.append) if self._source.is_dir() else ():
            folders[:] = [name for name in folders if not name.startswith(".") and name != "lost+found"]
        return f"{wrong[0].filename} cannot be read ({wrong[0].strerror})" if wrong else None

    async def _import(self, item: ImportItem, known: Reference | None) -> ImportResult:
        """Import an entry, unless it and its file are as they were when it was imported before."""
        stamp = None
        if item.path is not None:
            with suppress(OSError):  # importing it tells why
                about = item.path.stat()
                stamp = about.st_mtime_ns, about.st_size, about.st_ino
        before = self._imported.get(item.id)
        if before is not None and known is not None and before == (item, stamp, known.sha256):
            return ImportResult(item.where, "unchanged", item.id)
        result = await read_and_import(item, self._target)
        if result.outcome != "refused":
            for now in self._references.many([item.id]):
                self._imported[item.id] = item, stamp, now.sha256
        return result
