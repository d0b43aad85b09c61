"""Turns the segments of a request into a prompt for vLLM: a plain one with images, or token ids and a link order.

This runs on the caller's thread, and makes every refusal that needs no computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpic.engine.accounting import segment_shapes
from mpic.engine.base import GenerationRequest
from mpic.engine.checks import check_context, check_grammar, check_prompt, check_sampling
from mpic.engine.vllm.frontend.chunks import LinkedChunk
from mpic.engine.vllm.frontend.client import NO_CLIPS, VLLMClient
from mpic.engine.vllm.frontend.compiler import ChunkCompiler
from mpic.engine.vllm.frontend.prompts import VLLMPrompt
from mpic.engine.vllm.wire import LinkOrder, make_link_order
from mpic.errors import UnsupportedModality, UnsupportedParameter
from mpic.kv.chunk import Chunk
from mpic.link import LinkPlan, Policy, Ranges, make_plan
from mpic.link.engines import NO_PRESS, refusal
from mpic.press import parse_press
from mpic.prompt.segments import Segment, TextSegment


@dataclass(eq=False)
class PreparedPrompt:
    """A prompt, laid out.

    Args:
        linked: its chunks, in order.
        plan: its plan. While an image's rotary length is unknown, only the plan's rotary positions are wrong.
        plain: the prompt for a policy that links nothing; None for a link.
    """

    segments: tuple[Segment, ...]
    linked: list[LinkedChunk]
    plan: LinkPlan
    plain: VLLMPrompt | None

    @property
    def needed(self) -> list[LinkedChunk]:
        """The chunks whose files a link needs: those that the plan maps, and images, whose embeddings are in them."""
        if self.plain is not None:
            return []
        mapped = {span.source for span in self.plan.spans}
        return [one for i, one in enumerate(self.linked) if i in mapped or one.chunk.kind == "image"]

    def ids(self) -> list[int]:
        """Return the tokens of the whole prompt."""
        chunks = iter(self.linked)
        return [
            token
            for segment in self.segments
            for token in (segment.token_ids if isinstance(segment, TextSegment) else next(chunks).ids)
        ]


class PromptPreparer:
    """Prepares prompts; see the module's docstring.

    Args:
        sharing: links map the engine's one copy of each chunk where they can (``order``).
    """

    def __init__(self, compiler: ChunkCompiler, client: VLLMClient, sharing: bool = False) -> None:
        self._compiler, self._client, self._sharing = compiler, client, sharing

    def check(self, request: GenerationRequest) -> None:
        """Raise EmptyPrompt, UnsupportedModality or UnsupportedParameter for a request that this engine can never
        answer."""
        check_sampling(request.sampling)
        check_grammar(request)
        if request.retrieval is not None and request.sampling.counts_answers:
            raise UnsupportedParameter(
                "vLLM forgets the words of an answer that a search interrupts: use mode 'always'",
                param="mpic.retrieval.mode",
            )
        check_prompt(request.prompt)
        if any(chunk.kind == "video" for chunk in request.prompt.chunks):
            raise UnsupportedModality(NO_CLIPS, param="messages")
        refused = refusal(request.policy, "vllm")
        if refused is not None:
            raise UnsupportedParameter(refused, param="mpic.policy")
        if request.policy.uses_chunks and any(parse_press(chunk.press) for chunk in request.prompt.chunks):
            raise UnsupportedParameter(NO_PRESS.format(engine="vllm"), param="mpic.press")

    def prepare(
        self,
        segments: tuple[Segment, ...],
        policy: Policy,
        salt: str,
        asked: int | None,
        known: Sequence[LinkedChunk] = (),
    ) -> PreparedPrompt:
        """Lay out a prompt.

        Args:
            salt: cache salt for the blocks of a plain prompt.
            asked: tokens of the answer that must fit after the prompt, if the request gives a number.
            known: the prompt's first chunks, if they have already been linked.

        Raises:
            ContextLengthExceeded, InvalidImage, UnsupportedModality: the prompt is too long, or has an image that
                cannot be used.
        """
        chunks = [segment.chunk for segment in segments if not isinstance(segment, TextSegment)]
        own = sum(len(segment) for segment in segments if isinstance(segment, TextSegment))
        check_context(own, None, self._client.context)  # checked before anything is encoded
        plain = None
        if policy.exact or not policy.context:
            plain, linked = self._plain(segments, policy.context, chunks, salt)
        else:
            linked = [*known, *self._compiler.link(chunks[len(known) :], policy)]
        prepared = PreparedPrompt(segments, linked, self.plan(segments, linked, policy), plain)
        check_context(prepared.plan.length, asked, self._client.context)
        return prepared

    def _plain(
        self, segments: Sequence[Segment], shown: bool, chunks: Sequence[Chunk], salt: str
    ) -> tuple[VLLMPrompt, list[LinkedChunk]]:
        """Return a prompt in which chunks are computed like text, or left out unless they are ``shown``."""
        parts: list[Sequence[int] | Chunk] = []
        for segment in segments:
            if isinstance(segment, TextSegment):
                parts.append(segment.token_ids)
            elif shown:
                parts.append(segment.chunk)
        prompt = self._client.wait(self._client.render(parts, salt))
        images = iter(prompt.images)
        linked = []
        for chunk in chunks:
            ids = chunk.token_ids or ()
            if chunk.token_ids is None and shown:
                first, n = next(images)
                ids = tuple(prompt.ids[first : first + n])
            linked.append(LinkedChunk(chunk, self._compiler.key(chunk), ids, len(ids)))
        return prompt, linked

    @staticmethod
    def plan(
        segments: Sequence[Segment],
        linked: Sequence[LinkedChunk],
        policy: Policy,
        decided: Sequence[Ranges] | None = None,
    ) -> LinkPlan:
        """Return the plan of segments whose chunks are ``linked``.

        Args:
            decided: the ranges of each chunk that are recomputed; None asks the policy.
        """
        sizes = ((one.tokens, one.rotary_length or one.tokens) for one in linked)
        return make_plan(segment_shapes(segments, sizes, policy), policy, decided)

    def order(self, prepared: PreparedPrompt, answer: int, copied: bool = False) -> LinkOrder:
        """Return the link order of a prompt whose needed chunks have files.

        Where chunks are shared, a link is still copied in two cases: its policy leaves holes in chunks, which would
        split them into many ranges for attention; or its chunks (in separate blocks), its own tokens and its answer
        need more blocks than there are.

        Args:
            answer: maximum tokens of the answer.
            copied: copy the chunks, because the prompt must have all of their tokens.
        """
        needed = set(map(id, prepared.needed))
        files = [self._compiler.files.file(one) if id(one) in needed else None for one in prepared.linked]
        plan, shared = prepared.plan, self._sharing and not copied
        if shared:
            chunks = {span.source: prepared.linked[span.source] for span in plan.spans}
            tokens = {one.key: one.tokens for one in chunks.values()}
            blocks = sum(map(self._blocks, tokens.values())) + self._blocks(plan.own + answer)
            shared = len(plan.spans) == len(chunks) and blocks < self._client.blocks
        return make_link_order(plan, files, shared)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._client.block_size)

    def room(self, prepared: PreparedPrompt) -> int:
        """Return how many tokens can be generated after a prompt."""
        return self._client.context - prepared.plan.length
