"""Long work has its own threads, few for each user, and ends when its client disconnects."""

import asyncio
import json
import threading
import time

import pytest
from anyio import to_thread
from fake_engine import FakeEngine
from hostile_texts import demo, prose, recorded
from server_helpers import fake_server, post_raw, wait_until
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from mpic.cancel import checkpoint
from mpic.errors import BadRequest
from mpic.http.sse import ClientDisconnected
from mpic.prompt import ChatTemplate
from mpic.server.auth import User
from mpic.server.routers import chat, common
from mpic.server.thread_pools import PROMPTS_PER_USER, ThreadPool


def request_of(user, leaves=None):
    """A request whose client leaves when ``leaves`` is set."""

    async def receive():
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "state": {"user": User(user, "user")}}, receive)


class Work:
    """Work that waits until it is released, and records how much of it ran at the same time."""

    def __init__(self):
        self.go, self.lock = threading.Event(), threading.Lock()
        self.running, self.most, self.begun = 0, 0, []

    def __call__(self, name):
        with self.lock:
            self.begun.append(name)
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.go.wait(60)
        with self.lock:
            self.running -= 1
        return name


async def test_one_user_cannot_take_all_threads():
    workers, greedy, modest = ThreadPool(4, 2), Work(), Work()
    tasks = [asyncio.ensure_future(workers.run(request_of("mallory"), greedy, i)) for i in range(30)]
    await wait_until(lambda: greedy.running == 2)
    modest.go.set()
    assert await workers.run(request_of("alice"), modest, "answer") == "answer"
    assert greedy.running == 2
    greedy.go.set()
    assert await asyncio.gather(*tasks) == list(range(30))
    assert greedy.most == 2 and set(greedy.begun[:2]) == {0, 1}


async def test_work_begins_in_the_turn_of_the_event_loop_in_which_it_is_asked_for():
    """A request that waits for several turns waits for what others do in them."""
    begun = threading.Event()
    asked = asyncio.ensure_future(ThreadPool(1, 1).call("alice", begun.set))
    await asyncio.sleep(0)
    assert begun.wait(60)  # which holds up the event loop
    await asked


async def test_all_users_together_have_few_threads():
    workers, work = ThreadPool(3, 2), Work()
    tasks = [asyncio.ensure_future(workers.run(request_of(f"user {i}"), work, i)) for i in range(12)]
    await wait_until(lambda: work.running == 3)
    await asyncio.sleep(0.05)
    work.go.set()
    await asyncio.gather(*tasks)
    assert work.most == 3


async def test_quick_requests_do_not_wait_for_long_work():
    workers, work = ThreadPool(50, 50), Work()
    tasks = [asyncio.ensure_future(workers.run(request_of("mallory"), work, i)) for i in range(50)]
    await wait_until(lambda: work.running == 50)  # more than the web framework has threads
    assert await asyncio.wait_for(run_in_threadpool(lambda: "listing"), 60) == "listing"
    work.go.set()
    await asyncio.gather(*tasks)


async def test_a_chat_is_answered_while_all_threads_of_the_web_framework_are_busy(server):
    work, threads = Work(), int(to_thread.current_default_thread_limiter().total_tokens)
    tasks = [asyncio.ensure_future(run_in_threadpool(work, i)) for i in range(threads)]
    await wait_until(lambda: work.running == threads)
    try:
        assert (await asyncio.wait_for(server.ask("Hello?"), 60)).status_code == 200
    finally:
        work.go.set()
        await asyncio.gather(*tasks)


async def test_work_ends_at_its_next_step_when_the_client_leaves():
    steps, leaves = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def work():
        while len(steps) < 10_000:
            steps.append(1)
            if len(steps) == 3:
                loop.call_soon_threadsafe(leaves.set)
            if len(steps) >= 3:
                time.sleep(0.01)
            checkpoint()

    with pytest.raises(ClientDisconnected):
        await ThreadPool(1, 1).run(request_of("alice", leaves), work)
    ended = len(steps)
    assert ended < 1_000
    await asyncio.sleep(0.05)
    assert len(steps) == ended


async def test_work_of_a_client_that_left_the_queue_never_begins():
    workers, work, leaves, begun = ThreadPool(2, 1), Work(), asyncio.Event(), []
    first = asyncio.ensure_future(workers.run(request_of("alice"), work, 1))
    await wait_until(lambda: work.running == 1)
    second = asyncio.ensure_future(workers.run(request_of("alice", leaves), begun.append, 2))
    await asyncio.sleep(0)
    leaves.set()
    with pytest.raises(ClientDisconnected):
        await second
    work.go.set()
    assert await first == 1
    assert await workers.run(request_of("alice"), lambda: 3) == 3 and begun == []


