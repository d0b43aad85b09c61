"""CUDA attention operators of torch in plain Python, with the contracts that ``mpic.kernels.cuda`` relies on.

On a CPU the real operators do not exist. These stand in for them: they check what the CUDA kernels demand of their
arguments, and they return results in the shapes, dtypes and strides of the real ones, with the padding of the
log-sum-exp poisoned. A caller that confuses a folded head with a row, reads the padding, or passes memory that the
kernel would misread fails here, on every machine.

What is taken from torch (checked against the schemas and meta functions of the installed version by the tests):

- flash: fp16 and bf16 only; head sizes are multiples of 8 up to 256; ``logsumexp [batch, heads, rows]`` fp32.
- efficient: equal head counts; ``log_sumexp [batch, heads, rows rounded up to 32]`` fp32.
- both: ``[batch, heads, rows, head_dim]``; elements of a row are adjacent, rows begin at 16 bytes; the output is
  ``[batch, rows, heads, head_dim]`` in memory, returned transposed.
- ``is_causal`` is used for square calls only, on which upper-left and lower-right alignment agree.
"""

from __future__ import annotations

import torch

LSE_BLOCK = 32
"""The efficient kernel rounds the rows of its log-sum-exp up to a multiple of this."""


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    """``aten::_scaled_dot_product_flash_attention``."""
    assert query.dtype in (torch.float16, torch.bfloat16), f"the flash kernel does not take {query.dtype}"
    assert query.shape[-1] % 8 == 0 and query.shape[-1] <= 256, "head sizes: multiples of 8 up to 256"
    assert not dropout_p and not return_debug_mask
    out, lse = _attend(query, key, value, is_causal, scale)
    seed = torch.zeros(2, dtype=torch.int64)
    empty = torch.empty(0, dtype=query.dtype)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, seed[0], empty


def efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """``aten::_scaled_dot_product_efficient_attention``."""
    assert attn_bias is None and not dropout_p
    out, lse = _attend(query, key, value, is_causal, scale)
    rows = query.shape[2]
    padded = torch.full((*lse.shape[:2], -(-rows // LSE_BLOCK) * LSE_BLOCK), float("nan"))
    padded[..., :rows] = lse
    if not compute_log_sumexp:
        padded = padded[..., :0]
    seed = torch.zeros((), dtype=torch.int64)
    return out, padded, seed, seed


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check(name, tensor, query)
    assert key.shape == value.shape
    rows, keys = query.shape[2], key.shape[2]
    assert rows and keys, "an empty call would read nothing and return no log-sum-exp"
    assert not causal or rows == keys, "rectangular causal calls are aligned differently by every kernel"
    scores = (
        query.float() @ key.float().transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    )
    if causal:
        scores = scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    found = torch.exp(scores - lse[..., None]) @ value.float()
    batch, heads, _, dim = query.shape
    out = torch.empty(batch, rows, heads, dim, dtype=query.dtype)  # in the layout of the kernels
    out.copy_(found.transpose(1, 2))
    return out.transpose(1, 2), lse


def _check(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    assert tensor.ndim == 4 and tensor.dtype == query.dtype, (
        f"{name}: {tuple(tensor.shape)} of {tensor.dtype}"
    )
    assert tensor.shape[:2] == query.shape[:2], f"{name}: {tensor.shape[1]} heads beside {query.shape[1]}"
    assert tensor.stride(-1) == 1, f"{name}: the elements of a row are not adjacent"
    size = tensor.element_size()
    assert tensor.data_ptr() % 16 == 0, f"{name} begins at no multiple of 16 bytes"
    for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1]):
        assert length == 1 or stride * size % 16 == 0, f"{name}: rows begin at no multiple of 16 bytes"
