"""Dynamic policies: look at a prompt's own keys and values, then say which chunk tokens it recomputes."""

from __future__ import annotations

import torch

from mpic.engine.native.lanes import Sequence, build_sequence
from mpic.engine.native.runner import Runner, Slice
from mpic.kernels.spans import rotate
from mpic.link.plan import DynamicPolicy, make_plan
from mpic.link.policies.full import Full


class Decider:
    """Runs the deciding pass of a request: its whole prompt, through the layers before the policy's, in one go.

    A pass of T tokens is a step of its own: it holds up the batch as an unchunked prefill of that many layers would.
    It reads resident chunks and writes nothing, so it may be repeated.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self._model, self._pool = runner, runner.model, runner.pool

    def decide(self, sequence: Sequence) -> None:
        """Replace the sequence's provisional plan. All of its chunks must be ready."""
        policy, request = sequence.request.policy, sequence.request
        assert isinstance(policy, DynamicPolicy)
        plan = make_plan(sequence.shapes, policy, policy.choose(self.deviations(sequence, policy.layer)))
        decided = build_sequence(request, plan, sequence.linked, self._model.mrope)
        assert len(decided) == sequence.prompt_own == len(sequence), f"{policy} did not keep to its budget"
        for name in ("plan", "ids", "positions", "pieces", "items"):
            setattr(sequence, name, getattr(decided, name))
        sequence.usage.probed = plan.length
        sequence.undecided = False

    def deviations(self, sequence: Sequence, layer: int) -> list[torch.Tensor]:
        """Of each chunk ``[tokens]`` fp32: the squared distance between a token's key and value in a full prefill and
        in its compiled chunk at ``layer``, summed over heads; keys are compared at chunk-local positions."""
        layer = min(layer, self._model.shape.layers - 1)
        everything = make_plan(sequence.shapes, Full())
        prompt = build_sequence(sequence.request, everything, sequence.linked, self._model.mrope)
        embeds, deepstack = self._runner.inputs([Slice(prompt, 0, len(prompt))], [0])
        positions = prompt.positions.to(self._model.device)
        keys, values = self._model.probe(embeds, positions, layer, deepstack)
        for linked in sequence.linked:
            if linked.resident.gate is not None:  # its last copy may have been started and not be done
                linked.resident.gate.settle()
        found = []
        for slot, linked in zip(sequence.plan.slots, sequence.linked, strict=True):
            rows = slice(slot.start, slot.start + slot.length)
            fresh, shift = keys[:, rows], self._model.shift(slot.base)
            if shift is not None:
                fresh = rotate(fresh, shift)
            first = linked.resident.first
            compiled = self._pool.view(linked.resident.extent)[
                layer, :, :, first : first + slot.length
            ].float()
            difference = torch.stack([fresh, values[:, rows]]).float() - compiled
            found.append(difference.square().sum((0, 1, 3)))
        return found
