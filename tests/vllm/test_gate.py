"""Requests go into vLLM in turn, by user; no vLLM is needed for that."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from mpic.engine.vllm.frontend.gate import Gate


class Requests:
    """Requests at a gate; ``inside`` are those that it has let in, in order, until they ``end``."""

    def __init__(self, gate):
        self.gate, self.inside, self.turns, self.tasks, self.over = gate, [], {}, {}, {}

    async def come(self, *names, rows=10):
        for name in names:
            self.over[name] = asyncio.Event()
            self.tasks[name] = asyncio.ensure_future(self._run(name, rows))
        await self.settle()

    async def _run(self, name, rows):
        async with self.gate.turn(name[0], rows) as self.turns[name]:
            self.inside.append(name)
            await self.over[name].wait()
        self.inside.remove(name)

    async def end(self, *names):
        for name in names:
            self.over[name].set()
        await self.settle()

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def requests():
    requests = Requests(Gate(places=4, rows=100))
    yield requests
    await requests.end(*requests.tasks)
    await asyncio.gather(*requests.tasks.values(), return_exceptions=True)
    assert not (requests.gate._inside or requests.gate._rows or requests.gate._queues)


async def test_a_place_is_left_for_a_user_who_has_nothing_inside(requests):
    await requests.come(*(f"a{i}" for i in range(80)))
    assert requests.inside == ["a0", "a1", "a2"]
    await requests.come("b0", "b1")
    assert requests.inside == ["a0", "a1", "a2", "b0"]


async def test_the_user_with_the_fewest_inside_is_next(requests):
    await requests.come(*(f"a{i}" for i in range(80)), "b0", "b1", "c0", "c1")
    await requests.end("a0")
    assert requests.inside == ["a1", "a2", "b0", "c0"]
    await requests.end("a1", "a2")
    assert requests.inside == ["b0", "c0", "a3"]


async def test_a_users_prompts_inside_are_a_step_at_most_until_they_answer(requests):
    await requests.come("a0", "a1", rows=70)
    await requests.come("a2")
    assert requests.inside == ["a0", "a1"]  # 140 rows: the second was admitted behind 70
    await requests.come("b0", rows=500)
    assert requests.inside == ["a0", "a1", "b0"]
    requests.turns["a0"].answers()
    await requests.end("b0")
    await requests.settle()
    assert requests.inside == ["a0", "a1", "a2"]


async def test_who_leaves_the_queue_or_is_cancelled_as_his_turn_comes_takes_no_place(requests):
    await requests.come("a0", "a1", "a2", "a3", "a4")
    requests.tasks["a3"].cancel()
    await requests.end("a0")
    assert requests.inside == ["a1", "a2", "a4"]
    requests.over["a1"].set()
    await requests.come("a5")
    requests.tasks["a5"].cancel()
    await requests.settle()
    await requests.end("a2", "a4")
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(requests.gate.turn("a", 1))
