"""A request's status and its growing rows."""

from __future__ import annotations

import pytest
import torch
from engine_kit import family, ids, prompt_of, request_of, text_chunk

from mpic.engine.native.request import Request, Status
from mpic.engine.stream import DeltaStream
from mpic.errors import IntegrityError

LIFE = [Status.WAITING, Status.RUNNING, Status.SEARCHING, Status.PREEMPTED, Status.WAITING, Status.DECIDING]
LIFE += [Status.RUNNING, Status.FINISHED]


def bare(**given):
    """A request that is not generated from."""
    parts = dict.fromkeys(("spec", "prompt", "stream", "sampler", "detokenizer"))
    return Request([], torch.zeros(1, 0), **parts, **given)


def test_a_request_goes_through_its_life_and_nothing_follows_the_end():
    request = bare()
    for status in LIFE[1:]:
        request.become(status)
        assert request.status is status
    for status in Status:
        with pytest.raises(IntegrityError, match="from FINISHED"):
            request.become(status)


@pytest.mark.parametrize(
    ("status", "next"),
    [
        (Status.WAITING, Status.SEARCHING),
        (Status.DECIDING, Status.SEARCHING),
        (Status.RUNNING, Status.PREEMPTED),
        (Status.SEARCHING, Status.WAITING),
        (Status.PREEMPTED, Status.RUNNING),
    ],
)
def test_a_status_that_may_not_follow_is_refused(status, next):
    request = bare(status=status)
    with pytest.raises(IntegrityError, match=f"from {status.name} to {next.name}"):
        request.become(next)
    assert request.status is status


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_generated_tokens_are_placed_behind_the_prompt_and_everything_generated(name, make_engine):
    engine = make_engine(name)
    prompt = prompt_of(ids(1, 5), text_chunk(ids(2, 9)), ids(3, 4))
    spec = request_of(prompt, "reuse", 40)
    request = engine.builder.build(spec, DeltaStream(spec.id), 0.0)
    for token in range(40):
        request.append(token)
    axes = family(name).loaded.mrope
    expected = [*range(5), *range(14, 18), *range(18, 58)]
    assert request.positions[:, : len(request)].tolist() == [expected] * axes
    assert request.ids[-40:] == list(range(40)) == request.items[-40:]
    assert (request.generated, request.left, request.own_prompt, request.since_plan) == (40, 0, 9, 40)
