"""Chunks into the paged cache: keys are turned from their chunk-local positions to where they stand.

A key rotated at local position j becomes the key at ``base + j`` by a rotation of ``base`` (less the sink tokens it
was compiled behind); with M-RoPE all three positions of a token move by the same amount, so one rotation serves
(DESIGN section 3). Angles are computed in fp64, the rotation in fp32, whatever the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

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


TRANSFER_BYTES = 128 << 20
"""Most bytes of keys and values that one copy to a GPU takes, so that a long chunk needs little memory beside the
cache."""

Angles: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each ``[1, half]`` fp32."""


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
        """``keys [..., heads, n, head_dim]`` turned by the angles whose ``cos, sin [1, half]`` are given."""
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

    def angles(self, delta: int) -> Angles | None:
        """cos and sin ``[1, half]`` of a move by ``delta`` positions; None for no move."""
        if not delta:
            return None
        angle = delta * self.frequencies[None]
        return angle.cos().float(), angle.sin().float()


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

    On a GPU a piece crosses the bus in few large copies and is rotated and written there. On a CPU layers are handled
    one after the other, so that a rotated key is still in the processor's cache when it is written.
    """
    for piece in pieces:
        angles = turn.angles(piece.delta)
        if paged.on_cpu:
            _place_from_host(paged, turn, piece, angles)
        else:
            _place_on_device(paged, turn, piece, angles)


def _place_from_host(paged: Paged, turn: Turn, piece: Piece, angles: Angles | None) -> None:
    for i, layer in enumerate(paged.layers):
        keys, values = (piece.kv[i][half][:, piece.tokens] for half in (0, 1))
        if angles is not None:
            keys = turn(keys, *angles)
        paged.write(layer, keys.transpose(0, 1), values.transpose(0, 1), piece.slots)


def _place_on_device(paged: Paged, turn: Turn, piece: Piece, angles: Angles | None) -> None:
    device = paged.device
    slots = piece.slots.to(device, non_blocking=True)
    if angles is not None:
        angles = tuple(table.to(device, non_blocking=True) for table in angles)
    _, heads, _, width = piece.kv[0].shape
    layer_bytes = 2 * heads * piece.count * width * piece.kv[0].element_size()
    group = max(1, TRANSFER_BYTES // layer_bytes)
    for first in range(0, len(paged.layers), group):
        layers = range(first, min(first + group, len(paged.layers)))
        keys, values = upload(piece, layers, device).unbind(1)
        if angles is not None:
            keys = turn(keys, *angles)
        for i, layer in enumerate(layers):
            paged.write(paged.layers[layer], keys[i].transpose(0, 1), values[i].transpose(0, 1), slots)


def upload(piece: Piece, layers: range, device: torch.device) -> torch.Tensor:
    """Copy some layers of a piece to the device in one transfer from page-locked memory.

    A whole chunk lies contiguous in page-locked host memory already and is copied from there. A part of one, or a chunk
    that this process maps from its file, is gathered first: a strided transfer would go through pageable memory.

    Returns:
        ``[layers, 2, heads, count, head_dim]`` on ``device``; the copy may still be under way on the current stream.
    """
    kv = piece.kv[layers.start : layers.stop]
    if isinstance(kv, torch.Tensor) and kv.is_contiguous() and piece.count == kv.shape[3]:
        return kv.to(device, non_blocking=True)
    two, heads, _, width = kv[0].shape
    shape = (len(kv), two, heads, piece.count, width)
    gathered = torch.empty(shape, dtype=kv[0].dtype, pin_memory=device.type == "cuda")
    for i, layer in enumerate(kv):
        gathered[i] = layer[:, :, piece.tokens]
    return gathered.to(device, non_blocking=True)
