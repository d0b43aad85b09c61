"""Steps whose pieces between attentions are played again give the answers of steps that run as ever."""

from __future__ import annotations

import gc
from contextlib import closing
from types import SimpleNamespace

import pytest
import tape
import torch
from engine_kit import (
    SHRINKING,
    MemoryStore,
    answers_at_once,
    assert_answers_equal,
    family,
    ids,
    image_chunk,
    prompt_of,
    request_of,
    submit_together,
)
from families import random_image
from tape import captured_pieces

from mpic.engine.native import cuda_executor, piecewise
from mpic.engine.native.batch import BatchSlice, Rows
from mpic.engine.native.cuda_executor import CudaExecutor
from mpic.engine.native.engine import NativeEngine
from mpic.engine.native.piecewise import PiecewiseSteps, bucket_sizes
from mpic.errors import IntegrityError, ModelRefused
from mpic.kernels.span import Span
from mpic.kv.pool import Pool


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(piecewise, "SIZES", (6, 24, 48))
    # as on CUDA, for which the tape stands in: it does not see what a kernel for the CPU writes
    monkeypatch.setattr("mpic.model.own_modules.KernelLinear._kernels_for", lambda layer, x, weight: None)


def in_pieces(capture, choice="auto"):
    """Return what makes an executor that captures pieces of steps, and no decoding ones."""

    def made(model, pool, budget, most, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CudaExecutor, "_capture_decoding", lambda *given: None)
            return CudaExecutor(model, pool, budget, most, choice, capture_pieces=capture)

    return made


@pytest.fixture
def answers(monkeypatch):
    """Answers to prompts that arrive at once, with log-probabilities, and the engine's counters."""

    def run(name: str, policy: str, capture=None, asked=SHRINKING, choice: str = "auto", store=None):
        monkeypatch.setattr("mpic.engine.native.engine.executor_for", in_pieces(capture, choice))
        loaded = family(name).loaded
        with closing(NativeEngine(loaded, store, pages=96, page_size=16, budget=40)) as engine:
            return answers_at_once(engine, policy, asked)

    return run


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("llama", "mpic-4"),
        ("llama", "random-20"),
        ("llama", "cacheblend-15"),
        ("gemma3", "legolink-4"),
        ("gpt_oss", "mpic-4"),
        ("gemma2", "mpic-4"),
        ("gemma4", "mpic-4"),
        ("deepseek", "mpic-4"),
    ],
)
def test_answers_are_those_of_steps_that_run_as_ever(answers, name, policy):
    """A tape replaces the graphs, so everything that changes between steps has to be in the buffers. Chunks are
    compiled, links and decoding rows share steps, layers have windows, holes and sinks."""
    found, counters = answers(name, policy, captured_pieces)
    expected, usual = answers(name, policy)
    assert counters["piecewise_steps"] >= 4 and "piecewise_steps" not in usual
    assert_answers_equal(found, expected)


def test_images_are_linked_in_pieces_and_features_for_later_layers_are_not(answers):
    image = image_chunk(random_image(1))
    asked = {prompt_of(ids(1, 5), image, ids(2, 4)): 5}
    for name, pieces in (("qwen2_5_vl", True), ("qwen3_vl", False)):
        found, counters = answers(name, "mpic-4", captured_pieces, asked)
        assert_answers_equal(found, answers(name, "mpic-4", asked=asked)[0])
        others = counters["steps"] - counters["piecewise_steps"]
        assert (others == 0) is pieces


def test_a_link_that_is_computed_in_pieces_follows_its_loads_layer_by_layer(answers):
    store = MemoryStore()
    answers("llama", "mpic-4", store=store)
    expected, _ = answers("llama", "mpic-4", store=store)
    store.delay = 0.02
    found, counters = answers("llama", "mpic-4", captured_pieces, store=store)
    assert counters["piecewise_steps"] and counters["chunks_from_disk"]
    assert_answers_equal(found, expected)


