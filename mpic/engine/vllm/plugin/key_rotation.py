"""The rotation that moves a model's keys by whole positions, with the frequencies of vLLM's own rotary modules.

A key rotated at local position j becomes the key at ``base + j`` by a rotation of ``base`` (less the sink tokens it
was compiled behind); with M-RoPE all three positions of a token move by the same amount, so one rotation serves
(docs/design.md, "Rotation on the query side"). Angles are computed in fp64 and rotations in fp32, whatever dtype the
cache has.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from mpic.engine.vllm.plugin import transformers_rotary
from mpic.errors import ModelRefused
from mpic.kernels.attention import QueryRotation

_SCALED = {
    "DynamicNTKScalingRotaryEmbedding": "dynamic NTK",
    "DynamicNTKAlphaRotaryEmbedding": "dynamic NTK",
    "Phi3LongRoPEScaledRotaryEmbedding": "LongRoPE",
}


class KeyRotation:
    """Rotations of a model's keys.

    Args:
        model: vLLM's module of the language model, which may hold transformers' modules (``transformers_rotary.py``).

    Attributes:
        frequencies: ``[half]`` fp64.
        interleaved: True where dimensions (2i, 2i+1) turn together, otherwise (i, i + half).

    Raises:
        ModelRefused: it has no rotary embedding, several different ones, or one whose frequencies may change.
    """

    def __init__(self, model: nn.Module) -> None:
        rotaries = [m for m in model.modules() if isinstance(m, RotaryEmbeddingBase)]
        found = [(_frequencies(rotary), not rotary.is_neox_style) for rotary in rotaries]
        found += transformers_rotary.find(model)
        if not found:
            raise ModelRefused("the model has no rotary embedding: keys cannot be moved")
        self.frequencies, self.interleaved = found[0]
        for frequencies, interleaved in found:
            if interleaved != self.interleaved or not torch.equal(frequencies, self.frequencies):
                raise ModelRefused("the model's layers have different rotary embeddings")

    def by(self, delta: int) -> QueryRotation | None:
        """Return the rotation by ``delta`` positions for ``mpic.kernels.attention.rotate``; None for no rotation."""
        if not delta:
            return None
        angle = delta * self.frequencies
        return QueryRotation(angle.cos().float(), angle.sin().float(), self.interleaved)


def _frequencies(rotary: RotaryEmbeddingBase) -> torch.Tensor:
    """Return the frequencies ``[half]`` fp64, checked against the table that the model itself uses."""
    name = type(rotary).__name__
    if name in _SCALED:
        raise ModelRefused(f"{_SCALED[name]} changes the rotary frequencies with the length of the prompt")
    if isinstance(rotary, YaRNScalingRotaryEmbedding):
        frequencies = rotary._compute_inv_freq(rotary.scaling_factor)
    elif isinstance(rotary, MRotaryEmbedding) and rotary.scaling_factor is not None:
        frequencies = YaRNScalingRotaryEmbedding._compute_inv_freq(rotary, rotary.scaling_factor)
    else:
        frequencies = rotary._compute_inv_freq(rotary.base)
    frequencies = frequencies.detach().double().cpu()
    table = rotary.cos_sin_cache[:9].double().cpu()
    own = torch.arange(len(table), dtype=torch.float64)[:, None] * frequencies
    own = torch.cat([own.cos(), own.sin()], -1) * table[0, 0]
    tolerance = 1e-5 if rotary.cos_sin_cache.dtype == torch.float32 else 2e-2
    if own.shape != table.shape or (own - table).abs().max() > tolerance:
        raise ModelRefused(f"{name}: its rotary frequencies are not those of its table")
    return frequencies
