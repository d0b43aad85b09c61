"""A stored chunk that is opened only if it has to be read."""

from __future__ import annotations

import torch

from mpic.engine.base import ChunkStore
from mpic.errors import NotFound
from mpic.kv.chunk import ChunkInputs, KVKey


class StoredLater:
    """What a waiting request keeps of a stored chunk: no open file, and no disk access at all while the chunk is
    resident."""

    def __init__(self, store: ChunkStore, key: KVKey, inputs: ChunkInputs) -> None:
        self.inputs, self._store, self._key = inputs, store, key

    def read_into(self, destination: torch.Tensor) -> None:
        """As ``StoredChunk.read_into``.

        Raises:
            NotFound: it has left the store, or was never written.
            CorruptFile: it is damaged.
        """
        stored = self._store.open(self._key)
        if stored is None:
            raise NotFound(f"chunk {self._key.chunk} is not stored")
        stored.read_into(destination)
