"""Blocks of rows over all their spans in one call, against one softmax in double precision."""

from __future__ import annotations

import pytest
import spans_kit
import torch
from hypothesis import given, settings
from processors import compiled_for
from rotation_kit import Rotary
from spans_kit import (
    CPU,
    BlockKernelTests,
    covered,
    exact,
    in_bf16,
    miswritten,
    needs_compiler,
    steps,
)

from mpic.kernels import block_spans, c_kernel
from mpic.kernels.attention import PLAIN, Extras
from mpic.kernels.backends import block_spans as choose

processor = compiled_for("avx2", "avx512")


def attended(q: torch.Tensor, calls: list, rotary: Rotary, extras: Extras = PLAIN, **given) -> torch.Tensor:
    return spans_kit.attended(block_spans.load(q.shape[2], q.dtype), q, calls, rotary, extras, **given)


@needs_compiler
@settings(max_examples=80, deadline=None, derandomize=True)
@given(step=steps())
def test_every_row_equals_one_softmax_over_all_it_sees(step):
    q, calls, rotary, extras = step
    rows = covered(calls)
    expected = exact(q, calls, rotary, extras)[rows]
    assert (attended(q, calls, rotary, extras)[rows] - expected).abs().max() < 1e-5
    rounded = attended(q.bfloat16(), list(map(in_bf16, calls)), rotary, extras)[rows]
    assert (rounded - expected).norm() / expected.norm() < 1e-2


@pytest.fixture
def kernel():
    load = lambda dim: block_spans.load(dim, torch.float32)
    return spans_kit.Subject(load, torch.float32, torch.bfloat16, 1e-5, 0.0)


@needs_compiler
class TestBlockSpans(BlockKernelTests):
    pass


# ---- where it is used


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and no kernel loaded before or after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    block_spans.load.cache_clear()
    yield tmp_path
    block_spans.load.cache_clear()


def test_a_cpu_with_a_compiler_has_it_for_dtypes_and_heads_that_it_reads(fresh, monkeypatch):
    assert choose(torch.device("cuda"), torch.float32, [64]) == ([], "")
    assert "not float16" in choose(CPU, torch.float16, [64])[1]
    assert "up to 256 dimensions, not 576" in choose(CPU, torch.float32, [64, 576])[1]
    monkeypatch.setattr(c_kernel.shutil, "which", lambda name: None)
    assert choose(CPU, torch.float32, [72]) == ([], "no C compiler (gcc, cc, clang)")


@needs_compiler
@pytest.mark.parametrize(
    "right, wrong",
    [
        ("l->scale * LOG2E", "l->scale * 1.4f"),
        ("row - c->first + 1", "row - c->first + 2"),
        ("x * cosine[i] - y * sine[i]", "x * cosine[i] + y * sine[i]"),
        ("if (t < from || t >= to || t >= count)", "if (0)"),
        ("load(out + r * PADDED + i * LANES) * fade[r]", "load(out + r * PADDED + i * LANES)"),
        ("c->hidden ? c->hidden[row - c->first] : 0", "0"),
        ("c->slots ? c->slots[first + t + j] : first + t + j", "first + t + j"),
        ("(vec){l->sinks ? 1 : 0}", "(vec){0}"),
    ],
    ids=["scale", "mask", "rotation", "rest", "fade", "hidden", "slots", "sink"],
)
def test_a_kernel_that_computes_something_else_is_refused(fresh, monkeypatch, right, wrong):
    monkeypatch.setattr(block_spans, "SOURCE", miswritten(block_spans.SOURCE, fresh, right, wrong))
    kernels, reason = choose(CPU, torch.float32, [64])
    assert kernels == [] and "the compiled kernel is wrong by" in reason
