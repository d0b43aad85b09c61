"""Segment attention in Triton against one softmax over gathered keys in double precision.

Without a GPU the kernels run in Triton's interpreter; with one the same tests run on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton_kit import DEVICE, LAYERS, SMALL, Described, World, rotary_of

from mpic.kernels import reference
from mpic.kernels.attention import Extras, KVView, SpanCall
from mpic.kernels.span import Span
from mpic.kernels.triton import attention
from mpic.kernels.triton.launch import Geometry, interpreted
from mpic.kernels.triton.step import TritonStep, strides_of
from mpic.kernels.triton.tables import ItemColumn, SegmentColumn
from mpic.kernels.triton.tiles import Shape, Strides
from mpic.kernels.triton.warmup import occupancy, warm_up
from mpic.kernels.triton.worklist import WorkList, build
from mpic.kernels.windows import Stretch, Window, own_calls, span_calls

GENERATE = (Phase.explicit, Phase.generate)  # shrinking in the interpreter takes minutes
BASES = [0, 0, 1, 511, 30_000]


@st.composite
def steps(draw, dtype=torch.float32):
    """Blocks of rows and single rows with own spans and chunks, some shared between requests at different bases, rows
    that no call covers in between."""
    group, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (7, 1)]))
    dim = draw(st.sampled_from([16, 16, 32, 64]))
    half = draw(st.sampled_from([dim // 2, dim // 4]))
    geometry = Geometry(group * kv_heads, kv_heads, dim, half, draw(st.booleans()))
    world = World(geometry, dtype, draw(st.integers(0, 2**31)))
    step, rows = Described(world), 0
    lengths = st.sampled_from([1, 1, 2, 15, 16, 33])
    shared = [world.fill(draw(lengths), draw(st.integers(0, 5))) for _ in range(draw(st.integers(0, 2)))]
    for _ in range(draw(st.integers(1, 4))):
        rows += draw(st.sampled_from([0, 0, 1]))  # empty rows
        n = draw(st.sampled_from([1, 1, 2, 7, 19]))
        step.add(rows, rows + n, *world.fill(n), causal=True)
        if draw(st.booleans()):
            step.add(rows, rows + n, *world.fill(draw(lengths)))
        for span in shared:
            if draw(st.booleans()):
                step.add(rows, rows + n, *span, base=draw(st.sampled_from(BASES)))
        for _ in range(draw(st.integers(0, 2))):
            start = rows + draw(st.integers(0, n - 1))
            span = world.fill(draw(lengths), draw(st.integers(0, 5)))
            step.add(start, rows + n, *span, base=draw(st.sampled_from(BASES)))
        rows += n
    return step, rows + draw(st.sampled_from([0, 0, 1])), draw(st.sampled_from([1, 6, 64]))


def run(step: Described, rows: int, programs: int, layer: int) -> tuple[torch.Tensor, ...]:
    """Return the kernels' result in poisoned outputs, and the reference's."""
    world = step.world
    g = world.geometry
    rotation = rotary_of(g).rotation
    sizes = {"tiles": SMALL, "programs": programs, "least": 16}
    prepared = TritonStep(step.calls, rows, g, world.arena, rotation, **sizes)
    for partial in prepared.partials:
        partial.fill_(float("nan"))
    q = world.random(rows, g.heads, g.dim).transpose(0, 1)  # as models give it: rows outside
    out = torch.full((rows, g.heads, g.dim), float("nan"), dtype=world.dtype, device=DEVICE)
    lse = torch.full((g.heads, rows), float("nan"), device=DEVICE)
    prepared.attend(layer, q, g.dim**-0.5, None, out, lse)
    expected = reference.attend_lse(q.float(), step.expected, g.dim**-0.5, rotation, layer)
    return out, lse, *expected


def keys_of(work: WorkList) -> int:
    return int((work.segments[:, SegmentColumn.HI] - work.segments[:, SegmentColumn.LO]).sum())


@settings(max_examples=30, deadline=None, phases=GENERATE)
@given(drawn=steps())
def test_equals_one_softmax_over_all_segments(drawn):
    step, rows, programs = drawn
    out, lse, expected, expected_lse = run(step, rows, programs, LAYERS - 1)
    assert (out - expected).abs().max() < 1e-5
    assert torch.equal(lse == float("-inf"), expected_lse == float("-inf"))
    finite = expected_lse > float("-inf")
    assert not finite.any() or (lse - expected_lse)[finite].abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_in_relative_norm(dtype):
    @settings(max_examples=6, deadline=None, phases=GENERATE)
    @given(drawn=steps(dtype))
    def check(drawn):
        step, rows, programs = drawn
        out, _, expected, _ = run(step, rows, programs, 0)
        assert (out.float() - expected).norm() <= 2e-2 * expected.norm()

    check()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_size_of_head_with_whole_and_partial_rotary(dim, interleaved):
    for half in (dim // 2, dim // 4):
        world = World(Geometry(4, 2, dim, half, interleaved))
        step = Described(world)
        step.add(0, 3, *world.fill(3), causal=True)
        step.add(1, 3, *world.fill(21), base=30_000)
        step.add(3, 4, *world.fill(5, 2), base=777)
        out, _, expected, _ = run(step, 4, 1, 1)
        assert (out - expected).abs().max() < 1e-5


def test_a_chunk_with_many_holes_is_one_segment():
    """CacheBlend leaves short spans of a chunk: spans of a few keys, each seen from another row on."""
    world = World(Geometry(2, 1, 32, 16))
    whole, data = world.fill(120)
    holes = [4, 5, 11, 40, 41, 42, 77, 100]
    step = Described(world)
    step.add(0, 30, *world.fill(30), causal=True)
    for alone in (False, True):  # a request's block of rows, then its decoding row and another's
        lo = 0
        for number, hole in enumerate([*holes, 120]):
            if hole > lo:
                span = whole._replace(lo=whole.lo + lo, hi=whole.lo + hole)
                if alone:
                    step.add(30, 31, span, data[:, :, :, lo:hole], 900)
                    step.add(31, 32, span, data[:, :, :, lo:hole], 40)
                else:
                    step.add(3 + 2 * number, 30, span, data[:, :, :, lo:hole], 900)
            lo = hole + 1
    for hole in holes:  # a hole is never read
        poison = torch.full((LAYERS, 2, 1, 1, 32), float("nan"), device=DEVICE)
        world.put(whole._replace(lo=hole, hi=hole + 1), poison)
    step.calls.sort(key=lambda c: c.rows.start)
    out, _, expected, _ = run(step, 32, 1, 0)
    assert (out - expected).abs().max() < 1e-5
    work = build(step.calls, 32, Shape(2, 1, 32, 16, 16, 16))
    tiles = -(-30 // 8)
    # before and on the diagonal, the chunk; the single rows share theirs
    assert len(work.segments) <= 3 * tiles + 1
    assert work.items[-1][ItemColumn.ROWS] == 2


def windowed(cut: bool) -> tuple[Described, TritonStep]:
    """Rows of a block that see suffixes of what stands before them and of themselves; a later tile begins behind the
    slots that its rows do not see."""
    world = World(Geometry(6, 2, 32, 16))
    step = Described(world)
    window = Window(9)
    places = np.arange(40, 67)  # of the block's own tokens; a chunk stands before them
    chunk, data = world.fill(25, 2)
    own, own_data = world.fill(len(places))
    by_value = {id(own): own_data, id(chunk): data}
    for call in [
        *own_calls(window, 0, places, own._replace(source=KVView(own_data)), []),
        *span_calls(Window(30), 0, places, Stretch(chunk._replace(base=7, source=KVView(data)), 15)),
    ]:
        kept = own if call.span.source.data is own_data else chunk
        step.calls.append(call._replace(span=call.span._replace(source=kept.source)))
        slots = slice(call.span.lo - kept.lo, call.span.hi - kept.lo)
        value = Span(KVView(by_value[id(kept)][:, :, :, slots].float()), 0, call.span.tokens, call.span.base)
        step.expected.append(call._replace(span=value))
    step.add(27, 28, *world.fill(33))
    sizes = {"tiles": SMALL, "programs": 64 if cut else 1, "least": 16}
    g = world.geometry
    return step, TritonStep(step.calls, 28, g, world.arena, rotary_of(g).rotation, **sizes)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("cut", [False, True])
def test_windows_and_capped_scores_equal_the_reference(softcap, cut):
    step, prepared = windowed(cut)
    g, rotation = step.world.geometry, rotary_of(step.world.geometry).rotation
    q = step.world.random(28, g.heads, g.dim).transpose(0, 1) * 3
    out, lse = prepared.attend(1, q, 0.5, softcap)
    expected, expected_lse = reference.attend_lse(q, step.expected, 0.5, rotation, 1, Extras(softcap=softcap))
    assert (out - expected).abs().max() < 1e-5 and (lse - expected_lse).abs().max() < 1e-5
    assert len(prepared.work.floors) and (not cut or prepared.work.partials)
    assert keys_of(prepared.work) == 64 + 95 + 33  # slots that no row of a tile sees are not read


def test_every_variant_that_steps_launch_is_compiled_before(monkeypatch):
    """Compare all constants on which the kernels are specialized, for the launches of some steps and of the warm-up.
    The interpreter computes nothing; on a GPU the warm-up asks what was compiled."""
    launched: list[tuple] = []
    compiled = attention.attend

    class Noted:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                launched.append(tuple(sorted(kwargs.items())))
                return None if interpreted() else compiled[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(attention, "attend", Noted())
    geometry = Geometry(6, 2, 32, 16)
    assert min(warm_up(geometry, SMALL, torch.float32, DEVICE, {False, True}, True)) >= 1
    before = set(launched)
    launched.clear()
    for cut in (True, False):
        step, prepared = windowed(cut)
        for softcap in (None, 0.7):
            prepared.attend(1, step.world.random(28, 6, 32).transpose(0, 1), 0.5, softcap)
    assert len(set(launched)) >= 2 and set(launched) <= before


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [(255, 0, 8, 1), (128, 0, 4, 4), (64, 98304, 4, 2), (32, 0, 8, 8)],
)
def test_a_multiprocessor_runs_as_many_programs_as_fit_it(registers, shared, warps, programs):
    assert occupancy(registers, shared, warps, 233472, 2048) == programs


def test_rows_that_share_a_chunk_read_it_once():
    world = World(Geometry(4, 2, 16, 8))
    chunk, data = world.fill(40)
    step = Described(world)
    for row in range(5):
        step.add(row, row + 1, *world.fill(3 + row))
        step.add(row, row + 1, chunk, data, base=100 * row)
    out, _, expected, _ = run(step, 5, 1, 0)
    assert (out - expected).abs().max() < 1e-5
    work = build(step.calls, 5, Shape(2, 2, 16))
    assert keys_of(work) == 40 + sum(3 + row for row in range(5))
    assert sorted(work.items[:, ItemColumn.ROWS]) == [1, 1, 1, 1, 1, 5]


def test_a_long_context_of_one_row_is_cut_until_the_device_is_busy():
    calls = [SpanCall(slice(0, 1), World(Geometry(8, 8, 16, 8)).reserve(900))]
    shape = Shape(1, 8, 16, programs=64, least=16)
    work = build(calls, 1, shape)
    assert 48 <= len(work.items) * shape.kv_heads <= 2 * 64
    assert list(work.ends) == [0, len(work.items)] and work.partials == len(work.items)
    assert keys_of(work) == 900
    one = build(calls, 1, shape._replace(least=4096))
    assert len(one.items) == 1 and one.partials == 0


def test_many_partial_results_of_a_row_are_merged():
    """More than one load of the merging kernel, with larger scores behind smaller ones."""
    world = World(Geometry(2, 1, 16, 8))
    kv, data = world.fill(700)
    data[:, 0, :, 350:] *= 3
    world.put(kv, data)
    step = Described(world)
    step.add(0, 1, kv, data)
    assert build(step.calls, 1, Shape(2, 1, 16, single_n=16, programs=64, least=16)).partials > 32
    out, lse, expected, expected_lse = run(step, 1, 64, 1)
    assert (out - expected).abs().max() < 1e-5
    assert (lse - expected_lse).abs().max() < 1e-5


def test_blocks_of_rows_are_not_merged_when_there_are_enough_of_them():
    calls = [SpanCall(slice(0, 640), World(Geometry(1, 1, 16, 8)).reserve(640), causal=True)]
    assert build(calls, 640, Shape(1, 1, 16, programs=8)).partials == 0
    assert build(calls, 640, Shape(1, 1, 16, programs=400, least=64)).partials > 0


@pytest.mark.parametrize(
    ("rows", "items", "turns"), [(512, 256, 1), (520, 1728, 7), (230, 256, 1), (1024, 512, 2)]
)
def test_a_few_blocks_more_than_run_at_once_are_cut_and_not_given_a_turn_of_their_own(rows, items, turns):
    """A GPU on which 264 programs run at once, and 32 heads: 9 tiles of each would take two turns, the second of them
    for 24 programs. Cut into six each, they take seven turns of a sixth."""
    seen = Span(Strides(0, 0, 16, 0), 0, 23040)
    shape = Shape(1, 32, 16, programs=64, block_programs=264)
    work = build([SpanCall(slice(0, rows), seen)], rows, shape)
    assert work.blocks * shape.kv_heads == items and -(-items // 264) == turns
    assert keys_of(work) == -(-rows // 64) * 23040


def test_the_strides_of_a_view_lead_to_its_keys_and_values():
    torch.manual_seed(0)
    g = Geometry(4, 2, 32, 16)
    data = torch.randn(LAYERS, 2, 2, 29, 32, device=DEVICE)
    strides = strides_of(data, data)
    step = Described(World(g))
    step.add(0, 9, Span(strides, 20, 29), data[:, :, :, 20:], causal=True)
    step.add(4, 9, Span(strides, 0, 20), data[:, :, :, :20], base=3)
    prepared = TritonStep(step.calls, 9, g, data, rotary_of(g).rotation, tiles=SMALL)
    q = torch.randn(4, 9, 32, device=DEVICE)
    out, _ = prepared.attend(1, q, 0.2)
    assert (out - reference.attend(q, step.expected, 0.2, rotary_of(g).rotation, 1)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (torch.zeros(1, 2, 2, 9, 40)[..., :32], "strides"),
        (torch.zeros(1, 2, 2, 9, 33)[..., 1:], "strides"),
        (torch.zeros(1200)[3 : 3 + 1152].view(1, 2, 2, 9, 32), "offset"),
    ],
)
def test_memory_that_the_kernels_cannot_read_is_refused(data, what):
    with pytest.raises(ValueError, match=what):
        strides_of(data, torch.zeros(1))
