"""The deciding pass of dynamic policies, which choose the chunk tokens to recompute from a prompt's own keys, values or
queries."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from mpic.engine.checks import as_failure
from mpic.engine.native.batch import BatchSlice
from mpic.engine.native.executor import row_inputs
from mpic.engine.native.request import LinkedChunk, Request, own_tokens
from mpic.kernels.attention import rotate
from mpic.kv.pool import Pool
from mpic.link import DynamicPolicy, Evidence, make_plan
from mpic.link.policies.full import Full
from mpic.model.bidirectional import Scope
from mpic.model.loaded import LoadedModel

log = logging.getLogger(__name__)

MOST_ROWS = 2048
"""Most rows of a pass over several prompts."""


class Look(NamedTuple):
    """The keys, values and queries of one prompt at the pass's layer, rotated at the rows' positions.

    Args:
        keys, values: ``[kv_heads, T, head_dim]``.
        queries: ``[heads, T, head_dim]``.
        scale: scale of the layer's softmax.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    scale: float


class Decider:
    """Runs the deciding pass of requests: one forward over all the prompt rows that their policies look at.

    A pass of T tokens holds up the batch as an unchunked prefill of that many layers would, so a step has one at most.
    It reads resident chunks and writes nothing, so it may be repeated.

    ``counters``: ``deciding_passes``.
    """

    def __init__(self, model: LoadedModel, pool: Pool) -> None:
        self._model, self._pool = model, pool
        self._whole_prompt = model.scope is Scope.PROMPT
        self.counters: Counter[str] = Counter()

    def decide(
        self,
        requests: Sequence[Request],
        decided: Callable[[Request], None],
        failed: Callable[[Request, BaseException], None],
    ) -> None:
        """Replace the provisional plans of the first of some requests whose chunks are all ready, as many as share a
        pass, and report the outcome for each of them. The others are left for the next step, so that what has been
        decided is computed before more is looked at; else nobody would have an answer before the last prompt had been
        looked at. Nothing is written before the outcome is known, so an error concerns only its own request, or those
        in the same pass."""
        group = self._first(requests)
        looks: Sequence[Look | Exception]
        try:
            looks = self._look(group)
            self.counters["deciding_passes"] += 1
        except Exception as error:
            looks = [error] * len(group)
        for request, look in zip(group, looks, strict=True):
            try:
                if isinstance(look, Exception):
                    raise look
                self._choose(request, look)
                decided(request)
            except Exception as error:
                log.exception("a dynamic policy failed")
                failed(request, as_failure(error))

    def _first(self, requests: Sequence[Request]) -> list[Request]:
        """Return the first request and those behind it that share its pass: their policies look for the same evidence
        at the same layer, and all have at most ``MOST_ROWS`` rows (a longer request has a pass of its own)."""
        found: list[Request] = []
        held = 0
        for request in requests:
            if found and self._kind(request) != self._kind(found[0]):
                continue
            held += request.prompt.plan.length - self._since(request)
            if found and held > MOST_ROWS:
                break
            found.append(request)
        return found

    def _look(self, requests: Sequence[Request]) -> list[Look]:
        """Run one group's pass. All chunks of the requests must be ready."""
        for linked in (linked for request in requests for linked in request.prompt.chunks):
            if linked.resident.progress is not None:  # its last copy may have started and not be finished
                linked.resident.progress.settle()
        slices, blocks = zip(*map(self._rows, requests), strict=True)
        ends = list(accumulate(part.hi for part in slices))
        starts = [0, *ends[:-1]]
        positions = torch.cat([part.rows.positions for part in slices], 1).to(self._model.device)
        _, layer = self._kind(requests[0])
        lengths = [part.hi for part in slices]
        probe = self._model.probe(row_inputs(self._model, slices, starts), positions, layer, lengths, blocks)
        seen = (probe.keys, probe.values, probe.queries)
        return [
            Look(*(x[:, start:end] for x in seen), probe.scale)  # ty: ignore[not-subscriptable] (a probe that ran has them)
            for start, end in zip(starts, ends, strict=True)
        ]

    def _choose(self, request: Request, look: Look) -> None:
        """Replace a request's provisional plan."""
        policy, prompt = _policy(request), request.prompt
        evidence, layer = self._kind(request)
        found = _EVIDENCE[evidence](self, request, layer, look)
        request.usage.probed = look.queries.shape[1]
        plan = make_plan(prompt.undecided, policy, policy.choose(found), self._whole_prompt)
        own = own_tokens(prompt.segments, plan, prompt.chunks, self._model.mrope)
        assert len(own.ids) == len(request), f"{policy} did not keep to its budget"
        request.decide(replace(prompt, plan=plan, undecided=()), own)

    def deviations(self, request: Request, layer: int, look: Look) -> list[torch.Tensor]:
        """Return ``Evidence.DEVIATION`` of each chunk, ``[tokens]`` fp32. Keys are compared at chunk-local
        positions."""
        prompt, found = request.prompt, []
        for place, linked in zip(prompt.plan.places, prompt.chunks, strict=True):
            tokens = slice(place.start, place.start + place.length)
            fresh, rotation = look.keys[:, tokens], self._model.rotation(place.base, layer)
            if rotation is not None:
                fresh = rotate(fresh, rotation)
            compiled = self._compiled(linked, layer, look)
            difference = torch.stack([fresh, look.values[:, tokens]]).float() - compiled
            found.append(self._model.distances(difference, layer))
        return found

    def attention(self, request: Request, layer: int, look: Look) -> list[torch.Tensor]:
        """Return ``Evidence.ATTENTION`` of each chunk, ``[tokens]`` fp32. Queries are turned to chunk-local positions,
        as in a link."""
        assert layer == 0, "deeper queries depend on what stands before them"
        places, scores = request.prompt.plan.places, []
        for place, linked in zip(places, request.prompt.chunks, strict=True):
            queries, rotation = look.queries, self._model.rotation(place.base, layer)
            if rotation is not None:
                queries = rotate(queries, rotation)
            keys = self._compiled(linked, layer, look)[0]
            keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
            scores.append(queries.float() @ keys.transpose(1, 2) * look.scale)
        weights = torch.softmax(torch.cat(scores, -1), -1).sum((0, 1))
        return list(weights.split([place.length for place in places]))

    def _kind(self, request: Request) -> tuple[Evidence, int]:
        """Return the evidence that a request's policy looks for, and the layer."""
        policy = _policy(request)
        return policy.evidence, min(policy.layer, self._model.shape.layers - 1)

    def _since(self, request: Request) -> int:
        """Return the first sequence index that a request's policy looks at."""
        if _policy(request).evidence is Evidence.DEVIATION:
            return 0
        return max(place.start + place.length for place in request.prompt.plan.places)

    def _rows(self, request: Request) -> tuple[BatchSlice, Sequence[tuple[int, int]]]:
        """Return the rows of a prompt that its policy looks at, and the blocks among them."""
        prompt = request.prompt
        everything = make_plan(prompt.undecided, Full(), whole_prompt=self._whole_prompt)
        since = self._since(request)
        rows = own_tokens(prompt.segments, everything, prompt.chunks, self._model.mrope, since).rows()
        # policies that look only at later rows stop at the first layer, before any attention: they need no blocks
        return BatchSlice(rows, 0, len(rows)), everything.blocks if since == 0 else ()

    def _compiled(self, linked: LinkedChunk, layer: int, look: Look) -> torch.Tensor:
        """Return a chunk's compiled keys and values at a layer, ``[parts, kv_heads, tokens, head_dim]`` fp32, of
        the layer's own heads. One part is both."""
        first = linked.resident.first
        kv = self._pool.view(linked.resident.extent)
        heads, _, size = look.keys.shape
        return kv[layer, :, :heads, first : first + len(linked.inputs), :size].float()


_EVIDENCE = {Evidence.DEVIATION: Decider.deviations, Evidence.ATTENTION: Decider.attention}


def _policy(request: Request) -> DynamicPolicy:
    policy = request.spec.policy
    assert isinstance(policy, DynamicPolicy)
    return policy
