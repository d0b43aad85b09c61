"""A decoder on the CPU as a program of our own over its weights, without the model's modules: steps in which every row
is a decoding one are one call from tokens to logits (``mpic.kernels.decoder.WholeDecoder``), others are run layer by
layer (``BlockLayers``).

It is made for decoders with the parts of a Llama. A module is known by its parts, not by its class or its model: a
layer has two RMS norms, an attention of four linear layers and an MLP of three with SiLU, and nothing besides. What
parts cannot show, such as a factor between them or their order, ``program_proof.py`` finds out by running the model
both ways. The program reads the weights once: modules, hooks and weights that a model gets afterwards are not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from mpic.kernels import decoder
from mpic.kernels.attention import Write
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.kernels.decoder import BlockLayers, DecoderWeights, LayerWeights, WholeDecoder
from mpic.kernels.linear import Product
from mpic.kv.chunk import KVShape
from mpic.model.hooks import Step
from mpic.model.own_modules import KernelLinear, OneCallNorm
from mpic.model.rotary import Rotary
from mpic.model.structure import RowInputs

_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}

NOTE = "fused_step_note"
"""The detail of a model that says why it has no program; empty where it has one."""
TOKENS_NOTE = "fused_tokens_note"
"""The detail of a model with a program that says why no step begins with tokens; empty where they do."""
NOT_STREAM = "single rows do not attend with cpu-stream"
NO_HALVES = "it has no rotary embedding of halves of a head, or no output projection"


class Program:
    """The program of a model.

    Args:
        model, text_model: the model and its decoder.
        rotary: of every layer.
        axes: ``[half]`` int64, the axis of the positions that turns each pair of a head.
        scale: of attention scores.
        shape, kv_dtype: of the keys and values that are kept.

    Raises:
        Unfused: the model cannot be run this way; the message says why.
    """

    def __init__(
        self,
        model: Any,
        text_model: nn.Module,
        rotary: Rotary,
        axes: torch.Tensor,
        scale: float,
        shape: KVShape,
        kv_dtype: torch.dtype,
    ) -> None:
        head = model.get_output_embeddings()
        if rotary.interleaved or rotary.start or head is None:
            raise Unfused(NO_HALVES)
        self._dtype = next(text_model.parameters()).dtype
        self._head, self._embedding = head, model.get_input_embeddings()
        self._axes, self._scale, self._shape, self._kv_dtype = axes, scale, shape, kv_dtype
        try:
            self._kernel = decoder.load(shape.head_dim, self._dtype, kv_dtype)
            self._layers = self._kernel.decoder(read_decoder(text_model, scale), rotary.half)
        except (KernelUnavailable, ValueError) as reason:
            raise Unfused(str(reason)) from reason
        self._blocks = BlockLayers(self._kernel, self._layers)
        self._frequencies = rotary.frequencies.float()
        embedding = getattr(text_model, "rotary_emb", None)
        self._scaling = float(getattr(embedding, "attention_scaling", 1.0))

    @torch.inference_mode()
    def run(
        self, inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor
    ) -> torch.Tensor | None:
        """Run a step layer by layer. Arguments and result are those of ``LoadedModel.forward``; None: it has to be run
        through the model's modules, and nothing has been written."""
        if not len(inputs.embeds) or inputs.deepstack is not None or step.kernel is not None:
            return None
        cosine, sine = self.rotations(positions)
        state = inputs.embeds.clone(memory_format=torch.contiguous_format)
        places = self._places(len(state), step.writes)
        attend = functools.partial(_attend, step, self._scale)
        return self._head(self._blocks(state, cosine, sine, places, attend, wanted)).float()

    def whole_decoder(self) -> WholeDecoder:
        """Return what runs steps of decoding rows from their tokens to their logits, with memory of its own.

        Raises:
            Unfused: embeddings or output projection are not plain.
        """
        embedding, head = self._embedding, self._head
        plain = type(embedding) is nn.Embedding and embedding.max_norm is None
        if not plain or type(head) is not KernelLinear:
            raise Unfused("its embeddings or its output projection do more than look up and multiply")
        try:
            return WholeDecoder(self._kernel, self._layers, embedding.weight, Product(head.weight, head.bias))
        except ValueError as reason:
            raise Unfused(str(reason)) from reason

    def _places(self, count: int, writes: Sequence[Write]) -> torch.Tensor:
        """Return where keys and values of ``count`` rows go (``BlockLayers``): nowhere those that no write has."""
        shape = self._shape
        fits = (shape.layers, 2, shape.kv_heads, shape.head_dim, self._kv_dtype, 1)
        table = np.zeros((count, 4), dtype=np.int64)
        for rows, span in writes:
            kv = span.source.data
            to_layer, to_part, to_head, to_slot, dense = kv.stride()
            slots = np.arange(span.lo, span.hi)
            if (*kv.shape[:3], kv.shape[4], kv.dtype, dense) != fits or span.hi > kv.shape[3]:
                raise ValueError(
                    f"rows cannot be written to slots {span.lo} to {span.hi} of {tuple(kv.shape)}"
                )
            table[rows] = 0, to_layer, to_part, to_head
            table[rows, 0] = kv.data_ptr() + slots * (to_slot * kv.element_size())
        return torch.from_numpy(table)

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine ``[T, half]`` fp32 of positions ``[1 or 3, T]``, rounded as the model's own are."""
        of_pairs = positions[self._axes] if len(positions) > 1 else positions
        angle = of_pairs.T.float().contiguous() * self._frequencies
        cosine, sine = angle.cos(), angle.sin()
        if self._scaling != 1.0:
            cosine, sine = cosine * self._scaling, sine * self._scaling
        if self._dtype is not torch.float32:
            cosine, sine = cosine.to(self._dtype).float(), sine.to(self._dtype).float()
        return cosine, sine


