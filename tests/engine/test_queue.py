"""The queue of waiting requests is bounded."""

import threading

import pytest
from engine_kit import ids, prompt_of, request_of

from mpic.errors import QueueFull


def test_a_request_beyond_the_queue_is_refused_and_the_others_are_answered(make_engine):
    engine = make_engine(max_running=2, max_waiting=3)
    prompts = [prompt_of(ids(seed, 5)) for seed in range(5)]
    running = [engine.submit(request_of(prompt, "full", 1500)) for prompt in prompts[:2]]
    for stream in running:
        next(iter(stream))
    waiting = [engine.submit(request_of(prompt, "full", 4)) for prompt in prompts[2:]]
    with pytest.raises(QueueFull, check=lambda error: error.status == 429 and error.retry_after):
        engine.submit(request_of(prompts[0], "full", 4))
    running[0].abort()
    assert all(len(stream.result().token_ids) == 4 for stream in waiting)
    running[1].abort()
    assert engine.submit(request_of(prompts[0], "full", 4)).result().finish_reason == "length"
    assert engine.arrivals.count == 0


def test_a_burst_is_refused_only_beyond_what_may_run_and_wait(make_engine, monkeypatch):
    """This holds however early the engine looks at the first of them."""
    engine = make_engine(max_running=2, max_waiting=1)
    schedule, held, go = engine.scheduler.schedule, threading.Event(), threading.Event()

    def wait_with_one_in_the_queue():
        if engine.scheduler.waiting:
            held.set()
            assert go.wait(60)
        return schedule()

    monkeypatch.setattr(engine.scheduler, "schedule", wait_with_one_in_the_queue)
    streams = [engine.submit(request_of(prompt_of(ids(0, 5)), "full", 4))]
    assert held.wait(60)
    streams += [engine.submit(request_of(prompt_of(ids(seed, 5)), "full", 4)) for seed in (1, 2)]
    with pytest.raises(QueueFull):
        engine.submit(request_of(prompt_of(ids(3, 5)), "full", 4))
    go.set()
    assert [stream.result().finish_reason for stream in streams] == ["length"] * 3


def test_refused_requests_take_no_place_in_the_queue(make_engine):
    engine = make_engine(max_running=1, max_waiting=1)
    for _ in range(5):
        with pytest.raises(Exception, match="text of its own"):
            engine.submit(request_of(prompt_of(), "full", 4))
    assert engine.submit(request_of(prompt_of(ids(1, 5)), "full", 4)).result().finish_reason == "length"


def test_an_aborted_request_gives_its_pages_back_before_the_next_step(make_engine):
    engine = make_engine()
    streams = [engine.submit(request_of(prompt_of(ids(seed, 5)), "full", 1500)) for seed in range(2)]
    for stream in streams:
        next(iter(stream))
    seen = []
    step = engine.step

    def watched():
        seen.append((engine._counters["steps"], len(engine.scheduler.running)))
        step()

    engine.step = watched
    streams[0].abort()
    at = engine._counters["steps"]  # no step that begins later has both
    assert streams[0].result().finish_reason == "abort"
    streams[1].abort()
    assert streams[1].result().finish_reason == "abort"
    with_both = [steps for steps, running in seen if running == 2 and steps > at + 1]
    assert len(with_both) <= 1  # at most the step under way when it was asked for
