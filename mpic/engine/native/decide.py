"""The deciding pass of dynamic policies: a prompt's own keys and values say which chunk tokens it recomputes."""

from __future__ import annotations

from dataclasses import replace

import torch

from mpic.engine.native.batch import BatchSlice
from mpic.engine.native.request import LinkedChunk, LinkedPrompt, Request, own_tokens
from mpic.engine.native.runner import Runner
from mpic.kernels.attention import rotate
from mpic.link import DynamicPolicy, Evidence, make_plan
from mpic.link.policies.full import Full
from mpic.model.bidirectional import Scope
from mpic.model.hooks import Probe


class Decider:
    """Runs the deciding pass of a request: as many rows of its prompt as its policy looks at, in one go.

    A pass of T tokens is a step of its own: it holds up the batch as an unchunked prefill of that many layers would.
    It reads resident chunks and writes nothing, so it may be repeated.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self._model, self._pool = runner, runner.model, runner.pool
        self._whole_prompt = runner.model.scope is Scope.PROMPT

    def decide(self, request: Request) -> None:
        """Replaces the request's provisional plan. All of its chunks must be ready."""
        policy, prompt = request.spec.policy, request.prompt
        assert isinstance(policy, DynamicPolicy)
        for linked in prompt.chunks:
            if linked.resident.progress is not None:  # its last copy may have been started and not be done
                linked.resident.progress.settle()
        found, request.usage.probed = _EVIDENCE[policy.evidence](self, request, policy.layer)
        plan = make_plan(prompt.undecided, policy, policy.choose(found), self._whole_prompt)
        own = own_tokens(prompt.segments, plan, prompt.chunks, self._model.mrope)
        assert len(own.ids) == len(request), f"{policy} did not keep to its budget"
        request.decide(replace(prompt, plan=plan, undecided=()), own)

    def deviations(self, request: Request, layer: int) -> tuple[list[torch.Tensor], int]:
        """Returns ``Evidence.DEVIATION`` of each chunk, ``[tokens]`` fp32, and how many rows that took. Keys are
        compared at chunk-local positions."""
        layer = min(layer, self._model.shape.layers - 1)
        prompt = request.prompt
        probe = self._probe(prompt, layer, 0)
        found = []
        for place, linked in zip(prompt.plan.places, prompt.chunks, strict=True):
            tokens = slice(place.start, place.start + place.length)
            fresh, rotation = probe.keys[:, tokens], self._model.rotation(place.base, layer)
            if rotation is not None:
                fresh = rotate(fresh, rotation)
            difference = torch.stack([fresh, probe.values[:, tokens]]).float() - self._compiled(
                linked, layer, probe
            )
            found.append(self._model.distances(difference, layer))
        return found, prompt.plan.length

    def attention(self, request: Request, layer: int) -> tuple[list[torch.Tensor], int]:
        """Returns ``Evidence.ATTENTION`` of each chunk, ``[tokens]`` fp32, and how many rows that took. Queries are
        turned to chunk-local positions, as in a link."""
        assert layer == 0, "deeper queries depend on what stands before them"
        prompt = request.prompt
        places = prompt.plan.places
        since = max(place.start + place.length for place in places)
        probe = self._probe(prompt, layer, since)
        scores = []
        for place, linked in zip(places, prompt.chunks, strict=True):
            queries, rotation = probe.queries, self._model.rotation(place.base, layer)
            if rotation is not None:
                queries = rotate(queries, rotation)
            keys = self._compiled(linked, layer, probe)[0]
            keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
            scores.append(queries.float() @ keys.transpose(1, 2) * probe.scale)
        weights = torch.softmax(torch.cat(scores, -1), -1).sum((0, 1))
        return list(weights.split([place.length for place in places])), probe.queries.shape[1]

    def _probe(self, prompt: LinkedPrompt, layer: int, since: int) -> Probe:
        """Runs a prompt's rows from sequence index ``since`` on up to a layer."""
        everything = make_plan(prompt.undecided, Full(), whole_prompt=self._whole_prompt)
        own = own_tokens(prompt.segments, everything, prompt.chunks, self._model.mrope, since)
        rows = own.rows()
        inputs = self._runner.inputs([BatchSlice(rows, 0, len(rows))], [0])
        blocks = (
            everything.blocks if since == 0 else ()
        )  # later rows end at their first layer's keys and queries
        return self._model.probe(inputs, rows.positions.to(self._model.device), layer, blocks)

    def _compiled(self, linked: LinkedChunk, layer: int, probe: Probe) -> torch.Tensor:
        """Returns a chunk's compiled keys and values at a probe's layer, ``[2, kv_heads, tokens, head_dim]`` fp32, of
        the layer's own heads."""
        first = linked.resident.first
        kv = self._pool.view(linked.resident.extent)
        heads, _, size = probe.keys.shape
        return kv[layer, :, :heads, first : first + len(linked.inputs), :size].float()


_EVIDENCE = {Evidence.DEVIATION: Decider.deviations, Evidence.ATTENTION: Decider.attention}
