"""The self-test of a worker's cache, run on every device when the engine starts.

It writes known keys and values through the same path as a link, and checks three properties: they read back unchanged;
a moved key equals the one that vLLM's own rotary embedding computes at the new position; and the attention backend
computes with the written values and, where chunks are shared, rotates its query as keys would have been moved. No list
of devices, kernels and layouts could guarantee that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from mpic.engine.vllm.plugin import transformers_rotary
from mpic.engine.vllm.plugin.kv_import import PagedWrite, place_on_cpu
from mpic.engine.vllm.plugin.placement import Placement
from mpic.engine.vllm.plugin.shared_rows import SpanMetadata
from mpic.errors import ModelRefused
from mpic.kernels.attention import rotate
from mpic.kernels.paged_spans import MappedSpan, SharedRows
from mpic.kernels.reference import partial

if TYPE_CHECKING:
    from mpic.engine.vllm.plugin.runner import LinkRunner

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Maximum difference of values up to ``_USUAL``; for larger values, which are rounded more coarsely, it grows in
proportion."""
_USUAL = 2.0
ATTENTION_IN_TF32 = 1e-2
"""The same for the result of a GPU's attention in float32. Triton multiplies float32 in TF32 on GPUs that have it,
which cuts operands to 10 bits: errors reach 4e-3 here, while a single token that attention misses changes the result by
more than 5e-2."""
MOVE = 37
"""Positions by which the tested keys move."""


@torch.inference_mode()
def self_test(runner: LinkRunner, sharing: bool = False) -> None:
    """Test the path of a chunk into the paged cache and to the attention kernel.

    The cache must still be empty; it is cleared afterwards.

    Args:
        sharing: True if the attention backend maps resident chunks as well.

    Raises:
        ModelRefused: the device does not compute with the values written through the path of a link.
    """
    paged = runner.paged
    tokens = 2 * paged.block + 3
    blocks = torch.tensor([3, 1, 2])  # in random order; vLLM reserves block 0
    first = runner.paged.attention[0].kv_cache
    width, dtype = first.shape[-1] // 2, first.dtype
    shape = (len(paged.layers), 2, len(paged.heads), tokens, width)
    raw = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    compiled, moved = raw.clone(), raw.clone()
    compiled[:, 0] = _rotated(runner, raw[:, 0], 0)
    moved[:, 0] = _rotated(runner, raw[:, 0], MOVE)
    try:
        writes = _writes(runner, compiled.to(dtype), blocks)
        if paged.on_cpu:
            place_on_cpu(paged, runner.rotation, writes)
        else:
            Placement(paged, runner.rotation, writes, runner.staging).finish()
        found = paged.read(blocks, 0, tokens).float()
        _compare(found[:, 1], moved[:, 1], dtype, "values come back from the paged cache changed")
        _compare(
            found[:, 0],
            moved[:, 0],
            dtype,
            "a key placed at another position is not what vLLM's rotary gives",
        )
        _attend(runner, blocks, found, dtype)
        if sharing:
            _attend_shared(runner, blocks, found, dtype)
    finally:
        for layer in runner.paged.attention:
            layer.kv_cache.zero_()


def _writes(runner: LinkRunner, kv: torch.Tensor, blocks: torch.Tensor) -> list[PagedWrite]:
    """Return writes of all tokens of ``kv [layers, 2, heads, n, width]``: the first block, then every other token of
    the rest, then those between."""
    paged, tokens = runner.paged, kv.shape[3]
    if not paged.on_cpu:
        kv = runner.staging.copies.buffer(kv.shape, kv.dtype).copy_(kv)  # page-locked, like chunks
    first = slice(0, paged.block)
    writes = [PagedWrite(kv, first, paged.block, MOVE, paged.slots(blocks, torch.arange(paged.block)))]
    for start in (paged.block, paged.block + 1):
        picked = torch.arange(start, tokens, 2)
        writes.append(PagedWrite(kv, picked, len(picked), MOVE, paged.slots(blocks, picked)))
    return writes


