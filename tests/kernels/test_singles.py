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

from mpic.kernels import cpu, reference, stream
from mpic.kernels.singles import Singles, padded
from mpic.kernels.spans import Shift, SingleRows, SpanCall, attend, single_rows

SETTINGS = settings(max_examples=60, deadline=None)
FREQUENCY = 10_000.0
LAYERS, LAYER = 3, 1

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)
IMPLEMENTATIONS = ["torch", pytest.param("stream", marks=needs_compiler)]


def shifts_of(rotary: int, interleaved: bool):
    frequencies = FREQUENCY ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)

    def shifts(bases) -> Shift | None:
        if not any(bases):
            return None
        angle = -torch.tensor(bases, dtype=torch.float64)[:, None] * frequencies
        return Shift(angle.cos().float(), angle.sin().float(), interleaved)

    return shifts


@dataclass
class Case:
    """Rows ``singles`` of a step's ``q``, and what they read."""

    q: torch.Tensor
    singles: list[int]
    spans: list[stream.Reading]
    rotary: int
    interleaved: bool

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def rows(self, name: str) -> SingleRows:
        shifts = shifts_of(self.rotary, self.interleaved)
        if name == "stream":
            kernel = stream.load(self.q.shape[-1], self.q.dtype)
            return kernel.rows(self.singles, self.spans, self.q.shape[0], shifts)
        partials = [reader for span in self.spans for reader in span.readers]
        slots = [[i for i, (row, _) in enumerate(partials) if row == r] for r in range(len(self.singles))]
        starts = [sum(len(s.readers) for s in self.spans[:i]) for i in range(len(self.spans))]
        return Singles(
            torch.tensor(self.singles),
            torch.tensor([self.singles[row] for row, _ in partials]),
            shifts([base for _, base in partials]),
            *padded(slots, torch.device("cpu")),
            tuple((start, 1, len(s.readers)) for start, s in zip(starts, self.spans, strict=True)),
            tuple(s.kv[:, :, None] for s in self.spans),
            cpu.partial,
        )

    def expected(self) -> torch.Tensor:
        """In double precision, of the single rows."""
        shifts = shifts_of(self.rotary, self.interleaved)
        calls = []
        for kv, readers in self.spans:
            for number, base in readers:
                shift = shifts([base])
                shift = shift and Shift(shift.cos[0], shift.sin[0], shift.interleaved)
                calls.append(SpanCall(slice(number, number + 1), *kv[LAYER].float(), False, shift, False))
        return reference.attend(self.q[:, self.singles].float(), calls, self.scale)


