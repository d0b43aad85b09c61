"""The stream of an answer: one writer, one reader, on threads or on an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engine_kit import ids, prompt_of, request_of, until

import mpic.engine.stream as stream_module
from mpic.engine.base import Delta, TokenLogprob
from mpic.engine.stream import DeltaStream
from mpic.errors import OutOfMemory, QueueFull
from mpic.server.parallel_sampling import ParallelSampling

LAST = Delta("c", finish_reason="stop")


def written(stream: DeltaStream, *items: Delta | BaseException) -> threading.Thread:
    thread = threading.Thread(target=lambda: [stream.put(item) for item in items])
    thread.start()
    return thread


def texts_on_a_loop(stream: DeltaStream, begin=lambda: None) -> list[str]:
    async def read() -> list[str]:
        asyncio.get_running_loop().call_later(0.01, begin)
        return [delta.text async for delta in stream]

    return asyncio.run(asyncio.wait_for(read(), 60))


def test_a_reader_gets_the_deltas_in_order_up_to_the_last():
    stream = DeltaStream("one")
    writer = written(stream, Delta("a"), Delta("b"), LAST, Delta("too late"))
    assert [delta.text for delta in stream] == ["a", "b", "c"]
    assert list(stream) == []  # it has ended
    writer.join()


def test_a_reader_on_an_event_loop_is_woken_by_what_is_written_later():
    stream = DeltaStream("one")
    assert texts_on_a_loop(stream, lambda: written(stream, Delta("a"), LAST)) == ["a", "c"]
    assert texts_on_a_loop(stream) == []


def test_what_was_written_before_anybody_read_is_read():
    stream = DeltaStream("one")
    written(stream, Delta("a"), LAST).join()
    assert texts_on_a_loop(stream) == ["a", "c"]


@pytest.mark.parametrize("read", [list, texts_on_a_loop])
def test_an_error_ends_the_stream_behind_what_came_before_it(read):
    stream = DeltaStream("one")
    written(stream, Delta("a"), OutOfMemory("no memory"), Delta("too late")).join()
    with pytest.raises(OutOfMemory):
        read(stream)
    assert read(stream) == []


def test_a_loop_that_has_been_closed_does_not_disturb_the_writer():
    stream = DeltaStream("one")

    async def leave() -> None:
        async for _ in stream:
            return

    stream.put(Delta("a"))
    asyncio.run(leave())
    stream.put(Delta("b"))
    stream.put(LAST)


def test_every_delta_reaches_a_reader_that_reads_as_fast_as_it_is_written():
    stream, numbers = DeltaStream("one"), [str(i) for i in range(5000)]
    found = texts_on_a_loop(stream, lambda: written(stream, *map(Delta, numbers), LAST))
    assert found == [*numbers, "c"]


FEW = 16
PROMPT = prompt_of(ids(1, 9))


@pytest.fixture
def few(monkeypatch):
    """So few tokens may wait for a reader."""
    monkeypatch.setattr(stream_module, "UNREAD", FEW)


def generated(engine) -> int:
    return engine.stats()["counters"].get("generated", 0)


def asleep(engine) -> int:
    """Wait until the engine's thread has nothing to do; return how many tokens it has generated."""
    until(lambda: not (engine._inbox or engine._has_work()))
    engine.check()  # behind the last step
    until(lambda: not engine._more_to_do)
    return generated(engine)