def prefill(pool, tokens, chunk):
    rows = Rows(ids(1, tokens), torch.arange(tokens)[None], extent=pool.alloc(tokens))
    rows.spans = [Span(chunk, 2, chunk.tokens, 50, 1)]
    return BatchSlice(rows, 0, tokens)


@pytest.fixture
def runner():
    loaded = family("llama").loaded
    pool = Pool(loaded.shape, 64, 8, loaded.dtype)
    pool.arena.copy_(torch.randn(pool.arena.shape, generator=torch.Generator().manual_seed(5)))
    made = CudaExecutor(loaded, pool)
    made.piecewise = PiecewiseSteps(loaded, 48, 2, captured_pieces)
    return made


def test_every_layer_waits_between_its_pieces(runner):
    done = []

    def watched(work):
        return [
            (lambda piece=piece, n=n: (done.append(f"piece {n}"), piece()))
            for n, piece in enumerate(captured_pieces(work))
        ]

    runner.piecewise = PiecewiseSteps(runner.model, 48, 2, watched)
    barrier = type("Barrier", (), {"wait": lambda self, layer: done.append(f"wait {layer}")})()
    runner.run([prefill(runner.pool, 9, runner.pool.alloc(24))], barrier=barrier)
    assert done == ["piece 0", "wait 0", "piece 1", "wait 1", "piece 2", "wait 2", "piece 3"]


@pytest.mark.parametrize(("rows", "slices"), [(49, 1), (5, 3)])
def test_steps_with_more_rows_or_more_wanted_ones_run_as_ever(runner, rows, slices):
    chunk = runner.pool.alloc(24)
    parts = [prefill(runner.pool, rows, chunk) for _ in range(slices)]
    logits = runner.run(parts)
    assert not runner.piecewise.counters and logits.shape == (slices, 300)


def test_rows_that_fill_a_bucket_up_change_nothing(runner):
    """Steps come one after the other, the largest first, so that what the last ones have left behind is there, or NaN
    is."""
    steps, chunk = runner.piecewise, runner.pool.alloc(24)
    for rows in (48, 25, 24, 7, 6, 1, 3):
        part = [prefill(runner.pool, rows, chunk)]
        if rows % 2:
            steps.fill(float("nan"))
        got = runner.run(part).clone()
        runner.piecewise = None
        expected = runner.run(part)
        runner.piecewise = steps
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
        runner.pool.free(part[0].rows.extent)
    assert steps.counters["piecewise_steps"] == 7


def test_buckets_are_made_for_no_more_rows_than_a_step_has(monkeypatch):
    monkeypatch.undo()
    assert bucket_sizes(100) == [128, 64, 8]
    assert bucket_sizes(64) == [64, 8]
    assert bucket_sizes(1) == [8]
    assert bucket_sizes(2048)[0] == 1024 and bucket_sizes(2048)[-1] == 8


def test_pieces_that_compute_something_else_are_not_served(answers, monkeypatch, caplog):
    def wrong(work):
        return [lambda: None, *captured_pieces(work)[1:]]

    with pytest.raises(
        ModelRefused, match=r"steps with links cannot be captured: .*differ from the usual ones"
    ):
        answers("llama", "mpic-4", wrong, choice="on")
    found, counters = answers("llama", "mpic-4", wrong)
    assert "steps with links run without CUDA graphs" in caplog.text and "piecewise_steps" not in counters
    assert family("llama").loaded.info.details.pop("piecewise_graphs").startswith("off: IntegrityError")
    assert_answers_equal(found, answers("llama", "mpic-4")[0])


@pytest.mark.parametrize("coupled", [False, True])
def test_rows_that_change_others_are_not_served(answers, monkeypatch, coupled):
    """As a model does that scales all rows by the largest number in any of them."""
    loaded = family("llama").loaded
    norm = loaded.text_model.layers[1].input_layernorm
    plain = norm.forward

    def scaled(x):
        scale = x.abs().amax()
        return plain((x / scale * 2**6).round() / 2**6 * scale)

    if coupled:
        monkeypatch.setattr(norm, "forward", scaled)
    _, counters = answers("llama", "mpic-4", captured_pieces)
    assert ("piecewise_steps" in counters) is not coupled
    said = loaded.info.details.pop("piecewise_graphs")
    assert said.startswith(
        "off: IntegrityError: steps in pieces differ from the usual ones by nan"
        if coupled
        else "on: up to 48 rows"
    )


