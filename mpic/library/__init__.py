"""The library: uploads and their compiled chunks, durable and isolated (DESIGN section 5).

::

    library = Library.open(root)
    engine = ...(store=library.store)
    library.files.tokenize = ...
    file = await library.files.upload(user, stream, "eiffel.jpg", handle="EIFFEL2025")
    engine.compile(library.files.chunk(user, file))
    reference = await library.references.add(stream, "map.png", title="Map of the harbour")
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from mpic.durable import Files
from mpic.errors import BadRequest, LibraryGone
from mpic.library.backfill import Backfill
from mpic.library.caches import Cache, CacheChunk, CacheLibrary
from mpic.library.catalog import Catalog
from mpic.library.decode import decode_image, decode_text, thumbnail
from mpic.library.dynamic import DynamicLibrary
from mpic.library.home import Home
from mpic.library.limits import Limits
from mpic.library.mend import Mending
from mpic.library.names import CATALOG
from mpic.library.records import (
    SHARED,
    AsyncReader,
    Change,
    File,
    Page,
    Reference,
    ReferencePage,
    Removed,
    State,
    Tokenize,
    Usage,
)
from mpic.library.shares import Rules
from mpic.library.sidecars import Sidecars
from mpic.library.static import StaticLibrary
from mpic.library.store import DiskStore, HostTier, Tier, TieredStore
from mpic.library.store.orphans import Orphans

__all__ = [
    "SHARED",
    "AsyncReader",
    "Cache",
    "CacheChunk",
    "CacheLibrary",
    "Change",
    "DiskStore",
    "DynamicLibrary",
    "File",
    "HostTier",
    "Library",
    "Limits",
    "Page",
    "Reference",
    "ReferencePage",
    "Removed",
    "State",
    "StaticLibrary",
    "Tier",
    "TieredStore",
    "Tokenize",
    "Usage",
    "decode_image",
    "decode_text",
    "thumbnail",
]


SAYS = {
    "missing_chunks": "compiled chunks are gone; they are compiled again on next use",
    "lost_files": "originals are gone; their rows say that they have failed",
    "adopted_files": "uploads that the catalogue did not know were taken in by their sidecars",
    "adopted_chunks": "compiled chunks that the catalogue did not know were taken in",
    "orphans": "files that the catalogue does not know were put into quarantine/orphans",
}
"""What a start logs of what it has mended."""

log = logging.getLogger(__name__)


class Library:
    """Everything below one folder: catalogue, uploads, compiled chunks. One process at a time has it open.

    Attributes:
        files: the static library, see ``StaticLibrary``.
        caches: texts cached explicitly, see ``CacheLibrary``.
        references: the dynamic library, see ``DynamicLibrary``.
        store: the tiers below the device, for the engine; see ``mpic.engine.base.ChunkStore``.
        home: the folder, and whether it is still there.
        orphans: files that the catalogue does not know, put aside.
        sidecars: what the originals carry of the catalogue.
        recovered: what ``open`` found to mend, see ``Library.reconcile``.
    """

    files: StaticLibrary
    caches: CacheLibrary
    references: DynamicLibrary
    store: DiskStore | TieredStore
    catalog: Catalog
    recovered: dict[str, int]

    def __init__(
        self,
        home: Home,
        limits: Limits,
        files: Files,
        clock: Callable[[], float],
        host: Literal["none", "plain", "pinned"] = "none",
        remote: Sequence[Tier] = (),
        look: bool = False,
    ) -> None:
        root = home.root
        self.home, self.root = home, root
        self.limits = limits
        self.clock = clock
        self.recovered = {}
        guard = home.check
        self.catalog = Catalog(root / CATALOG, files, look, guard)
        self.store = DiskStore(root, self.catalog, limits, files, clock, guard)
        nearer = []
        if host != "none" and limits.host_bytes:
            rules = Rules(limits.host_bytes, limits.user_host_bytes, limits.shared_fraction)
            nearer.append(HostTier(rules, host == "pinned", self.store.pinned))
        if nearer or remote:
            self.store = TieredStore(self.store, nearer, remote)
        self.files = StaticLibrary(root, self.catalog, self.store, limits, files, clock, guard=guard)
        self.caches = CacheLibrary(root, self.catalog, self.files, limits, files, clock, guard)
        self.references = DynamicLibrary(root, self.catalog, self.store, limits, files, clock, guard)
        self.files_layer = files
        self.orphans = Orphans(root, files, clock, limits.orphan_days)
        self.sidecars = Sidecars(root, files)
        self._backfill = Backfill(self.catalog, self.sidecars)
        self._open = not look

    @classmethod
    def open(
        cls,
        root: Path,
        limits: Limits | None = None,
        *,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        host: Literal["none", "plain", "pinned"] = "none",
        remote: Sequence[Tier] = (),
        mend: bool = True,
        create: bool = True,
    ) -> Library:
        """Open or create a library and mend what a crash left behind.

        Args:
            files: the file layer; tests wrap it.
            clock: seconds since the epoch.
            host: keep chunks in host memory too: for an engine on an accelerator, ``pinned`` where that is CUDA.
            remote: farther tiers.
            mend: False leaves what a crash left behind, to be looked at.
            create: False refuses a folder without a library.

        Raises:
            Unavailable: another process has it open, or there is none and none is to be made.
            ForeignFolder: the folder is not a library's and holds somebody's files under names that a library uses.
            DatabaseDamaged: the catalogue is missing or damaged while files of the library are there.
            IntegrityError: it was written by a newer version of this program.
        """
        files = files or Files()
        home = Home(Path(root).absolute(), files).enter(create)
        try:
            library = cls(home, limits or Limits(), files, clock, host, remote)
            library.catalog.identify(home.id)
            home.settle()
            if mend:
                library.recovered = library.reconcile()
        except BaseException:
            home.close()
            raise
        return library

    @classmethod
    def look(cls, root: Path, limits: Limits | None = None) -> Library:
        """A library as it is just now, only to read from; a server may have it open.

        Raises:
            Unavailable: there is none, or it was written by an older version.
        """
        files = Files()
        return cls(Home(Path(root).absolute(), files), limits or Limits(), files, time.time, look=True)

    def reconcile(self) -> dict[str, int]:
        """Make rows and files agree, at start-up or while nothing is uploaded. Nothing is deleted but what is known to
        serve nothing.

        Returns:
            How many of each: ``missing_chunks`` and ``lost_files`` have a row and no file, ``found_chunks`` have theirs
            again, ``adopted_chunks`` and ``adopted_files`` had no row, ``leftovers`` of crashes were removed,
            ``orphans`` were put into quarantine and ``expired_orphans`` deleted there, ``unknown`` are not ours and
            were left alone.
        """
        names = (
            "missing_chunks lost_files found_chunks adopted_chunks adopted_files leftovers orphans unknown"
        )
        done = Counter(dict.fromkeys([*names.split(), "expired_orphans"], 0))
        done.update(self.store.reconcile(self.orphans))
        self.references.collect_retired()
        mending = Mending(self)
        done.update(mending.run())
        self.references.collect_retired()  # what was adopted may have replaced something
        done["expired_orphans"] = len(self.orphans.expire())
        for what in ("missing_chunks", "lost_files", "adopted_files", "adopted_chunks", "orphans"):
            if done[what]:
                log.warning("%s: %s %s", self.root, done[what], SAYS[what])
        self._backfill.start(*mending.without_sidecar())
        return dict(done)

    def finish_sidecars(self) -> None:
        """Wait until what an earlier version stored has its sidecars, which are written in the background."""
        self._backfill.wait()

    def set_quota(
        self, user: str, *, files: int | None = None, bytes: int | None = None, disk: int | None = None
    ) -> None:
        """Give a user quotas of its own. None: what the limits say; 0: none.

        Args:
            files: most files.
            bytes: most bytes of originals.
            disk: most bytes of compiled chunks on disk; what is too much goes with the next chunk that is stored.
        """
        if any(value is not None and value < 0 for value in (files, bytes, disk)):
            raise BadRequest("a quota is not negative")
        with self.catalog.write() as db:
            self.catalog.add_user(db, user, self.clock())
            sql = "UPDATE users SET quota_files = ?, quota_bytes = ?, quota_disk = ? WHERE id = ?"
            db.execute(sql, (files, bytes, disk, user))
            self.sidecars.rewrite_owner(db, user)

    def usage(self) -> list[Usage]:
        """What each user holds per tier, and the quotas that hold for it; the dynamic library is ``@shared``."""
        sql = """
            SELECT owner, tier, count, bytes, quota_files, quota_bytes, quota_disk
            FROM usage LEFT JOIN users ON users.id = owner WHERE count > 0 ORDER BY owner, tier DESC"""
        limits = self.limits
        found = []
        for row in self.catalog.read(sql):
            own = (row["quota_bytes"], limits.user_bytes), (row["quota_disk"], limits.user_disk_bytes)
            bound, default = own[row["tier"] == "disk"]
            files = limits.user_files if row["quota_files"] is None else row["quota_files"]
            shared = row["owner"] == SHARED
            found.append(
                Usage(
                    *row[:4],
                    files_quota=0 if shared or row["tier"] == "disk" else files,
                    bytes_quota=0 if shared else default if bound is None else bound,
                )
            )
        return found

    def stats(self) -> dict[str, Any]:
        """Counters of the tiers and totals of the catalogue."""
        row = self.catalog.one("SELECT COUNT(*) AS files, COALESCE(SUM(bytes), 0) AS bytes FROM files")
        assert row is not None
        return {
            "files": row["files"],
            "bytes": row["bytes"],
            "references": self.references.stats(),
            "disk": self.store.stats(),
            "tiers": self.store.tiers(),
            "recovered": self.recovered,
        }

    def check(self) -> None:
        """Verify the catalogue and that files and rows agree. Raises IntegrityError."""
        self.catalog.check()
        self.store.check()
        self.files.check()
        self.references.check()

    def close(self) -> None:
        """Write down what is kept in memory and let go of the folder. Close the engine first. Safe to call twice."""
        if self._open:
            self._open = False
            self._backfill.stop()
            try:
                self.store.flush()
            except LibraryGone as error:
                log.error("%s", error.message)
            self.catalog.close()
            self.home.close()
        elif self.catalog.look:
            self.catalog.close()

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
