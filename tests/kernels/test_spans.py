"""Span attention against the reference: one softmax over gathered keys, in double precision.

The CUDA implementations run on every machine over the operators of ``fake_aten``, and over torch's own where there is a
GPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import fake_aten
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotation_kit import Rotary

from mpic.kernels import cpu, cuda, reference
from mpic.kernels.attention import KVView, Partial, SpanCall, attend, rotate
from mpic.kernels.backends import backend
from mpic.kernels.span import Span
from mpic.kernels.writes import RowWrites

CUDA = torch.cuda.is_available()


class Implementation(NamedTuple):
    """A ``Partial``, its device, the dtypes it supports, and the operator of ``cuda`` that is faked for it."""

    partial: Partial
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    fake: tuple[str, object] | None = None
    tolerance: float = 1e-5

    @contextmanager
    def ready(self) -> Iterator[Partial]:
        if self.fake is None:
            yield self.partial
            return
        with mock.patch.object(cuda, *self.fake):
            yield self.partial


HALVES = (torch.bfloat16, torch.float16)
IMPLEMENTATIONS = {
    "cpu": Implementation(cpu.partial),
    "reference": Implementation(reference.partial),
    "cuda-efficient, faked": Implementation(
        cuda.efficient_partial, dtypes=(torch.float32,), fake=("_efficient", fake_aten.efficient)
    ),
    "cuda-flash, faked": Implementation(cuda.flash_partial, dtypes=HALVES, fake=("_flash", fake_aten.flash)),
}
if CUDA:
    IMPLEMENTATIONS["cuda-efficient"] = Implementation(
        cuda.efficient_partial,
        "cuda",
        (torch.float32,),
        tolerance=1e-4,  # tensor cores, fp32 in pieces
    )
    IMPLEMENTATIONS["cuda-flash"] = Implementation(cuda.flash_partial, "cuda", HALVES)
EXACT = [name for name, one in IMPLEMENTATIONS.items() if torch.float32 in one.dtypes]
ROUNDED = [(name, dtype) for name, one in IMPLEMENTATIONS.items() for dtype in one.dtypes if dtype in HALVES]
SETTINGS = settings(max_examples=40, deadline=None)


@st.composite
def steps(draw):
    """A step: requests with own rows (earlier own tokens or none) and spans seen by a suffix of their rows."""
    seed = draw(st.integers(0, 2**31))
    head_dim = draw(st.sampled_from([64, 80, 96, 128]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 8)]))
    rotary = Rotary(draw(st.sampled_from([head_dim // 2, head_dim // 4])), draw(st.booleans()))
    torch.manual_seed(seed)
    calls, total = [], 0

    def span(n: int, base: int = 0) -> Span:
        lo = draw(st.integers(0, 2))
        data = torch.full((1, 2, kv_heads, lo + n + 1, head_dim), float("nan"))
        data[:, :, :, lo : lo + n] = torch.randn(1, 2, kv_heads, n, head_dim)
        return Span(KVView(data), lo, lo + n, base)

    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.sampled_from([1, 1, 2, 7, 19]))
        calls.append(SpanCall(slice(total, total + n), span(n), causal=n > 1, first=True))
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(0, n - 1))
            length, base = draw(st.sampled_from([1, 2, 16, 33])), draw(st.sampled_from([0, 1, 511, 30_000]))
            calls.append(SpanCall(slice(total + start, total + n), span(length, base)))
        total += n
    return torch.randn(kv_heads * group, total, head_dim), calls, rotary


def moved(q: torch.Tensor, calls: list[SpanCall], device: str, dtype: torch.dtype) -> tuple:
    """The step with queries, keys and values on a device and in a dtype; rotations stay fp32."""
    views = [KVView(call.span.source.data.to(device, dtype)) for call in calls]
    return q.to(device, dtype), [
        call._replace(span=call.span._replace(source=view)) for call, view in zip(calls, views)
    ]


def attended(name: str, step: tuple, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the implementation's result on the CPU, and the reference's."""
    implementation, (q, calls, rotary) = IMPLEMENTATIONS[name], step
    scale = q.shape[-1] ** -0.5
    expected = reference.attend(q, calls, scale, rotary.rotation)
    there = Rotary(len(rotary.frequencies), rotary.interleaved, implementation.device)
    with implementation.ready() as partial:
        got = attend(*moved(q, calls, implementation.device, dtype), scale, partial, there.rotation)
    return got.cpu(), expected


@pytest.mark.parametrize("name", EXACT)
@SETTINGS
@given(step=steps())
def test_equals_one_softmax_over_all_spans(name, step):
    got, expected = attended(name, step, torch.float32)
    assert (got - expected).abs().max() < IMPLEMENTATIONS[name].tolerance


