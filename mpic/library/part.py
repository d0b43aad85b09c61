"""The base of every part of a library, and the record of storage that all parts use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpic.library.catalog.database import Catalog
from mpic.library.folder.originals import Originals
from mpic.library.folder.sidecars import Sidecars
from mpic.library.limits import Limits
from mpic.library.store import DiskStore, TieredStore


@dataclass(frozen=True)
class Storage:
    """Everything that is stored, and the bounds that hold for it; ``clock`` returns seconds since the epoch."""

    catalog: Catalog
    originals: Originals
    sidecars: Sidecars
    store: DiskStore | TieredStore
    limits: Limits
    clock: Callable[[], float]


class LibraryPart:
    """A part of a library, which reads and writes one `Storage` together with the other parts."""

    def __init__(self, storage: Storage) -> None:
        self._catalog, self._originals, self._store = storage.catalog, storage.originals, storage.store
        self._limits, self._clock = storage.limits, storage.clock
