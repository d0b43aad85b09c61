"""The decoder's RMS norms: torch's function where it computes exactly the same, and their own code elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mpic.model.own_modules import OneCallNorm, differs_by_order, use_one_call


class _GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states)


def _norm(kind, dtype, size=96):
    made = kind(size, 1e-5).to(dtype)
    with torch.no_grad():
        made.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(1)))
    return made.eval().requires_grad_(False)


def _used(norm):
    """A layer that a decoder may have instead of a norm."""
    decoder = nn.ModuleList([norm])
    use_one_call(decoder)
    return decoder[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_llama_gives_the_same_bits_in_one_call(dtype):
    own = _norm(LlamaRMSNorm, dtype)
    quick = _used(copy.deepcopy(own))
    assert type(quick) is OneCallNorm and type(own) is LlamaRMSNorm
    generator = torch.Generator().manual_seed(2)
    for rows in (1, 3, 500):
        x = (torch.randn(1, rows, 96, generator=generator) * 30).to(dtype)
        assert torch.equal(quick(x), own(x))
    assert torch.equal(copy.deepcopy(quick)(x), own(x))


@pytest.mark.parametrize("kind", [Gemma3RMSNorm, _GatedRMSNorm])
def test_norms_that_compute_or_take_something_else_stay_as_they_are(kind):
    assert type(_used(_norm(kind, torch.float32))) is kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_in_another_order_are_told_from_other_rounding(dtype):
    """On CUDA, where torch's function adds in another order."""
    x = (
        torch.randn(8, 4096, generator=torch.Generator().manual_seed(4)) * torch.logspace(-4, 4, 8)[:, None]
    ).to(dtype)
    own = _norm(LlamaRMSNorm, dtype, 4096)
    wide = x.float()
    backwards = wide.pow(2).flip(-1).cumsum(-1)[:, -1:] / 4096
    other_order = own.weight * (wide * torch.rsqrt(backwards + own.variance_epsilon)).to(dtype)
    assert differs_by_order(other_order, own(x))
    assert not differs_by_order(other_order * 1.01, own(x))
    if dtype != torch.float32:
        rounds_once = _norm(GptOssRMSNorm, dtype, 4096)
        assert not differs_by_order(own(x), rounds_once(x))


def test_other_devices_keep_their_own():
    assert type(_used(_norm(LlamaRMSNorm, torch.float32).to("meta"))) is LlamaRMSNorm


def test_hooks_of_a_norm_are_called():
    norm, seen = _used(_norm(LlamaRMSNorm, torch.float32)), []
    assert type(norm) is OneCallNorm
    x = torch.randn(1, 2, 96)
    with norm.register_forward_pre_hook(lambda module, args: seen.append(args[0])):
        norm(x)
    norm(x)
    assert len(seen) == 1 and seen[0] is x
