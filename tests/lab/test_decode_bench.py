"""The decode bench counts a step only if it decodes the whole batch."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest.mock import Mock

import pytest

from mpic.engine.base import Delta, GenerationUsage
from mpic_lab.bench import decode
from mpic_lab.bench.harness import BenchFailed
from mpic_lab.bench.workload import Ids

SETTINGS = decode.Settings(text=8, tokens=6)
WHOLE = GenerationUsage(completion_tokens=9, total_ms=1e6)


def rate_of(other: GenerationUsage) -> float:
    """Measure a batch of two, whose untimed request had this usage."""

    def submit(request):
        usage = GenerationUsage(completion_tokens=6)
        deltas = [Delta("", (1,), usage=usage) for _ in range(6)]
        steps = (time.sleep(0.001) or delta for delta in deltas)
        return Mock(__iter__=lambda _: steps, result=lambda: Mock(usage=other))

    measure = decode.decoded(Mock(submit=submit), SETTINGS, Ids(300), [[], []])
    return measure()


def test_a_batch_that_is_decoded_whole_is_counted():
    assert 0 < rate_of(WHOLE) < 2 * 5 / 0.005


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"ttft_ms": 1e5}, "began late"),
        ({"preemptions": 1}, "began late or paused"),
        ({"completion_tokens": 5}, r"\(5 tokens\)"),
        ({"completion_tokens": 6 + decode.LONGER, "total_ms": 0.1}, "ended early"),
    ],
)
def test_a_request_that_misses_timed_steps_fails_the_bench(changes, said):
    with pytest.raises(BenchFailed, match=said):
        rate_of(replace(WHOLE, **changes))
