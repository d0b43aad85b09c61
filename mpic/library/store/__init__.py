"""Tiers below the device pages. Each implements ``mpic.engine.base.ChunkStore``."""

from mpic.library.store.disk import DiskChunk, DiskStore

__all__ = ["DiskChunk", "DiskStore"]
