"""Attention over packed rows where each block of rows reads only the keys it can see.

torch's fused attention is no faster on a CPU: without matrix units it reaches in bf16 a tenth of the speed of the plain
matrix products, with them its backward pass takes back what its forward pass gains. Here the rows are cut into blocks,
and a block is two matrix products and a softmax over the range of keys that any of its rows sees. Scores are kept in
the inputs' precision and summed in fp32, as in transformers' eager attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlavaForConditionalGeneration
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "mpic-blocks"
BLOCK = 256
"""Rows of a block. With bf16 matrix units 1.4 times as fast as 128 on conversations of 4,400 tokens."""


@dataclass(frozen=True)
class AttentionBlock:
    """Rows [start, end) see some of keys [low, high); all of them see all of [low, mixed)."""

    start: int
    end: int
    low: int
    mixed: int
    high: int
    bias: torch.Tensor | None  # [rows, high - mixed], 0 where a row sees a key, else -inf


def make_block(visible: np.ndarray, start: int, low: int) -> AttentionBlock:
    """Returns the block of rows from `start` on; `visible` [rows, keys] is which of the keys from `low`
    on."""
    seen = np.flatnonzero(visible.any(0))
    first, last = int(seen[0]), int(seen[-1]) + 1
    holes = np.flatnonzero(~visible[:, first:last].all(0))
    mixed = first + int(holes[0]) if holes.size else last
    bias = None
    if mixed < last:
        bias = torch.zeros(visible.shape[0], last - mixed)
        bias.masked_fill_(torch.from_numpy(~visible[:, mixed:last]), float("-inf"))
    return AttentionBlock(start, start + len(visible), low + first, low + mixed, low + last, bias)


class _Attention(torch.autograd.Function):
    """q, k, v [heads, rows, head_dim] -> [heads, rows, head_dim]; q is already scaled."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: list[AttentionBlock]
    ) -> torch.Tensor:
        out, kept = torch.empty_like(q), []
        # CUDA's autocast would return a softmax in fp32, which a product of bf16 does not take; a CPU's does not.
        with torch.autocast(q.device.type, enabled=False):
            for b in blocks:
                scores = torch.bmm(q[:, b.start : b.end], k[:, b.low : b.high].transpose(1, 2))
                if b.bias is not None:
                    scores[..., b.mixed - b.low :] += b.bias.to(scores.dtype)
                weights = torch.softmax(scores, -1)
                torch.bmm(weights, v[:, b.low : b.high], out=out[:, b.start : b.end])
                kept.append(weights)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        q, k, v, *kept = ctx.saved_tensors
        dq = torch.empty_like(q)
        summed = torch.promote_types(k.dtype, torch.float32)
        dk, dv = (torch.zeros(x.shape, dtype=summed, device=x.device) for x in (k, v))
        for b, weights in zip(ctx.blocks, kept, strict=True):
            rows, keys = slice(b.start, b.end), slice(b.low, b.high)
            dv[:, keys] += torch.bmm(weights.transpose(1, 2), grad[:, rows])
            dweights = torch.bmm(grad[:, rows], v[:, keys].transpose(1, 2))
            dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
            dq[:, rows] = torch.bmm(dscores, k[:, keys])
            dk[:, keys] += torch.bmm(dscores.transpose(1, 2), q[:, rows])
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: list[AttentionBlock], scaling: float
) -> torch.Tensor:
    """Attends: q, k, v [heads, rows, head_dim] -> [heads, rows, head_dim]; the blocks cover every row once."""
    return _Attention.apply(*(x.contiguous() for x in (q * scaling, k, v)), blocks)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    blocks: list[AttentionBlock],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if torch.is_autocast_enabled(query.device.type):
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    return attend(query[0], key[0], value[0], blocks, scaling).transpose(0, 1)[None], None


@contextlib.contextmanager
def blocked(model: LlavaForConditionalGeneration) -> Iterator[None]:
    """Makes the language model attend by blocks inside the `with` block; they are passed to it as `blocks`."""
    config = model.config.text_config
    before, config._attn_implementation = config._attn_implementation, NAME
    try:
        yield
    finally:
        config._attn_implementation = before


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
