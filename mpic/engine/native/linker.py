"""Finding a request's chunks, on the caller's thread: their inputs from the nearest place, and where their KV lies."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch

from mpic import memory
from mpic.engine.native.request import LinkedChunk
from mpic.engine.tombstones import Tombstones
from mpic.errors import CorruptFile, InvalidUpload, NotFound, UnsupportedModality
from mpic.imaging.image_header import LARGE_PIXELS
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKey, KVKey, Recipe
from mpic.kv.device import DeviceCache
from mpic.kv.store import ChunkStore, StoredChunk
from mpic.link import BARE, Policy, Wrapping
from mpic.model.loaded import LoadedModel
from mpic.packet.adapter import Adapter, require_adapter

log = logging.getLogger(__name__)

_REMEMBERED_BYTES = 512 << 20


class LazyStoredChunk:
    """Implements ``StoredChunk`` for a chunk that is resident when its request arrives: no look-up and no disk access
    unless it is evicted before the request is admitted."""

    tier = "disk"  # the tier of record, until it is read

    def __init__(self, store: ChunkStore, key: KVKey, inputs: ChunkInputs) -> None:
        self.inputs, self._store, self._key = inputs, store, key

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        """Reads the chunk; see ``StoredChunk.read_layers``.

        Raises:
            NotFound: it has left the store, or was never written.
            CorruptFile: it is damaged.
        """
        stored = self._store.find([self._key]).get(self._key)
        if stored is None:
            raise NotFound(f"chunk {self._key.chunk} is not stored")
        self.tier = stored.tier
        yield from stored.read_layers(destination)


class ChunkLinker:
    """The first half of a link: finds the inputs of chunks. They are those of a resident chunk, remembered, stored, or
    made by the tokenizer and the vision encoder. Thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        adapter: Adapter | None,
        store: ChunkStore | None,
        device: DeviceCache,
        tombstones: Tombstones,
    ) -> None:
        self._model, self._adapter = model, adapter
        self._store, self._device, self._tombstones = store, device, tombstones
        self._remembered_bytes = 0
        self._inputs: OrderedDict[tuple[str, ChunkKey], ChunkInputs] = OrderedDict()
        self._lock = threading.Lock()
        self._encoder = threading.Lock()

    def recipe(self, wrapping: Wrapping) -> Recipe:
        """Returns how chunks are compiled that are wrapped so.

        Raises:
            NoAdapter: they shall be packets, and the model has no adapter.
        """
        packet = require_adapter(self._adapter, self._model).digest if wrapping.packet else ""
        model = self._model
        layout = "latent" if model.latents else ""
        return Recipe(model.info.dtype, "raw", wrapping.sink, model.preprocessing, packet, layout)

    def key(self, chunk: Chunk, wrapping: Wrapping = BARE) -> KVKey:
        return KVKey(chunk.owner, chunk.key, self._model.digest, self.recipe(wrapping))

    def link(self, chunks: Sequence[Chunk], policy: Policy, arrived: float) -> list[LinkedChunk]:
        """Returns every chunk with its inputs. The store is asked once for all that are not resident.

        Raises:
            UnsupportedModality, InvalidUpload, NoAdapter: the inputs of a chunk cannot be made.
        """
        recipe = self.recipe(policy.wrapping)
        keys = [KVKey.of(chunk.owner, chunk.key, self._model.digest, recipe) for chunk in chunks]
        ready = [r if r is not None and r.ready else None for r in map(self._device.get, keys)]
        known = [
            self._remembered(chunk, key) if resident is None else resident.inputs
            for chunk, key, resident in zip(chunks, keys, ready, strict=True)
        ]
        asked = [
            key
            for key, resident, inputs in zip(keys, ready, known, strict=True)
            if resident is None and (inputs is None or policy.uses_chunks)
        ]
        found = self._store.find(asked) if self._store is not None and asked else {}
        linked = []
        for chunk, key, resident, inputs in zip(chunks, keys, ready, known, strict=True):
            if resident is not None:
                later = LazyStoredChunk(self._store, key, inputs) if self._store is not None else None
                linked.append(LinkedChunk(chunk, key, inputs, later, "evicted"))
            elif inputs is not None and not policy.uses_chunks:
                linked.append(LinkedChunk(chunk, key, inputs, None, None))
            else:
                linked.append(self._link_stored(chunk, key, inputs, found.get(key), arrived))
        if recipe.packet:
            for one in linked:
                one.packet = len(self._adapter)
        return linked

    def _link_stored(
        self, chunk: Chunk, key: KVKey, inputs: ChunkInputs | None, stored: StoredChunk | None, arrived: float
    ) -> LinkedChunk:
        if inputs is None:
            inputs = self._remembered(chunk, key)  # linked twice, it was made a moment ago
        if inputs is None:
            inputs = self._read_inputs(stored, chunk, key)
            if inputs is None:
                stored, inputs = None, self.inputs(chunk, key, arrived)
            elif not key.recipe.packet:
                self._remember(chunk, inputs, arrived)
        reason = None
        if stored is None:
            reason = self._store.missing_reason(key) if self._store is not None else "new"
        return LinkedChunk(chunk, key, inputs, stored, reason)

    def stored(self, chunk: Chunk, key: KVKey) -> LinkedChunk | None:
        """Returns a chunk as the tier below the device has it, or None."""
        stored = self._store.find([key]).get(key) if self._store is not None else None
        inputs = self._read_inputs(stored, chunk, key)
        return LinkedChunk(chunk, key, inputs, stored, None) if inputs is not None else None

    def _read_inputs(self, stored: StoredChunk | None, chunk: Chunk, key: KVKey) -> ChunkInputs | None:
        """Returns what the store has, or None when it turns out to have nothing. Text needs no file: its chunk has the
        ids."""
        if stored is None:
            return None
        if chunk.token_ids:
            return self._wrapped(self._make(chunk), key)
        try:
            return stored.inputs
        except (NotFound, CorruptFile, OSError) as error:
            log.warning("chunk %s cannot be used as it is stored: %s", chunk.key, error)
            return None

    # ---- inputs that are made, and remembered as they are before they are wrapped

    def inputs(self, chunk: Chunk, key: KVKey, arrived: float) -> ChunkInputs:
        """Returns the inputs of a chunk that is not stored.

        Raises:
            UnsupportedModality, InvalidUpload: they cannot be made.
        """
        inputs = self._remembered(chunk, key)
        if inputs is None:
            bare = self._make(chunk)
            self._remember(chunk, bare, arrived)
            inputs = self._wrapped(bare, key)
        return inputs

    def _wrapped(self, inputs: ChunkInputs, key: KVKey) -> ChunkInputs:
        return self._adapter.wrap(inputs, self._model.embed) if key.recipe.packet else inputs

    def _make(self, chunk: Chunk) -> ChunkInputs:
        if chunk.token_ids is not None:
            if not chunk.token_ids:
                raise InvalidUpload("a text chunk has no tokens")
            return self._model.text_inputs(chunk.token_ids)
        if chunk.load_image is None:
            raise UnsupportedModality(f"chunk {chunk.key} has neither tokens nor an image")
        with self._encoder, memory.as_errors():  # one at a time: a large image takes hundreds of megabytes
            image = chunk.load_image()
            large = image.width * image.height > LARGE_PIXELS
            inputs = self._model.image_inputs(image)
            del image
            if large:
                memory.give_back()
            return inputs

    def _remembered(self, chunk: Chunk, key: KVKey) -> ChunkInputs | None:
        with self._lock:
            inputs = self._inputs.get((chunk.owner, chunk.key))
            if inputs is not None:
                self._inputs.move_to_end((chunk.owner, chunk.key))
        return None if inputs is None else self._wrapped(inputs, key)

    def _remember(self, chunk: Chunk, inputs: ChunkInputs, arrived: float) -> None:
        with self._lock:
            name = (chunk.owner, chunk.key)
            if name in self._inputs or self._tombstones.since(arrived, *name):
                return
            self._inputs[name] = inputs
            self._remembered_bytes += inputs.nbytes
            while len(self._inputs) > 1 and self._remembered_bytes > _REMEMBERED_BYTES:
                self._remembered_bytes -= self._inputs.popitem(last=False)[1].nbytes

    def forget(self, chunk: Chunk) -> None:
        """Drops the inputs of a deleted chunk, whose tombstone must exist already."""
        with self._lock:
            inputs = self._inputs.pop((chunk.owner, chunk.key), None)
            if inputs is not None:
                self._remembered_bytes -= inputs.nbytes
