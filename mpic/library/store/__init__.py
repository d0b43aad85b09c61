"""Tiers below the device pages. Each implements ``mpic.engine.base.ChunkStore`` or a part of it."""

from mpic.library.store.disk import DiskChunk, DiskStore
from mpic.library.store.host import HostTier
from mpic.library.store.tiers import Tier, TieredStore

__all__ = ["DiskChunk", "DiskStore", "HostTier", "Tier", "TieredStore"]
