"""Blocks of rows over all their spans in bf16 on a matrix unit, against one softmax in double precision. The same C
file with the unit's work in plain C is tested wherever there is a compiler."""

from __future__ import annotations

import math

import pytest
import spans_kit
import torch
from hypothesis import given, settings
from rotation_kit import Rotary
from spans_kit import (
    CPU,
    LAYER,
    LAYERS,
    BlockKernelTests,
    covered,
    exact,
    in_bf16,
    long_step,
    miswritten,
    needs_compiler,
    steps,
    threads,
)
from unit_kit import configured_threads, has_unit, needs_unit, on_both

from mpic.kernels import block_tiles, c_kernel, cpu, instructions
from mpic.kernels.attention import PLAIN, Extras, KVView, SpanCall, attend
from mpic.kernels.backends import AttentionChoice, single_rows
from mpic.kernels.backends import block_spans as choose
from mpic.kernels.backends import choose as choose_all
from mpic.kernels.span import Span

needs_single_rows = pytest.mark.skipif(
    single_rows(CPU, torch.bfloat16, 64)[0] is None, reason="no kernel for single rows, so none for blocks"
)
TOLERANCE = 2.0**-7
"""This is for results near 1: weights, values and queries that were turned have 8 significant bits."""
WEIGHT = 2.0**-8
"""This is for results of which one weight decides: it is rounded, and the sum of weights is not."""


def attended(
    emulated: bool, q: torch.Tensor, calls: list, rotary: Rotary, extras: Extras = PLAIN, **given
) -> torch.Tensor:
    kernel = block_tiles.load(q.shape[2], emulated=emulated)
    return spans_kit.attended(kernel, q, calls, rotary, extras, **given)


def in_fp32(call):
    return call._replace(span=call.span._replace(source=KVView(call.span.source.data.float())))


def exact_of_bf16(q: torch.Tensor, calls: list, rotary: Rotary, *given) -> torch.Tensor:
    """One softmax over the numbers that the kernel is given. The oracle turns queries without rounding them."""
    return exact(q.float(), list(map(in_fp32, calls)), rotary, *given)


def rounded(step: tuple) -> tuple:
    """A step of the kit in bf16."""
    q, calls, *rest = step
    return q.bfloat16(), list(map(in_bf16, calls)), *rest


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def assert_every_row_equals_one_softmax(emulated: bool, step: tuple) -> torch.Tensor:
    rows = covered(step[1])
    got = attended(emulated, *rounded(step))[rows]
    assert_near(got, exact_of_bf16(*rounded(step))[rows])
    expected = exact(*step)[rows]
    assert (got - expected).norm() / expected.norm() < 1e-2
    return got


@needs_compiler
@settings(max_examples=10, deadline=None, derandomize=True)
@given(step=steps())
def test_every_row_equals_one_softmax_over_all_it_sees_where_the_unit_is_emulated(step):
    assert_every_row_equals_one_softmax(True, step)


@needs_compiler
@needs_unit
@settings(max_examples=20, deadline=None, derandomize=True)
@given(step=steps())
def test_every_row_equals_one_softmax_over_all_it_sees_on_the_unit(step):
    assert_every_row_equals_one_softmax(False, step)


@needs_compiler
@needs_unit
def test_the_unit_gives_what_is_emulated():
    """Sum of the same products are in another order, so that a few weights are rounded to the other side."""
    step = rounded(long_step())
    ours, emulated = attended(False, *step), attended(True, *step)
    torch.testing.assert_close(ours, emulated, atol=2.0**-9, rtol=0)
    assert (ours - emulated).norm() / emulated.norm() < 2e-4


@on_both
def test_it_is_nearer_to_exact_than_torchs_kernel_span_by_span(emulated):
    q, calls, rotary = rounded(long_step())
    wanted = exact_of_bf16(q, calls, rotary)
    theirs = attend(q, calls, 0.125, cpu.partial, rotary.rotation, layer=LAYER)
    assert (attended(emulated, q, calls, rotary) - wanted).norm() < (theirs - wanted).norm()


