"""A transformers model as the engine sees it: embeddings, positions, one packed forward, logits where needed."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import nn

from mpic.errors import IntegrityError, ModelRefused, UnsupportedModality
from mpic.kernels import reference
from mpic.kernels.attention import Partial, QueryRotation, SingleRows, SpanCall
from mpic.kernels.backends import backend, single_rows
from mpic.kernels.patterns import Pattern
from mpic.kernels.singles import Singles
from mpic.kernels.upload import send
from mpic.kv.chunk import ChunkInputs, KVShape
from mpic.model import hooks
from mpic.model.facts import find_facts
from mpic.model.identity import VERIFIED, bos_id, eos_ids, fingerprint, preprocessing_digest
from mpic.model.info import ModelInfo
from mpic.model.refusals import context_limit, refuse_unsupported
from mpic.model.structure import (
    RowInputs,
    decoder_of,
    has_layer_embeddings,
    inner_of,
    per_layer_inputs,
)
from mpic.model.trace import Trace

if TYPE_CHECKING:
    from mpic.kernels.stream import StreamKernel
    from mpic.model.triton_attention import TritonAttention


class LoadedModel:
    """A model wrapped in place: its text layers attend through ``mpic.model.hooks`` from then on.

    Args:
        model: a ``...ForCausalLM`` or ``...ForConditionalGeneration`` in eval mode, on its device.
        processor: its processor (vision models) or tokenizer; None for benchmarks on token ids alone.
        name: shown to people.

    Raises:
        ModelRefused: says what cannot be right and why.
    """

    def __init__(self, model: nn.Module, processor: Any = None, name: str = "model") -> None:
        self.model = model.eval().requires_grad_(False)
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.config = model.config
        self.text_config = self.config.get_text_config()
        refuse_unsupported(self.config, self.text_config)
        self.text_model: nn.Module = decoder_of(self.model)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.heads = self.text_config.num_attention_heads
        self.mrope = 3 if hasattr(self._inner, "get_rope_index") else 1
        self.context_length = context_limit(self.text_config)
        self.image_token_id: int | None = getattr(self.config, "image_token_id", None)
        self._extra: dict[str, Any] = {}
        self._takes_per_layer = "per_layer_inputs" in inspect.signature(self.model.forward).parameters
        self.text_model.register_forward_pre_hook(self._inject, with_kwargs=True)
        self._hook(hooks.TRACED)
        self.stand_ins: dict[int, int] = {}
        self.kinds, self.layers, self.latents, self.scope, self.stand_ins = find_facts(self)
        self._hook(hooks.NAME)
        self.kind_of = [facts.kind for facts in self.layers]
        self.shape = KVShape(
            len(self.layers), max(kind.kv_heads for kind in self.kinds), max(kind.dim for kind in self.kinds)
        )
        self.triton: TritonAttention | None = None
        self._use_attention("auto")
        self.has_vision = hasattr(self._inner, "get_image_features")
        self.digest = fingerprint(self.model)
        self.preprocessing = preprocessing_digest(self.processor)
        family = self.config.model_type
        self.info = ModelInfo(
            name=name,
            digest=self.digest,
            family=family,
            context_length=self.context_length,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            modalities=("text", "image") if self.has_vision else ("text",),
            attention=self.attention_name,
            details={
                "verified": family in VERIFIED,
                "layers": self.shape.layers,
                "kv_heads": self.shape.kv_heads,
                "head_dim": self.shape.head_dim,
                "parameters": sum(p.numel() for p in model.parameters()),
                "attention_note": self.attention_note,
            },
        )

    @property
    def _inner(self) -> nn.Module:
        return inner_of(self.model)

    def _hook(self, name: str) -> None:
        if self.text_config is self.config:
            self.model.set_attn_implementation(name)
        else:
            key = next(k for k in self.config.sub_configs if getattr(self.config, k) is self.text_config)
            vision = {k: "sdpa" for k in self.config.sub_configs if k != key}
            self.model.set_attn_implementation({key: name, **vision})
        if getattr(self.text_model.config, "_attn_implementation", None) != name:
            raise ModelRefused(f"{type(self.model).__name__} does not use transformers' attention interface")

    @property
    def eos_ids(self) -> frozenset[int]:
        return eos_ids(getattr(self.model, "generation_config", None), self.text_config)

    @property
    def bos_id(self) -> int:
        return bos_id(self.text_config, self.tokenizer)

    def text_inputs(self, token_ids: Sequence[int]) -> ChunkInputs:
        """Returns the inputs of a text chunk; positions 0..n-1 on every axis."""
        n = len(token_ids)
        positions = torch.arange(n).expand(self.mrope, n).contiguous()
        return ChunkInputs(torch.tensor(token_ids, dtype=torch.int64), positions, n)

    @torch.inference_mode()
    def image_inputs(self, image: Image.Image) -> ChunkInputs:
        """Runs the vision encoder and returns an image's own tokens (newline tokens included, start and end markers
        excluded), their embeddings, DeepStack features and local rotary positions."""
        if not self.has_vision or self.processor is None or self.image_token_id is None:
            raise UnsupportedModality(f"model {self.info.name} does not take images")
        features = self.processor.image_processor(images=[image], return_tensors="pt")
        taken = inspect.signature(self._inner.get_image_features).parameters
        given = {
            k: v.to(self.device, self.dtype if v.is_floating_point() else None)
            for k, v in features.items()
            if k in taken and isinstance(v, torch.Tensor)
        }
        outputs = self._inner.get_image_features(**given)
        if getattr(outputs, "pooler_output", None) is None:
            raise UnsupportedModality(f"model {self.info.name} gives no features for an image's tokens")
        embeds = torch.cat([part.flatten(0, -2) for part in outputs.pooler_output]).to(self.dtype)
        deepstack = None
        if deep := getattr(outputs, "deepstack_features", None):
            deepstack = torch.stack([torch.cat(list(f)) if isinstance(f, list | tuple) else f for f in deep])
        n = embeds.shape[0]
        ids = torch.full((n,), self.image_token_id, dtype=torch.int64)
        positions, rotary_length = torch.arange(n)[None], n
        if self.mrope == 3:
            kinds = torch.ones(1, n, dtype=torch.int32, device=self.device)
            grid, _ = self._inner.get_rope_index(
                ids[None].to(self.device), kinds, image_grid_thw=given.get("image_grid_thw")
            )
            positions = grid[:, 0].cpu()
            rotary_length = int(positions.max()) + 1
        return ChunkInputs(
            ids,
            positions.to(torch.int64).contiguous(),
            rotary_length,
            embeds.cpu(),
            None if deepstack is None else deepstack.to(self.dtype).cpu(),
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns ``[n, hidden]`` from the embedding table for ``[n]`` int64."""
        return self.model.get_input_embeddings()(send(token_ids, self.device))

    def rows(self, token_ids: torch.Tensor) -> RowInputs:
        """Returns the inputs of rows ``[T]`` that are tokens of text."""
        return RowInputs(token_ids, self.embed(token_ids))

    def choose_attention(self, name: str) -> None:
        """Insists on an attention implementation; ``auto`` keeps the device's own.

        Raises:
            ModelRefused: it is not available for this device and dtype.
        """
        self._use_attention(name)
        details = {**self.info.details, "attention_note": self.attention_note}
        self.info = replace(self.info, attention=self.attention_name, details=details)

    def _use_attention(self, name: str) -> None:
        """Sets what serves rows: ``triton``, where it is not None, serves all of them; otherwise ``partial`` serves
        blocks of rows and, where ``streams`` (one a kind of layer) is empty, rows that stand alone."""
        own, partial = backend(self.device, self.dtype)
        found = [single_rows(self.device, self.dtype, kind.dim) for kind in self.kinds]
        streams = [stream for stream, _ in found if stream is not None]
        reason = next((reason for _, reason in found if reason), "")
        choices: dict[str, tuple[Partial, list[StreamKernel]]] = {
            own: (partial, []),
            "reference": (reference.partial, []),
        }
        if len(streams) == len(self.kinds):
            choices = {streams[0].name: (partial, streams), **choices}
        self.triton = None
        if name == "triton":
            from mpic.model.triton_attention import TritonAttention, plain_rotary

            rotary = plain_rotary(self.kinds, self.layers)
            self.triton = TritonAttention(self.shape, self.heads, rotary, self.device, self.dtype)
            self.attention_name, self.attention_note = self.triton.name, ""
            return
        if name == "auto":
            name = next(iter(choices))
        if name not in choices:
            why = f"; no cpu-stream: {reason}" if reason else ""
            raise ModelRefused(
                f"attention '{name}' does not run on {self.device} with {self.dtype}; "
                f"available: auto, {', '.join(choices)}, triton (CUDA){why}"
            )
        self.attention_name, (self.partial, self.streams) = name, choices[name]
        self.attention_note = f"no cpu-stream: {reason}" if reason else ""

    @property
    def is_uneven(self) -> bool:
        """True where layers differ in their key heads; the smaller ones leave a part of their memory unused."""
        return len({(kind.kv_heads, kind.dim) for kind in self.kinds}) > 1

    @property
    def is_plain(self) -> bool:
        """True where all layers are alike and attend causally to everything before."""
        special = any(facts.softcap or facts.sinks for facts in self.layers)
        return len(self.kinds) == 1 and not special and self.kinds[0].pattern == Pattern()

    @property
    def takes_packets(self) -> bool:
        """True where a chunk's rows may be vectors that no token has (``mpic.packet``)."""
        return not has_layer_embeddings(self.text_model) and self.scope is None

    @property
    def patterns(self) -> list[Pattern]:
        """The attention pattern of each layer."""
        return [self.kinds[kind].pattern for kind in self.kind_of]

    def rotation(self, base: int, layer: int = 0) -> QueryRotation | None:
        """Returns the rotation of a layer's queries over a span at ``base``; None where it is none."""
        return self.kinds[self.kind_of[layer]].rotary.rotation(base)

    def distances(self, difference: torch.Tensor, layer: int) -> torch.Tensor:
        """Returns ``[n]``, the squared lengths over all heads of ``difference [2, kv_heads, n, head_dim]`` fp32 of keys
        and values as a layer keeps them."""
        latent = self.latents.get(layer)
        return difference.square().sum((0, 1, 3)) if latent is None else latent.distances(difference)

    def single_rows(self, kind: int, calls: Sequence[SpanCall]) -> SingleRows:
        """Returns the tables of rows that stand alone, for layers of a kind.

        Args:
            calls: everything that the rows see, one row a call.
        """
        facts = self.kinds[kind]
        kv_heads = facts.kv_heads if self.is_uneven else None
        if self.streams:
            return self.streams[kind].rows(calls, facts.heads, facts.rotary.rotations, kv_heads)
        return Singles.of(calls, self.partial, facts.rotary.rotations, kv_heads)

    def kind_calls(self, kind: int, calls: list[SpanCall]) -> hooks.KindCalls:
        """Returns what layers of a kind do in a step for blocks of rows."""
        facts = self.kinds[kind]
        return hooks.KindCalls(calls, None, facts.rotary.rotation, facts.kv_heads if self.is_uneven else None)

    # ---- one packed forward

    @torch.inference_mode()
    def forward(
        self, inputs: RowInputs, positions: torch.Tensor, step: hooks.Step, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Runs T packed rows.

        Args:
            positions: ``[1 or 3, T]`` rotary positions of the rows.
            step: where keys are written and which spans rows see.
            wanted: ``[w]`` int64 rows whose logits are needed (may be empty).

        Returns:
            fp32 logits ``[w, vocabulary]``.
        """
        step.layers_seen.clear()
        if self.triton is not None and step.kernel is None:
            step.kernel = self.triton.prepare(step, len(inputs.embeds))
        out = self.call(inputs, positions, step, wanted)
        if len(step.layers_seen) != self.shape.layers:
            missing = sorted(set(range(self.shape.layers)) - step.layers_seen)
            raise IntegrityError(f"layers {missing} did not attend through MPIC")
        logits = out.logits[0] if out.logits.shape[1] == len(wanted) else out.logits[0, wanted]
        return logits.float()  # some models compute those of all rows, whatever they are asked for

    @torch.inference_mode()
    def probe(
        self,
        inputs: RowInputs,
        positions: torch.Tensor,
        layer: int,
        blocks: Sequence[tuple[int, int]] = (),
    ) -> hooks.Probe:
        """Runs one prompt of T rows as a full prefill up to ``layer``.

        Args:
            blocks: rows ``[lo, hi)`` that attend to each other in both directions, in layers that have such blocks.

        Returns:
            What reached the layer's attention: queries ``[heads, T, head_dim]``, keys and values ``[kv_heads, T,
            head_dim]``, rotated at ``positions``.
        """
        probe = hooks.Probe(layer, self.partial, self.patterns, blocks)
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        with contextlib.suppress(hooks.Decided):
            self.call(inputs, positions, probe, none)
        if probe.keys is None or probe.values is None:
            raise IntegrityError(f"layer {layer} did not attend through MPIC")
        return probe

    @torch.inference_mode()
    def observe(self, inputs: RowInputs, positions: torch.Tensor, probe: hooks.Probe) -> None:
        """Runs rows with a probe's own attention in every layer (analysis)."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.call(inputs, positions, probe, none)

    def call(
        self,
        inputs: RowInputs,
        positions: torch.Tensor,
        step: hooks.Step | hooks.Probe | Trace,
        wanted: torch.Tensor,
        given: dict[str, torch.Tensor] | None = None,
    ) -> Any:
        """Runs the model under a step; ``given`` are further arguments."""
        self._extra, extra = self._beside(inputs), dict(given or {})
        if "per_layer_inputs" in self._extra and self._takes_per_layer:
            extra["per_layer_inputs"] = self._extra["per_layer_inputs"]
        try:
            with hooks.running(step):
                return self.model(
                    inputs_embeds=inputs.embeds[None],
                    position_ids=positions[:1] if self.mrope == 1 else positions[:, None],
                    use_cache=False,
                    logits_to_keep=wanted,
                    **extra,
                )
        finally:
            self._extra = {}

    def stock_logits(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
        keep: int,
        deepstack: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Runs T rows as transformers does, with gradients where the caller wants them (training of packets). The
        caller sets an attention implementation of transformers' own.

        Args:
            embeds: ``[T, hidden]``.
            positions: ``[1 or 3, T]``.
            mask: ``[T, T]`` bool, true where a row sees another; None is causal.
            cache: transformers' own, which is read and extended, or None.
            keep: how many of the last rows' logits are needed.
            deepstack: as ``forward``.

        Returns:
            ``[keep, vocabulary]``.
        """
        if deepstack is not None:
            marks, features = deepstack
            self._extra = {"visual_pos_masks": marks[None], "deepstack_visual_embeds": list(features)}
        try:
            out = self.model(
                inputs_embeds=embeds[None],
                position_ids=positions[:1] if self.mrope == 1 else positions[:, None],
                attention_mask=None if mask is None else mask[None, None],
                past_key_values=cache,
                use_cache=cache is not None,
                logits_to_keep=keep,
            )
        finally:
            self._extra = {}
        return out.logits[0]

    def _beside(self, inputs: RowInputs) -> dict[str, Any]:
        """Returns what the text model takes for rows beside their embeddings."""
        extra: dict[str, Any] = {}
        if inputs.deepstack is not None:
            marks, features = inputs.deepstack
            extra = {"visual_pos_masks": marks[None], "deepstack_visual_embeds": list(features)}
        found = per_layer_inputs(self.text_model, inputs.ids, self.stand_ins)
        return extra if found is None else {**extra, "per_layer_inputs": found}

    def _inject(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Gives the text model what models around it have no argument for."""
        return (args, {**kwargs, **self._extra}) if self._extra else None
