"""Tiers below the device pages: ``HostTier`` and ``RemoteTier`` are ``Tier``s, ``DiskStore`` and ``TieredStore`` are
chunk stores (``mpic.kv.store.ChunkStore``)."""

from mpic.library.store.disk import DiskStore
from mpic.library.store.host import HostTier
from mpic.library.store.objects import Objects
from mpic.library.store.remote import RemoteTier
from mpic.library.store.tiers import Tier, TieredStore

__all__ = ["DiskStore", "HostTier", "Objects", "RemoteTier", "Tier", "TieredStore"]
