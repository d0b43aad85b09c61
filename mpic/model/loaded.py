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

from mpic.errors import IntegrityError, ModelRefused
from mpic.imaging.clips import Clip, Sample
from mpic.kernels import backends
from mpic.kernels.attention import QueryRotation, SingleRows, SpanCall
from mpic.kernels.patterns import Pattern
from mpic.kernels.singles import Singles
from mpic.kernels.upload import send
from mpic.kv.chunk import LATENT_ONCE, ChunkInputs, KVShape
from mpic.kv.expected import Expected, Soft
from mpic.model import hooks, vision
from mpic.model.clip_sampling import refusal, sampling_digest
from mpic.model.facts import find_facts
from mpic.model.identity import VERIFIED, bos_id, deepstack_layers, eos_ids, fingerprint, preprocessing_digest
from mpic.model.info import ModelInfo
from mpic.model.latent import layout_of
from mpic.model.own_modules import use_kernels, use_one_call
from mpic.model.refusals import context_limit, refuse_unsupported
from mpic.model.structure import (
    OWN_EMBEDDINGS,
    RowInputs,
    decoder_of,
    has_layer_embeddings,
    inner_of,
    per_layer_inputs,
)
from mpic.model.trace import ForwardTrace

if TYPE_CHECKING:
    from mpic.model.program import Program
    from mpic.model.triton_attention import TritonAttention