@on_both
@pytest.mark.parametrize("dim", [2, 33, 256])
def test_the_smallest_and_largest_heads_and_odd_ones(emulated, dim):
    torch.manual_seed(4)
    own, chunk = (KVView(torch.randn(LAYERS, 2, 1, n, dim)) for n in (40, 130))
    calls = [
        SpanCall(slice(0, 40), Span(own, 0, 40), causal=True, first=True),
        SpanCall(slice(9, 40), Span(chunk, 1, 130, 50)),
    ]
    assert_every_row_equals_one_softmax(emulated, (torch.randn(2, 40, dim), calls, Rotary(dim // 2)))


@on_both
def test_any_token_of_a_tile_may_have_the_only_score_that_counts(emulated):
    """Row ``i`` scores 11,250 for token ``i``, and 0 for all others."""
    torch.manual_seed(5)
    kv = torch.randn(LAYERS, 2, 1, 128, 128)
    kv[:, 0] = 300 * torch.eye(128)
    calls = [SpanCall(slice(0, 128), Span(KVView(kv), 0, 128), first=True)]
    q, calls = rounded((300 * torch.eye(128)[None], calls))
    out = attended(emulated, q, calls, Rotary(64), scale=0.125)
    torch.testing.assert_close(out[:, 0], calls[0].span.source.data[LAYER, 1, 0].float(), atol=0, rtol=WEIGHT)


def rising_step(rise: float, tiles: int) -> tuple[torch.Tensor, list, Rotary]:
    """45 rows over tiles of 64 tokens, for which their scores rise by ``rise`` (base 2) from one tile to the next, fall
    by as much, or do neither. Of the values one half falls as scores rise and the other half rises, so that for every
    row the tiles weigh the same in one of the halves: a tile that is scaled as another one is shows."""
    torch.manual_seed(6)
    tile = torch.arange(64 * tiles) // 64
    kv = torch.randn(LAYERS, 2, 1, 64 * tiles, 64)
    kv[:, 0, 0, :, 0] = rise * tile
    by = 2 ** (rise * (tile - (tiles - 1) / 2))[:, None]
    kv[:, 1, 0, :, :32] /= by
    kv[:, 1, 0, :, 32:] *= by
    q = torch.randn(2, 45, 64) / 8
    q[:, :, 0] = torch.tensor([1.0, -1.0, 0.0]).repeat(15)
    return q, [SpanCall(slice(0, 45), Span(KVView(kv), 0, 64 * tiles), first=True)], Rotary(32)


@on_both
@pytest.mark.parametrize("rise, tiles", [(1.5, 9), (7.0, 9), (20.0, 5), (60.0, 3)])
def test_maxima_that_grow_along_the_keys_scale_what_was_summed_before(emulated, rise, tiles):
    """A row is scaled once a score is more than 8 above its maximum: for the smaller rises after some tiles only."""
    q, calls, rotary = rounded(rising_step(rise, tiles))
    got = attended(emulated, q, calls, rotary, scale=math.log(2))
    wanted = exact_of_bf16(q, calls, rotary, PLAIN, math.log(2))
    halves = (x.unflatten(2, (2, 32)) for x in (got - wanted, wanted))  # they differ by powers of two
    error, size = (x.norm(dim=-1) for x in halves)
    assert (error < 1e-2 * size).all()
    for row in (0, 1, 2, 44):
        alone = [calls[0]._replace(rows=slice(0, 1))]
        by_itself = attended(emulated, q[:, row : row + 1], alone, rotary, scale=math.log(2))
        assert torch.equal(by_itself[0], got[row])


@on_both
@pytest.mark.parametrize("sink", [-math.inf, -1000.0, 5.0, 1000.0])
def test_a_sink_far_from_the_scores_takes_nothing_or_everything(emulated, sink):
    q, calls, rotary = rounded(spans_kit.hidden_chunk())
    got = attended(emulated, q, calls, rotary, Extras(None, torch.full((4,), sink)))
    if sink == 5.0:
        return assert_near(got, exact_of_bf16(q, calls, rotary, Extras(None, torch.full((4,), sink))))
    wanted = attended(emulated, q, calls, rotary) if sink < 0 else torch.zeros(8, 4, 64)
    assert torch.equal(got, wanted)


@pytest.fixture(
    params=[
        pytest.param(True, id="emulated", marks=needs_compiler),
        pytest.param(False, id="unit", marks=[needs_compiler, needs_unit]),
    ]
)
def kernel(request):
    load = lambda dim: block_tiles.load(dim, emulated=request.param)
    return spans_kit.Subject(load, torch.bfloat16, torch.float32, TOLERANCE, WEIGHT)


class TestBlockTiles(BlockKernelTests):
    pass


# ---- torch beside it, whose threads it runs in


@needs_compiler
@needs_unit
def test_torchs_products_and_attention_on_the_unit_are_the_same_before_and_after_it():
    step = rounded(long_step())
    generator = torch.Generator().manual_seed(7)
    x, w = torch.randn(2, 256, 256, generator=generator).bfloat16()
    qkv = torch.randn(3, 1, 4, 256, 64, generator=generator).bfloat16()
    theirs = [
        lambda: x @ w,
        lambda: torch.nn.functional.linear(x, w[:, :200].T.contiguous(), w[0, :200]),
        lambda: torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True),
    ]
    with threads(2):
        before, ours = [run() for run in theirs], attended(False, *step)
        for run, wanted in zip(theirs, before, strict=True):
            assert torch.equal(run(), wanted) and torch.equal(run(), wanted)
            assert torch.equal(attended(False, *step), ours)
            assert torch.equal(run(), wanted)


@needs_compiler
@needs_unit
def test_no_thread_keeps_the_units_configuration(tmp_path):
    with threads(2):
        attended(False, *rounded(long_step()))
        assert configured_threads(tmp_path, 2) == 0


# ---- where it is used


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and no kernel loaded before or after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clear = block_tiles.load.cache_clear
    clear()
    yield tmp_path
    clear()


@needs_compiler
def test_bf16_has_it_on_a_processor_with_a_matrix_unit_and_other_dtypes_do_not(monkeypatch):
    has_unit(monkeypatch)
    kernels, reason = choose(CPU, torch.bfloat16, [64, 128, 64])
    assert [(k.name, k.head_dim) for k in kernels] == [("cpu-block-tiles", d) for d in (64, 128, 64)]
    assert reason == "" and choose(CPU, torch.bfloat16, [64], torch.bfloat16)[0] == kernels[:1]
    others = [(torch.float32, None), (torch.float32, torch.float16), (torch.bfloat16, torch.float16)]
    for dtype, kv_dtype in others:
        assert {k.name for k in choose(CPU, dtype, [64], kv_dtype)[0]} <= {"cpu-block-spans"}
    assert choose(torch.device("cuda"), torch.bfloat16, [64]) == ([], "")


def attention(capped: bool = False) -> AttentionChoice:
    return choose_all("auto", [64], capped, CPU, torch.bfloat16, torch.bfloat16)


@needs_single_rows
def test_a_matrix_unit_has_the_work_of_bf16_over_all_spans(monkeypatch):
    has_unit(monkeypatch)
    chosen = attention()
    assert chosen.name == "cpu-stream" and chosen.blocks == "cpu-block-tiles"
    assert [spans.name for spans in chosen.spans] == ["cpu-block-tiles"] and not chosen.blocks_note


@needs_single_rows
def test_scores_that_are_capped_stay_torchs_on_a_matrix_unit(monkeypatch):
    """Not even the kernel that would compute in fp32 takes them: torch uses the unit where it can."""
    monkeypatch.setattr(instructions, "unit", lambda: True)
    chosen = attention(capped=True)
    assert chosen.blocks == "cpu-flash" and not chosen.spans and "are capped" in chosen.blocks_note


@needs_single_rows
def test_a_unit_that_the_system_withholds_leaves_the_work_to_fp32_and_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(instructions, "unit", lambda: True)
    monkeypatch.setattr(instructions, "pairs", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    chosen = attention()
    assert chosen.blocks == "cpu-block-spans" and "does not let" in chosen.blocks_note


@needs_single_rows
@pytest.mark.parametrize("pairs", [False, True])
def test_without_a_unit_bf16_attends_in_fp32_whether_or_not_there_are_products_of_pairs(monkeypatch, pairs):
    monkeypatch.setattr(instructions, "unit", lambda: False)
    monkeypatch.setattr(instructions, "pairs", lambda: pairs)
    chosen = attention()
    assert chosen.blocks == "cpu-block-spans" and chosen.blocks_note == ""


def test_bf16_does_not_have_it_on_other_processors(monkeypatch):
    block_tiles.load.cache_clear()
    monkeypatch.setattr(instructions, "unit", lambda: False)
    assert {k.name for k in choose(CPU, torch.bfloat16, [64])[0]} <= {"cpu-block-spans"}
    with pytest.raises(block_tiles.KernelUnavailable, match="the processor has no matrix unit"):
        block_tiles.load(64)


def test_a_unit_that_the_operating_system_withholds_is_not_used(fresh, monkeypatch):
    monkeypatch.setattr(instructions, "unit", lambda: True)
    monkeypatch.setattr(instructions, "pairs", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    kernels, note = choose(CPU, torch.bfloat16, [64])
    assert {kernel.name for kernel in kernels} <= {"cpu-block-spans"}
    assert note == "the operating system does not let programs use the matrix unit"


def test_heads_above_256_dimensions_and_a_machine_without_a_compiler_are_refused(fresh, monkeypatch):
    with pytest.raises(block_tiles.KernelUnavailable, match="up to 256 dimensions, not 257"):
        block_tiles.load(257, emulated=True)
    monkeypatch.setattr(instructions, "unit", lambda: True)
    monkeypatch.setattr(instructions, "pairs", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    monkeypatch.setattr(c_kernel.shutil, "which", lambda name: None)
    assert "up to 256 dimensions, not 576" in choose(CPU, torch.bfloat16, [576])[1]
    assert choose(CPU, torch.bfloat16, [64]) == ([], "no C compiler (gcc, cc, clang)")


@needs_compiler
@pytest.mark.parametrize(
    "right, wrong",
    [
        ("l->scale * LOG2E", "l->scale * 1.4f"),
        ("row - offset + 1", "row - offset + 2"),
        ("x * cosine[i] - y * sine[i]", "x * cosine[i] + y * sine[i]"),
        (" & (s->to[half] > token)", ""),
        ("s->sum[p][half].row[i] *= fade", ""),
        ("(int32_t)c->hidden[row[i] - offset]", "0"),
        ("c->slots ? c->slots[token] : token", "token"),
        ("s->total[half][i] = l->sinks != 0", "s->total[half][i] = 0"),
    ],
    ids=["scale", "mask", "rotation", "rest", "fade", "hidden", "slots", "sink"],
)
def test_a_kernel_that_computes_something_else_is_refused(fresh, monkeypatch, right, wrong):
    monkeypatch.setattr(block_tiles, "SOURCE", miswritten(block_tiles.SOURCE, fresh, right, wrong))
    with pytest.raises(block_tiles.KernelUnavailable, match="the compiled kernel is wrong by"):
        block_tiles.load(64, emulated=True)
