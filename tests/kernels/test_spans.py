"""Span attention against the reference: one softmax over gathered keys, in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpic.kernels import cpu, reference
from mpic.kernels.spans import Shift, SpanCall, attend, backend, rotate

IMPLEMENTATIONS = {"cpu": cpu.partial, "reference": reference.partial}
SETTINGS = settings(max_examples=40, deadline=None)


def shift_of(base: int, rotary_dim: int, interleaved: bool = False) -> Shift:
    frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = -base * frequencies
    return Shift(angle.cos().float(), angle.sin().float(), interleaved)


@st.composite
def steps(draw):
    """A step: requests with own rows (earlier own tokens or none) and spans seen by a suffix of their rows."""
    seed = draw(st.integers(0, 2**31))
    head_dim = draw(st.sampled_from([64, 80, 96, 128]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 8)]))
    torch.manual_seed(seed)
    calls, total = [], 0

    def kv(n):
        return torch.randn(kv_heads, n, head_dim), torch.randn(kv_heads, n, head_dim)

    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.sampled_from([1, 1, 2, 7, 19]))
        rows = slice(total, total + n)
        calls.append(SpanCall(rows, *kv(n), n > 1, None, True))
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(0, n - 1))
            length = draw(st.sampled_from([1, 2, 16, 33]))
            base = draw(st.sampled_from([0, 1, 511, 30_000]))
            rotary = draw(st.sampled_from([head_dim, head_dim // 2]))
            shift = shift_of(base, rotary, draw(st.booleans())) if base else None
            calls.append(SpanCall(slice(total + start, total + n), *kv(length), False, shift, False))
        total += n
    return torch.randn(kv_heads * group, total, head_dim), calls


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@SETTINGS
@given(step=steps())
def test_equals_one_softmax_over_all_spans(name, step):
    q, calls = step
    scale = q.shape[-1] ** -0.5
    got = attend(q, calls, scale, IMPLEMENTATIONS[name])
    assert (got - reference.attend(q, calls, scale)).abs().max() < 1e-5


@SETTINGS
@given(step=steps())
def test_bfloat16_stays_close_in_relative_norm(step):
    q, calls = step
    scale = q.shape[-1] ** -0.5
    expected = reference.attend(q, calls, scale)
    half = [c._replace(keys=c.keys.bfloat16(), values=c.values.bfloat16()) for c in calls]
    got = attend(q.bfloat16(), half, scale, cpu.partial)
    assert (got.float() - expected).norm() / expected.norm() < 2e-2


def test_rotating_the_query_back_equals_rotating_the_key_forward():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    back, forward = shift_of(1234, 64), shift_of(-1234, 64)
    left = (rotate(q, back) * k).sum()
    right = (q * rotate(k, forward)).sum()
    assert abs(left - right) < 1e-4


def test_the_implementation_is_chosen_by_device_and_dtype_and_has_a_name():
    assert backend(torch.device("cpu"), torch.float32)[0] == "cpu-flash"
    assert backend(torch.device("cuda"), torch.bfloat16)[0] == "cuda-flash"
    assert backend(torch.device("cuda"), torch.float32)[0] == "cuda-efficient"
    assert backend(torch.device("mps"), torch.float32)[0] == "reference"
