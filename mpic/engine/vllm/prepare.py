"""Turning segments into what vLLM is asked: a plain prompt with images, or token ids and a link order. On the caller's
thread, with every refusal that can be known without computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpic.engine.base import GenerationRequest
from mpic.engine.checks import check_context, check_prompt, check_sampling
from mpic.engine.vllm.chunks import Chunks, Linked
from mpic.engine.vllm.model import Described
from mpic.engine.vllm.talk import Rendered, Talk
from mpic.engine.vllm.wire import LinkOrder, order_of
from mpic.errors import UnsupportedParameter
from mpic.kv.chunk import Chunk
from mpic.link.plan import DynamicPolicy, LinkPlan, Policy, Ranges, SegmentShape, make_plan
from mpic.prompt.segments import Segment, TextSegment


@dataclass(eq=False)
class Prepared:
    """A prompt, laid out.

    Args:
        linked: its chunks, in order.
        plan: of all of it. While an image's extent is not known, right in everything but rotary positions.
        plain: for policies that link nothing; None for a link.
    """

    segments: tuple[Segment, ...]
    linked: list[Linked]
    plan: LinkPlan
    plain: Rendered | None

    @property
    def needed(self) -> list[Linked]:
        """Chunks whose file a link needs: images (their embeddings are in it), and what the plan maps."""
        if self.plain is not None:
            return []
        mapped = {span.chunk for span in self.plan.spans}
        return [one for i, one in enumerate(self.linked) if i in mapped or one.chunk.kind == "image"]

    def ids(self) -> list[int]:
        """The whole prompt's tokens."""
        following = iter(self.linked)
        return [
            token
            for segment in self.segments
            for token in (segment.token_ids if isinstance(segment, TextSegment) else next(following).ids)
        ]


class Preparer:
    """See the module."""

    def __init__(self, model: Described, chunks: Chunks, talk: Talk) -> None:
        self._model, self._chunks, self._talk = model, chunks, talk

    def check(self, request: GenerationRequest) -> None:
        """Raises EmptyPrompt, UnsupportedParameter: what this engine never answers."""
        check_sampling(request.sampling)
        check_prompt(request.prompt)
        policy = request.policy
        if isinstance(policy, DynamicPolicy) or policy.two_step:
            why = (
                "it looks at keys and values before it decides"
                if isinstance(policy, DynamicPolicy)
                else "it takes two steps"
            )
            raise UnsupportedParameter(
                f"policy {policy} does not run on the vllm engine: {why}. Use another policy, or engine = native",
                param="mpic.policy",
            )

    def prepare(
        self,
        segments: tuple[Segment, ...],
        policy: Policy,
        salt: str,
        asked: int | None,
        known: Sequence[Linked] = (),
    ) -> Prepared:
        """Lay out a prompt.

        Args:
            salt: of a plain prompt's blocks.
            asked: tokens that must fit behind it, if a number was asked for.
            known: its first chunks, when they have been linked already.

        Raises:
            ContextLengthExceeded, InvalidImage, UnsupportedModality.
        """
        chunks = [segment.chunk for segment in segments if not isinstance(segment, TextSegment)]
        own = sum(len(segment) for segment in segments if isinstance(segment, TextSegment))
        check_context(own, None, self._talk.context)  # before anything is encoded
        plain = None
        if policy.exact or not policy.context:
            plain, linked = self._plain(segments, policy.context, chunks, salt)
        else:
            linked = [*known, *self._chunks.link(chunks[len(known) :], policy)]
        prepared = Prepared(segments, linked, self.plan(segments, linked, policy), plain)
        check_context(prepared.plan.length, asked, self._talk.context)
        return prepared

    def _plain(
        self, segments: Sequence[Segment], shown: bool, chunks: Sequence[Chunk], salt: str
    ) -> tuple[Rendered, list[Linked]]:
        parts: list[Sequence[int] | Chunk] = []
        for segment in segments:
            if isinstance(segment, TextSegment):
                parts.append(segment.token_ids)
            elif shown:
                parts.append(segment.chunk)
        rendered = self._talk.wait(self._talk.render(parts, salt))
        images = iter(rendered.images)
        linked = []
        for chunk in chunks:
            ids = chunk.token_ids or ()
            if chunk.token_ids is None and shown:
                first, n = next(images)
                ids = tuple(rendered.ids[first : first + n])
            linked.append(Linked(chunk, self._chunks.key(chunk, 0), ids, len(ids)))
        return rendered, linked

    @staticmethod
    def plan(
        segments: Sequence[Segment],
        linked: Sequence[Linked],
        policy: Policy,
        decided: Sequence[Ranges] | None = None,
    ) -> LinkPlan:
        """The plan of segments whose chunks are ``linked``; with ``decided``, of another selection."""
        following = iter(linked)
        shapes = []
        for segment in segments:
            if isinstance(segment, TextSegment):
                shapes.append(SegmentShape(len(segment), len(segment), False))
            else:
                one = next(following)
                size = (one.tokens, one.extent or one.tokens) if policy.context else (0, 0)
                shapes.append(SegmentShape(*size, True))
        return make_plan(shapes, policy, decided)

    def order(self, prepared: Prepared) -> LinkOrder:
        """The link order of a prompt whose needed chunks are there."""
        needed = set(map(id, prepared.needed))
        files = [self._chunks.file(one) if id(one) in needed else None for one in prepared.linked]
        return order_of(prepared.plan, files)

    def room(self, prepared: Prepared) -> int:
        """Tokens that can be said after a prompt."""
        return self._talk.context - prepared.plan.length
