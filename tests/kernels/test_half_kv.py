"""Keys and values in fp16 under queries in fp32 or bf16, against one softmax over the same rounded numbers."""

from __future__ import annotations

import shutil

import pytest
import torch
from processors import compiled_for
from rotation_kit import Rotary

from mpic.kernels import block_spans, reference, stream
from mpic.kernels.attention import KVView, SpanCall
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.kernels.span import Span
from mpic.kernels.writes import RowWrites

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)
LAYERS, LAYER = 2, 1
processor = compiled_for("avx2", "avx512")


def extent(slots: int, dim: int, kv_heads: int = 2) -> KVView:
    """Numbers of very different sizes in one layer; what lies around them is not a number."""
    data = torch.full((LAYERS, 2, kv_heads, slots + 4, dim), float("nan"))
    sizes = torch.logspace(-6, 0, dim)  # the smallest are subnormal in fp16
    data[LAYER, :, :, 2 : 2 + slots] = torch.randn(2, kv_heads, slots, dim) * sizes
    return KVView(data.half())


def widened(calls: list[SpanCall]) -> list[SpanCall]:
    return [
        call._replace(span=call.span._replace(source=KVView(call.span.source.data.float()))) for call in calls
    ]


@needs_compiler
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
def test_blocks_of_rows_equal_one_softmax(dim, dtype, limit):
    torch.manual_seed(dim)
    own, chunk = extent(70, dim), extent(150, dim)
    calls = [
        SpanCall(slice(0, 70), Span(own, 2, 72), causal=True, first=True),
        SpanCall(slice(9, 70), Span(chunk, 2, 152, base=40)),
    ]
    q, rotary = torch.randn(6, 70, dim).to(dtype), Rotary(dim // 2)
    kernel = block_spans.load(dim, dtype, torch.float16)
    got = kernel.blocks(calls, 6, rotary.rotations).attend(q, LAYER, 0.3)
    wanted = reference.attend(q.float(), widened(calls), 0.3, rotary.rotation, LAYER)
    assert (got - wanted).abs().max() < limit


@needs_compiler
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
def test_single_rows_equal_one_softmax(dim, dtype, limit):
    torch.manual_seed(dim)
    owns, chunk = [extent(n, dim) for n in (1, 40, 700)], extent(530, dim)
    calls = [
        SpanCall(slice(row, row + 1), Span(own, 2, own.data.shape[3] - 2), first=True)
        for row, own in enumerate(owns)
    ]
    calls += [SpanCall(slice(row, row + 1), Span(chunk, 2, 532, base=30 * row)) for row in range(3)]
    q, rotary = torch.randn(6, 3, dim).to(dtype), Rotary(dim // 2)
    rows = stream.load(dim, dtype, torch.float16).rows(calls, 6, rotary.rotations)
    wanted = reference.attend(q.float(), widened(calls), 0.3, rotary.rotation, LAYER)
    assert (rows.attend(q, LAYER, 0.3) - wanted[rows.rows]).abs().max() < limit


@needs_compiler
def test_the_dtype_of_keys_and_values_is_not_mistaken():
    view = extent(20, 64)
    call = SpanCall(slice(0, 20), Span(view, 2, 22), first=True)
    with pytest.raises(ValueError, match="float16 of slots"):
        block_spans.load(64, torch.float32).blocks([call], 4, Rotary(32).rotations)
    one = SpanCall(slice(0, 1), Span(KVView(view.data.float()), 2, 22), first=True)
    with pytest.raises(ValueError, match="float32 of slots"):
        stream.load(64, torch.float32, torch.float16).rows([one], 4, Rotary(32).rotations)
    with pytest.raises(KernelUnavailable, match="in float32 or float16, not bfloat16"):
        stream.load(64, torch.float32, torch.bfloat16)


def test_single_rows_are_rounded_when_they_are_written():
    memory = torch.zeros(2 * 2 * 2 * 5 * 8, dtype=torch.float16)
    target = memory.view(LAYERS, 2, 2, 5, 8)
    k, v = torch.randn(2, 2, 1, 8)
    RowWrites(memory, [0], [target], [3]).write(LAYER, k, v)
    assert torch.equal(target[LAYER, :, :, 3], torch.stack([k, v])[:, :, 0].half())
    assert target[LAYER, :, :, 3].abs().sum() == target.abs().sum()