def _rotated(runner: LinkRunner, keys: torch.Tensor, first: int) -> torch.Tensor:
    """Rotate ``keys [layers, heads, n, width]`` to positions from ``first`` on, by the model's own rotary module."""
    modules = runner.language_model.modules()
    rotary = next((m for m in modules if isinstance(m, RotaryEmbeddingBase)), None)
    layers, heads, n, width = keys.shape
    if rotary is None:
        theirs = transformers_rotary.modules(runner.language_model)[0]
        flat = keys.reshape(-1, n, width).to(runner.device)
        return transformers_rotary.rotated(theirs, flat, first).float().cpu().view(keys.shape)
    rows = keys.permute(2, 0, 1, 3).reshape(n, -1).to(runner.device)
    positions = torch.arange(first, first + n, device=runner.device)
    # In another dtype than the table's, vLLM puts a converted table in its place, which all layers share. The model has
    # been compiled for the one that was there, without a check of its dtype.
    table = rotary.cos_sin_cache
    try:
        rotated, _ = rotary.forward_native(positions, rows, rows.clone())
    finally:
        rotary.cos_sin_cache = table
    return rotated.float().cpu().view(n, layers, heads, width).permute(1, 2, 0, 3)


def _attend(runner: LinkRunner, blocks: torch.Tensor, kv: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare the backend's attention for one query, that of the last token, over the written cache with the
    definition."""
    tokens = kv.shape[3]
    device = runner.device
    limit = ATTENTION_IN_TF32 if dtype == torch.float32 and not runner.paged.on_cpu else None
    metadata = runner.attention_metadata(
        owners=torch.zeros(1, dtype=torch.int64),
        queries=torch.ones(1, dtype=torch.int32),
        ends=torch.tensor([tokens], dtype=torch.int32),
        blocks=blocks[None].to(device, torch.int32),
        slots=runner.paged.slots(blocks, torch.tensor([tokens - 1])).to(device),
        positions=torch.tensor([tokens - 1], device=device),
    )
    for layer, (keys, values) in zip(runner.paged.attention, kv, strict=True):
        heads, width = layer.num_heads, keys.shape[-1]
        query = torch.randn(1, heads, width, generator=torch.Generator().manual_seed(2)).to(dtype)
        own = (half[:, -1:].transpose(0, 1).to(device, dtype).contiguous() for half in (keys, values))
        output = torch.empty(1, heads, width, dtype=dtype, device=device)
        layer.impl.forward(layer, query.to(device), *own, layer.kv_cache, metadata, output)
        expected, _ = partial(query[:, :, None].float(), keys[None], values[None], False, layer.impl.scale)
        _compare(
            output[0].float().cpu(),
            expected[0, :, 0],
            dtype,
            "the attention backend does not see what was placed",
            limit,
        )


def _attend_shared(runner: LinkRunner, blocks: torch.Tensor, kv: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare the attention of one row that maps the written tokens ``MOVE`` positions farther back, all but the first
    one, with the definition over moved keys. Its own token is in a block of zeros."""
    tokens, turn = kv.shape[3], runner.rotation.by(MOVE)
    span = MappedSpan(blocks.numpy().astype(np.int32), 1, tokens, 0, runner.rotation.by(-MOVE))
    rows = [SharedRows(slice(0, 1), 0, np.zeros(1, np.int32), [span])]
    for layer, (keys, values) in zip(runner.paged.attention, kv, strict=True):
        heads, width = layer.num_heads, keys.shape[-1]
        query = torch.randn(1, heads, width, generator=torch.Generator().manual_seed(3)).to(dtype)
        own = torch.zeros(1, len(keys), width, dtype=dtype)
        output = torch.empty(1, heads, width, dtype=dtype)
        metadata = SpanMetadata(None, torch.zeros(0, dtype=torch.int64), rows)
        layer.impl.forward(layer, query, own, own, layer.kv_cache, metadata, output)
        seen = [torch.cat([each[:, :1] * 0, each[:, 1:]], 1) for each in (rotate(keys, turn), values)]
        expected, _ = partial(
            query[:, :, None].float(), *(each[None] for each in seen), False, layer.impl.scale
        )
        _compare(
            output[0].float(), expected[0, :, 0], dtype, "shared chunks are not attended to where they stand"
        )


def _compare(
    found: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    reason: str,
    limit: float | None = None,
) -> None:
    """Raise ModelRefused with ``reason`` where values differ by more than ``limit`` (None: that of their dtype)."""
    difference = float((found - expected).abs().max())
    limit = limit or TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    limit *= max(1.0, float(expected.abs().max()) / _USUAL)
    if not difference <= limit:  # NaN is refused too
        raise ModelRefused(f"linking in vLLM: {reason} (difference {difference:.1e}, limit {limit:.0e})")
