"""A step's profile: every operation counts once, for the part that it runs in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from unit_kit import use_emulated_unit

from mpic.config import ConfigError
from mpic.kernels import decoder
from mpic.kernels.c_kernel import KernelUnavailable
from mpic.model import hooks
from mpic.model.program import NOTE
from mpic_lab.bench import profile, step_profile
from mpic_lab.bench.harness import BenchDevice, Ticker
from mpic_lab.bench.step_profile import (
    ATTENTION,
    FUSED,
    LOOP,
    MATRIX,
    MODEL,
    OTHER,
    PARTS,
    RESULTS,
    STEP,
    profile_steps,
    summarize,
)
from mpic_lab.bench.workload import (
    DecoderShape,
    Ids,
    engine_for,
    first_token,
    make_pair,
    prompt_of,
    request_of,
)

CPU = BenchDevice(torch.device("cpu"), torch.float32)
TINY = DecoderShape(layers=2, hidden=64, heads=2, intermediate=96, vocabulary=300, context=2048)


def _event(name, start, end, thread=1, flops=0, shapes=()):
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, thread=thread, flops=flops, input_shapes=shapes)


def test_every_microsecond_of_a_step_belongs_to_one_part():
    found = summarize(
        [
            _event(STEP, 0, 100),
            _event(MODEL, 10, 80),
            _event("layer 0", 12, 70),
            _event("aten::linear", 14, 30),
            _event("aten::mm", 15, 29, flops=600, shapes=[[2, 10], [10, 15], []]),
            _event(ATTENTION, 35, 60),
            _event("aten::bmm", 40, 55, flops=7, shapes=[[1, 2, 2], [1, 2, 2]]),
            _event("aten::mul", 62, 66),
            _event(RESULTS, 85, 95),
            _event("aten::argmax", 86, 90),
            _event("aten::mm", 200, 300, flops=9, shapes=[[1, 1], [1, 1]]),  # of no step
            _event("aten::mm", 20, 90, thread=2, flops=9, shapes=[[1, 1], [1, 1]]),  # of another thread
        ],
        itemsize=4,
    )
    micro = {part: round(1e6 * seconds) for part, seconds in found.parts.items()}
    assert micro == {LOOP: 20, MODEL: 12 + 13, OTHER: 2 + 4, MATRIX: 14, ATTENTION: 25, RESULTS: 10}
    assert sum(micro.values()) == round(1e6 * found.total) == 100
    assert found.steps == 1 and found.layers == {0: pytest.approx(58e-6)}
    assert found.operations == 600 and found.bytes == 4 * (20 + 150)


def test_turns_of_the_engine_that_compute_nothing_do_not_count():
    found = summarize([_event(STEP, 0, 5), _event(STEP, 6, 20), _event(MODEL, 7, 19)], itemsize=4)
    assert found.steps == 1 and found.total == pytest.approx(14e-6)


def test_an_engines_own_thread_is_watched_and_left_as_it_was():
    pair, ids = make_pair(TINY, CPU), Ids(TINY.vocabulary)
    before, pair.loaded.program = hooks.attend_layer, None
    with engine_for(pair.loaded, 512) as engine:
        found = profile_steps(
            engine, lambda: first_token(engine, request_of(prompt_of(ids.fresh(40)), "full", 1))
        )
        assert "step" not in vars(engine) and hooks.attend_layer is before
    assert found.steps == 1 and set(found.parts) <= set(PARTS) and set(found.layers) == {0, 1}
    assert sum(found.parts.values()) == pytest.approx(found.total)
    projections = 4 * 64 * 64 + 3 * 64 * 96
    # the last row alone meets the vocabulary
    assert found.operations == 2 * (2 * 40 * projections + 64 * 300)
    assert found.parts[ATTENTION] > 0 and found.parts[MATRIX] > 0


def test_a_fused_step_is_one_part_and_no_layer_is_watched():
    pair, ids = make_pair(TINY, CPU), Ids(TINY.vocabulary)
    try:
        decoder.load(pair.loaded.kinds[0].dim, pair.loaded.dtype)
    except KernelUnavailable as reason:
        pytest.skip(f"the kernel of fused steps cannot be built or is not used here: {reason}")
    assert pair.loaded.program is not None, pair.loaded.info.details[NOTE]
    with engine_for(pair.loaded, 512) as engine:
        request = request_of(prompt_of(ids.fresh(40)), "full", 6)
        found = profile_steps(engine, lambda: engine.submit(request).result())
        assert engine.stats()["counters"]["fused_steps"] >= 4
    assert found.parts[FUSED] > 0 and not found.layers
    assert sum(found.parts.values()) == pytest.approx(found.total)


@pytest.mark.parametrize("tokens, dtype", [(3, torch.float32), (40, torch.float32), (40, torch.bfloat16)])
def test_products_are_counted_whichever_kernel_multiplies(tokens, dtype, monkeypatch):
    """Torch's profiler knows nothing of the kernels for few rows, and for blocks on a matrix unit."""
    try:
        use_emulated_unit(monkeypatch)
    except KernelUnavailable as reason:
        pytest.skip(f"the kernels for products cannot be built or are not used here: {reason}")
    pair, ids = make_pair(TINY, BenchDevice(CPU.device, dtype)), Ids(TINY.vocabulary)
    wanted = "cpu-linear-tiles" if dtype is torch.bfloat16 else "torch"
    assert pair.loaded.info.details["linear_blocks"] == wanted
    with engine_for(pair.loaded, 512) as engine:
        found = profile_steps(
            engine, lambda: first_token(engine, request_of(prompt_of(ids.fresh(tokens)), "full", 1))
        )
    heads, behind = 3 * 64 * 64, 64 * 64 + 3 * 64 * 96  # behind the last attention there is one row
    projections = heads + behind
    wanted_row = behind + 64 * 300
    assert found.operations == 2 * (tokens * (projections + heads) + wanted_row) and found.parts[MATRIX] > 0
    assert found.bytes > dtype.itemsize * (2 * projections + 64 * 300)


def test_a_gpu_is_referred_to_the_bench_that_profiles_gpus():
    with pytest.raises(ConfigError, match="bench-gpu"):
        profile.run(profile.Settings(), BenchDevice(torch.device("cuda"), torch.float32), Ticker())


def test_the_parts_are_listed_once_each():
    assert len(set(step_profile.PARTS)) == len(step_profile.PARTS) == 9
