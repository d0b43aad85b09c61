"""Links a prompt slowly and plainly over a dense cache, and records every attention weight of every layer.

Chunks are compiled alone, their keys rotated to their places in one dense cache, and the tokens that the policy
recomputes run over it. The engine does the same with spans; here it uses full matrices, which can be drawn.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from mpic.engine.accounting import segment_shapes
from mpic.engine.native.batch import BatchSlice, compile_job
from mpic.engine.native.executor import row_inputs
from mpic.engine.native.request import LinkedChunk, own_tokens
from mpic.errors import UnsupportedParameter
from mpic.kernels.attention import rotate
from mpic.kv.chunk import Chunk, ChunkInputs, KVKey, Recipe
from mpic.link import ChunkPlace, DynamicPolicy, LinkPlan, Policy, make_plan
from mpic.link.policies.full import Full
from mpic.model.hooks import LayerCall, Probe
from mpic.model.loaded import LoadedModel
from mpic.model.structure import RowInputs
from mpic.packet.adapter import Adapter, require_adapter
from mpic.prompt.segments import Prompt


@dataclass
class Recorder(Probe):
    """Rows at ``index`` of a dense cache ``keys/values[layer] [kv_heads, N, head_dim]``; keeps the weights
    ``[rows, N]`` of each layer, averaged over heads, in host memory."""

    index: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    length: int = 0
    cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    weights: list[torch.Tensor] = field(default_factory=list)

    def attend(self, call: LayerCall) -> torch.Tensor:
        layer, query, key, value, scale, _ = call
        keys, values = self.place(layer, self.index, key[0], value[0])
        group = query.shape[1] // key.shape[1]
        scores = query[0].float() @ keys.float().repeat_interleave(group, 0).transpose(1, 2) * scale
        hidden = (torch.arange(self.length)[None] > self.index[:, None]).to(query.device)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        self.weights.append(weights.mean(0).cpu())
        out = weights @ values.float().repeat_interleave(group, 0)
        return out.transpose(0, 1)[None].to(query.dtype)

    def place(
        self, layer: int, tokens: slice | torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[kv_heads, n, head_dim]`` of a layer into the cache; return the layer's whole keys and values."""
        if layer not in self.cache:
            shape = (key.shape[0], self.length, key.shape[2])
            self.cache[layer] = key.new_zeros(shape), value.new_zeros(shape)
        held = self.cache[layer]
        held[0][:, tokens], held[1][:, tokens] = key, value
        return held

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all layers, ``[layers, kv_heads, N, head_dim]``."""
        keys, values = zip(*(self.cache[layer] for layer in sorted(self.cache)), strict=True)
        return torch.stack(keys), torch.stack(values)


@dataclass(frozen=True)
class DenseLink:
    """A prompt linked under a policy.

    Args:
        rows: sequence index of every computed token.
        weights: ``[rows, N]`` for each layer, averaged over heads.
        keys, values: ``[layers, kv_heads, N, head_dim]``, keys rotated to their places in the prompt.
        places: the chunks' places in the prompt.
    """

    policy: str
    rows: torch.Tensor
    weights: list[torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor
    places: tuple[ChunkPlace, ...]

    @property
    def asking(self) -> torch.Tensor:
        """Return, for every row, whether it stands after the last chunk, that is, belongs to the question."""
        return self.rows >= max((place.start + place.length for place in self.places), default=0)


class DenseLinker:
    """Links prompts of one model densely.

    Args:
        adapter: the model's adapter, for the policies ``packet`` and ``packet-K``.

    Raises:
        UnsupportedParameter: layers of the model have more than causal attention with one rotary embedding.
    """

    def __init__(self, model: LoadedModel, adapter: Adapter | None = None) -> None:
        if not model.is_plain:
            raise UnsupportedParameter(
                f"{model.info.name} has layers that cannot be drawn yet (windows, sinks, both directions)"
            )
        self.model, self.adapter = model, adapter
        self._inputs = functools.partial(row_inputs, model)

    def inputs(self, chunk: Chunk) -> ChunkInputs:
        if chunk.token_ids is not None:
            return self.model.text_inputs(chunk.token_ids)
        assert chunk.load_image is not None
        return self.model.image_inputs(chunk.load_image())

    @torch.inference_mode()
    def compile(self, inputs: ChunkInputs, sink: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys (rotated at chunk-local positions) and values of a chunk alone, ``[layers, kv_heads, n,
        head_dim]``."""
        keys, values = self._alone(inputs, sink).kv()
        return keys[:, :, sink:], values[:, :, sink:]

    @torch.inference_mode()
    def weights_alone(self, inputs: ChunkInputs) -> list[torch.Tensor]:
        """Return the attention of a chunk that is compiled alone, ``[n, n]`` for each layer, averaged over heads."""
        return self._alone(inputs, 0).weights

    def _alone(self, inputs: ChunkInputs, sink: int) -> Recorder:
        job = compile_job(inputs, sink, self.model.bos_id)
        n = len(job)
        recorder = self._recorder(torch.arange(n), n)
        rows = self._inputs([BatchSlice(job, 0, n)], [0])
        self.model.observe(rows, job.positions.to(self.model.device), recorder)
        return recorder

    @torch.inference_mode()
    def link(self, prompt: Prompt, policy: Policy) -> DenseLink:
        """Run a prompt.

        Raises:
            UnsupportedParameter: the policy is dynamic, runs in two steps, or leaves the chunks out.
            NoAdapter: the policy links packets, and there is no adapter.
        """
        if isinstance(policy, DynamicPolicy) or policy.two_step or not policy.context:
            raise UnsupportedParameter(f"{policy} cannot be drawn: its tokens are not known beforehand")
        inputs = [self.inputs(chunk) for chunk in prompt.chunks]
        if policy.wrapping.packet:
            adapter = require_adapter(self.adapter, self.model.info.name, self.model.no_packets)
            inputs = [adapter.wrap(one, self.model.embed) for one in inputs]
        shapes = segment_shapes(prompt.segments, ((len(i), i.rotary_length) for i in inputs), policy)
        plan, everything = (make_plan(shapes, p) for p in (policy, Full()))
        recipe = Recipe(self.model.info.dtype, sink=policy.wrapping.sink)
        linked = [
            LinkedChunk(c, KVKey(c.owner, c.key, self.model.digest, recipe), i, None, None)
            for c, i in zip(prompt.chunks, inputs, strict=True)
        ]
        whole = own_tokens(prompt.segments, everything, linked, self.model.mrope).rows()
        rows = _rows(plan)
        recorder = self._recorder(rows, len(whole))
        for place, chunk in zip(plan.places, inputs, strict=True):
            tokens = slice(place.start, place.start + place.length)
            for layer, (key, value) in enumerate(zip(*self.compile(chunk, recipe.sink), strict=True)):
                recorder.place(layer, tokens, self.moved(key, place.base - recipe.sink), value)
        ids, embeds, deepstack = self._inputs([BatchSlice(whole, 0, len(whole))], [0])
        if deepstack is not None:
            mask, features = deepstack
            kept = torch.zeros(len(whole), dtype=torch.bool)
            kept[rows] = True
            deepstack = mask[rows], features[:, kept[mask.cpu()]]
        wanted = RowInputs(ids[rows], embeds[rows], deepstack)
        self.model.observe(wanted, whole.positions[:, rows].to(self.model.device), recorder)
        return DenseLink(policy.name, rows, recorder.weights, *recorder.kv(), plan.places)

    def _recorder(self, rows: torch.Tensor, length: int) -> Recorder:
        model = self.model
        given = (model.layer_calls, model.kv_dtype, model.partial, model.patterns, [len(rows)], [()])
        return Recorder(-1, *given, index=rows, length=length)

    def moved(self, keys: torch.Tensor, base: int) -> torch.Tensor:
        """Return ``keys [heads, n, head_dim]`` rotated by a further ``base`` positions."""
        rotation = self.model.rotation(-base)
        return keys if rotation is None else rotate(keys, rotation)


def _rows(plan: LinkPlan) -> torch.Tensor:
    parts = [torch.arange(own.start, own.start + own.hi - own.lo) for own in plan.own_ranges]
    return torch.cat(parts)
