"""Span attention on CUDA through torch's own flash (half precision) and memory-efficient (fp32) kernels.

The Triton kernel that reads a whole step in one launch is a separate implementation behind the same seam.
"""

from __future__ import annotations

from functools import cache

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
_MOST = 256
"""Dimensions of a head that the flash kernel takes."""


def _fold(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the head counts equal: unmasked calls fold a group's heads into query rows, causal ones repeat the keys."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return q, k, v
    if causal:
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return q.reshape(q.shape[0], k.shape[1], group * q.shape[2], q.shape[3]), k, v


def flash_partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in bf16 or fp16; shapes as ``mpic.kernels.attention.Partial``. Larger heads, and GPUs that are older than
    sm_80, get torch's other kernel."""
    if q.shape[-1] > _MOST or _is_old(q.device):
        return efficient_partial(q, k, v, causal, scale)
    fq, fk, fv = _fold(q, k, v, causal)
    out, lse, *_ = _flash(fq, fk, fv, 0.0, causal, False, scale=scale)
    return out.reshape(q.shape), lse[..., : fq.shape[2]].reshape(q.shape[:3])


def efficient_partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in any precision; shapes as ``mpic.kernels.attention.Partial``. Torch's kernel pads its log-sum-exp to a
    multiple of 32 rows."""
    fq, fk, fv = _fold(q, k, v, causal)
    out, lse, *_ = _efficient(fq, fk, fv, None, True, 0.0, causal, scale=scale)
    return out.reshape(q.shape), lse[..., : fq.shape[2]].reshape(q.shape[:3])


@cache
def _is_old(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
