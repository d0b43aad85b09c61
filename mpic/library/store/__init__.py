"""Tiers below the device pages: ``HostTier`` is a ``Tier``, ``DiskStore`` and ``TieredStore`` are chunk stores
(``mpic.kv.store.ChunkStore``)."""

from mpic.library.store.disk import DiskStore
from mpic.library.store.host import HostTier
from mpic.library.store.tiers import Tier, TieredStore

__all__ = ["DiskStore", "HostTier", "Tier", "TieredStore"]
