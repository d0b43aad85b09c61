"""Long prompts beside streaming answers: steps are cut, and nothing else changes."""

import pytest
from engine_kit import ids, prompt_of, request_of

from mpic.engine.native import pace
from mpic.engine.native.pace import StepPace


@pytest.fixture
def steps(make_engine, monkeypatch):
    """An engine on which every row takes a second, and the rows ``(decodes, others)`` of each of its steps."""
    monkeypatch.setattr(pace, "LEAST", 32)
    engine = make_engine("mistral", budget=512)
    seen = []
    run = engine.executor.run

    def recorded(slices, barrier=None):
        decodes = sum(s.hi - s.lo == 1 and s.rows.generated > 0 for s in slices)
        seen.append((decodes, sum(s.hi - s.lo for s in slices) - decodes))
        return run(slices, barrier)

    monkeypatch.setattr(engine.executor, "run", recorded)
    monkeypatch.setattr(engine.scheduler.pace, "measure", lambda rows, seconds: None)
    engine.scheduler.pace.seconds_per_row = 1.0
    return engine, seen


def test_a_prompt_is_computed_in_one_step_when_no_answer_streams(steps):
    engine, seen = steps
    engine.submit(request_of(prompt_of(ids(1, 200)), "full", 1)).result()
    assert seen == [(0, 200)]


def test_a_prompt_that_arrives_while_an_answer_streams_is_cut(steps):
    engine, seen = steps
    streaming = engine.submit(request_of(prompt_of(ids(1, 8)), "full", 1000))
    next(iter(streaming))
    alone = engine.submit(request_of(prompt_of(ids(2, 200)), "full", 1)).result()
    streaming.abort()
    streaming.result()
    beside = [others for decodes, others in seen if decodes]
    assert max(beside) == 32 and sum(beside) == 200
    assert alone.token_ids == engine.submit(request_of(prompt_of(ids(2, 200)), "full", 1)).result().token_ids


def test_the_limit_follows_what_was_measured():
    measured = StepPace()
    assert measured.limit(2048) == pace.LEAST  # nothing is known yet
    measured.measure(1, 1e-9)
    assert measured.limit(2048) == pace.LEAST  # a step of one row says nothing about many
    measured.measure(1000, 0.1)
    assert measured.limit(2048) == 800
    for _ in range(50):
        measured.measure(1000, 10.0)
    assert measured.limit(2048) == pace.LEAST
    assert measured.limit(100) == 100
