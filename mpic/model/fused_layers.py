"""Reads a decoder's modules as the weights of a fused step (``mpic.kernels.decoder``), where they have its structure.

A module is known by its parts, not by its class or its model: a layer has two RMS norms, an attention of four linear
layers and an MLP of three with SiLU, and nothing besides. What parts cannot show, such as a factor between them or
their order, ``fused_proof.py`` finds out by running the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Protocol

import torch
from torch import nn

from mpic.kernels.decoder import DecoderWeights, LayerWeights
from mpic.kernels.linear import Product
from mpic.kernels.whole_decoder import WholeDecoder
from mpic.model.hooks import Step
from mpic.model.kernel_linear import KernelLinear
from mpic.model.norms import OneCallNorm
from mpic.model.structure import RowInputs

_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


NOTE = "fused_step_note"
"""The detail of a model that says why its steps are not fused; empty where they are."""
TOKENS_NOTE = "fused_tokens_note"
"""The detail of a model with fused steps that says why none of them begins with tokens; empty where they do."""
NOT_STREAM = "single rows do not attend with cpu-stream"


class StepsInOneCall(Protocol):
    """The interface through which a loaded model runs its fused steps (``mpic.model.fused_step.FusedStep``)."""

    counters: Counter[str]
    note: str

    def begins_with_tokens(self) -> bool: ...

    def whole_decoder(self) -> WholeDecoder: ...

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def run(
        self, inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor
    ) -> torch.Tensor | None: ...


class Unfused(Exception):
    """A model, or a step, cannot be fused; the message says why."""


def read_decoder(text_model: nn.Module, scale: float) -> DecoderWeights:
    """Returns the weights of a decoder.

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


def read_head(layer: nn.Module) -> Product | None:
    """Returns the weights of an output projection that the kernels for products multiply, or None."""
    return Product(layer.weight, layer.bias) if type(layer) is KernelLinear else None


def _layer(name: str, layer: nn.Module, epsilons: set[float], head_epsilons: set[float]) -> LayerWeights:
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
        _norm(name, layer.input_layernorm, epsilons),
        *(_product(name, getattr(attention, part)) for part in ("q_proj", "k_proj", "v_proj")),
        *(query, key),
        _product(name, attention.o_proj),
        _norm(name, layer.post_attention_layernorm, epsilons),
        *(_product(name, getattr(mlp, part)) for part in ("gate_proj", "up_proj", "down_proj")),
    )


def _refuse_parts(
    name: str, module: nn.Module, needed: AbstractSet[str], allowed: AbstractSet[str] = frozenset()
) -> None:
    """Raises Unfused unless a module has the needed parts, and others only if they are allowed."""
    parts = {part for part, _ in module.named_children()}
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    other = sorted({*(parts - needed - allowed), *(tensor for tensor, _ in tensors)})
    if other:
        raise Unfused(f"{name} also has {', '.join(other)}")
    if missing := sorted(needed - parts):
        raise Unfused(f"{name} has no {', '.join(missing)}")


def _norm(name: str, norm: nn.Module, epsilons: set[float]) -> torch.Tensor:
    """Returns a norm's weight, and adds its epsilon to those of its kind."""
    if not isinstance(norm, OneCallNorm):
        raise Unfused(f"{name} has a norm that is not weight * rms_norm(x) to the last bit")
    epsilons.add(norm.one_call_epsilon)
    return norm.weight


def _product(name: str, layer: nn.Module) -> Product:
    if type(layer) is not KernelLinear:
        raise Unfused(f"{name} has a {type(layer).__name__} that the kernels for products do not multiply")
    return Product(layer.weight, layer.bias)


@torch.inference_mode()
def _is_silu(activation: nn.Module) -> bool:
    x = torch.linspace(-30, 30, 601)
    return torch.equal(activation(x), nn.functional.silu(x))
