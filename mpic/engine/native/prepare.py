"""Turning a request into a sequence, on the caller's thread: inputs of its chunks, its plan, and every refusal that
can be known without computing."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future

import torch

from mpic.engine.base import ChunkStore, GenerationRequest
from mpic.engine.native.lanes import LinkedChunk, Sequence, build_sequence
from mpic.engine.native.sampling import Detokenizer, Sampler
from mpic.engine.native.scheduler import GROWTH, CompileRequest
from mpic.engine.native.stream import Stream
from mpic.errors import (
    ContextLengthExceeded,
    CorruptFile,
    EmptyPrompt,
    InvalidUpload,
    MPICError,
    PoolTooSmall,
    UnsupportedModality,
)
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKey, KVKey, Recipe
from mpic.kv.device import DeviceCache
from mpic.link.plan import Policy, SegmentShape, make_plan
from mpic.model.loaded import LoadedModel
from mpic.prompt.segments import TextSegment

_REMEMBERED_BYTES = 512 << 20


class StoredLater:
    """A stored chunk that is opened only if it has to be read: while its chunk is resident nobody touches the disk."""

    def __init__(self, store: ChunkStore, key: KVKey, inputs: ChunkInputs) -> None:
        self.inputs, self._store, self._key = inputs, store, key

    def read_into(self, destination: torch.Tensor) -> None:
        """Raises CorruptFile when it is not there any more."""
        stored = self._store.open(self._key)
        if stored is None:
            raise CorruptFile("the chunk is no longer stored")
        stored.read_into(destination)


class Preparer:
    """Resolves chunks to inputs (remembered, stored, or made by tokenizer and vision encoder) and makes plans."""

    def __init__(self, model: LoadedModel, store: ChunkStore | None, device: DeviceCache) -> None:
        self._model, self._store, self._device, self._pool = model, store, device, device.pool
        self._inputs: OrderedDict[tuple[str, ChunkKey], ChunkInputs] = OrderedDict()
        self._lock = threading.Lock()
        self._encoder = threading.Lock()

    def recipe(self, sink: int) -> Recipe:
        return Recipe(self._model.info.dtype, "raw", sink, self._model.preprocessing)

    def key(self, chunk: Chunk, sink: int) -> KVKey:
        return KVKey(chunk.owner, chunk.key, self._model.digest, self.recipe(sink))

    def sequence(self, request: GenerationRequest, stream: Stream) -> Sequence:
        """Raises EmptyPrompt, UnsupportedModality, ContextLengthExceeded, PoolTooSmall."""
        began = time.monotonic()
        segments = request.prompt.segments
        if not segments or not isinstance(segments[-1], TextSegment) or len(segments[-1]) == 0:
            raise EmptyPrompt("a prompt must end with text of its own", param="messages")
        linked = [self._link(chunk, request.policy) for chunk in request.prompt.chunks]
        inputs = iter(linked)
        shapes = []
        for segment in segments:
            if isinstance(segment, TextSegment):
                shapes.append(SegmentShape(len(segment), len(segment), False))
            else:
                found = next(inputs).inputs
                shapes.append(SegmentShape(len(found), found.extent, True))
        plan = make_plan(shapes, request.policy)
        sequence = build_sequence(request, plan, linked, self._model.mrope)
        sequence.stream, sequence.arrived = stream, began
        sequence.max_tokens = self._max_tokens(request, plan.length, sequence)
        sequence.sampler = Sampler(request.sampling)
        sequence.detokenizer = Detokenizer(self._model.tokenizer, request.sampling.stop)
        usage = sequence.usage
        usage.policy = request.policy.name
        usage.prompt_tokens = plan.length
        usage.reused = plan.length - plan.own
        usage.recomputed = sum(slot.length for slot in plan.slots) - usage.reused
        return sequence

    def _max_tokens(self, request: GenerationRequest, length: int, sequence: Sequence) -> int:
        """The answer's limit, from the request, the context and the pool."""
        context, asked = self._model.context_length, request.sampling.max_tokens
        if length >= context or (asked is not None and length + asked > context):
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens{'' if asked is None else f' and {asked} were asked for'}; "
                f"the model's context is {context}",
                param="messages",
                prompt_tokens=length,
                context_length=context,
            )
        chunk_pages = sum(
            self._pool.pages_for(len(linked.inputs) + linked.key.recipe.sink)
            for linked in {linked.key: linked for linked in sequence.needed}.values()
        )
        room = (self._pool.pages - chunk_pages) * self._pool.page_size - sequence.prompt_own
        if room < (asked or 1):
            pages = chunk_pages + self._pool.pages_for(sequence.prompt_own + (asked or 1))
            raise PoolTooSmall(
                f"the request needs {pages} pages of {self._pool.page_size} tokens; the pool has {self._pool.pages}",
                param="messages",
                pages_needed=pages,
                pages=self._pool.pages,
            )
        return asked if asked is not None else min(context - length, room)

    def compile_request(self, chunk: Chunk, sink: int, future: Future[int]) -> CompileRequest | None:
        """The request to queue, or None when the chunk is stored already (the future is then done)."""
        key = self.key(chunk, sink)
        stored = self._store.open(key) if self._store is not None else None
        inputs = stored.inputs if stored is not None else self._remembered(chunk) or self._make(chunk)
        n = len(inputs)
        if stored is not None:
            future.set_result(n)
            return None
        self._remember(chunk, inputs)
        request = CompileRequest(key, inputs, future)
        if n + sink > self._model.context_length:
            raise ContextLengthExceeded(
                f"the chunk has {n} tokens; the model's context is {self._model.context_length}",
                prompt_tokens=n,
                context_length=self._model.context_length,
            )
        if self._pool.pages_for(n + sink) > self._pool.pages:
            raise self.too_large(request, self._pool.pages)
        return request

    def too_large(self, item: Sequence | CompileRequest, available: int) -> MPICError:
        """The error for something that does not fit even into an otherwise idle pool."""
        if isinstance(item, CompileRequest):
            pages = self._pool.pages_for(len(item.inputs) + item.key.recipe.sink)
        else:
            pages = self._pool.pages_for(len(item) + min(item.max_tokens - item.generated, GROWTH))
            keys = {linked.key: linked for linked in item.needed}
            pages += sum(self._pool.pages_for(len(i.inputs) + i.key.recipe.sink) for i in keys.values())
        return PoolTooSmall(
            f"{pages} pages of {self._pool.page_size} tokens are needed and {available} can be had",
            pages_needed=pages,
            pages=self._pool.pages,
        )

    def _link(self, chunk: Chunk, policy: Policy) -> LinkedChunk:
        """Inputs from the nearest place: the device's resident chunk, memory, the store, or made anew."""
        key = self.key(chunk, policy.sink)
        resident = self._device.get(key)
        if resident is not None and resident.ready:
            later = StoredLater(self._store, key, resident.inputs) if self._store is not None else None
            return LinkedChunk(chunk, key, resident.inputs, later, "evicted")
        remembered = self._remembered(chunk)
        if remembered is not None and not policy.uses_chunks:
            return LinkedChunk(chunk, key, remembered, None, None)
        stored = self._store.open(key) if self._store is not None else None
        inputs = remembered or (stored.inputs if stored is not None else self._make(chunk))
        if remembered is None:
            self._remember(chunk, inputs)
        reason = None
        if stored is None:
            reason = self._store.missing_reason(key) if self._store is not None else "new"
        return LinkedChunk(chunk, key, inputs, stored, reason)

    def _make(self, chunk: Chunk) -> ChunkInputs:
        if chunk.token_ids is not None:
            if not chunk.token_ids:
                raise InvalidUpload("a text chunk has no tokens")
            return self._model.text_inputs(chunk.token_ids)
        if chunk.load_image is None:
            raise UnsupportedModality(f"chunk {chunk.key} has neither tokens nor an image")
        with self._encoder:
            return self._model.image_inputs(chunk.load_image())

    def _remembered(self, chunk: Chunk) -> ChunkInputs | None:
        with self._lock:
            found = self._inputs.get((chunk.owner, chunk.key))
            if found is not None:
                self._inputs.move_to_end((chunk.owner, chunk.key))
            return found

    def _remember(self, chunk: Chunk, inputs: ChunkInputs) -> None:
        with self._lock:
            self._inputs[chunk.owner, chunk.key] = inputs
            while len(self._inputs) > 1 and sum(i.nbytes for i in self._inputs.values()) > _REMEMBERED_BYTES:
                self._inputs.popitem(last=False)

    def forget(self, chunk: Chunk) -> None:
        with self._lock:
            self._inputs.pop((chunk.owner, chunk.key), None)