class LoadedModel:
    """A model wrapped in place: its text layers attend through ``mpic.model.hooks`` from then on.

    Args:
        model: a ``...ForCausalLM`` or ``...ForConditionalGeneration`` in eval mode, on its device.
        processor: its processor (vision models) or tokenizer; None for benchmarks on token ids alone.
        name: shown to people.
        kv_dtype: of the keys and values that are kept; None: the model's. With float16 a float32 model on the CPU
            keeps half the bytes: 11 significant bits of each number, and none larger than 65,504.

    Raises:
        ModelRefused: results would be wrong; the message says why.

    Attributes:
        program: the proved program of a decoder on the CPU (``mpic.model.program_proof`` sets it), or None.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any = None,
        name: str = "model",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model: Any = model.eval().requires_grad_(
            False
        )  # torch declares nothing of what transformers adds
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.config: Any = model.config
        self.text_config = self.config.get_text_config()
        refuse_unsupported(self.config, self.text_config)
        self.text_model: nn.Module = decoder_of(self.model)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.kv_dtype = kv_dtype or self.dtype
        self.heads = self.text_config.num_attention_heads
        self.mrope = 3 if hasattr(self._inner, "get_rope_index") else 1
        self.context_length = context_limit(self.text_config)
        self.image_token_id: int | None = getattr(self.config, "image_token_id", None)
        self.program: Program | None = None
        self.extra_inputs: dict[str, Any] = {}  # of the forward that runs, beside embeddings and positions
        self._takes_per_layer = "per_layer_inputs" in inspect.signature(self.model.forward).parameters
        self.text_model.register_forward_pre_hook(self._inject, with_kwargs=True)
        self._hook(hooks.TRACED)
        self.stand_ins: dict[int, int] = {}
        self.kinds, self.layers, self.latents, self.scope, self.stand_ins = find_facts(self)
        self._hook(hooks.NAME)
        self.kind_of = [facts.kind for facts in self.layers]
        heads, size = max(kind.kv_heads for kind in self.kinds), max(kind.dim for kind in self.kinds)
        self.layout = layout_of(self.latents, len(self.layers))
        self.shape = KVShape(len(self.layers), heads, size, 1 if self.layout == LATENT_ONCE else 2)
        self._use_attention("auto")
        use_one_call(self.text_model)
        self.has_vision = hasattr(self._inner, "get_image_features")
        self.digest = fingerprint(self.model)
        self.preprocessing = preprocessing_digest(self.processor)
        self.no_clips = refusal(self._inner, self.processor, self.mrope)
        self.sampling = "" if self.no_clips else sampling_digest(self.processor, self.preprocessing)
        family = self.config.model_type
        self.info = ModelInfo(
            name=name,
            digest=self.digest,
            family=family,
            context_length=self.context_length,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            modalities=("text", *["image"] * self.has_vision, *["video"] * (self.no_clips is None)),
            attention=self.attention_name,
            no_clips=self.no_clips,
            details={
                "verified": family in VERIFIED,
                "layers": self.shape.layers,
                "kv_heads": self.shape.kv_heads,
                "head_dim": self.shape.head_dim,
                "parts": self.shape.parts,
                "kv_dtype": self.kv_name,
                "parameters": sum(p.numel() for p in model.parameters()),
                **self._attention_details,
                **use_kernels(self.model, self.text_model).details,
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
        """Return the inputs of a text chunk; positions 0..n-1 on every axis."""
        n = len(token_ids)
        positions = torch.arange(n).expand(self.mrope, n).contiguous()
        return ChunkInputs(torch.tensor(token_ids, dtype=torch.int64), positions, n)

    @torch.inference_mode()
    def image_inputs(self, image: Image.Image) -> ChunkInputs:
        """Run the vision encoder over an image; see ``vision.image_inputs``."""
        return vision.image_inputs(self, image)

    @property
    def clip_sampler(self) -> Sample:
        """Choose the frames of a clip; see ``vision.clip_sampler``."""
        return vision.clip_sampler(self)

    @torch.inference_mode()
    def clip_inputs(self, clip: Clip) -> ChunkInputs:
        """Run the vision encoder over the frames of a clip; see ``vision.clip_inputs``."""
        return vision.clip_inputs(self, clip)

    def refuse_clips(self, why: str) -> None:
        """Take no clips from now on."""
        self.no_clips = why
        modalities = tuple(m for m in self.info.modalities if m != "video")
        self.info = replace(self.info, modalities=modalities, no_clips=why)

    def expected(self, adapter: Soft | None) -> Expected:
        """Return what a stored chunk must be to fit the model, with the adapter that its packets were compiled in."""
        probe = self.embed(torch.zeros(1, dtype=torch.int64))
        own = [self.kinds[kind] for kind in self.kind_of]
        return Expected(
            self.shape,
            self.kv_dtype,
            probe.shape[-1],
            deepstack_layers(self.config),
            adapter,
            embeds=probe.dtype,
            vocabulary=len(self.model.get_input_embeddings().weight),
            axes=(self.mrope,),
            image=self.image_token_id,
            own=tuple((kind.kv_heads, kind.dim) for kind in own) if self.is_uneven else (),
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return ``[n, hidden]`` from the embedding table for ``[n]`` int64."""
        return self.model.get_input_embeddings()(send(token_ids, self.device))

    def rows(self, token_ids: torch.Tensor) -> RowInputs:
        """Return the inputs of rows ``[T]`` that are tokens of text."""
        return RowInputs(token_ids, self.embed(token_ids))

    def choose_attention(self, name: str) -> None:
        """Select an attention implementation; ``auto`` keeps the device's default.

        Raises:
            ModelRefused: it is not available for this device and dtype.
        """
        self._use_attention(name)
        details = self.info.details | self._attention_details
        self.info = replace(self.info, attention=self.attention_name, details=details)

    def _use_attention(self, name: str) -> None:
        """Set the implementations that serve rows: ``triton``, if it is not None, serve all of them, else those of
        the choice do."""
        self.triton: TritonAttention | None = None
        if name == "triton":
            self.triton = self.triton_attention()
            self.attention_name, self.attention_note = self.triton.name, ""
            self._blocks_name, self._blocks_note = self.triton.name, ""
            return
        dims, capped = [kind.dim for kind in self.kinds], any(facts.softcap for facts in self.layers)
        choice = backends.choose(name, dims, capped, self.device, self.dtype, self.kv_dtype)
        self.attention_name, self.attention_note = choice.name, choice.note
        self.partial, self.streams, self.block_spans = choice.partial, choice.streams, choice.spans
        self._blocks_name, self._blocks_note = choice.blocks, choice.blocks_note

    def triton_attention(self) -> TritonAttention:
        """Return the Triton attention that serves the model, or that would serve it.

        Raises:
            ModelRefused: Triton cannot serve it.
        """
        from mpic.model.triton_attention import TritonAttention

        if self.triton is not None:
            return self.triton
        own = (self.shape, self.kinds, self.kind_of, self.device, self.dtype)
        return TritonAttention(*own, {facts.softcap for facts in self.layers})

    @property
    def _attention_details(self) -> dict[str, str]:
        """The facts that ``/health`` shows beside the name: what serves blocks of rows, and why it is not faster."""
        notes = {"attention_blocks_note": self._blocks_note, "attention_note": self.attention_note}
        return {"attention_blocks": self._blocks_name, **notes}

    @property
    def kv_name(self) -> str:
        """The dtype of the keys and values that are kept, as recipes name it."""
        return str(self.kv_dtype).removeprefix("torch.")

    @property
    def gathers_spans(self) -> bool:
        """True where blocks of rows attend to a chunk's many spans together (``mpic.kernels.gathered``): with kernels
        for blocks over all their spans. Triton has its own tables."""
        return bool(self.block_spans) and self.triton is None

    @property
    def is_uneven(self) -> bool:
        """True where layers have different numbers or sizes of key heads; the smaller ones leave a part of their memory
        unused."""
        return len({(kind.kv_heads, kind.dim) for kind in self.kinds}) > 1

    @property
    def is_plain(self) -> bool:
        """True where all layers are of the same kind and attend causally to everything before."""
        special = any(facts.softcap or facts.sinks for facts in self.layers)
        return len(self.kinds) == 1 and not special and self.kinds[0].pattern == Pattern()

    @property
    def takes_packets(self) -> bool:
        """True where the rows of a chunk may be arbitrary vectors (``mpic.packet``)."""
        return not self.no_packets

    @property
    def no_packets(self) -> str:
        """The reason why it cannot have packets; empty where it can."""
        if has_layer_embeddings(self.text_model):
            return OWN_EMBEDDINGS
        return "" if self.scope is None else "its tokens attend to each other in both directions"

    @property
    def patterns(self) -> list[Pattern]:
        """The attention pattern of each layer."""
        return [self.kinds[kind].pattern for kind in self.kind_of]

    def rotation(self, base: int, layer: int = 0) -> QueryRotation | None:
        """Return the rotation of a layer's queries over a span at ``base``; None where no rotation is needed."""
        return self.kinds[self.kind_of[layer]].rotary.rotation(base)

    def distances(self, difference: torch.Tensor, layer: int) -> torch.Tensor:
        """Return ``[n]``, the squared lengths over all heads of ``difference [2, kv_heads, n, head_dim]`` fp32 of keys
        and values as a layer attends to them."""
        latent = self.latents.get(layer)
        return difference.square().sum((0, 1, 3)) if latent is None else latent.distances(difference)

    def single_rows(self, kind: int, calls: Sequence[SpanCall]) -> SingleRows:
        """Return the tables of rows that stand alone, for layers of a kind.

        Args:
            calls: everything that the rows see, one row per call.
        """
        facts = self.kinds[kind]
        kv_heads = facts.kv_heads if self.is_uneven else None
        if self.streams:
            return self.streams[kind].rows(calls, facts.heads, facts.rotary.rotations, kv_heads)
        return Singles.of(calls, self.partial, facts.rotary.rotations, kv_heads)  # ty: ignore[invalid-explicit-return] (its rows cannot be set)

    def kind_calls(self, kind: int, calls: list[SpanCall]) -> hooks.KindCalls:
        """Return the calls of blocks of rows in a step, for layers of a kind."""
        facts = self.kinds[kind]
        kv_heads, blocks = facts.kv_heads if self.is_uneven else None, None
        if self.block_spans and self.triton is None and calls:
            blocks = self.block_spans[kind].blocks(calls, facts.heads, facts.rotary.rotations, kv_heads)
        return hooks.KindCalls(calls, None, facts.rotary.rotation, kv_heads, blocks)

    def layer_calls(self, layer: int, calls: list[SpanCall]) -> hooks.KindCalls:
        """Return the calls of blocks of rows over keys and values of one layer alone."""
        return self.kind_calls(self.kind_of[layer], calls)

    # ---- one packed forward

    @torch.inference_mode()
    def forward(
        self, inputs: RowInputs, positions: torch.Tensor, step: hooks.Step, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run T packed rows.

        Args:
            positions: ``[1 or 3, T]`` rotary positions of the rows.
            step: the places where keys are written, and the spans that rows see.
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
        return logits.float()  # some models compute the logits of all rows, whatever they are asked for

    @torch.inference_mode()
    def probe(
        self,
        inputs: RowInputs,
        positions: torch.Tensor,
        layer: int,
        lengths: Sequence[int],
        blocks: Sequence[Sequence[tuple[int, int]]],
    ) -> hooks.Probe:
        """Run T rows of prompts as full prefills up to ``layer``. ``lengths`` are the rows of each prompt, ``blocks``
        those of its rows ``[lo, hi)`` that attend to each other in both directions, in layers that do so.

        Returns:
            The inputs of the layer's attention: queries ``[heads, T, head_dim]``, keys and values ``[kv_heads, T,
            head_dim]``, rotated at ``positions``.
        """
        probe = hooks.Probe(
            layer, self.layer_calls, self.kv_dtype, self.partial, self.patterns, lengths, blocks
        )
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        with contextlib.suppress(hooks.ProbeFinished):
            self.call(inputs, positions, probe, none)
        if probe.keys is None or probe.values is None:
            raise IntegrityError(f"layer {layer} did not attend through MPIC")
        return probe

    @torch.inference_mode()
    def observe(self, inputs: RowInputs, positions: torch.Tensor, probe: hooks.Probe) -> None:
        """Run rows with a probe's own attention in every layer (analysis)."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.call(inputs, positions, probe, none)

    def call(
        self,
        inputs: RowInputs,
        positions: torch.Tensor,
        step: hooks.Step | hooks.Attends | ForwardTrace,
        wanted: torch.Tensor,
        given: dict[str, torch.Tensor] | None = None,
    ) -> Any:
        """Run the model under a step; ``given`` are further arguments."""
        self.extra_inputs, extra = self._beside(inputs), dict(given or {})
        if "per_layer_inputs" in self.extra_inputs and self._takes_per_layer:
            extra["per_layer_inputs"] = self.extra_inputs["per_layer_inputs"]
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
            self.extra_inputs = {}

    def _beside(self, inputs: RowInputs) -> dict[str, Any]:
        """Return the text model's inputs for rows in addition to their embeddings."""
        extra: dict[str, Any] = {}
        if inputs.deepstack is not None:
            marks, features = inputs.deepstack
            extra = {"visual_pos_masks": marks[None], "deepstack_visual_embeds": list(features)}
        found = per_layer_inputs(self.text_model, inputs.ids, self.stand_ins)
        return extra if found is None else {**extra, "per_layer_inputs": found}

    def _inject(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Pass inputs to the text model for which the models around it have no argument."""
        return (args, {**kwargs, **self.extra_inputs}) if self.extra_inputs else None
