"""Predictions by the roofline, and their comparison with measurements."""

from __future__ import annotations

import pytest
import torch

from mpic.engine.base import GenerationUsage
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.workload import DecoderShape, random_model
from mpic_lab.gpu.roofline import Ceilings, Cost, Costs, against

WHERE = BenchDevice(torch.device("cpu"), torch.float32)
DECODER = DecoderShape(layers=2, hidden=64, heads=4, intermediate=96, kv_heads=2, vocabulary=300)
TOP = Ceilings(copy=100.0, matmul=1000.0, to_device=10.0)


@pytest.fixture(scope="module")
def costs():
    return Costs(random_model(DECODER, WHERE), torch.float32)


def test_the_roofline_is_what_the_scarcest_resource_needs():
    assert TOP.seconds(Cost(flops=2000, bytes=100)) == 2.0
    assert TOP.seconds(Cost(flops=2000, bytes=300)) == 3.0
    assert TOP.seconds(Cost(flops=2000, bytes=300, bus=40)) == 4.0
    assert TOP.seconds(Cost(1, 2, 3) + Cost(1999, 98, 37)) == 4.0


def test_a_time_and_a_rate_of_the_same_work_are_equally_far_from_it():
    cost = Cost(bytes=200)  # 2 s at least
    time = against(TOP, cost, 3.0, 3000.0, "ms")
    rate = against(TOP, cost, 3.0, 200 / 3.0, "B/s")
    assert time == {"predicted": 2000.0, "ratio": 1.5, "bound": "memory"}
    assert rate == {"predicted": 100.0, "ratio": 1.5, "bound": "memory"}


def test_nothing_is_predicted_without_ceilings_or_counts():
    assert against(None, Cost(1), 1.0, 1.0, "ms")["ratio"] is None
    assert against(TOP, Cost(), 1.0, 1.0, "ms")["predicted"] is None


def test_a_step_reads_the_weights_once_and_shared_tokens_once(costs):
    linear = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96) + 64 * 300
    assert costs.weights == 4 * linear
    assert costs.token == 4 * 2 * 2 * 2 * 16
    own, shared = costs.step(8, 100, 800), costs.step(8, 100, 100)
    assert own.flops == shared.flops
    assert own.bytes - shared.bytes == 700 * costs.token
    assert costs.step(1, 100, 100).bytes == costs.weights + 101 * costs.token


def test_a_step_of_one_row_computes_what_a_prefill_of_one_row_does(costs):
    usage = GenerationUsage(prompt_tokens=100, computed=1, attended=100)
    assert costs.prefill(usage).flops == costs.step(1, 100, 100).flops
