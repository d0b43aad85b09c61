"""The tests hand work to an event loop in a thread of its own while that loop ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from mpic.engine.vllm.frontend.loop_thread import LoopThread
from mpic.errors import EngineStopped


@pytest.fixture
def thread():
    thread = LoopThread("loop")
    yield thread
    thread.stop()


def test_nothing_that_is_handed_over_while_the_loop_ends_is_left_without_an_end(thread):
    """Whoever is refused hears of it at once; all others hear the end of what they asked for."""
    futures, refused, calls = [], [], []

    def hand_over():
        try:
            while True:
                futures.append(thread.submit(asyncio.sleep(60)))
                thread.post(lambda: calls.append(None))
        except EngineStopped:
            refused.append(None)

    threads = [threading.Thread(target=hand_over) for _ in range(4)]
    for one in threads:
        one.start()
    while len(futures) < 50:
        pass
    thread.stop()
    for one in threads:
        one.join()
    assert len(refused) == 4
    assert len(futures) - len(calls) <= 4, "each call but one that was refused has been made"
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(0)


def test_what_is_cancelled_by_the_end_has_had_its_first_step_and_may_say_how_it_ended(thread):
    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise EngineStopped("it ends") from None

    hold = threading.Event()
    thread.post(lambda: hold.wait(60))
    future = thread.submit(work())
    ending = threading.Thread(target=thread.stop)
    ending.start()
    hold.set()
    ending.join()
    with pytest.raises(EngineStopped, match="it ends"):
        future.result(0)


def test_a_task_that_is_begun_while_another_is_cancelled_is_cancelled_too(thread):
    begun = []

    async def follower():
        await asyncio.sleep(60)

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            begun.append(asyncio.create_task(follower()))

    future = thread.submit(work())
    thread.wait(asyncio.sleep(0))
    thread.stop()
    assert future.cancelled() and begun[0].cancelled()


def test_a_loop_that_has_ended_refuses_and_may_be_ended_again(thread):
    thread.stop()
    thread.stop()
    for refused in (lambda: thread.submit(asyncio.sleep(0)), lambda: thread.post(print)):
        with pytest.raises(EngineStopped):
            refused()