class Unfused(Exception):
    """A model, or a step, cannot be fused; the message says why."""


def read_decoder(text_model: Any, scale: float) -> DecoderWeights:
    """Return the weights of a decoder.

    Args:
        scale: of the attention scores of the first layer.

    Raises:
        Unfused: the decoder has other parts.
    """
    _refuse_parts("the decoder", text_model, {"layers", "norm"}, {"embed_tokens", "rotary_emb"})
    layers: list[LayerWeights] = []
    epsilons: set[float] = set()
    head_epsilons: set[float] = set()
    for number, layer in enumerate(text_model.layers):
        name = f"layer {number}"
        _refuse_parts(name, layer, {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"})
        layers.append(_layer(name, layer, epsilons, head_epsilons))
        attention = layer.self_attn
        if attention.layer_idx != number or getattr(attention, "scaling", scale) != scale:
            raise Unfused(f"{name} is not in its place, or scales its scores differently")
    last = _norm("the decoder", text_model.norm, epsilons)
    if len(epsilons) > 1 or len(head_epsilons) > 1:
        raise Unfused("its norms have different epsilons")
    return DecoderWeights(layers, last, *epsilons, *(head_epsilons or {0.0}), scale)


def _layer(name: str, layer: Any, epsilons: set[float], head_epsilons: set[float]) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    _refuse_parts(f"the attention of {name}", attention, _LINEAR, _HEAD_NORMS)
    _refuse_parts(f"the MLP of {name}", mlp, {*_MLP, "act_fn"})
    if not _is_silu(mlp.act_fn):
        raise Unfused(f"{name} has another activation than SiLU")
    norms = [getattr(attention, norm, None) for norm in ("q_norm", "k_norm")]
    if (norms[0] is None) != (norms[1] is None):
        raise Unfused(f"{name} has a norm for queries or for keys alone")
    query, key = (None if norm is None else _norm(name, norm, head_epsilons) for norm in norms)
    return LayerWeights(
        before_attention=_norm(name, layer.input_layernorm, epsilons),
        query=_product(name, attention.q_proj),
        key=_product(name, attention.k_proj),
        value=_product(name, attention.v_proj),
        query_norm=query,
        key_norm=key,
        output=_product(name, attention.o_proj),
        before_gate=_norm(name, layer.post_attention_layernorm, epsilons),
        gate=_product(name, mlp.gate_proj),
        up=_product(name, mlp.up_proj),
        down=_product(name, mlp.down_proj),
    )


def _refuse_parts(
    name: str, module: nn.Module, needed: AbstractSet[str], allowed: AbstractSet[str] = frozenset()
) -> None:
    """Raise Unfused unless a module has the needed parts, and others only if they are allowed."""
    parts = {part for part, _ in module.named_children()}
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    other = sorted({*(parts - needed - allowed), *(tensor for tensor, _ in tensors)})
    if other:
        raise Unfused(f"{name} also has {', '.join(other)}")
    if missing := sorted(needed - parts):
        raise Unfused(f"{name} has no {', '.join(missing)}")


def _norm(name: str, norm: nn.Module, epsilons: set[float]) -> torch.Tensor:
    """Return a norm's weight, and add its epsilon to those of its kind."""
    if not isinstance(norm, OneCallNorm):
        raise Unfused(f"{name} has a norm that is not weight * rms_norm(x) to the last bit")
    epsilons.add(norm.epsilon)
    return cast(torch.Tensor, norm.weight)


def _product(name: str, layer: nn.Module) -> Product:
    if type(layer) is not KernelLinear:
        raise Unfused(f"{name} has a {type(layer).__name__} that the kernels for products do not multiply")
    return Product(layer.weight, layer.bias)


@torch.inference_mode()
def _is_silu(activation: nn.Module) -> bool:
    x = torch.linspace(-30, 30, 601)
    return torch.equal(activation(x), nn.functional.silu(x))


def _attend(
    step: Step, scale: float, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Compute a layer's attention (``mpic.kernels.decoder.Attend``) in a step whose blocks are written."""
    for rows, observed in step.observed:
        observed.take(layer, q[:, rows], scale)
    if step.single_writes is not None:
        step.single_writes.write(layer, k, v)
    if step.barrier is not None:
        step.barrier.wait(layer)
    return step.kinds[0].attend(q, layer, scale, step.partial)
