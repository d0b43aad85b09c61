"""Finds a request's chunks on the caller's thread: their inputs from the nearest tier, and the tier that holds their
KV."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mpic import memory
from mpic.engine.native.request import LinkedChunk
from mpic.engine.tombstones import Tombstones
from mpic.errors import CorruptFile, InvalidUpload, NotFound, OutOfMemory, UnsupportedModality
from mpic.imaging.clips import Clip, Sample
from mpic.imaging.image_header import LARGE_PIXELS
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKey, Kind, KVKey, Recipe
from mpic.kv.device import DeviceCache, Resident
from mpic.kv.store import ChunkStore, LaterChunk, StoredChunk, optional
from mpic.link import BARE, Policy, Wrapping
from mpic.model.loaded import LoadedModel
from mpic.packet.adapter import Adapter, require_adapter
from mpic.press import parse_press

log = logging.getLogger(__name__)

_REMEMBERED_BYTES = 512 << 20


@dataclass(eq=False)
class _Sought:
    """A chunk that is looked for, from the nearest tier to the farthest, with all that has been found of it.
    ``uncompressed``: what is stored is the form that its press has yet to compress."""

    chunk: Chunk
    key: KVKey
    resident: Resident | None
    inputs: ChunkInputs | None
    stored: StoredChunk | None = None
    uncompressed: bool = False

    @property
    def has_to_be_encoded(self) -> bool:
        return self.inputs is None and self.stored is None and self.chunk.token_ids is None


class ChunkLinker:
    """The first half of a link: finds the inputs of chunks. They come from a resident chunk, from memory, from the
    store, or from the tokenizer and the vision encoder. Thread-safe.

    Args:
        seconds_per_token: measures how long a prompt's token takes to compute; None while that is unknown.
    """

    def __init__(
        self,
        model: LoadedModel,
        adapter: Adapter | None,
        store: ChunkStore | None,
        device: DeviceCache,
        tombstones: Tombstones,
        seconds_per_token: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._model, self._adapter, self._seconds_per_token = model, adapter, seconds_per_token
        self._store, self._device, self._tombstones = store, device, tombstones
        self._remembered_bytes = 0
        self._inputs: OrderedDict[tuple[str, ChunkKey], ChunkInputs] = OrderedDict()
        self._lock = threading.Lock()
        self._encoder = threading.Lock()
        self._clips = threading.Lock()

    def recipe(self, wrapping: Wrapping, press: str = "", kind: Kind = "text") -> Recipe:
        """Return how chunks of a kind are compiled that are wrapped so, and compressed by a press of that name.

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
        """Return every chunk with its inputs. The store is asked once for all that are not resident.

        Raises:
            UnsupportedModality, InvalidUpload, NoAdapter: the inputs of a chunk cannot be made.
        """
        recipes = {
            (press, kind): self.recipe(policy.wrapping, press if policy.uses_chunks else "", kind)
            for press, kind in {(chunk.press, chunk.kind) for chunk in chunks}
        }
        keys = [KVKey.of(c.owner, c.key, self._model.digest, recipes[c.press, c.kind]) for c in chunks]
        sought = [self._on_device_or_in_memory(*one) for one in zip(chunks, keys, strict=True)]
        asked = [one for one in sought if one.resident is None and (one.inputs is None or policy.uses_chunks)]
        self._look_up(asked)
        if self._store is not None:
            self._store.touch([one.key for one in sought if one.resident is not None])
        if policy.uses_chunks and any(one.has_to_be_encoded for one in asked):
            # files are read beside the vision encoder and not only after it (MPIC, section 4.3)
            for one in asked:
                if one.stored is not None:
                    optional(one.stored, "read_ahead")
        linked = [self._linked(one, policy, arrived) for one in sought]
        if policy.wrapping.packet:
            for one in linked:
                assert self._adapter is not None  # or `recipe` refuses it
                one.packet = len(self._adapter)
        return linked

    def _on_device_or_in_memory(self, chunk: Chunk, key: KVKey) -> _Sought:
        resident = self._device.get(key)
        if resident is not None and resident.ready:
            return _Sought(chunk, key, resident, resident.inputs)
        return _Sought(chunk, key, None, self._remembered(chunk, key))

    def _look_up(self, asked: Sequence[_Sought]) -> None:
        """Ask the store for chunks. Those that are to be compressed by a press that can do it afterwards may be stored
        uncompressed."""
        if self._store is None or not asked:
            return
        found = self._store.find([one.key for one in asked])
        whole: dict[_Sought, KVKey] = {}
        for one in asked:
            one.stored = found.get(one.key)
            press = parse_press(one.key.recipe.press)
            if one.stored is None and press is not None and not press.needs_queries:
                recipe = replace(one.key.recipe, press="")
                whole[one] = KVKey.of(one.key.owner, one.key.chunk, one.key.model, recipe)
        uncompressed = self._store.find(list(whole.values())) if whole else {}
        for one, key in whole.items():
            one.stored = uncompressed.get(key)
            one.uncompressed = one.stored is not None

    def _linked(self, one: _Sought, policy: Policy, arrived: float) -> LinkedChunk:
        """Return a chunk as its request links it, with inputs from the nearest place that has them."""
        chunk, key = one.chunk, one.key
        if one.resident is not None:
            assert one.inputs is not None  # the resident's
            later = LaterChunk(self._store, key) if self._store is not None else None
            return LinkedChunk(chunk, key, one.inputs, later, "evicted")
        if one.inputs is not None and not policy.uses_chunks:
            return LinkedChunk(chunk, key, one.inputs, None, None)
        stored = one.stored
        # where the chunk is linked twice, its inputs were made a moment ago
        inputs = self._remembered(chunk, key) if one.inputs is None else one.inputs
        if inputs is None:
            inputs = self._read_inputs(stored, chunk, key)
            if inputs is None:
                stored, inputs = None, self.inputs(chunk, key, arrived)
            elif not key.recipe.packet:
                self._remember(chunk, inputs, arrived)
        reason = None
        if stored is None:
            reason = self._store.missing_reason(key) if self._store is not None else "new"
        elif not self._worth(stored, inputs):
            stored, reason = None, "slower"
        uncompressed = one.uncompressed and stored is not None
        return LinkedChunk(chunk, key, inputs, stored, reason, uncompressed=uncompressed)

    def _worth(self, stored: StoredChunk, inputs: ChunkInputs) -> bool:
        """Return whether to load a chunk rather than compute it, by the cost rule of its tier (``StoredChunk.worth``).
        Its inputs are read in any case: they save the vision encoder."""
        rate = self._seconds_per_token()
        return rate is None or optional(stored, "worth", rate * len(inputs)) is not False

    def stored(self, chunk: Chunk, key: KVKey) -> LinkedChunk | None:
        """Return a chunk as the tier below the device has it, if it is worth loading, or None."""
        stored = self._store.find([key]).get(key) if self._store is not None else None
        inputs = self._read_inputs(stored, chunk, key)
        if stored is None or inputs is None or not self._worth(stored, inputs):
            return None
        return LinkedChunk(chunk, key, inputs, stored, None)

    def _read_inputs(self, stored: StoredChunk | None, chunk: Chunk, key: KVKey) -> ChunkInputs | None:
        """Return the stored inputs, or None when the store turns out not to have them. Text needs no file, because its
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
        """Return the inputs of a chunk that is not stored.

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
        if not key.recipe.packet:
            return inputs
        assert self._adapter is not None
        return self._adapter.wrap(inputs, self._model.embed)

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
        """Decode a clip while images may be encoded, and then encode it."""
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
        """Drop the inputs of a deleted chunk, whose tombstone must exist already."""
        with self._lock:
            inputs = self._inputs.pop((chunk.owner, chunk.key), None)
            if inputs is not None:
                self._remembered_bytes -= inputs.nbytes
