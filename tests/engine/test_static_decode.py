"""Static decoding steps give the answers of other steps, and read the same addresses every time."""

from __future__ import annotations

import gc
from contextlib import closing

import pytest
import torch
from engine_kit import SHRINKING, answers_at_once, assert_answers_equal, family
from tape import Tape, captured

from mpic import memory
from mpic.engine.native import cuda_executor, device_memory, static_decode
from mpic.engine.native.cuda_executor import CudaExecutor
from mpic.engine.native.engine import NativeEngine
from mpic.errors import IntegrityError, ModelRefused
from mpic.kv.pool import Pool


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make sizes small: few numbers of rows, tables that are soon cut anew, keys that are cut and merged."""
    monkeypatch.setattr(static_decode, "bucket_sizes", lambda most: [4, 1])
    monkeypatch.setattr("mpic.kernels.triton.static._WIDER", 2)
    monkeypatch.setattr("mpic.model.triton_attention.TritonAttention.programs", 6)
    monkeypatch.setattr("mpic.model.triton_attention.TritonAttention.least", 16)
    monkeypatch.setattr("mpic.engine.native.scheduler.GROWTH", 2)
    # as on CUDA, for which the tape stands in: it does not see what a kernel for the CPU writes
    monkeypatch.setattr("mpic.model.own_modules.KernelLinear._kernels_for", lambda layer, x, weight: None)


@pytest.fixture
def answers(monkeypatch):
    """Answers to all prompts at once with log-probabilities, and the engine's counters."""

    def run(graphs: str, capture=None, name: str = "llama", policy: str = "mpic-4") -> tuple[list, dict]:
        given = lambda model, pool, budget, most, choice: CudaExecutor(
            model, pool, budget, 4, choice, capture
        )
        monkeypatch.setattr("mpic.engine.native.engine.executor_for", given)
        with closing(NativeEngine(family(name).loaded, pages=64, page_size=16, cuda_graphs=graphs)) as engine:
            return answers_at_once(engine, policy)

    return run


@pytest.mark.parametrize(
    ("name", "policy", "capture"),
    [("llama", "random-20", captured), ("gemma3", "mpic-4", None)],
    ids=["llama", "gemma3"],
)
def test_steps_that_are_played_again_give_the_tokens_of_steps_run_one_by_one(answers, name, policy, capture):
    """A tape replaces the CUDA graph, so everything that changes between steps has to be in the buffers. The batches
    have three, two and one rows, extents grow and move, and chunks have holes. Layers with windows and two rotary
    embeddings are run without the tape."""
    found, counters = answers("on", capture, name, policy)
    expected, usual = answers("off", None, name, policy)
    assert counters["static_steps"] >= max(SHRINKING.values()) - 2 and "static_steps" not in usual
    assert_answers_equal(found, expected)


def test_a_step_reads_the_same_addresses_whatever_the_batch(answers, monkeypatch):
    """This compares all memory from before the step and every number from the host: pointers, shapes, strides,
    grids."""
    reads: dict[int, list] = {}

    def watched(work):
        work()  # the first step makes the buffer of logits

        def run():
            tape = Tape()
            out = tape.record(work)
            reads.setdefault(len(out), []).append((work, tape.reads))
            return out

        return run

    found, _ = answers("on", watched)
    assert_answers_equal(found, answers("off")[0])
    for steps in reads.values():
        for work in {work for work, _ in steps}:
            of_one = [read for other, read in steps if other is work]
            assert all(read == of_one[0] for read in of_one)
    assert len(reads[4]) > 2 and len(reads[4][0][1]) > 100


def test_nothing_that_a_captured_step_reads_is_freed_when_it_has_been_captured(monkeypatch):
    """A CUDA graph keeps addresses and no tensors: memory that only the captured code held would be given to others,
    and the step would read what they write there."""
    read: set[int] = set()

    def forgetful(work):
        work()
        tape = Tape()
        tape.record(work)
        read.update(tape.storages)
        return lambda: pytest.fail("not to be played")

    monkeypatch.setattr(cuda_executor, "compare", lambda decode, executor: 0.0)
    given = lambda model, pool, budget, most, choice: CudaExecutor(model, pool, budget, 4, choice, forgetful)
    monkeypatch.setattr("mpic.engine.native.engine.executor_for", given)
    with closing(NativeEngine(family("llama").loaded, pages=64, page_size=16, cuda_graphs="on")):
        gc.unfreeze()  # servers of other tests have put what there was out of the collector's sight
        gc.collect()
        held = {t.untyped_storage().data_ptr() for t in gc.get_objects() if isinstance(t, torch.Tensor)}
        assert len(read) > 20 and read <= held


