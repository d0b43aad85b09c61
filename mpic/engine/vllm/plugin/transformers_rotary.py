"""Rotary embeddings of transformers' own modules, inside vLLM.

vLLM runs many families (Olmo, GLM, GPT-NeoX, Phi, Seed-OSS, ...) through transformers' modules with its own attention
("transformers backend"). Their rotary embedding is then transformers', with ``apply_rotary_pos_emb`` beside it
in the same file. How that function pairs dimensions is found by calling it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpic.errors import ModelRefused
from mpic.kernels.attention import QueryRotation, rotate

_CHANGING = ("dynamic", "longrope")
"""Kinds whose frequencies depend on the length of the prompt."""
_PROBED = 5
"""Positions at which the function is called."""
_LIMIT = 1e-5


def modules(model: nn.Module) -> list[nn.Module]:
    """Return transformers' rotary modules in a model."""
    return [
        m
        for m in model.modules()
        if type(m).__module__.startswith("transformers.") and type(m).__name__.endswith("RotaryEmbedding")
    ]


def find(model: nn.Module) -> list[tuple[torch.Tensor, bool]]:
    """Return frequencies ``[half]`` fp64, and whether neighbouring dimensions turn together, of each of them.

    Raises:
        ModelRefused: frequencies that change, that differ by kind of layer, or that turn keys in another way.
    """
    return [_read(rotary) for rotary in modules(model)]


def rotated(rotary: nn.Module, keys: torch.Tensor, first: int) -> torch.Tensor:
    """Rotate ``keys [heads, n, width]`` to positions from ``first`` on, as the model's attention does. If keys are
    wider than the embedding, only their first dimensions are rotated.

    Raises:
        ModelRefused: the function is missing, or wants other arguments.
    """
    apply: Callable[..., Any] | None = getattr(
        sys.modules[type(rotary).__module__], "apply_rotary_pos_emb", None
    )
    if apply is None:
        raise ModelRefused(f"{type(rotary).__name__}: it does not say how it turns keys")
    positions = torch.arange(first, first + keys.shape[1], device=keys.device)[None]
    turned = 2 * rotary.inv_freq.numel()
    one = keys[None, ..., :turned]
    try:
        _, out = apply(one, one, *rotary(one, positions))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelRefused(f"{type(rotary).__name__}: it turns keys in an unknown way: {error}") from error
    return torch.cat([out[0], keys[..., turned:]], -1)


def _read(rotary: nn.Module) -> tuple[torch.Tensor, bool]:
    name = type(rotary).__name__
    if getattr(rotary, "rope_type", "default") in _CHANGING:
        raise ModelRefused(f"{name}: its rotary frequencies change with the length of the prompt")
    if not isinstance(getattr(rotary, "inv_freq", None), torch.Tensor):
        raise ModelRefused("the model's layers have different rotary embeddings")
    frequencies = rotary.inv_freq.detach().double().cpu()
    device = rotary.inv_freq.device
    keys = torch.randn(1, _PROBED, 2 * len(frequencies), generator=torch.Generator().manual_seed(3))
    scale = float(getattr(rotary, "attention_scaling", 1.0))
    for interleaved in (False, True):
        angle = torch.arange(_PROBED, dtype=torch.float64)[:, None] * frequencies
        wanted = rotate(keys, QueryRotation(angle.cos().float(), angle.sin().float(), interleaved)) * scale
        if (rotated(rotary, keys.to(device), 0).float().cpu() - wanted).abs().max() < _LIMIT:
            return frequencies, interleaved
    raise ModelRefused(f"{name}: it turns keys neither in halves nor in neighbouring pairs")
