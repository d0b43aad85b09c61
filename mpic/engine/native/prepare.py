"""Turning a request into a sequence, on the caller's thread: inputs of its chunks, its plan, and every refusal that
can be known without computing."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from mpic import memory
from mpic.engine.base import ChunkStore, GenerationRequest, StoredChunk
from mpic.engine.calls import reader
from mpic.engine.checks import check_context, check_prompt, check_sampling
from mpic.engine.deletions import Deletions
from mpic.engine.native import lanes
from mpic.engine.native.lanes import LinkedChunk, build_sequence
from mpic.engine.native.sampling import Sampler
from mpic.engine.native.scheduler import GROWTH, CompileRequest
from mpic.engine.native.stored import StoredLater
from mpic.engine.stream import Stream
from mpic.errors import (
    ContextLengthExceeded,
    CorruptFile,
    InvalidUpload,
    MPICError,
    NotFound,
    PoolTooSmall,
    UnsupportedModality,
    UnsupportedParameter,
)
from mpic.imaging.claims import LARGE_PIXELS
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKey, KVKey, Recipe
from mpic.kv.device import DeviceCache
from mpic.link.plan import DynamicPolicy, LinkPlan, Policy, SegmentShape, make_plan
from mpic.model.loaded import LoadedModel
from mpic.prompt.segments import Segment, TextSegment

log = logging.getLogger(__name__)

_REMEMBERED_BYTES = 512 << 20


class Preparer:
    """Resolves chunks to inputs (remembered, stored, or made by tokenizer and vision encoder) and makes plans."""

    def __init__(
        self, model: LoadedModel, store: ChunkStore | None, device: DeviceCache, deletions: Deletions
    ) -> None:
        self._model, self._store, self._device, self._pool = model, store, device, device.pool
        self._deletions = deletions
        self._remembered_bytes = 0
        self._inputs: OrderedDict[tuple[str, ChunkKey], ChunkInputs] = OrderedDict()
        self._lock = threading.Lock()
        self._encoder = threading.Lock()

    def recipe(self, sink: int) -> Recipe:
        return Recipe(self._model.info.dtype, "raw", sink, self._model.preprocessing)

    def key(self, chunk: Chunk, sink: int) -> KVKey:
        return KVKey(chunk.owner, chunk.key, self._model.digest, self.recipe(sink))

    def sequence(self, request: GenerationRequest, stream: Stream, arrived: float) -> lanes.Sequence:
        """Raises EmptyPrompt, UnsupportedParameter, UnsupportedModality, ContextLengthExceeded, PoolTooSmall."""
        check_sampling(request.sampling)
        segments, policy = request.prompt.segments, request.policy
        check_prompt(request.prompt)
        if request.retrieval is not None and (policy.two_step or isinstance(policy, DynamicPolicy)):
            raise UnsupportedParameter(
                f"policy {policy} cannot take references while decoding", param="mpic.policy"
            )
        own = sum(len(segment) for segment in segments if isinstance(segment, TextSegment))
        check_context(own, None, self._model.context_length)  # before anything is decoded or encoded
        linked = self.link(request.prompt.chunks, policy, arrived)
        shapes = self.shapes(segments, linked, policy)
        plan = make_plan(shapes, policy)
        sequence = build_sequence(request, plan, linked, self._model.mrope)
        sequence.shapes = shapes
        if isinstance(policy, DynamicPolicy):
            chunk_tokens = sum(slot.length for slot in plan.slots)
            sequence.undecided = plan.length - chunk_tokens < plan.own < plan.length
            sequence.needed = linked if sequence.undecided else sequence.needed
        sequence.stream, sequence.arrived = stream, arrived
        sequence.max_tokens = self._max_tokens(request, plan.length, sequence)
        sequence.sampler = Sampler(request.sampling)
        sequence.detokenizer = reader(self._model.tokenizer, request)
        usage = sequence.usage
        usage.policy = policy.name
        usage.prompt_tokens = plan.length
        usage.reused = plan.length - plan.own
        usage.recomputed = sum(slot.length for slot in plan.slots) - usage.reused
        return sequence

    @staticmethod
    def shapes(
        segments: tuple[Segment, ...], linked: list[LinkedChunk], policy: Policy
    ) -> list[SegmentShape]:
        """What planning needs of segments whose chunks are ``linked``, in order."""
        inputs = iter(linked)
        shapes = []
        for segment in segments:
            if isinstance(segment, TextSegment):
                shapes.append(SegmentShape(len(segment), len(segment), False))
            else:
                found = next(inputs).inputs
                size = (len(found), found.extent) if policy.context else (0, 0)
                shapes.append(SegmentShape(*size, True))
        return shapes

    def room(self, plan: LinkPlan, needed: list[LinkedChunk]) -> int:
        """Tokens that can still be said once a request has been extended to ``plan``.

        Raises:
            ContextLengthExceeded, PoolTooSmall: none.
        """
        context = self._model.context_length
        if plan.length >= context:
            raise ContextLengthExceeded("the references do not fit the model's context")
        for linked in needed:
            self._check_compiles(len(linked.inputs), linked.key.recipe.sink)
        pages = self._chunk_pages(needed)
        room = (self._pool.pages - pages) * self._pool.page_size - plan.own
        if room < 1:
            raise PoolTooSmall("the references do not fit the pool")
        return min(context - plan.length, room)

    def _max_tokens(self, request: GenerationRequest, length: int, sequence: lanes.Sequence) -> int:
        """The answer's limit, from the request, the context and the pool."""
        context, asked = self._model.context_length, request.sampling.max_tokens
        check_context(length, asked, context)
        for linked in sequence.needed:
            self._check_compiles(len(linked.inputs), linked.key.recipe.sink)
        chunk_pages = self._chunk_pages(sequence.needed)
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

    def _chunk_pages(self, needed: list[LinkedChunk]) -> int:
        """Pages of the chunks a request maps, each once."""
        lengths = {linked.key: len(linked.inputs) + linked.key.recipe.sink for linked in needed}
        return sum(self._pool.pages_for(n) for n in lengths.values())

    def _check_compiles(self, tokens: int, sink: int) -> None:
        if tokens + sink > self._model.context_length:
            raise ContextLengthExceeded(
                f"a chunk has {tokens} tokens{f' and {sink} before it' if sink else ''}; "
                f"the model's context is {self._model.context_length}",
                prompt_tokens=tokens,
                context_length=self._model.context_length,
            )

    def compile_request(
        self, chunk: Chunk, sink: int, future: Future[int], arrived: float
    ) -> CompileRequest | None:
        """The request to queue, or None when the chunk is stored already (the future is then done)."""
        key = self.key(chunk, sink)
        stored = self._store.open(key) if self._store is not None else None
        inputs = stored.inputs if stored is not None else self._remembered(chunk) or self._make(chunk)
        n = len(inputs)
        if stored is not None:
            future.set_result(n)
            return None
        self._remember(chunk, inputs, arrived)
        request = CompileRequest(key, inputs, future, arrived)
        self._check_compiles(n, sink)
        if self._pool.pages_for(n + sink) > self._pool.pages:
            raise self.too_large(request, self._pool.pages)
        return request

    def too_large(self, item: lanes.Sequence | CompileRequest, available: int) -> MPICError:
        """The error for something that does not fit even into an otherwise idle pool."""
        if isinstance(item, CompileRequest):
            pages = self._pool.pages_for(len(item.inputs) + item.key.recipe.sink)
        else:
            pages = self._pool.pages_for(len(item) + min(item.max_tokens - item.generated, GROWTH))
            pages += self._chunk_pages(item.needed)
        return PoolTooSmall(
            f"{pages} pages of {self._pool.page_size} tokens are needed and {available} can be had",
            pages_needed=pages,
            pages=self._pool.pages,
        )

    def link(self, chunks: Sequence[Chunk], policy: Policy, arrived: float) -> list[LinkedChunk]:
        """Every chunk's inputs from the nearest place: the device's resident chunk, memory, the store, or made anew.
        The store is asked once for all that are not resident."""
        recipe = self.recipe(policy.sink)
        keys = [KVKey.of(chunk.owner, chunk.key, self._model.digest, recipe) for chunk in chunks]
        residents = [self._device.get(key) for key in keys]
        known = [
            r.inputs if r is not None and r.ready else self._remembered(chunk)
            for chunk, r in zip(chunks, residents, strict=True)
        ]
        asked = [
            key
            for key, resident, inputs in zip(keys, residents, known, strict=True)
            if (resident is None or not resident.ready) and (inputs is None or policy.uses_chunks)
        ]
        found = self._store.find(asked) if self._store is not None and asked else {}
        linked = []
        for chunk, key, resident, inputs in zip(chunks, keys, residents, known, strict=True):
            if resident is not None and resident.ready:
                later = StoredLater(self._store, key, inputs) if self._store is not None else None
                linked.append(LinkedChunk(chunk, key, inputs, later, "evicted"))
            elif inputs is not None and not policy.uses_chunks:
                linked.append(LinkedChunk(chunk, key, inputs, None, None))
            else:
                linked.append(self._link_stored(chunk, key, inputs, found.get(key), arrived))
        return linked

    def _link_stored(
        self, chunk: Chunk, key: KVKey, inputs: ChunkInputs | None, stored: StoredChunk | None, arrived: float
    ) -> LinkedChunk:
        if inputs is None:
            inputs = self._remembered(chunk)  # linked twice, it was made a moment ago
        if inputs is None:
            inputs = self._read_inputs(stored, chunk)
            if inputs is None:
                stored, inputs = None, self._make(chunk)
            self._remember(chunk, inputs, arrived)
        reason = None
        if stored is None:
            reason = self._store.missing_reason(key) if self._store is not None else "new"
        return LinkedChunk(chunk, key, inputs, stored, reason)

    def _read_inputs(self, stored: StoredChunk | None, chunk: Chunk) -> ChunkInputs | None:
        """What the store has, or None when it turns out that it has not. Text needs no file: its chunk has the ids."""
        if stored is None:
            return None
        if chunk.token_ids:
            return self._make(chunk)
        try:
            return stored.inputs
        except (NotFound, CorruptFile, OSError) as error:
            log.warning("chunk %s cannot be used as it is stored: %s", chunk.key, error)
            return None

    def stored(self, chunk: Chunk, key: KVKey) -> LinkedChunk | None:
        """A chunk as the tier below the device has it, or None."""
        stored = self._store.find([key]).get(key) if self._store is not None else None
        inputs = self._read_inputs(stored, chunk)
        return LinkedChunk(chunk, key, inputs, stored, None) if inputs is not None else None

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

    def _remembered(self, chunk: Chunk) -> ChunkInputs | None:
        with self._lock:
            found = self._inputs.get((chunk.owner, chunk.key))
            if found is not None:
                self._inputs.move_to_end((chunk.owner, chunk.key))
            return found

    def _remember(self, chunk: Chunk, inputs: ChunkInputs, arrived: float) -> None:
        with self._lock:
            name = (chunk.owner, chunk.key)
            if name in self._inputs or self._deletions.since(arrived, *name):
                return
            self._inputs[name] = inputs
            self._remembered_bytes += inputs.nbytes
            while len(self._inputs) > 1 and self._remembered_bytes > _REMEMBERED_BYTES:
                self._remembered_bytes -= self._inputs.popitem(last=False)[1].nbytes

    def forget(self, chunk: Chunk) -> None:
        """The deletion must have been marked before."""
        with self._lock:
            inputs = self._inputs.pop((chunk.owner, chunk.key), None)
            if inputs is not None:
                self._remembered_bytes -= inputs.nbytes
