"""Prepares requests for the engine on the caller's thread: makes their plans, and refuses what is known to fail without
computing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from mpic.engine.accounting import count_prompt, oversized_chunk, segment_shapes
from mpic.engine.base import GenerationRequest
from mpic.engine.checks import check_context, check_grammar, check_prompt, check_sampling
from mpic.engine.detokenize import detokenizer_for
from mpic.engine.grammar import Constraints
from mpic.engine.native.batch import CompileRequest
from mpic.engine.native.linker import ChunkLinker
from mpic.engine.native.presser import check_press
from mpic.engine.native.request import LinkedChunk, LinkedPrompt, Request, mapped_chunks, own_tokens
from mpic.engine.native.sampling import Sampler
from mpic.engine.native.scheduler import GROWTH
from mpic.engine.stream import DeltaStream
from mpic.errors import ContextLengthExceeded, MPICError, PoolTooSmall, UnsupportedParameter
from mpic.kv.chunk import Chunk
from mpic.kv.pool import Pool
from mpic.kv.store import ChunkStore
from mpic.link import DynamicPolicy, LinkPlan, Policy, SegmentShape, Wrapping, make_plan
from mpic.link.pressing import check_presses
from mpic.model.bidirectional import Scope
from mpic.model.loaded import LoadedModel
from mpic.prompt.segments import Segment, TextSegment


def shapes_of(
    segments: Sequence[Segment], chunks: Sequence[LinkedChunk], policy: Policy, scope: Scope | None = None
) -> list[SegmentShape]:
    """Return the shapes of segments, from which the plan is made. ``chunks`` are the chunk segments in order.

    Args:
        scope: the tokens that attend to each other in both directions.
    """
    sizes = ((len(linked.inputs), linked.inputs.rotary_length) for linked in chunks)
    shapes, following = segment_shapes(segments, sizes, policy), iter(chunks)
    if scope is not Scope.IMAGE:
        return shapes
    return [
        shape._replace(bidirectional=shape.is_chunk and next(following).inputs.embeds is not None)
        for shape in shapes
    ]


class RequestBuilder:
    """Builds requests and compile requests, or refuses them. Thread-safe."""

    def __init__(self, model: LoadedModel, store: ChunkStore | None, linker: ChunkLinker, pool: Pool) -> None:
        self._model, self._store, self.linker, self._pool = model, store, linker, pool
        self.constraints = Constraints(model.tokenizer, model.eos_ids, model.text_config.vocab_size)

    @property
    def scope(self) -> Scope | None:
        """The tokens of the model that attend to each other in both directions."""
        return self._model.scope

    @property
    def whole_prompt(self) -> bool:
        """True where all tokens of a prompt attend to each other in both directions."""
        return self.scope is Scope.PROMPT

    def build(self, spec: GenerationRequest, stream: DeltaStream, arrived: float) -> Request:
        """Return the request, before any computation.

        Raises:
            EmptyPrompt, UnsupportedParameter, UnsupportedModality, NoAdapter, ContextLengthExceeded, PoolTooSmall,
                InvalidGrammar: it cannot be answered.
        """
        check_sampling(spec.sampling)
        check_grammar(spec)
        segments, policy = spec.prompt.segments, spec.policy
        check_prompt(spec.prompt)
        if spec.retrieval is not None and (policy.two_step or isinstance(policy, DynamicPolicy)):
            raise UnsupportedParameter(
                f"policy {policy} cannot take references while decoding", param="mpic.policy"
            )
        if spec.retrieval is not None and self.whole_prompt:
            raise UnsupportedParameter(
                f"model {self._model.info.name} cannot take references while decoding: its prompt attends to itself "
                "in both directions",
                param="mpic.retrieval",
            )
        text = sum(len(segment) for segment in segments if isinstance(segment, TextSegment))
        check_context(text, None, self._model.context_length)  # before anything is decoded or encoded
        self.check_presses(spec.prompt.chunks, policy)
        constraint = self.constraints.begin(spec.grammar) if spec.grammar is not None else None
        chunks = self.linker.link(spec.prompt.chunks, policy, arrived)
        shapes = shapes_of(segments, chunks, policy, self._model.scope)
        plan = make_plan(shapes, policy, whole_prompt=self.whole_prompt)
        chunk_tokens = sum(place.length for place in plan.places)
        chooses = isinstance(policy, DynamicPolicy) and plan.length - chunk_tokens < plan.own < plan.length
        prompt = LinkedPrompt(
            segments,
            plan,
            chunks,
            needed=chunks if chooses else mapped_chunks(plan, chunks),
            undecided=tuple(shapes) if chooses else (),
        )
        own = own_tokens(segments, plan, chunks, self._model.mrope)
        request = Request(
            own.ids,
            own.positions,
            own.embedded,
            spec=spec,
            prompt=prompt,
            items=own.items,
            stream=stream,
            sampler=Sampler(spec.sampling),
            detokenizer=detokenizer_for(self._model.tokenizer, spec),
            constraint=constraint,
            arrived=arrived,
            max_tokens=self._max_tokens(spec, prompt),
        )
        request.sampler.seen.read(segments)
        request.usage.policy = policy.name
        count_prompt(request.usage, plan)
        return request

    def compile_request(
        self, chunk: Chunk, wrapping: Wrapping, future: Future[int], arrived: float
    ) -> CompileRequest | None:
        """Return the request to queue, or None when the chunk is stored already (the future is then done).

        Raises:
            UnsupportedModality, InvalidUpload, NoAdapter: the chunk's inputs cannot be made.
            ContextLengthExceeded, PoolTooSmall: it does not fit.
        """
        check_press(self._model, chunk.press)
        key = self.linker.key(chunk, wrapping)
        stored = self._store.open(key) if self._store is not None else None
        if stored is not None:
            future.set_result(len(stored.inputs))
            return None
        request = CompileRequest(key, self.linker.inputs(chunk, key, arrived), future, arrived)
        self._check_compiles(len(request.inputs), wrapping.sink)
        if self._pool.pages_for(len(request.inputs) + wrapping.sink) > self._pool.pages:
            raise self.too_large(request, self._pool.pages)
        return request

    def check_presses(self, chunks: Sequence[Chunk], policy: Policy) -> None:
        """Raise UnsupportedParameter when the policy or the model cannot be combined with the press of a chunk."""
        check_presses(policy, (chunk.press for chunk in chunks))
        if policy.uses_chunks:
            for chunk in chunks:
                check_press(self._model, chunk.press)

    def tokens_left(self, plan: LinkPlan, needed: list[LinkedChunk]) -> int:
        """Return how many tokens can still be generated once a request has been extended to ``plan``.

        Raises:
            ContextLengthExceeded, PoolTooSmall: no token can be generated any more.
        """
        context = self._model.context_length
        if plan.length >= context:
            raise ContextLengthExceeded("the references do not fit the model's context")
        left = self._slots_left(plan, needed)
        if left < 1:
            raise PoolTooSmall("the references do not fit the pool")
        return min(context - plan.length, left)

    def _max_tokens(self, spec: GenerationRequest, prompt: LinkedPrompt) -> int:
        """Return the answer's limit, from the request, the context and the pool."""
        plan, context, asked = prompt.plan, self._model.context_length, spec.sampling.max_tokens
        check_context(plan.length, asked, context)
        left = self._slots_left(plan, prompt.needed)
        if left < (asked or 1):
            pages = self._chunk_pages(prompt.needed) + self._pool.pages_for(plan.own + (asked or 1))
            raise PoolTooSmall(
                f"the request needs {pages} pages of {self._pool.page_size} tokens; the pool has {self._pool.pages}",
                param="messages",
                pages_needed=pages,
                pages=self._pool.pages,
            )
        return asked if asked is not None else min(context - plan.length, left)

    def _slots_left(self, plan: LinkPlan, needed: list[LinkedChunk]) -> int:
        """Return how many slots would be left in a pool that holds only these chunks and a plan's own tokens."""
        for linked in needed:
            self._check_compiles(len(linked.inputs), linked.key.recipe.sink)
        return (self._pool.pages - self._chunk_pages(needed)) * self._pool.page_size - plan.own

    def _chunk_pages(self, needed: list[LinkedChunk]) -> int:
        """Return the pages of the chunks that a request maps, each counted once."""
        lengths = {linked.key: len(linked.inputs) + linked.key.recipe.sink for linked in needed}
        return sum(self._pool.pages_for(n) for n in lengths.values())

    def _check_compiles(self, tokens: int, sink: int) -> None:
        if tokens + sink > self._model.context_length:
            raise oversized_chunk(tokens, sink, self._model.context_length, tokens)

    def too_large(self, item: Request | CompileRequest, available: int) -> MPICError:
        """Return the error for something that does not fit even into an otherwise idle pool."""
        if isinstance(item, CompileRequest):
            pages = self._pool.pages_for(len(item.inputs) + item.key.recipe.sink)
        else:
            pages = self._pool.pages_for(len(item) + min(item.left, GROWTH))
            pages += self._chunk_pages(item.prompt.needed)
        return PoolTooSmall(
            f"{pages} pages of {self._pool.page_size} tokens are needed and {available} can be had",
            pages_needed=pages,
            pages=self._pool.pages,
        )
