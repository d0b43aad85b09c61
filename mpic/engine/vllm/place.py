"""Chunks into the paged cache: keys are turned from their chunk-local positions to where they stand.

A key rotated at local position j becomes the key at ``base + j`` by a rotation of ``base`` (less the sink tokens it
was compiled behind); with M-RoPE all three positions of a token move by the same amount, so one rotation serves
(DESIGN section 3). Angles are computed in fp64, the rotation in fp32, whatever the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from mpic.engine.vllm.layout import Paged
from mpic.errors import ModelRefused

_SCALED = {
    "DynamicNTKScalingRotaryEmbedding": "dynamic NTK",
    "DynamicNTKAlphaRotaryEmbedding": "dynamic NTK",
    "Phi3LongRoPEScaledRotaryEmbedding": "LongRoPE",
}


class Turn:
    """The rotation of a model's keys by whole positions.

    Args:
        model: vLLM's module of the language model.

    Raises:
        ModelRefused: no rotary embedding, several different ones, or one whose frequencies are not known to be fixed.
    """

    def __init__(self, model: nn.Module) -> None:
        rotaries = [m for m in model.modules() if isinstance(m, RotaryEmbeddingBase)]
        if not rotaries:
            raise ModelRefused("the model has no rotary embedding: keys cannot be moved")
        found = [_frequencies(rotary) for rotary in rotaries]
        self.frequencies, self.interleaved = found[0], not rotaries[0].is_neox_style
        for other, rotary in zip(found, rotaries, strict=True):
            if rotary.is_neox_style == self.interleaved or not torch.equal(other, self.frequencies):
                raise ModelRefused("the model's layers have different rotary embeddings")

    def __call__(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``keys [heads, n, head_dim]`` turned by the angles whose ``cos, sin [n or 1, half]`` are given."""
        width = 2 * cos.shape[1]
        part = slice(None, width, 2), slice(1, width, 2)
        if not self.interleaved:
            part = slice(None, width // 2), slice(width // 2, width)
        a, b = (keys[..., half].float() for half in part)
        out = torch.empty_like(keys, dtype=torch.float32)
        torch.mul(a, cos, out=out[..., part[0]]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out[..., part[1]]).addcmul_(a, sin)
        out[..., width:] = keys[..., width:]
        return out.to(keys.dtype)

    def angles(
        self, deltas: Sequence[int], counts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """cos and sin ``[n, half]`` for ``counts[i]`` tokens that move by ``deltas[i]`` each; ``[1, half]`` when all
        move alike; None when none moves."""
        if not any(deltas):
            return None
        alike = len(set(deltas)) == 1
        angle = torch.tensor(deltas[:1] if alike else deltas, dtype=torch.float64)[:, None] * self.frequencies
        tables = angle.cos().float(), angle.sin().float()
        return tables if alike else tuple(t.repeat_interleave(torch.tensor(counts), 0) for t in tables)


def _frequencies(rotary: RotaryEmbeddingBase) -> torch.Tensor:
    """``[half]`` fp64, checked against the table that the model itself uses."""
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
        raise ModelRefused(f"{name}: its rotary frequencies are not what they are known to be")
    return frequencies


class Piece(NamedTuple):
    """Tokens of a chunk that go into the paged cache.

    Args:
        kv: for each of this worker's layers ``[2, heads, n, head_dim]`` of its heads, in host memory.
        tokens: which of the n, a slice or ``[count]`` indices.
        count: how many.
        delta: positions that their keys move.
        slots: ``[count]`` where they go.
    """

    kv: Sequence[torch.Tensor]
    tokens: slice | torch.Tensor
    count: int
    delta: int
    slots: torch.Tensor


def place(paged: Paged, turn: Turn, pieces: Sequence[Piece]) -> None:
    """Write pieces, of any requests, into the paged cache.

    On a GPU all at once: per layer one rotation and one write. On a CPU one after the other, so that what is turned is
    still in the processor's cache when it is written.
    """
    if paged.device.type == "cpu":
        for piece in pieces:
            _place(paged, turn, [piece])
    elif pieces:
        _place(paged, turn, pieces)


def _place(paged: Paged, turn: Turn, pieces: Sequence[Piece]) -> None:
    device = paged.device
    slots = torch.cat([piece.slots for piece in pieces]).to(device)
    angles = turn.angles([piece.delta for piece in pieces], [piece.count for piece in pieces])
    if angles is not None:
        angles = tuple(table.to(device, non_blocking=True) for table in angles)
    for i, layer in enumerate(paged.layers):
        keys, values = (
            _together([piece.kv[i][half][:, piece.tokens] for piece in pieces], device) for half in (0, 1)
        )
        if angles is not None:
            keys = turn(keys, *angles)
        paged.write(layer, keys.transpose(0, 1), values.transpose(0, 1), slots)


def _together(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    moved = [part.to(device, non_blocking=True) for part in parts]
    return moved[0] if len(moved) == 1 else torch.cat(moved, 1)
