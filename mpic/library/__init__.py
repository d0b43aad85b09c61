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

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from mpic.durable import Files
from mpic.errors import BadRequest, Unavailable
from mpic.library.caches import Cache, CacheChunk, CacheLibrary
from mpic.library.catalog import Catalog
from mpic.library.decode import decode_image, decode_text, thumbnail
from mpic.library.dynamic import DynamicLibrary
from mpic.library.limits import Limits
from mpic.library.originals import Originals
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
from mpic.library.static import StaticLibrary
from mpic.library.store import DiskStore, HostTier, Tier, TieredStore

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


class Library:
    """Everything below one folder: catalogue, uploads, compiled chunks. One process at a time has it open.

    Attributes:
        files: the static library, see ``StaticLibrary``.
        caches: texts cached explicitly, see ``CacheLibrary``.
        references: the dynamic library, see ``DynamicLibrary``.
        store: the tiers below the device, for the engine; see ``mpic.engine.base.ChunkStore``.
        recovered: what ``open`` found to mend: garbage of a crash, and objects whose files are gone.
    """

    files: StaticLibrary
    caches: CacheLibrary
    references: DynamicLibrary
    store: DiskStore | TieredStore
    catalog: Catalog
    recovered: dict[str, int]
    _lock: int | None

    def __init__(
        self,
        root: Path,
        limits: Limits,
        files: Files,
        clock: Callable[[], float],
        host: Literal["none", "plain", "pinned"] = "none",
        remote: Sequence[Tier] = (),
        look: bool = False,
    ) -> None:
        self.root = root
        self.limits = limits
        self.clock = clock
        self.catalog = Catalog(root / "catalog.sqlite", files, look)
        self.store = DiskStore(root, self.catalog, limits, files, clock)
        nearer = []
        if host != "none" and limits.host_bytes:
            rules = Rules(limits.host_bytes, limits.user_host_bytes, limits.shared_fraction)
            nearer.append(HostTier(rules, host == "pinned", self.store.pinned))
        if nearer or remote:
            self.store = TieredStore(self.store, nearer, remote)
        self.files = StaticLibrary(root, self.catalog, self.store, limits, files, clock)
        self.caches = CacheLibrary(root, self.catalog, self.files, limits, files, clock)
        self.references = DynamicLibrary(root, self.catalog, self.store, limits, files, clock)
        self.files_layer = files
        self._originals = Originals(root, files)

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
    ) -> Library:
        """Open or create a library and mend what a crash left behind.

        Args:
            files: the file layer; tests wrap it.
            clock: seconds since the epoch.
            host: keep chunks in host memory too: for an engine on an accelerator, ``pinned`` where that is CUDA.
            remote: farther tiers.
            mend: False leaves what a crash left behind, to be looked at.

        Raises:
            Unavailable: another process has it open.
            IntegrityError: it was written by a newer version of this program.
        """
        root, files = Path(root).absolute(), files or Files()
        files.make_folder(root)
        lock = _lock(root)
        try:
            library = cls(root, limits or Limits(), files, clock, host, remote)
            library.recovered = library.reconcile() if mend else {}
        except BaseException:
            os.close(lock)
            raise
        library._lock = lock
        return library

    @classmethod
    def look(cls, root: Path, limits: Limits | None = None) -> Library:
        """A library as it is just now, only to read from; a server may have it open.

        Raises:
            Unavailable: there is none, or it was written by an older version.
        """
        library = cls(Path(root).absolute(), limits or Limits(), Files(), time.time, look=True)
        library._lock, library.recovered = None, {}
        return library

    def reconcile(self) -> dict[str, int]:
        """Make rows and files agree, at start-up or while nothing is uploaded; what there was to mend."""
        chunks = self.store.reconcile()
        self.references.collect_retired()
        lost, orphans = self._originals.reconcile(self.files.paths() | self.references.paths())
        self.files.mark_lost(lost)
        self.references.mark_lost(lost)
        return {
            "missing_chunks": chunks["missing"],
            "lost_files": len(lost),
            "orphans": chunks["orphans"] + orphans,
        }

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
        lock, self._lock = self._lock, None
        if lock is not None:
            self.store.flush()
            self.catalog.close()
            os.close(lock)
        elif self.catalog.look:
            self.catalog.close()

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _lock(root: Path) -> int:
    """Hold the library for this process; the operating system lets go of it when the process dies."""
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise Unavailable(f"another process has the library in {root} open") from error
    return fd
