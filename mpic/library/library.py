"""``Library``, the facade over everything below one folder."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from mpic.durable import FileSystem
from mpic.errors import BadRequest, MPICError
from mpic.kv.chunk import Chunk
from mpic.library.caches import CacheLibrary
from mpic.library.catalog.database import Catalog
from mpic.library.catalog.file_rows import FileRows
from mpic.library.catalog.reference_rows import ReferenceRows
from mpic.library.folder.layout import CATALOG
from mpic.library.folder.lock import FolderLock
from mpic.library.folder.originals import Originals
from mpic.library.folder.sidecars import Sidecars
from mpic.library.limits import Limits
from mpic.library.part import Storage
from mpic.library.reconcile import Reconciliation
from mpic.library.records import SHARED, StorageUsage
from mpic.library.references import ReferenceLibrary
from mpic.library.store import DiskStore, HostTier, Tier, TieredStore
from mpic.library.store.shares import TierBounds
from mpic.library.uploads import UploadLibrary

WARNINGS = {
    "missing_chunks": "compiled chunks are gone; they are compiled again on next use",
    "lost_files": "originals are gone; their files are marked as failed",
    "unlisted_files": "files or quotas that the catalogue does not list stay as they are; stop the server and run "
    "`mpic library recover --force`, which lists those that a sidecar describes and names the others",
}
"""Log lines of a start, by count of ``Library.reconcile``."""

log = logging.getLogger(__name__)


class Library:
    """Everything below one folder: catalogue, uploads, compiled chunks. One process at a time has it open.

    Attributes:
        files: uploads, see ``UploadLibrary``.
        caches: texts cached explicitly, see ``CacheLibrary``.
        references: references for retrieval, see ``ReferenceLibrary``.
        store: the tiers below the device, for the engine; see ``mpic.kv.store.ChunkStore``.
        folder: the lock on the folder, which also detects that the folder was removed.
        sidecars: the files beside the originals that repeat their rows of the catalogue.
        recovered: counts of the repairs that ``open`` has made; see ``reconcile``.
    """

    files: UploadLibrary
    caches: CacheLibrary
    references: ReferenceLibrary
    store: DiskStore | TieredStore
    catalog: Catalog
    recovered: dict[str, int]

    def __init__(
        self,
        folder: FolderLock,
        limits: Limits,
        filesystem: FileSystem,
        clock: Callable[[], float],
        host: Literal["none", "plain", "pinned"] = "none",
        remote: Sequence[Tier] = (),
        read_only: bool = False,
    ) -> None:
        root = folder.root
        self.folder, self.root = folder, root
        self.limits = limits
        self.clock = clock
        self.recovered = {}
        guard = folder.check
        self.filesystem = filesystem
        self.catalog = Catalog(root / CATALOG, filesystem, read_only, guard)
        self.store = DiskStore(root, self.catalog, limits, filesystem, clock, guard)
        nearer = []
        if host != "none" and limits.host_bytes:
            bounds = TierBounds(limits.host_bytes, limits.user_host_bytes, limits.shared_fraction)
            nearer.append(HostTier(bounds, host == "pinned", self.store.pinned))
        if nearer or remote:
            self.store = TieredStore(self.store, nearer, remote)
        self.sidecars = Sidecars(root, filesystem, self.catalog.if_undone)
        self._originals = originals = Originals(root, filesystem, guard)
        files = FileRows(self.catalog, root, limits, clock, self.sidecars)
        references = ReferenceRows(self.catalog, root, clock, self.sidecars)
        storage = Storage(self.catalog, originals, self.sidecars, self.store, limits, clock)
        self.files = UploadLibrary(storage, files)
        self.caches = CacheLibrary(storage, files, self.files)
        self.references = ReferenceLibrary(storage, references)
        self._open, self._probed = not read_only, -math.inf

    @classmethod
    def open(
        cls,
        root: Path,
        limits: Limits | None = None,
        *,
        filesystem: FileSystem | None = None,
        clock: Callable[[], float] = time.time,
        host: Literal["none", "plain", "pinned"] = "none",
        remote: Sequence[Tier] = (),
        reconcile: bool = True,
        create: bool = True,
    ) -> Library:
        """Open or create a library and repair the effects of a crash.

        Args:
            filesystem: writes every file; tests wrap it.
            clock: function that returns seconds since the epoch.
            host: keep chunks in host memory too: for an engine on an accelerator, ``pinned`` where that is CUDA.
            remote: additional tiers beyond the disk.
            reconcile: False makes no repairs, for inspection after a crash.
            create: False refuses a folder without a library.

        Raises:
            Unavailable: another process has it open, or there is none and ``create`` is False.
            ForeignFolder: the folder is not a library's and holds other files under names that a library uses.
            DatabaseDamaged: the catalogue is missing or damaged while files of the library are there.
            IntegrityError: it was written by a newer version of this program, or has rows that no library writes.
        """
        filesystem = filesystem or FileSystem()
        folder = FolderLock(Path(root).absolute(), filesystem).acquire(create)
        with ExitStack() as undo:
            undo.callback(folder.release)
            library = cls(folder, limits or Limits(), filesystem, clock, host, remote)
            undo.callback(library.catalog.close)
            library.catalog.identify(folder.id)
            folder.remember()
            library.catalog.check_paths()
            if reconcile:
                library.recovered = library.reconcile()
            if isinstance(library.store, TieredStore):
                library.store.begin(folder.id)
            undo.pop_all()
        return library

    @classmethod
    def open_read_only(cls, root: Path, limits: Limits | None = None) -> Library:
        """Open the present state of a library for reading only; a server may have it open.

        Raises:
            Unavailable: there is none, or it was written by an older version.
            IntegrityError: its catalogue has rows that no library writes.
        """
        filesystem = FileSystem()
        folder = FolderLock(Path(root).absolute(), filesystem)
        library = cls(folder, limits or Limits(), filesystem, time.time, read_only=True)
        library.catalog.check_paths()
        return library

    def reconcile(self) -> dict[str, int]:
        """Make rows and files agree, at start-up or while nothing is uploaded. Only files that are known to be useless
        are deleted.

        Returns:
            How many of each: ``missing_chunks`` and ``lost_files`` have a row and no file, ``found_chunks`` have a row
            again, ``unlisted_files`` have none and were left alone, ``leftovers`` of crashes were removed, ``unknown``
            have no name of this program and were left alone.
        """
        names = "missing_chunks lost_files found_chunks unlisted_files leftovers unknown"
        done: Counter[str] = Counter(dict.fromkeys(names.split(), 0))
        known = self.files.paths() | self.references.paths()
        originals = Reconciliation(self.root, self.catalog, self.sidecars, self.filesystem, known)
        originals.remove_leftovers()
        done.update(self.store.reconcile())
        self.references.collect_retired()
        done.update(originals.run())
        self.forget_gone()
        for what, warning in WARNINGS.items():
            if done[what]:
                log.warning("%s: %s %s", self.root, done[what], warning)
        originals.write_missing_sidecars()
        return dict(done)

    def expire_kv(self) -> list[Chunk]:
        """Remove compiled chunks that nobody has used for as long as their files (``kv_ttl``) or the limits say.
        Originals stay. Call it periodically, and pass the result to ``Engine.forget``."""
        return [Chunk(chunk, owner) for owner, chunk in self.store.expire(self.limits.kv_ttl)]

    def forget_gone(self) -> None:
        """Forget the deletions, and the chunks that are gone, which are older than the limits say."""
        before = self.clock() - self.limits.tombstone_seconds
        self.store.forget_gone(before)
        self.catalog.drop_tombstones(before)

    def set_quota(
        self, user: str, *, files: int | None = None, bytes: int | None = None, disk: int | None = None
    ) -> None:
        """Set the quotas of a user. None means the quota of the limits, 0 means no quota.

        Args:
            files: most files.
            bytes: most bytes of originals.
            disk: most bytes of compiled chunks on disk; chunks beyond it are evicted when the next one is stored.

        Raises:
            BadRequest: a quota is negative.
        """
        if any(value is not None and value < 0 for value in (files, bytes, disk)):
            raise BadRequest("a quota must not be negative")
        with self.catalog.write() as db:
            self.catalog.add_user(db, user, self.clock())
            sql = "UPDATE users SET quota_files = ?, quota_bytes = ?, quota_disk = ? WHERE id = ?"
            db.execute(sql, (files, bytes, disk, user))
            self.sidecars.rewrite(db, "owner", user)

    def usage(self) -> list[StorageUsage]:
        """Return each user's usage per tier, with the user's quotas; references belong to ``@shared``."""
        sql = """
            SELECT owner, tier, count, bytes,
                CASE WHEN owner = :shared OR tier = 'disk' THEN 0 ELSE COALESCE(quota_files, :files) END,
                CASE WHEN owner = :shared THEN 0 WHEN tier = 'disk' THEN COALESCE(quota_disk, :disk)
                     ELSE COALESCE(quota_bytes, :bytes) END
            FROM usage LEFT JOIN users ON users.id = owner WHERE count > 0 ORDER BY owner, tier DESC"""
        limits = self.limits
        quotas = {"files": limits.user_files, "bytes": limits.user_bytes, "disk": limits.user_disk_bytes}
        return [StorageUsage(*row) for row in self.catalog.read(sql, shared=SHARED, **quotas)]

    def stats(self) -> dict[str, Any]:
        """Return counters of the tiers and totals of the catalogue."""
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
        """Verify the catalogue, and that files and rows agree. Raise IntegrityError: they do not."""
        self.catalog.check()
        self.store.check()
        self.files.check()
        self.references.check()

    def probe(self) -> None:
        """Raise LibraryGone, DatabaseFailed, DatabaseBusy or DatabaseDamaged if the library cannot be used now. Its
        disk is tried once a second at most, because this is asked without a key."""
        self.folder.check()
        if time.monotonic() - self._probed >= 1:
            self._originals.probe()
            self.catalog.probe()
            self._probed = time.monotonic()

    def close(self) -> None:
        """Write the state that is kept in memory, if it can be written, and release the folder. Close the engine
        first. Safe to call twice."""
        if self._open:
            self._open = False
            with ExitStack() as ends:
                ends.callback(self.folder.release)
                ends.callback(self.catalog.close)
                if isinstance(self.store, TieredStore):
                    ends.callback(self.store.close)
                try:
                    self.store.flush()
                except MPICError as error:  # only the order of evictions depends on it
                    log.error("%s", error.message)
        elif self.catalog.read_only:
            self.catalog.close()

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
