"""A chunk that is resident, and looked up in the store only if it has left the device before it is needed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mpic.engine.base import ChunkStore
from mpic.errors import NotFound
from mpic.kv.chunk import ChunkInputs, KVKey


class StoredLater:
    """What a waiting request keeps of a resident chunk: no look-up and no disk access unless it is evicted."""

    tier = "disk"  # the tier of record, until it is read

    def __init__(self, store: ChunkStore, key: KVKey, inputs: ChunkInputs) -> None:
        self.inputs, self._store, self._key = inputs, store, key

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        """As ``StoredChunk.read_layers``.

        Raises:
            NotFound: it has left the store, or was never written.
            CorruptFile: it is damaged.
        """
        stored = self._store.find([self._key]).get(self._key)
        if stored is None:
            raise NotFound(f"chunk {self._key.chunk} is not stored")
        self.tier = stored.tier
        yield from stored.read_layers(destination)
