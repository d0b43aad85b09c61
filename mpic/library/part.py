"""The base class of the parts of a library, and the storage that they share."""

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
    """Everything that a library stores, and the bounds that hold for it.

    Args:
        clock: function that returns seconds since the epoch.
    """

    catalog: Catalog
    originals: Originals
    sidecars: Sidecars
    store: DiskStore | TieredStore
    limits: Limits
    clock: Callable[[], float]


class LibraryPart:
    """The base class of the parts of a library, such as its uploads, caches and references."""

    def __init__(self, storage: Storage) -> None:
        self._catalog, self._originals, self._store = storage.catalog, storage.originals, storage.store
        self._limits, self._clock = storage.limits, storage.clock