@pytest.mark.parametrize("wanted", [6, 24, 47])
def test_the_wanted_rows_of_a_model_that_returns_all_logits_are_taken(monkeypatch, wanted):
    loaded = family("llama").loaded
    call = type(loaded).call
    everything = lambda self, inputs, positions, step, rows: call(
        self, inputs, positions, step, torch.arange(len(inputs.embeds))
    )
    pool = Pool(loaded.shape, 64, 8, loaded.dtype)
    pool.arena.normal_(generator=torch.Generator().manual_seed(5))
    runner, part = CudaExecutor(loaded, pool), [prefill(pool, 9, pool.alloc(24))]
    expected = runner.run(part)
    monkeypatch.setattr(type(loaded), "call", everything)
    runner.piecewise = PiecewiseSteps(loaded, 48, wanted, captured_pieces)
    assert (runner.run(part) - expected).abs().max() < 1e-4


def test_decoding_steps_run_in_pieces_where_there_is_nothing_faster(monkeypatch):
    """One step ahead, too, which overwrites the logits of the step before it."""
    loaded = family("gemma4").loaded
    asked = lambda: [
        request_of(prompt_of(ids(n, 5 + n)), "prefix", 6, temperature=0.7, seed=n) for n in range(3)
    ]
    found = {}
    for pieces in (False, True):
        if pieces:
            monkeypatch.setattr("mpic.engine.native.engine.executor_for", in_pieces(captured_pieces))
        with closing(NativeEngine(loaded, pages=96, page_size=16, ahead=pieces)) as engine:
            found[pieces] = [stream.result().token_ids for stream in submit_together(engine, asked())]
            counters = engine.stats()["counters"]
    assert found[True] == found[False]
    assert counters["piecewise_steps"] >= 6 and counters["steps_ahead"]


def test_a_model_whose_layers_do_not_all_end_a_piece_is_refused(monkeypatch):
    loaded = family("llama").loaded
    with pytest.raises(IntegrityError, match="pieces between the attention of layers"):
        PiecewiseSteps(loaded, 48, 2, lambda work: captured_pieces(work)[1:])


def test_nothing_that_a_captured_piece_reads_is_freed_when_it_has_been_captured():
    """A CUDA graph keeps addresses and no tensors."""
    read: set[int] = set()

    def forgetful(work):
        work(lambda: None)
        tapes, count = [tape.Tape()], []
        tapes[0].record(lambda: work(lambda: count.append(1)))
        read.update(tapes[0].storages)
        return [lambda: pytest.fail("not to be played")] * (len(count) + 1)

    steps = PiecewiseSteps(family("llama").loaded, 48, 2, forgetful)
    gc.unfreeze()  # servers of other tests have put what there was out of the collector's sight
    gc.collect()
    held = {t.untyped_storage().data_ptr() for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    assert len(read) > 20 and read <= held and steps.nbytes > 0


@pytest.mark.parametrize("wide", [128, [64, 128]])
def test_what_is_reserved_has_room_for_the_buffers(monkeypatch, wide):
    """Gemma 3n's MLPs have a size for each layer."""
    loaded = family("llama").loaded
    steps = PiecewiseSteps(loaded, 48, 4, captured_pieces)
    sizes = SimpleNamespace(hidden_size=64, vocab_size=300, intermediate_size=wide)
    monkeypatch.setattr(loaded, "text_config", sizes)
    monkeypatch.setattr(cuda_executor, "_GRAPH", 0)
    monkeypatch.setattr(cuda_executor, "_WORKSPACE", 0)
    assert steps.nbytes <= cuda_executor._piecewise_bytes(loaded, 4, 48) < 20 * steps.nbytes
