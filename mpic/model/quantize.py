"""Weight-only quantisation of plain weights as they are loaded: the linear layers of the decoder keep 8 or 4 bits a
weight, and torch's own CPU kernels multiply with them. Activations, embeddings, head and vision encoder stay as they
are.

Weights are rounded to nearest: ``int8`` is symmetric with a scale for each output, ``int4`` has a scale and a zero for
each output and each group of 32 inputs (the layouts of ``_weight_int8pack_mm`` and ``_weight_int4pack_mm_for_cpu``). A
row's result does not depend on the rows beside it, as it would if activations were quantised by batch.

The projection that expands the latents of multi-head latent attention stays plain: its weight is absorbed into queries
and outputs (``latent.py``), and a layer that could not do so would have to keep every head's keys and values. It is
a small part of the weights, 0.4 % in DeepSeek-V2-Lite and 0.2 % in DeepSeek-V3.

The experts of a mixture stay plain, too: transformers keeps those of a layer in two tensors, outside of linear layers.
A model that consists of experts for the most part is refused.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import nn

from mpic.errors import ModelRefused
from mpic.model.identity import remember_weights
from mpic.model.structure import text_model_of

log = logging.getLogger(__name__)

GROUP = 32
"""Inputs that share a scale in ``int4``."""
BLOCK = 16
"""torch's packed layout of 4-bit weights takes whole blocks of so many outputs."""
FEW_ROWS = 16
"""torch's 8-bit kernel is made for few rows; with more, unpacking the weights first is faster."""
METHODS = ("int8", "int4")
LATENTS = "kv_b_proj"
"""The name that transformers gives to the projection from latents to keys and values, in every family."""


class Int8Linear(nn.Module):
    """``x W^T + b`` with ``W`` as 8-bit integers ``[out, in]`` and ``scale [out]``."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        # weights are rounded by the scale as it is in their own dtype
        scale = (weight.abs().amax(1) / 127).to(linear.weight.dtype)
        steps = weight / scale.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        self.register_buffer("weight", steps.round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= FEW_ROWS and x.dtype != torch.float32:  # torch has no fast kernel for float32
            out = torch._weight_int8pack_mm(rows.contiguous(), self.weight, self.scale)
        elif x.dtype == torch.float16:  # products with integers would exceed its largest number, 65,504
            out = rows @ (self.weight.to(x.dtype) * self.scale[:, None]).T
        else:
            out = (rows @ self.weight.to(x.dtype).T) * self.scale
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], -1)


class Int4Linear(nn.Module):
    """``x W^T + b`` with ``W`` as 4-bit integers in torch's packed layout, and ``scales [in / 32, out, 2]``: of each
    group its scale and the value of the integer 8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        groups = weight.reshape(weight.shape[0], -1, GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).clamp_min(torch.finfo(torch.float32).tiny)
        values = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.reshape(weight.shape), 1)
        scales = torch.stack([scale, low + 8 * scale], -1).transpose(0, 1).contiguous()
        self.register_buffer("weight", packed)
        self.register_buffer("scales", scales.to(linear.weight.dtype))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scales)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], -1)


def refuse_quantize(method: str, device: torch.device, already: dict[str, Any] | None) -> None:
    """Raise ModelRefused if there is no such method, the device is not a CPU, or the weights are quantised
    ``already``."""
    if method not in METHODS:
        raise ModelRefused(f"unknown quantize '{method}'; available: {', '.join(METHODS)}")
    if device.type != "cpu":
        raise ModelRefused(
            f"quantize = {method} runs on the CPU only; on {device.type}, load a checkpoint that is quantised already"
        )
    if already is not None:
        raise ModelRefused(f"quantize = {method}: the model's weights are quantised already")


def quantize_weights(model: nn.Module, method: str) -> dict[str, int | str]:
    """Replace the linear layers of a model's decoder in place, one after the other.

    Args:
        model: a model with plain weights on the CPU.
        method: ``int8`` or ``int4``.

    Returns:
        What ``/health`` says of it: the method, how many layers were replaced, how many stay because their sizes do not
        fit torch's layout, how many because they expand latents, how many other weights stay plain and their bytes,
        and the bytes of all weights before and after.

    Raises:
        ModelRefused: no layer can be replaced, or most weights of the decoder are not those of linear layers.
    """
    kind, before = {"int8": Int8Linear, "int4": Int4Linear}[method], weight_bytes(model)
    layers = cast(nn.Module, text_model_of(model).layers)
    fitting, latents, kept = _linears(layers, method)
    others = _other_weights(layers)
    if not fitting:
        raise ModelRefused(f"quantize = {method}: no linear layer of the decoder can be replaced")
    other_bytes = sum(one.nbytes for one in others)
    if other_bytes > sum(getattr(parent, name).weight.nbytes for parent, name in fitting):
        raise ModelRefused(
            f"quantize = {method}: most weights of the decoder ({other_bytes:,} bytes) are not those of linear layers "
            "but, for example, of a mixture's experts, which stay plain: load a checkpoint that is quantised already"
        )
    if others:
        log.warning(
            "quantize = %s: %d weights of the decoder (%s bytes) are not those of linear layers and stay plain",
            method,
            len(others),
            f"{other_bytes:,}",
        )
    remember_weights(model)  # what was trained with the plain weights still fits
    for parent, name in fitting:
        setattr(parent, name, kind(getattr(parent, name)))
    return {
        "method": method,
        "layers": len(fitting),
        "layers_not_quantized": kept,
        "layers_of_latents": latents,
        "other_weights": len(others),
        "other_bytes": other_bytes,
        "bytes_before": before,
        "bytes": weight_bytes(model),
    }


def _linears(layers: nn.Module, method: str) -> tuple[list[tuple[nn.Module, str]], int, int]:
    """Return the linear layers that can be replaced, each by its parent and its name there, the number of those that
    expand latents, and that of those whose sizes do not fit."""
    fitting: list[tuple[nn.Module, str]] = []
    latents = kept = 0
    for parent in layers.modules():
        for name, child in parent.named_children():
            if type(child) is not nn.Linear:
                continue
            if name == LATENTS:
                latents += 1
            elif method == "int4" and (child.in_features % GROUP or child.out_features % BLOCK):
                kept += 1
            else:
                fitting.append((parent, name))
    return fitting, latents, kept


def _other_weights(layers: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of a decoder that are not those of linear layers or embeddings: of routers and experts, but
    not the small ones of convolutions and the like."""
    found = {
        id(one): one
        for module in layers.modules()
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding)
        for one in module.parameters(recurse=False)
        if one.ndim >= 2 and one.is_floating_point() and min(one.shape[-2:]) >= GROUP
    }
    return list(found.values())


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights; shared ones are counted once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values())
