"""The stream of an answer: one writer, one reader, on threads or on an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mpic.engine.base import Delta
from mpic.engine.stream import DeltaStream
from mpic.errors import OutOfMemory

LAST = Delta("c", finish_reason="stop")


def written(stream: DeltaStream, *items: Delta | BaseException) -> threading.Thread:
    thread = threading.Thread(target=lambda: [stream.put(item) for item in items])
    thread.start()
    return thread


def texts_on_a_loop(stream: DeltaStream, begin=lambda: None) -> list[str]:
    async def read() -> list[str]:
        asyncio.get_running_loop().call_later(0.01, begin)
        return [delta.text async for delta in stream]

    return asyncio.run(asyncio.wait_for(read(), 30))


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