def test_a_reader_of_half_of_what_waits_is_noticed_once(few):
    stream, room = DeltaStream("one"), []
    stream.on_room = lambda: room.append(stream._written - stream._read)
    for i in range(FEW + 1):
        assert not stream.full
        stream.put(Delta("a", (i,)))
    assert stream.full
    reading = iter(stream)
    for _ in range(FEW // 2):
        next(reading)
        assert stream.full and not room
    next(reading)
    assert not stream.full and room == [FEW // 2]
    stream.put(Delta("b", (1,)))
    assert not stream.full
    stream.put(LAST)
    assert len(list(reading)) == FEW // 2 + 2 and len(room) == 1


def test_alternatives_count_as_tokens_do(few):
    stream = DeltaStream("one")
    stream.put(Delta("a", (1,), (TokenLogprob(1, 0.0, tuple((i, 0.0) for i in range(FEW))),)))
    assert stream.full


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_answer_that_nobody_reads_is_paused_and_goes_on_as_if_it_had_been_read(
    make_engine, few, ahead, logprobs
):
    whole = make_engine().submit(request_of(PROMPT, "full", 100, logprobs=logprobs)).result()
    engine = make_engine(ahead=ahead)
    stream = engine.submit(request_of(PROMPT, "full", 100, logprobs=logprobs))
    until(lambda: generated(engine) > FEW // 3)
    made = asleep(engine)
    steps = engine.stats()["counters"]["steps"]
    assert made <= FEW + 1 + ahead
    other = engine.submit(request_of(prompt_of(ids(2, 9)), "full", 40)).result()
    assert len(other.token_ids) == 40 and asleep(engine) == made + 40
    assert engine.stats()["counters"]["steps"] - steps <= 41 and engine.stats()["running"] == 1
    answer = stream.result()
    assert (answer.text, answer.token_ids) == (whole.text, whole.token_ids)
    assert generated(engine) == 140


@pytest.mark.parametrize("user", ["local", "another"])
def test_a_paused_answer_gives_its_place_to_whoever_waits_and_is_finished_later(make_engine, few, user):
    engine = make_engine(max_running=2, max_waiting=2)
    whole = make_engine().submit(request_of(PROMPT, "full", 60)).result()
    streams = [engine.submit(request_of(PROMPT, "full", 60)) for _ in range(2)]
    until(lambda: generated(engine) > FEW)
    asleep(engine)
    others = [engine.submit(request_of(prompt_of(ids(i, 9)), "full", 12, user)) for i in (2, 3)]
    assert [len(stream.result().token_ids) for stream in others] == [12, 12]
    asleep(engine)
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["searching"]) == (0, 2, 0)
    with pytest.raises(QueueFull):  # they count as waiting
        for _ in range(4):
            engine.submit(request_of(PROMPT, "full", 60))
    assert [stream.result().token_ids for stream in streams] == [whole.token_ids] * 2


def test_a_paused_answer_can_be_cancelled_with_its_place_and_without(make_engine, few):
    engine = make_engine(max_running=1)
    for taken in (False, True):
        before = generated(engine)
        stream = engine.submit(request_of(PROMPT, "full", 100))
        until(lambda: generated(engine) - before > FEW)  # noqa: B023 - called at once
        asleep(engine)
        if taken:
            engine.submit(request_of(prompt_of(ids(2, 9)), "full", 4)).result()
        stream.abort()
        assert stream.result().finish_reason == "abort"
        engine.check()
        assert engine.scheduler.idle


def test_a_paused_answer_gives_its_pages_to_one_that_grows(make_engine, few):
    engine = make_engine(pages=80, page_size=8, max_running=4)
    paused = engine.submit(request_of(prompt_of(ids(1, 200)), "full", 300))
    until(lambda: generated(engine) > FEW)
    asleep(engine)
    grown = engine.submit(request_of(prompt_of(ids(2, 9)), "full", 500, "another"))
    assert len(grown.result().token_ids) == 500
    assert len(paused.result().token_ids) == 300


def test_of_several_answers_read_as_one_none_is_computed_ahead_of_its_reader(make_engine, few):
    engine = make_engine()
    answers = ParallelSampling.submit(engine.submit, [request_of(PROMPT, "full", 100, temperature=1.0)], 4)

    async def read() -> list[int]:
        reading = aiter(answers)
        got = [await anext(reading)]
        await asyncio.to_thread(until, lambda: generated(engine) > 3 * FEW)
        made = await asyncio.to_thread(asleep, engine)
        assert made <= 4 * (FEW + 4)
        got += [item async for item in reading]
        return [sum(len(delta.token_ids) for number, delta in got if number == i) for i in range(4)]

    assert asyncio.run(asyncio.wait_for(read(), 60)) == [100] * 4
