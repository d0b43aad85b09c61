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
    LAYER,
    UNREADABLE_QUERIES,
    UNREADABLE_SPANS,
    covered,
    exact,
    in_bf16,
    long_step,
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


@needs_compiler
def test_a_row_does_not_depend_on_the_rows_and_threads_beside_it():
    q, calls, rotary = long_step()
    whole = attended(q, calls, rotary)
    assert torch.equal(attended(q[:, 450:451], spans_kit.alone(calls, 450), rotary)[0], whole[450])
    threads = torch.get_num_threads()
    try:
        for count in {1, 2, 5} - {threads}:  # blocks are cut by it, too
            torch.set_num_threads(count)
            assert torch.equal(attended(q, calls, rotary), whole)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_scores_beyond_the_range_of_exponentials_give_neither_nan_nor_infinity():
    out = attended(*spans_kit.beyond_exponentials())
    assert out[2:].eq(70).all() and (out[1] - 0.5).abs().max() < 1e-6


@needs_compiler
def test_a_row_that_a_window_hides_a_whole_chunk_from_keeps_what_it_has():
    q, calls, rotary = spans_kit.hidden_chunk()
    got = attended(q, calls, rotary)
    assert torch.equal(got[6:], attended(q, calls[:1], rotary)[6:])
    assert (got[:6] - exact(q, calls, rotary)[:6]).abs().max() < 1e-5


@needs_compiler
def test_rows_whose_window_hides_what_the_rows_before_them_see_first():
    q, calls, rotary = spans_kit.sliding_window()
    assert (attended(q, calls, rotary) - exact(q, calls, rotary)).abs().max() < 1e-5


@needs_compiler
def test_fewer_and_smaller_heads_than_the_views_and_turning_last_dimensions():
    q, calls, cut, rotary = spans_kit.small_heads()
    assert (attended(q, calls, rotary, kv_heads=2) - exact(q, cut, rotary)).abs().max() < 1e-5


@needs_compiler
@pytest.mark.parametrize("wrong", UNREADABLE_SPANS)
def test_spans_that_it_cannot_read_are_refused_and_not_read(wrong):
    call, heads = spans_kit.unreadable_span(wrong, torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"cpu-block-spans .* cannot read a span"):
        block_spans.load(64, torch.float32).blocks([call], heads, Rotary(32).rotations)


@needs_compiler
@pytest.mark.parametrize("wrong", UNREADABLE_QUERIES)
def test_queries_that_it_cannot_read_are_refused_and_not_read(wrong):
    q, calls, rotary = long_step()
    blocks = block_spans.load(64, torch.float32).blocks(calls, 6, rotary.rotations)
    with pytest.raises(ValueError, match=r"cpu-block-spans .* cannot read queries"):
        blocks.attend(spans_kit.unreadable_queries(wrong, q, torch.bfloat16), LAYER, 0.125)


@needs_compiler
@pytest.mark.parametrize("scale, extras", [(0.125, Extras(30.0)), (0.0, PLAIN), (-0.125, PLAIN)])
def test_a_softcap_and_a_scale_that_is_not_above_zero_are_refused(scale, extras):
    q, calls, rotary = long_step()
    blocks = block_spans.load(64, torch.float32).blocks(calls, 6, rotary.rotations)
    with pytest.raises(ValueError, match=r"cpu-block-spans .* does not cap scores"):
        blocks.attend(q, LAYER, scale, extras)


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