async def test_a_thread_is_counted_until_it_ends_although_its_client_has_left():
    workers, work, left = ThreadPool(2, 1), Work(), []
    for i in range(5):
        leaves = asyncio.Event()
        left.append(asyncio.ensure_future(workers.run(request_of("alice", leaves), work, i)))
        await wait_until(lambda: work.running == 1)
        leaves.set()
        await asyncio.sleep(0.02)
    last = asyncio.ensure_future(workers.run(request_of("alice"), work, "last"))
    await asyncio.sleep(0.05)
    assert work.begun == [0]
    work.go.set()
    assert await last == "last" and work.begun == [0, "last"] and work.most == 1
    assert set(map(type, await asyncio.gather(*left, return_exceptions=True))) == {ClientDisconnected}


async def test_all_threads_are_counted_until_they_end_although_their_callers_are_cancelled():
    workers, work = ThreadPool(2, 2), Work()
    tasks = [asyncio.ensure_future(workers.call(f"user {i}", work, i)) for i in range(2)]
    await wait_until(lambda: work.running == 2)
    for _ in range(3):
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.01)
    waiting = asyncio.ensure_future(workers.call("modest", work, "later"))
    await asyncio.sleep(0.05)
    assert set(work.begun) == {0, 1} and not any(task.done() for task in tasks)
    work.go.set()
    assert await waiting == "later" and work.most == 2
    assert set(map(type, await asyncio.gather(*tasks, return_exceptions=True))) == {asyncio.CancelledError}


async def test_a_server_that_stops_does_not_wait_until_a_long_upload_is_tokenized(tmp_path, monkeypatch):
    template = ChatTemplate(demo(), image_token="<image>")
    recorder = recorded(template.documents, monkeypatch)
    note = recorder._note
    monkeypatch.setattr(recorder, "_note", lambda texts: (note(texts), time.sleep(0.2)))
    async with fake_server(tmp_path, template, FakeEngine(context=10**9, pool=10**9)) as server:
        await server.upload(prose(8_000_000).encode(), "long.txt", split="none")
        await wait_until(lambda: len(recorder.sizes) >= 3)
    assert len(recorder.sizes) < 60  # of 123 slices


async def test_errors_are_raised_and_free_the_thread():
    workers = ThreadPool(1, 1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await workers.run(request_of("alice"), lambda: 1 / 0)
    assert await workers.call("alice", lambda: "fine") == "fine"


@pytest.mark.parametrize(("parts", "at_once"), [(4, PROMPTS_PER_USER), (1_000, 1)])
async def test_conversations_of_very_many_parts_are_built_one_at_a_time(
    tmp_path, monkeypatch, parts, at_once
):
    work = Work()

    def prepare(body, state, user, handles):
        work(user)
        raise BadRequest("built")

    monkeypatch.setattr(chat, "prepare", prepare)
    content = [{"type": "text", "text": "a"}] * parts
    async with fake_server(tmp_path, ChatTemplate(demo(), image_token="<image>")) as server:
        asked = [asyncio.ensure_future(server.ask(content)) for _ in range(2 * PROMPTS_PER_USER)]
        await wait_until(lambda: work.running == at_once)
        await asyncio.sleep(0.05)
        assert work.most == at_once
        work.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {400}
        assert work.most == at_once


async def test_tokenizing_stops_when_the_client_leaves(tmp_path, monkeypatch):
    template = ChatTemplate(demo(), image_token="<image>")
    recorder = recorded(template.documents, monkeypatch)
    async with fake_server(tmp_path, template, FakeEngine(context=10**9, pool=10**9)) as server:
        loop, leaves = asyncio.get_running_loop(), asyncio.Event()
        note = recorder._note

        def noting(texts):
            note(texts)
            if len(recorder.sizes) == 3:
                loop.call_soon_threadsafe(leaves.set)
            # in which the loop learns that the client left
            time.sleep(0.02 if len(recorder.sizes) < 10 else 0.2)

        monkeypatch.setattr(recorder, "_note", noting)
        body = json.dumps({"messages": [{"role": "user", "content": prose(8_000_000)}]}).encode()
        sent = []
        await asyncio.wait_for(post_raw(server.app, "/v1/chat/completions", [body], sent, leaves), 60)
        assert sent[0]["status"] == 499 and not server.engine.requests
        assert 3 <= len(recorder.sizes) < 60 and threading.get_ident() not in recorder.threads
        whole = len(recorder.sizes)
        await asyncio.sleep(0.1)
        assert len(recorder.sizes) == whole  # of 123 slices


@pytest.mark.parametrize("path", ["/v1/files", "/v1/caches", "/v1/references", "/v1/savings"])
async def test_listings_of_one_user_leave_threads_for_those_of_others(tmp_path, template, monkeypatch, path):
    work = Work()
    for module in ("files", "caches", "references", "savings"):
        monkeypatch.setattr(
            f"mpic.server.routers.{module}.listed",
            lambda request, state, make: common.listed(request, state, lambda: work("page") and make()),
        )
    async with fake_server(tmp_path, template, FakeEngine()) as server:
        asked = [asyncio.ensure_future(server.http.get(path)) for _ in range(60)]
        await wait_until(lambda: work.running == 2)
        pool = server.app.state.mpic.pools.listings
        assert await asyncio.wait_for(pool.call("another", lambda: "answered"), 60) == "answered"
        assert work.running == work.most == 2
        work.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert work.most == 2
