"""Finds a request's chunks on the caller's thread: their inputs from the nearest tier, and the tier that holds their
KV."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from mpic import memory
from mpic.engine.native.request import LinkedChunk
from mpic.engine.tombstones import Tombstones
from mpic.errors import CorruptFile, InvalidUpload, NotFound, OutOfMemory, UnsupportedModality
from mpic.imaging.clips import Clip, Sample
from mpic.imaging.image_header import LARGE_PIXELS
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKey, Kind, KVKey, Recipe
from mpic.kv.device import DeviceCache
from mpic.kv.store import ChunkStore, PartedChunk, Reservation, StoredChunk, optional
from mpic.link import BARE, Policy, Wrapping
from mpic.model.loaded import LoadedModel
from mpic.packet.adapter import Adapter, require_adapter
from mpic.press import parse_press

log = logging.getLogger(__name__)

_REMEMBERED_BYTES = 512 << 20


class LazyStoredChunk:
    """Implements ``StoredChunk`` for a chunk that is resident when its request arrives: no look-up and no disk access
    unless it is evicted before the request is admitted."""

    tier = "disk"  # the default until the chunk is read

    def __init__(self, store: ChunkStore, key: KVKey, inputs: ChunkInputs) -> None:
        self.inputs, self._store, self._key = inputs, store, key
        self._found: StoredChunk | None = None

    def _stored(self) -> StoredChunk:
        if self._found is None:
            self._found = self._store.find([self._key]).get(self._key)
        if self._found is None:
            raise NotFound(f"chunk {self._key.chunk} is not stored")
        self.tier = self._found.tier
        return self._found

    def read_layers(self, destination: torch.Tensor) -> Iterator[int]:
        """Reads the chunk; see ``StoredChunk.read_layers``.

        Raises:
            NotFound: it has left the store, or was never written.
            CorruptFile: it is damaged.
        """
        stored, self._found = self._stored(), None
        yield from stored.read_layers(destination)

    def lend(self) -> torch.Tensor | None:
        """See ``StoredChunk``. It is asked for first, and looks the chunk up again for every load."""
        self._found = None
        memory = optional(self._stored(), "lend")
        if memory is not None:
            self._found = None
        return memory

    def in_parts(self, most: int) -> PartedChunk | None:
        return optional(self._stored(), "in_parts", most)

    def reserve(self, shape: Sequence[int], dtype: torch.dtype) -> Reservation | None:
        return optional(self._stored(), "reserve", shape, dtype)


class ChunkLinker:
    """The first half of a link: finds the inputs of chunks. They come from a resident chunk, from memory, from the
    store, or from the tokenizer and the vision encoder. Thread-safe."""

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
        self._clips = threading.Lock()

    def recipe(self, wrapping: Wrapping, press: str = "", kind: Kind = "text") -> Recipe:
        """Returns how chunks of a kind are compiled that are wrapped so, and compressed by a press of that name.

        Raises:
            NoAdapter: the wrapping is that of packets, and the model has no adapter.
        """
        model, packet = self._model, ""
        if wrapping.packet:
            packet = require_adapter(self._adapter, model.info.name, model.no_packets).digest
        kept = "" if (found := parse_press(press)) is None else found.name
        preprocessing = model.sampling if kind == "video" else model.preprocessing
        return Recipe(model.kv_name, "raw", wrapping.sink, preprocessing, packet, model.layout, kept)

    def key(self, chunk: Chunk, wrapping: Wrapping = BARE) -> KVKey:
        recipe = self.recipe(wrapping, chunk.press, chunk.kind)
        return KVKey.of(chunk.owner, chunk.key, self._model.digest, recipe)

    def link(self, chunks: Sequence[Chunk], policy: Policy, arrived: float) -> list[LinkedChunk]:
        """Returns every chunk with its inputs. The store is asked once for all that are not resident.

        Raises:
            UnsupportedModality, InvalidUpload, NoAdapter: the inputs of a chunk cannot be made.
        """
        recipes = {
            (press, kind): self.recipe(policy.wrapping, press if policy.uses_chunks else "", kind)
            for press, kind in {(chunk.press, chunk.kind) for chunk in chunks}
        }
        keys = [KVKey.of(c.owner, c.key, self._model.digest, recipes[c.press, c.kind]) for c in chunks]
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
        whole = self._uncompressed([key for key in asked if key not in found])
        encoded = (
            resident is None
            and inputs is None
            and chunk.token_ids is None
            and not (key in found or key in whole)
            for chunk, key, resident, inputs in zip(chunks, keys, ready, known, strict=True)
        )
        if policy.uses_chunks and any(encoded):
            # files are read beside the vision encoder and not only after it (MPIC, section 4.3)
            for stored in (*found.values(), *whole.values()):
                optional(stored, "read_ahead")
        linked = []
        for chunk, key, resident, inputs in zip(chunks, keys, ready, known, strict=True):
            if resident is not None:
                later = LazyStoredChunk(self._store, key, inputs) if self._store is not None else None
                linked.append(LinkedChunk(chunk, key, inputs, later, "evicted"))
            elif inputs is not None and not policy.uses_chunks:
                linked.append(LinkedChunk(chunk, key, inputs, None, None))
            else:
                stored = found.get(key) or whole.get(key)
                linked.append(self._link_stored(chunk, key, inputs, stored, arrived, key in whole))
        if policy.wrapping.packet:
            for one in linked:
                one.packet = len(self._adapter)
        return linked

    def _uncompressed(self, keys: Sequence[KVKey]) -> dict[KVKey, StoredChunk]:
        """Returns, for chunks that are to be compressed by a press that can do it afterwards, the uncompressed forms
        that are stored."""
        wanted = {}
        for key in keys:
            press = parse_press(key.recipe.press)
            if press is not None and not press.needs_queries:
                wanted[key] = KVKey.of(key.owner, key.chunk, key.model, replace(key.recipe, press=""))
        found = self._store.find(list(wanted.values())) if self._store is not None and wanted else {}
        return {key: found[whole] for key, whole in wanted.items() if whole in found}

    def _link_stored(
        self,
        chunk: Chunk,
        key: KVKey,
        inputs: ChunkInputs | None,
        stored: StoredChunk | None,
        arrived: float,
        uncompressed: bool,
    ) -> LinkedChunk:
        if inputs is None:
            # the chunk is linked twice, and its inputs were made a moment ago
            inputs = self._remembered(chunk, key)
        if inputs is None:
            inputs = self._read_inputs(stored, chunk, key)
            if inputs is None:
                stored, inputs = None, self.inputs(chunk, key, arrived)
            elif not key.recipe.packet:
                self._remember(chunk, inputs, arrived)
        reason = None
        if stored is None:
            reason = self._store.missing_reason(key) if self._store is not None else "new"
        return LinkedChunk(
            chunk, key, inputs, stored, reason, uncompressed=uncompressed and stored is not None
        )

    def stored(self, chunk: Chunk, key: KVKey) -> LinkedChunk | None:
        """Returns a chunk as the tier below the device has it, or None."""
        stored = self._store.find([key]).get(key) if self._store is not None else None
        inputs = self._read_inputs(stored, chunk, key)
        return LinkedChunk(chunk, key, inputs, stored, None) if inputs is not None else None

    def _read_inputs(self, stored: StoredChunk | None, chunk: Chunk, key: KVKey) -> ChunkInputs | None:
        """Returns the stored inputs, or None when the store turns out not to have them. Text needs no file, because its
        chunk has the ids."""
        if stored is None:
            return None
        if chunk.token_ids:
            return self._wrapped(self._make(chunk), key)
        try:
            return stored.inputs
        except (NotFound, CorruptFile, OutOfMemory, OSError) as error:
            log.warning("chunk %s cannot be used as it is stored: %s", chunk.key, error)
            return None

    # ---- new inputs, which are remembered as they are before they are wrapped

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
        if chunk.load_clip is not None:
            return self._make_clip(chunk.load_clip)
        if chunk.load_image is None:
            raise UnsupportedModality(f"chunk {chunk.key} has neither tokens nor an image")
        # one image at a time: a large one takes hundreds of megabytes
        with self._encoder, memory.as_errors():
            image = chunk.load_image()
            large = image.width * image.height > LARGE_PIXELS
            inputs = self._model.image_inputs(image)
            del image
            if large:
                memory.give_back()
            return inputs

    def _make_clip(self, load: Callable[[Sample], Clip]) -> ChunkInputs:
        """Decodes a clip while images may be encoded, and then encodes it."""
        with self._clips, memory.as_errors():
            clip = load(self._model.clip_sampler)
            with self._encoder:
                inputs = self._model.clip_inputs(clip)
            del clip
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