@pytest.mark.parametrize(("name", "dtype"), ROUNDED)
@SETTINGS
@given(step=steps())
def test_half_precision_stays_close_in_relative_norm(name, dtype, step):
    got, expected = attended(name, step, dtype)
    assert (got.float() - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_a_call_gives_outputs_and_a_log_sum_exp_for_every_head_and_row(name, causal, group):
    """With 33 rows the log-sum-exp of one implementation is padded; queries and keys are cut out of larger tensors, as
    a step's are."""
    implementation = IMPLEMENTATIONS[name]
    dtype = implementation.dtypes[0]
    rows, keys = 33, 33 if causal else 70
    generator = torch.Generator().manual_seed(3)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(implementation.device, dtype)
    q = random(80, 2 * group, 64).transpose(0, 1)[None, :, 5 : 5 + rows]  # rows outside, as models give it
    k, v = random(2, 2, 100, 64)[:, :, 7 : 7 + keys].unbind(0)
    with implementation.ready() as partial:
        out, lse = partial(q, k[None], v[None], causal, 0.1)
    expected, expected_lse = reference.partial(q.float(), k[None].float(), v[None].float(), causal, 0.1)
    assert out.shape == q.shape and out.dtype == dtype
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert (lse - expected_lse).abs().max() < (1e-3 if dtype == torch.float32 else 2e-2)
    tolerance = implementation.tolerance if dtype == torch.float32 else 2e-2
    assert (out.float() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(("dim", "old"), [(512, False), (64, True)], ids=["large heads", "an old GPU"])
def test_what_the_flash_kernel_does_not_take_is_computed_by_torchs_other_one(monkeypatch, dim, old):
    """Gemma 4 has heads of 512; flash refuses them, and GPUs before sm_80."""
    monkeypatch.setattr(cuda, "_flash", fake_aten.flash if dim > 256 else None)
    monkeypatch.setattr(cuda, "_efficient", fake_aten.efficient)
    monkeypatch.setattr(cuda, "_is_old", lambda device: old)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 5, dim).bfloat16() for heads in (4, 2, 2))
    out, lse = cuda.flash_partial(q, k, v, True, 0.1)
    expected, expected_lse = reference.partial(q.float(), k.float(), v.float(), True, 0.1)
    assert (out.float() - expected).norm() <= 2e-2 * expected.norm()
    assert (lse - expected_lse).abs().max() < 2e-2


@pytest.mark.parametrize(
    ("name", "fake", "results"),
    [
        ("_scaled_dot_product_flash_attention", fake_aten.flash, 9),
        ("_scaled_dot_product_efficient_attention", fake_aten.efficient, 4),
    ],
)
def test_the_fakes_have_the_signature_of_the_installed_operators(name, fake, results):
    schema = getattr(torch.ops.aten, name).default._schema
    parameters = inspect.signature(fake).parameters.values()
    assert [(a.name, a.kwarg_only) for a in schema.arguments] == [
        (p.name, p.kind is p.KEYWORD_ONLY) for p in parameters
    ]
    for argument, parameter in zip(schema.arguments, parameters):
        if argument.has_default_value():
            assert argument.default_value == parameter.default
    assert len(schema.returns) == results


@pytest.mark.parametrize("rows", [1, 32, 33])
def test_the_fakes_return_shapes_as_the_meta_functions_of_the_installed_operators(rows):
    for dtype, real, fake, more in (
        (torch.bfloat16, cuda._flash, fake_aten.flash, (0.0, False, False)),
        (torch.float32, cuda._efficient, fake_aten.efficient, (None, True, 0.0, False)),
    ):
        q, k = torch.zeros(1, 2, rows, 64, dtype=dtype), torch.zeros(1, 2, 40, 64, dtype=dtype)
        wanted = real(q.to("meta"), k.to("meta"), k.to("meta"), *more, scale=0.1)
        got = fake(q, k, k, *more, scale=0.1)
        for meta, result in zip(wanted[:2], got[:2]):
            assert (meta.shape, meta.dtype) == (result.shape, result.dtype)


def test_rotating_the_query_back_equals_rotating_the_key_forward():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    back, forward = map(Rotary(32).rotation, (1234, -1234))
    left = (rotate(q, back) * k).sum()
    right = (q * rotate(k, forward)).sum()
    assert abs(left - right) < 1e-4


def test_the_implementation_is_chosen_by_device_and_dtype_and_has_a_name():
    assert backend(torch.device("cpu"), torch.float32)[0] == "cpu-flash"
    assert backend(torch.device("cuda"), torch.bfloat16)[0] == "cuda-flash"
    assert backend(torch.device("cuda"), torch.float32)[0] == "cuda-efficient"
    assert backend(torch.device("mps"), torch.float32)[0] == "reference"


@pytest.mark.parametrize("name", EXACT)
def test_values_that_are_the_keys_are_read_from_one_place(name):
    torch.manual_seed(0)
    once = torch.randn(1, 1, 1, 40, 64)
    view, two = KVView(once), KVView(once.expand(-1, 2, -1, -1, -1).contiguous())
    keys, values = view.layers(2, 9)[0]
    assert keys is values and keys.data_ptr() == once[0, 0, 0, 2].data_ptr()
    q, rotary = torch.randn(6, 7, 64), Rotary(8)
    found = []
    for source in (view, two):
        own = SpanCall(slice(0, 7), Span(source, 2, 9), causal=True, first=True)
        calls = [own, SpanCall(slice(3, 7), Span(source, 9, 40, base=11))]
        found.append(attended(name, (q, calls, rotary), torch.float32))
    (got, expected), (doubled, _) = found
    assert torch.equal(got, doubled)
    assert (got - expected).abs().max() < IMPLEMENTATIONS[name].tolerance


def test_the_keys_of_single_rows_are_written_once_where_they_are_the_values_too():
    memory = torch.zeros(2 * 5 * 8)
    extent, k = memory.view(2, 1, 1, 5, 8), torch.randn(1, 2, 8)
    writes = RowWrites(memory, [0, 1], [extent, extent], [3, 1])
    writes.write(1, k, k)
    assert torch.equal(extent[1, 0, :, [3, 1]], k)
    assert not extent[0].any()
    assert not extent[1, 0, 0, [0, 2, 4]].any()