@st.composite
def cases(draw, dtype=torch.float32):
    """Requests of one row each: an own span of any length at base 0, chunks of their own or shared, at any base, cut
    out of larger extents; other rows of the step stand between them. What no one may read is NaN."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dim = draw(st.sampled_from([8, 24, 64, 80, 96, 128]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 7), (3, 4), (1, 8)]))
    lengths = st.sampled_from([1, 1, 2, 5, 15, 16, 17, 33, 64, 511, 512, 513, 1030])

    def kv() -> torch.Tensor:
        n, lo, beyond = draw(lengths), draw(st.integers(0, 3)), draw(st.integers(0, 3))
        extent = torch.full((LAYERS, 2, kv_heads, lo + n + beyond, dim), float("nan"))
        extent[LAYER, :, :, lo : lo + n] = torch.randn(2, kv_heads, n, dim)
        return extent.to(dtype)[:, :, :, lo : lo + n]

    rows = draw(st.integers(1, 5))
    spans = [stream.Reading(kv(), [(row, 0)]) for row in range(rows)]
    bases = st.sampled_from([0, 0, 1, 700, 30_000, -4])
    for _ in range(draw(st.integers(0, 4))):
        members = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True))
        spans.append(stream.Reading(kv(), [(row, draw(bases)) for row in members]))
    spans = draw(st.permutations(spans))
    singles = sorted(draw(st.lists(st.integers(0, 8), min_size=rows, max_size=rows, unique=True)))
    strided = torch.randn(9, kv_heads * group, dim).to(dtype).transpose(0, 1)
    rotary = draw(st.sampled_from([dim, dim // 2]))
    return Case(strided, singles, spans, rotary, draw(st.booleans()))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@SETTINGS
@given(case=cases())
def test_single_rows_equal_one_softmax_over_all_their_spans(name, case):
    got = case.rows(name).attend(case.q, LAYER, case.scale)
    assert (got - case.expected()).abs().max() < 1e-5


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@SETTINGS
@given(case=cases(torch.bfloat16))
def test_bfloat16_single_rows_stay_close_in_relative_norm(name, case):
    expected = case.expected()
    got = case.rows(name).attend(case.q, LAYER, case.scale)
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
    case = Case(torch.randn(2, 1, 64), [0], [stream.Reading(kv, [(0, 5)])], 64, False)
    got = case.rows(name).attend(case.q, LAYER, case.scale)
    assert (got - case.expected()).abs().max() < 1e-5


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_single_rows_stand_beside_blocks_of_rows(name):
    torch.manual_seed(0)
    kv = torch.randn(LAYERS, 2, 2, 20, 64)
    case = Case(torch.randn(2, 4, 64), [0, 3], [stream.Reading(kv, [(0, 9), (1, 0)])], 64, False)
    own = torch.randn(2, 2, 2, 64)
    calls = [SpanCall(slice(1, 3), own[0], own[1], True, None, True)]
    got = attend(case.q, calls, case.scale, cpu.partial, case.rows(name), LAYER)
    assert (got[[0, 3]] - case.expected()).abs().max() < 1e-5
    alone = reference.attend(case.q[:, 1:3], [calls[0]._replace(rows=slice(0, 2))], case.scale)
    assert (got[1:3] - alone).abs().max() < 1e-5


@needs_compiler
def test_what_the_kernel_cannot_read_is_an_error():
    kernel = stream.load(64, torch.float32)
    good = torch.zeros(1, 2, 2, 3, 64)

    def rows(kv, numbers=(0,), heads=4, count=1):
        readers = [(number, 0) for number in numbers]
        return kernel.rows(list(range(count)), [stream.Reading(kv, readers)], heads, lambda bases: None)

    for bad in (good.double(), good[..., :32], good[:, :, :, :0], good.transpose(3, 4).contiguous().mT):
        with pytest.raises(ValueError, match="cannot read a span"):
            rows(bad)
    with pytest.raises(ValueError, match="for 3 heads"):
        rows(good, heads=3)
    with pytest.raises(ValueError, match="a row sees no span"):
        rows(good, count=2)
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
    monkeypatch.setattr(stream.shutil, "which", lambda name: str(tool) if name == "cc" else None)


def test_without_a_compiler_there_is_no_kernel_and_the_reason_is_said(fresh, monkeypatch):
    monkeypatch.setattr(stream.shutil, "which", lambda name: None)
    assert single_rows(torch.device("cpu"), torch.float32, 64) == (None, "no C compiler (cc, gcc, clang)")


def test_without_a_place_to_keep_it_there_is_no_kernel_and_the_reason_is_said(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "platformdirs", None)  # not installed
    with pytest.raises(stream.Unavailable, match="platformdirs"):
        stream.load(64, torch.float32)


def test_other_devices_and_dtypes_have_no_kernel(fresh):
    assert single_rows(torch.device("cuda"), torch.bfloat16, 64) == (None, "")
    kernel, reason = single_rows(torch.device("cpu"), torch.float16, 64)
    assert kernel is None and "not float16" in reason


def test_what_a_failing_compiler_says_is_the_reason(fresh, monkeypatch):
    compiler_that(fresh, monkeypatch, '[ "$1" = --version ] || { echo "no such option" >&2; exit 1; }')
    kernel, reason = single_rows(torch.device("cpu"), torch.float32, 64)
    assert kernel is None and reason.endswith("could not build it: no such option")


def test_a_library_that_does_not_load_is_no_kernel(fresh, monkeypatch):
    compiler_that(
        fresh, monkeypatch, 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo rubbish > "$2"; shift; done'
    )
    kernel, reason = single_rows(torch.device("cpu"), torch.float32, 64)
    assert kernel is None and "could not be built or loaded" in reason


@needs_compiler
def test_a_kernel_that_computes_something_else_is_refused(fresh, monkeypatch):
    wrong = fresh / "wrong.c"
    wrong.write_text(stream.SOURCE.read_text().replace("scale * 1.44269504f", "scale * 1.4f"))
    monkeypatch.setattr(stream, "SOURCE", wrong)
    kernel, reason = single_rows(torch.device("cpu"), torch.float32, 64)
    assert kernel is None and "wrong by" in reason


@needs_compiler
def test_it_is_built_once_and_found_again(fresh, monkeypatch):
    stream.load(64, torch.float32)
    built = list((fresh / "cache" / "kernels").iterdir())
    assert len(built) == 1 and built[0].suffix == ".so"
    stream.load.cache_clear()
    run = stream._run

    def no_building(*command: str) -> str:
        assert command[1:] == ("--version",)
        return run(*command)

    monkeypatch.setattr(stream, "_run", no_building)
    stream.load(64, torch.float32)
    assert list((fresh / "cache" / "kernels").iterdir()) == built
