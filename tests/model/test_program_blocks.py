"""Steps with blocks of rows, layer by layer without the model's modules: what these compute."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from fused_kit import DTYPES, FAMILIES, loaded_model, needs_fused
from processors import compiled_for

from mpic.kernels.attention import SpanCall, Write
from mpic.kernels.decoder import BlockLayers
from mpic.kernels.span import Span
from mpic.kernels.writes import RowWrites
from mpic.kv.pool import Pool
from mpic.model.hooks import Observed, Step
from mpic.model.program import NOTE
from mpic.model.program_proof import TOLERANCE

pytestmark = needs_fused
processor = compiled_for("avx2", "avx512", "avx512_bf16", "amx")
BLOCKS = ((40, 0), (3, 25), (90, 7))
"""Rows of each block, and its own tokens before them."""


@pytest.fixture(scope="module")
def llama():
    return loaded_model()


class Barrier:
    """Loads that a step follows; keeps the memory of every layer as it was when the layer waited."""

    def __init__(self) -> None:
        self.arena, self.waited = None, []

    def wait(self, layer: int) -> None:
        self.waited.append((layer, self.arena.clone()))


def case(loaded, blocks=BLOCKS, alone=2):
    """Return a step of blocks and of rows that stand alone, which see two chunks at bases of their own, its inputs and
    its memory. The same contents each time."""
    own = sum(rows + before for rows, before in blocks)
    pool = Pool(loaded.shape, own + 40 * alone + 150, 1, loaded.dtype)
    pool.arena.normal_(generator=torch.Generator().manual_seed(1))
    chunks, calls, writes, start = [pool.kv(pool.alloc(n)) for n in (80, 30)], [], [], 0
    for number, (rows, before) in enumerate(blocks):
        view, block = pool.kv(pool.alloc(rows + before)), slice(start, start + rows)
        writes.append(Write(block, Span(view, before, before + rows)))
        calls.append(SpanCall(block, writes[-1].span, causal=True, first=True))
        if before:
            calls.append(SpanCall(block, Span(view, 0, before)))
        for seen, chunk in enumerate(chunks):
            calls.append(
                SpanCall(slice(start + seen, start + rows), Span(chunk, 3, 30, base=50 * number + seen))
            )
        start += rows
    singles, ends = [], [pool.kv(pool.alloc(31)) for _ in range(alone)]
    for row, view in enumerate(ends, start):
        singles.append(SpanCall(slice(row, row + 1), Span(view, 0, 31), first=True))
        singles.append(SpanCall(slice(row, row + 1), Span(chunks[0], 5, 80, base=9)))
    kind = loaded.kind_calls(0, calls)
    step_writes = None
    if alone:
        kind = kind._replace(singles=loaded.single_rows(0, singles))
        step_writes = RowWrites(pool.arena, range(start, start + alone), [v.data for v in ends], [30] * alone)
    step = Step(writes, [kind], loaded.kind_of, loaded.partial, single_writes=step_writes)
    generator = torch.Generator().manual_seed(2)
    inputs = loaded.rows(torch.randint(9, 200, (start + alone,), generator=generator))
    positions = torch.randint(0, 2000, (loaded.mrope, start + alone), generator=generator)
    return step, inputs, positions, pool.arena


def both(loaded, change=lambda step: step, wanted=None, barriers=(None, None), **given):
    """Return logits, memory and step of the modules, and those of the program."""
    results = []
    for run, barrier in zip((loaded.forward, loaded.program.run), barriers, strict=True):
        step, inputs, positions, arena = case(loaded, **given)
        if barrier is not None:
            barrier.arena, step.barrier = arena, barrier
        step = change(step)
        rows = torch.arange(len(inputs.ids)) if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        results.append((run(inputs, positions, step, rows), arena, step))
    return results


def assert_near(loaded, got, wanted):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    error = (got.float() - wanted.float()).abs().max()
    # in bf16 one of some hundred thousand numbers is now and then rounded the other way
    limit = TOLERANCE[loaded.dtype] * (2 if loaded.dtype is torch.bfloat16 else 1)
    assert error <= limit * wanted.float().abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_keys_and_values_are_those_of_the_modules(name, dtype):
    loaded = loaded_model(name, dtype, FAMILIES[name])
    for blocks, alone in ((BLOCKS, 2), (((5, 0),), 0), (((1100, 4),), 1)):
        (wanted, memory, _), (got, fused_memory, _) = both(loaded, blocks=blocks, alone=alone)
        assert_near(loaded, got, wanted)
        assert_near(loaded, fused_memory, memory)


def test_only_wanted_logits_are_computed_in_their_order(llama):
    (wanted, _, _), (got, _, _) = both(llama, wanted=[41, 3])
    assert len(got) == 2
    assert_near(llama, got, wanted)
    assert len(both(llama, wanted=[])[1][0]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", [[41, 3], [134], []])
def test_behind_the_last_attention_nothing_is_computed_of_rows_that_nobody_wants(wanted, dtype):
    loaded, counts = loaded_model(dtype=dtype), []
    products = loaded.program._blocks._products

    def counted(x, by, outs):
        counts.append((len(x), len(by)))
        products.into(x, by, outs)

    loaded.program._blocks._products = Mock(into=counted)
    (logits, memory, _), (got, fused_memory, _) = both(loaded, wanted=wanted)
    assert_near(loaded, fused_memory, memory)
    if wanted:
        assert_near(loaded, got, logits)
    rows, layers = sum(count for count, _ in BLOCKS) + 2, loaded.shape.layers
    of_layer = [3, 1, 2, 1]
    behind_last = [(len(wanted), count) for count in of_layer[1:]] if wanted else []
    assert counts == [(rows, count) for count in of_layer * (layers - 1) + of_layer[:1]] + behind_last


def test_a_model_whose_wanted_rows_are_others_has_no_program(monkeypatch):
    run = BlockLayers.__call__

    def wrong(self, state, *tables, wanted):
        return run(self, state, *tables, wanted if len(wanted) == len(state) else wanted.flip(0).roll(1))

    monkeypatch.setattr(
        BlockLayers, "__call__", lambda self, *given: wrong(self, *given[:-1], wanted=given[-1])
    )
    assert "differs from the model's own" in loaded_model().info.details[NOTE]


def test_every_layer_waits_for_its_loads_when_its_keys_are_written_and_before_it_attends(llama):
    barriers = Barrier(), Barrier()
    both(llama, barriers=barriers)
    assert [layer for layer, _ in barriers[0].waited] == list(range(llama.shape.layers))
    for (layer, memory), (fused_layer, fused_memory) in zip(*(b.waited for b in barriers), strict=True):
        assert layer == fused_layer
        assert_near(llama, fused_memory, memory)


def test_presses_observe_the_queries_that_the_modules_compute(llama):
    watch = lambda step: replace(step, observed=[(slice(10, 40), Observed(30))])
    (_, _, modules), (_, _, fused) = both(llama, change=watch)
    (_, wanted), (_, got) = modules.observed[0], fused.observed[0]
    assert got.scales == pytest.approx(wanted.scales) and list(got.queries) == list(wanted.queries)
    for layer, [queries] in wanted.queries.items():
        assert_near(llama, got.queries[layer][0], queries)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads):
    """Sizes at which several threads share what stands between products: more than 2^15 numbers."""
    loaded = loaded_model(text={"hidden_size": 256, "intermediate_size": 520})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (wanted, memory, _), (got, fused_memory, _) = both(loaded)
    finally:
        torch.set_num_threads(before)
    assert_near(loaded, got, wanted)
    assert_near(loaded, fused_memory, memory)


def test_memory_of_another_layout_is_refused_and_not_written(llama):
    step, inputs, positions, arena = case(llama)
    before = arena.clone()
    rows, span = step.writes[0]
    for wrong in (
        span._replace(hi=span.hi + 99, lo=span.lo + 99),
        span._replace(source=type(span.source)(span.source.data[:1])),
    ):
        broken = replace(step, writes=[Write(rows, wrong), *step.writes[1:]])
        with pytest.raises(ValueError, match="rows cannot be written"):
            llama.program.run(inputs, positions, broken, torch.arange(1))
    turn = llama.program.rotations(positions)
    layers: BlockLayers = llama.program._blocks
    rows = torch.arange(len(inputs.embeds))
    with pytest.raises(ValueError, match="cannot run a step"):
        layers(inputs.embeds.clone(), *turn, torch.zeros(3, 4, dtype=torch.int64), lambda *rows: None, rows)
    assert torch.equal(arena, before)
