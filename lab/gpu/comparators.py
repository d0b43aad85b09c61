"""Attention of other projects for the cases of ``attention_cases``, where their packages are installed: FlashAttention
(``flash-attn``, Dao, 2023) and FlashInfer (``flashinfer-python``, Ye et al., 2025).

They compute the attention of a case: each request's own rows are causal among themselves and see all keys before them.
Keys are contiguous or in pages, rotated beforehand, and every request has a copy of its own. FlashInfer's planning,
which is done once per step, is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mpic_lab.bench.harness import BenchDevice
from mpic_lab.gpu.attention_cases import Case

PAGE = 16
"""Tokens of a page for FlashInfer's decoding."""
WORKSPACE = 128 << 20
"""Bytes that FlashInfer's documentation recommends for its partial results."""


class Inputs(NamedTuple):
    """The tensors of a case.

    Args:
        q: ``[requests, rows, heads, head_dim]``.
        k, v: ``[requests, linked + rows, kv_heads, head_dim]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


Attention = Callable[[], torch.Tensor]
"""Returns ``[requests * rows, heads, head_dim]``, or the same with its first axis in two."""


def random_inputs(case: Case, placement: BenchDevice) -> Inputs:
    options = {"dtype": placement.dtype, "device": placement.device}
    q = torch.randn(case.requests, case.rows, case.heads, case.dim, **options)
    shape = (case.requests, case.linked + case.rows, case.kv_heads, case.dim)
    return Inputs(q, torch.randn(shape, **options), torch.randn(shape, **options))


def error_of(found: torch.Tensor, case: Case, inputs: Inputs) -> float:
    """Returns the largest difference from the case's attention by torch, under an explicit mask."""
    q, k, v = (each.transpose(1, 2) for each in inputs)
    visible = torch.ones(case.rows, case.linked + case.rows, dtype=torch.bool, device=q.device)
    visible = visible.tril(case.linked)
    expected = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=case.heads != case.kv_heads)
    return float((found.view(inputs.q.shape) - expected.transpose(1, 2)).float().abs().max())


def flash_attention(case: Case, inputs: Inputs) -> Attention:
    """Returns a call of FlashAttention, whose causal mask is aligned with the last key."""
    from flash_attn import flash_attn_func

    q, k, v = inputs
    return lambda: flash_attn_func(q, k, v, softmax_scale=case.dim**-0.5, causal=True)


def flashinfer(case: Case, inputs: Inputs) -> Attention:
    """Returns a call of FlashInfer: its decoding over pages for single rows, its ragged prefill for more."""
    return _flashinfer_decode(case, inputs) if case.rows == 1 else _flashinfer_prefill(case, inputs)


def _flashinfer_prefill(case: Case, inputs: Inputs) -> Attention:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    q, k, v = (each.flatten(0, 1) for each in inputs)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace)
    starts = torch.arange(case.requests + 1, dtype=torch.int32)
    wrapper.plan(
        qo_indptr=starts * case.rows,
        kv_indptr=starts * (case.linked + case.rows),
        num_qo_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim_qk=case.dim,
        causal=True,
        sm_scale=case.dim**-0.5,
        q_data_type=q.dtype,
    )
    return lambda: wrapper.run(q, k, v)


def _flashinfer_decode(case: Case, inputs: Inputs) -> Attention:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    q, keys = inputs.q.flatten(0, 1), case.linked + 1
    pages = -(-keys // PAGE)
    spare = pages * PAGE - keys
    k, v = (F.pad(each, (0, 0, 0, 0, 0, spare)).view(-1, PAGE, *each.shape[2:]) for each in inputs[1:])
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        indptr=torch.arange(case.requests + 1, dtype=torch.int32) * pages,
        indices=torch.arange(case.requests * pages, dtype=torch.int32, device=q.device),
        last_page_len=torch.full((case.requests,), PAGE - spare, dtype=torch.int32),
        num_qo_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.dim,
        page_size=PAGE,
        sm_scale=case.dim**-0.5,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    return lambda: wrapper.run(q, (k, v))


class Comparator(NamedTuple):
    """Attention of another project.

    Args:
        package: name of the package to import.
        distribution: name of the distribution to install.
    """

    package: str
    distribution: str
    build: Callable[[Case, Inputs], Attention]


COMPARATORS = {
    "FlashAttention": Comparator("flash_attn", "flash-attn", flash_attention),
    "FlashInfer": Comparator("flashinfer", "flashinfer-python", flashinfer),
}