def test_a_batch_that_does_not_fit_runs_in_the_usual_way_and_is_counted(answers, monkeypatch, caplog):
    expected, _ = answers("off")
    monkeypatch.setattr("mpic.kernels.triton.static._SEGMENTS", 0)
    monkeypatch.setattr(cuda_executor, "compare", lambda decode, executor: 0.0)  # would not fit either
    found, counters = answers("on")
    assert counters["static_too_large"] > 0
    assert "no CUDA graph" in caplog.text
    assert_answers_equal(found, expected)


def test_steps_that_differ_are_not_served_and_the_reason_is_logged(answers, monkeypatch, caplog):
    for value in (1.0, float("nan")):
        wrong = lambda work, value=value: lambda: work().add_(value)
        with pytest.raises(ModelRefused, match="differ from the usual ones"):
            answers("on", wrong)
    loaded = family("llama").loaded
    monkeypatch.setattr(loaded, "device", torch.device("cuda"))
    monkeypatch.setattr(cuda_executor, "_allocated", lambda device: 0)
    monkeypatch.setattr(
        static_decode.StaticDecode, "__init__", lambda *args: (_ for _ in ()).throw(IntegrityError("x"))
    )
    monkeypatch.setattr(CudaExecutor, "_capture_pieces", lambda *given: None)
    assert CudaExecutor(loaded, None, 40, 4, "auto", captured).static is None
    assert "decoding steps run without CUDA graphs" in caplog.text
    assert loaded.info.details.pop("cuda_graphs") == "off: IntegrityError: x"


def test_what_is_reserved_is_what_buffers_take_and_a_bound_for_graphs(monkeypatch):
    loaded = family("llama").loaded
    assert cuda_executor.reserved_bytes(loaded, 4, "auto") == 0  # not on the CPU
    attention = loaded.triton_attention()
    with monkeypatch.context() as there:
        there.setattr(loaded, "triton_attention", lambda: attention)
        there.setattr(loaded, "device", torch.device("cuda"))
        reserved = cuda_executor.reserved_bytes(loaded, 4, "auto")
        assert cuda_executor.reserved_bytes(loaded, 4, "off") == 0
    decode = static_decode.StaticDecode(loaded, Pool(loaded.shape, 4, 16, loaded.dtype), 4)
    logits = 4 * 300 * (4 + 4 + 4)  # kept; of a step, in fp32 and as the model gives them
    graphs = 2 * 3 * cuda_executor._GRAPH  # for 4, 2 and 1 rows
    assert reserved == decode.nbytes + logits + graphs + cuda_executor._WORKSPACE


def test_a_pool_that_takes_a_share_leaves_what_is_reserved(monkeypatch):
    loaded = family("llama").loaded
    page = 16 * loaded.shape.per_token * loaded.dtype.itemsize
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 * page, 300 * page))
    monkeypatch.setattr(loaded, "device", torch.device("cuda"))
    assert [device_memory.pool_pages(loaded, 0, n * page) for n in (0, 100)] == [170, 85]


def test_a_pool_on_the_cpu_takes_a_share_of_what_the_limits_of_the_process_leave(monkeypatch):
    loaded = family("llama").loaded
    page = 16 * loaded.shape.per_token * loaded.kv_dtype.itemsize
    monkeypatch.setattr(memory, "room", lambda: 80.0 * page)
    assert [device_memory.pool_pages(loaded, 0, n * page) for n in (0, 40, 90)] == [20, 10, 1]


def test_without_cuda_they_are_off_unless_they_are_asked_for(answers):
    _, counters = answers("auto")
    assert "static_steps" not in counters
