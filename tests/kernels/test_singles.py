"""Single rows, through torch and through the kernel made for them, against one softmax over gathered keys."""

from __future__ import annotations

import shutil
import stat
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import compiled_for
from rotation_kit import Rotary

from mpic.kernels import c_kernel, cpu, reference, stream
from mpic.kernels.attention import PLAIN, Extras, KVView, SingleRows, SpanCall, attend
from mpic.kernels.backends import single_rows
from mpic.kernels.singles import Singles
from mpic.kernels.span import Span

SETTINGS = settings(max_examples=60, deadline=None)
LAYERS, LAYER = 3, 1
processor = compiled_for("avx2", "avx512")

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)
IMPLEMENTATIONS = ["torch", pytest.param("stream", marks=needs_compiler)]


@dataclass
class Case:
    """A step's ``q`` and the calls of its single rows."""

    q: torch.Tensor
    calls: list[SpanCall]
    rotary: Rotary

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def rows(self, name: str) -> SingleRows:
        if name == "stream":
            kernel = stream.load(self.q.shape[-1], self.q.dtype)
            return kernel.rows(self.calls, self.q.shape[0], self.rotary.rotations)
        return Singles.of(self.calls, cpu.partial, self.rotary.rotations)

    def both(self, name: str, extras: Extras = PLAIN) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the implementation's result and the reference's for the same rows."""
        rows = self.rows(name)
        arguments = (self.calls, self.scale, self.rotary.rotation, LAYER, extras)
        expected = reference.attend(self.q.float(), *arguments)
        return rows.attend(self.q, LAYER, self.scale, extras), expected[rows.rows]


def call_of(row: int, kv: torch.Tensor, base: int = 0) -> SpanCall:
    return SpanCall(slice(row, row + 1), Span(KVView(kv), 0, kv.shape[3], base))


@st.composite
def cases(draw, dtype=torch.float32):
    """Requests of one row each: an own span of any length at base 0, chunks of their own or shared, at any base, cut
    out of larger extents; other rows of the step stand between them. Slots that must not be read are NaN."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dim = draw(st.sampled_from([8, 24, 64, 80, 96, 128]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 7), (3, 4), (1, 8)]))
    lengths = st.sampled_from([1, 1, 2, 5, 15, 16, 17, 33, 64, 511, 512, 513, 1030])

    def span() -> Span:
        n, lo, beyond = draw(lengths), draw(st.integers(0, 3)), draw(st.integers(0, 3))
        extent = torch.full((LAYERS, 2, kv_heads, lo + n + beyond, dim), float("nan"))
        extent[LAYER, :, :, lo : lo + n] = torch.randn(2, kv_heads, n, dim)
        return Span(KVView(extent.to(dtype)), lo, lo + n)

    def cut(whole: Span) -> list[Span]:
        """The span, or many that leave out every seventh slot of it."""
        if whole.tokens < 64 or draw(st.booleans()):
            return [whole]
        return [
            whole._replace(lo=lo + 1, hi=min(lo + 7, whole.hi)) for lo in range(whole.lo, whole.hi - 1, 7)
        ]

    count = draw(st.integers(1, 5))
    rows = sorted(draw(st.lists(st.integers(0, 8), min_size=count, max_size=count, unique=True)))
    calls = [[SpanCall(slice(row, row + 1), span())] for row in rows]
    bases = st.sampled_from([0, 0, 1, 700, 30_000, -4])
    for _ in range(draw(st.integers(0, 4))):
        pieces = cut(span())
        for row in draw(st.lists(st.sampled_from(rows), min_size=1, max_size=count, unique=True)):
            base = draw(bases)
            calls.append([SpanCall(slice(row, row + 1), one._replace(base=base)) for one in pieces])
    strided = torch.randn(9, kv_heads * group, dim).to(dtype).transpose(0, 1)
    rotary = Rotary(draw(st.sampled_from([dim // 2, dim // 4])), draw(st.booleans()))
    return Case(strided, [call for one in draw(st.permutations(calls)) for call in one], rotary)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@SETTINGS
@given(case=cases())
def test_single_rows_equal_one_softmax_over_all_their_spans(name, case):
    got, expected = case.both(name)
    assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@SETTINGS
@given(case=cases(torch.bfloat16))
def test_bfloat16_single_rows_stay_close_in_relative_norm(name, case):
    got, expected = case.both(name)
    assert (got - expected).norm() / expected.norm() < (2e-2 if name == "torch" else 1e-5)


@needs_compiler
@SETTINGS
@given(case=cases(), threads=st.integers(2, 5))
def test_the_number_of_threads_changes_no_bit(case, threads):
    alone = case.rows("stream").attend(case.q, LAYER, case.scale)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(case.rows("stream").attend(case.q, LAYER, case.scale), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_flat_and_sharp_scores_are_exact(name, size):
    torch.manual_seed(0)
    kv = torch.randn(LAYERS, 2, 2, 700, 64)
    kv[:, 0] *= size
    case = Case(torch.randn(2, 1, 64), [call_of(0, kv, 5)], Rotary(32))
    got, expected = case.both(name)
    assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_single_rows_stand_beside_blocks_of_rows(name):
    torch.manual_seed(0)
    kv, rotary = torch.randn(LAYERS, 2, 2, 20, 64), Rotary(32)
    case = Case(torch.randn(2, 4, 64), [call_of(0, kv, 9), call_of(3, kv, 0)], rotary)
    own = Span(KVView(torch.randn(LAYERS, 2, 2, 2, 64)), 0, 2)
    block = SpanCall(slice(1, 3), own, causal=True, first=True)
    got = attend(case.q, [block], case.scale, cpu.partial, rotary.rotation, case.rows(name), LAYER)
    expected = reference.attend(case.q, [block, *case.calls], case.scale, rotary.rotation, LAYER)
    assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_advanced_rows_read_one_own_token_more_each(name):
    torch.manual_seed(0)
    chunk = Span(KVView(torch.randn(LAYERS, 2, 2, 30, 64)), 3, 30, 40)
    extents = [KVView(torch.randn(LAYERS, 2, 2, 600, 64)) for _ in range(4)]
    lengths, advanced, kept = [1, 40, 40, 509], None, 0
    for step in range(6):
        calls = []
        for row, (view, length) in enumerate(zip(extents, lengths, strict=True)):
            calls.append(SpanCall(slice(row, row + 1), Span(view, 0, length + step), first=True))
            if row % 2:
                calls.append(SpanCall(slice(row, row + 1), chunk._replace(base=40 + row)))
        case = Case(torch.randn(4, 4, 64), calls, Rotary(32))
        advanced = advanced.advance() if advanced is not None else None
        kept += advanced is not None
        advanced = advanced or case.rows(name)
        expected = reference.attend(case.q, calls, case.scale, case.rotary.rotation, LAYER)
        assert (advanced.attend(case.q, LAYER, case.scale) - expected).abs().max() < 1e-5
    assert kept == (4 if name == "stream" else 5)  # a section of the kernel was full at 512 tokens


@needs_compiler
def test_a_span_that_the_kernel_cannot_read_is_an_error():
    kernel = stream.load(64, torch.float32)
    good = torch.zeros(1, 2, 2, 3, 64)

    def rows(kv: torch.Tensor, heads: int = 4) -> stream.StreamRows:
        return kernel.rows([call_of(0, kv)], heads, lambda bases: None)

    for bad in (good.double(), good[..., :32], good[:, :, :, :0], good.transpose(3, 4).contiguous().mT):
        with pytest.raises(ValueError, match="cannot read a span"):
            rows(bad)
    with pytest.raises(ValueError, match="for 3 heads"):
        rows(good, heads=3)
    for bad in (torch.zeros(4, 1, 64).bfloat16(), torch.zeros(2, 1, 64), torch.zeros(4, 64, 1).mT[..., ::2]):
        with pytest.raises(ValueError, match="cannot read queries"):
            rows(good).attend(bad, 0, 1.0)


# ---- building it


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, and nothing loaded before."""
    stream.load.cache_clear()
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *args, **kwargs: str(tmp_path / "cache"))
    yield tmp_path
    stream.load.cache_clear()


def compiler_that(fresh, monkeypatch, script: str) -> None:
    tool = fresh / "cc"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(c_kernel.shutil, "which", lambda name: str(tool) if name == "cc" else None)


def test_without_a_compiler_there_is_no_kernel_and_the_reason_is_given(fresh, monkeypatch):
    monkeypatch.setattr(c_kernel.shutil, "which", lambda name: None)
    assert single_rows(torch.device("cpu"), torch.float32, 64) == (None, "no C compiler (gcc, cc, clang)")


def test_without_a_cache_folder_there_is_no_kernel_and_the_reason_is_given(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "platformdirs", None)  # not installed
    with pytest.raises(stream.KernelUnavailable, match="platformdirs"):
        stream.load(64, torch.float32)


def test_other_devices_and_dtypes_have_no_kernel(fresh):
    assert single_rows(torch.device("cuda"), torch.bfloat16, 64) == (None, "")
    kernel, reason = single_rows(torch.device("cpu"), torch.float16, 64)
    assert kernel is None and "not float16" in reason


def test_the_message_of_a_failing_compiler_is_the_reason(fresh, monkeypatch):
    compiler_that(fresh, monkeypatch, '[ "$1" = --version ] || { echo "no such option" >&2; exit 1; }')
    kernel, reason = single_rows(torch.device("cpu"), torch.float32, 64)
    assert kernel is None and reason.endswith("could not build it: no such option")


def test_a_library_that_does_not_load_is_no_kernel(fresh, monkeypatch):
    rubbish = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo rubbish > "$2"; shift; done'
    compiler_that(fresh, monkeypatch, rubbish)
    kernel, reason = single_rows(torch.device("cpu"), torch.float32, 64)
    assert kernel is None and "could not be built or loaded" in reason


@needs_compiler
def test_a_kernel_that_computes_something_else_is_refused(fresh, monkeypatch):
    wrong = fresh / "wrong.c"
    wrong.write_text(stream.SOURCE.read_text().replace("scale * LOG2E", "scale * 1.4f"))
    shutil.copy(stream.SOURCE.with_name("vectors.h"), fresh)
    monkeypatch.setattr(stream, "SOURCE", wrong)
    kernel, reason = single_rows(torch.device("cpu"), torch.float32, 64)
    assert kernel is None and "wrong results" in reason


@needs_compiler
def test_it_is_built_once_and_found_again(fresh, monkeypatch):
    stream.load(64, torch.float32)
    built = list((fresh / "cache" / "kernels").iterdir())
    assert len(built) == 1 and built[0].suffix == ".so"
    stream.load.cache_clear()
    run = c_kernel._run

    def no_building(*command: str) -> str:
        assert command[1:] == ("--version",)
        return run(*command)

    monkeypatch.setattr(c_kernel, "_run", no_building)
    stream.load(64, torch.float32)
    assert list((fresh / "cache" / "kernels").iterdir()) == built


@pytest.mark.parametrize("softcap, sinks", [(0.7, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(SETTINGS, max_examples=12)
@given(case=cases())
def test_capped_scores_and_sinks_equal_one_softmax_in_which_a_sink_is_a_key(name, softcap, sinks, case):
    logits = torch.randn(len(case.q), generator=torch.Generator().manual_seed(1)) * 2
    got, expected = case.both(name, Extras(softcap, logits if sinks else None))
    assert torch.allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_fewer_and_smaller_heads_than_the_views_and_turning_last_dimensions(name):
    """Layers of one model may differ: what is left of a view is never read."""
    torch.manual_seed(0)
    kv = torch.full((LAYERS, 2, 4, 40, 48), float("nan"))
    kv[LAYER, :, :2, :, :24] = torch.randn(2, 2, 40, 24)
    cut = kv[:, :, :2, :, :24]
    q = torch.randn(6, 3, 24)
    rotary = Rotary(4, start=16)
    calls = [(row, lo, base) for row in (0, 2) for lo, base in ((0, 0), (5, 30 + row))]
    whole, part = (
        [SpanCall(slice(row, row + 1), Span(KVView(data), lo, 40, base)) for row, lo, base in calls]
        for data in (kv, cut)
    )
    if name == "stream":
        rows = stream.load(24, q.dtype).rows(whole, 6, rotary.rotations, kv_heads=2)
    else:
        rows = Singles.of(whole, cpu.partial, rotary.rotations, kv_heads=2)
    expected = reference.attend(q, part, 0.2, rotary.rotation, LAYER)
    assert torch.allclose(rows.attend(q, LAYER, 0.2), expected[rows.rows], atol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_values_that_are_the_keys_are_read_from_one_place(name):
    """Latents are kept once: what is computed is the same, bit for bit, as with a second copy in place of values."""
    torch.manual_seed(0)
    extents = torch.randn(3, LAYERS, 1, 1, 600, 24)  # evenly spaced, as those of equal chunks are
    results = []
    for kv in (extents, extents.expand(-1, -1, 2, -1, -1, -1).contiguous()):
        views = [KVView(extent) for extent in kv]
        spans = [(0, 0, 0), (2, 0, 0), (0, 1, 5), (2, 1, 30), (0, 2, 40)]
        calls = [SpanCall(slice(row, row + 1), Span(views[i], 3, 600, base)) for row, i, base in spans]
        case = Case(
            torch.randn(6, 3, 24, generator=torch.Generator().manual_seed(1)), calls, Rotary(4, start=16)
        )
        results.append(case.both(name))
    (got, expected), (doubled, reference_of_two) = results
    assert torch.equal(got, doubled) and torch.equal(expected, reference_of_two)
    assert (got - expected).abs().max() < 1e-5
