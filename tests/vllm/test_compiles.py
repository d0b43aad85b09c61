"""Compiles and deletions on the engine's event loop, with a stub in vLLM's place that computes nothing."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from engine_kit import ids, prompt_of, request_of, text_chunk, until
from threads_kit import started
from vllm_stub import CHUNK, READ, Stub, request, stubbed_engine

from mpic.engine.vllm.frontend import compiled as exported
from mpic.engine.vllm.frontend import compiler as compiling
from mpic.engine.vllm.frontend import engine as module
from mpic.engine.vllm.frontend.client import VLLMClient
from mpic.engine.vllm.frontend.gate import Gate
from mpic.errors import (
    DeletedMeanwhile,
    EngineStopped,
    FileNotFound,
    OutOfMemory,
    StorageFull,
)
from mpic.link import BARE, parse_policy


@pytest.fixture
def engine(monkeypatch):
    with stubbed_engine(monkeypatch) as engine:
        yield engine


def test_an_upload_after_a_deletion_does_not_join_an_earlier_compile(engine):
    first = engine.compile(CHUNK)
    until(lambda: engine.client.compiles == 1)
    engine.forget(CHUNK)
    again, third = engine.compile(CHUNK), engine.compile(CHUNK)
    time.sleep(0.2)  # they have found the first compile
    engine.client.go.set()
    assert again.result(60) == third.result(60) == 5
    with pytest.raises(DeletedMeanwhile):
        first.result(60)
    assert engine.client.compiles == 2
    assert engine._store.find([engine.compiler.key(CHUNK, BARE)])


def test_a_deletion_is_forgotten_when_what_began_before_it_has_ended_whatever_else_runs(engine):
    older = engine.compile(CHUNK)
    until(lambda: engine.client.compiles == 1)
    engine.forget(text_chunk(ids(99, 5)))
    younger = engine.tombstones.begin()
    assert engine.tombstones._times
    engine.client.go.set()
    assert older.result(60) == 5
    assert not engine.tombstones._times
    engine.tombstones.end(younger)


def test_deletions_of_many_chunks_are_known_before_any_of_them_takes_time(engine, monkeypatch):
    chunks, seen = [text_chunk(ids(50 + i, 5)) for i in range(3)], []
    arrived = engine.tombstones.begin()

    def slow(chunk):
        seen.append([engine.tombstones.since(arrived, one.owner, one.key) for one in chunks])

    monkeypatch.setattr(engine.compiler, "forget", slow)
    engine.forget(*chunks)
    assert seen == [[True] * 3] * 3
    engine.tombstones.end(arrived)


def test_the_sizes_of_chunks_are_forgotten_by_content_while_others_are_remembered(engine):
    """A deletion must not stop half-way because another thread has just compiled something."""
    compiler, stop = engine.compiler, threading.Event()

    def remember():
        number = 0
        while not stop.is_set():
            number += 1
            compiler.sizes.keep(compiler.key(text_chunk([number % 7, number], "bob")), 2, 2)

    thread = started(remember)
    try:
        for _ in range(200):
            key = compiler.key(CHUNK)
            compiler.sizes.keep(key, 5, 5)
            compiler.forget(CHUNK)
            assert compiler.sizes.get(key) is None
    finally:
        stop.set()
        thread.join()


def test_a_chunk_deleted_just_after_it_was_seen_to_exist_is_not_stored(engine):
    engine.client.go.set()
    with pytest.raises(DeletedMeanwhile):
        engine.compile(CHUNK, exists=lambda: engine.forget(CHUNK)).result(60)
    with pytest.raises(FileNotFound):
        engine.compile(CHUNK, exists=Mock(side_effect=FileNotFound("it was deleted")))
    assert not engine._store.find([engine.compiler.key(CHUNK, BARE)])
    assert not engine.tombstones._unfinished


def test_a_chunk_is_counted_once_over_all_rounds_of_its_request(engine):
    engine.client.go.set()
    linked = engine.compiler.link([CHUNK], parse_policy("reuse"))
    for compiled in (5, 0, 0):
        assert engine.client.wait(engine.compiler.ensure(linked, time.monotonic())) == compiled
    later = engine.compiler.link([CHUNK], parse_policy("reuse"))
    engine.client.wait(engine.compiler.ensure([*linked, *later], time.monotonic()))
    counted = {name: n for name, n in engine.compiler.counters.items() if name.startswith("chunk")}
    assert counted == {"chunk_requests": 2, "chunk_hits": 1, "chunks_from_compiled": 1, "chunks_from_disk": 1}


def test_a_chunk_that_was_stored_after_a_request_linked_it_is_not_compiled_again(engine):
    engine.client.go.set()
    linked = engine.compiler.link([CHUNK, CHUNK], parse_policy("reuse"))
    assert engine.compile(CHUNK).result(60) == 5
    assert engine.client.wait(engine.compiler.ensure(linked, time.monotonic())) == 0
    assert engine.client.compiles == 1
    assert [(one.stored, one.tier, one.rotary_length) for one in linked] == [(True, "disk", 5)] * 2
    assert engine.compiler.counters["chunk_hits"] == engine.compiler.counters["chunks_from_disk"] == 2


def test_a_chunk_whose_file_was_found_damaged_is_compiled_although_it_has_been_stored(engine):
    engine.client.go.set()
    assert engine.compile(CHUNK).result(60) == 5
    linked = engine.compiler.link([CHUNK], parse_policy("reuse"))
    linked[0].stored, linked[0].reason = False, "corrupt"
    assert engine.client.wait(engine.compiler.ensure(linked, time.monotonic())) == 5
    assert (linked[0].tier, engine.client.compiles) == ("compiled", 2)


def test_deletions_without_end_take_no_more_memory_and_keep_salts_apart(engine, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED_DELETIONS", 4)
    linked = request_of(prompt_of(ids(1, 6), CHUNK, ids(4, 5)), "mpic-4")
    first = engine._salt(linked)
    engine.forget(text_chunk(ids(99, 5)))
    assert engine._salt(linked) == first, "another chunk was deleted"
    salts = {first}
    for number in range(20):
        engine.forget(CHUNK)
        salts.add(engine._salt(linked))
        engine.forget(text_chunk(ids(100 + number, 5)))
        assert len(engine._deleted_times) <= 4
    assert len(salts) == 21, "no salt of before a deletion is made again"


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "no memory"), RuntimeError("can't start new thread")]
)
def test_a_compile_that_there_is_no_memory_for_may_be_tried_again(engine, monkeypatch, error):
    engine.client.go.set()
    monkeypatch.setattr(exported, "read_compiled", Mock(side_effect=error))
    with pytest.raises(OutOfMemory):
        engine.compile(CHUNK).result(60)


def test_a_compile_succeeds_although_no_thread_can_be_started_to_clean_up_behind_it(engine, monkeypatch):
    run = asyncio.to_thread

    async def crowded(work, *args, **options):
        if work is compiling.shutil.rmtree:
            raise RuntimeError("can't start new thread")
        return await run(work, *args, **options)

    monkeypatch.setattr(compiling.asyncio, "to_thread", crowded)
    engine.client.go.set()
    assert engine.compile(CHUNK).result(60) == 5
    until(lambda: not engine.compiler.check())


def test_a_chunk_that_there_is_no_memory_to_store_may_be_compiled_again(engine, monkeypatch):
    engine.client.go.set()
    with monkeypatch.context() as short:
        short.setattr(engine._store, "save", Mock(side_effect=MemoryError()))
        with pytest.raises(OutOfMemory):
            engine.compile(CHUNK).result(60)
    assert engine.compile(CHUNK).result(60) == 5


def test_a_chunk_that_is_gone_as_soon_as_it_is_stored_may_be_compiled_again(engine, monkeypatch):
    """Its rows are deleted before its tombstone is set, and what is stored after them is dropped."""
    engine.client.go.set()
    monkeypatch.setattr(engine._store, "save", lambda made: None)
    with pytest.raises(DeletedMeanwhile):
        engine.compile(CHUNK).result(60)


@pytest.mark.parametrize("code, kind", [("out_of_memory", OutOfMemory), ("storage_full", StorageFull)])
def test_what_a_worker_lacks_is_the_error_of_a_compile_and_of_a_request(engine, monkeypatch, code, kind):
    async def failing(self, prompt, params):
        one = SimpleNamespace(token_ids=[], finish_reason="error", logprobs=None)
        report = {"mpic": {"error": code, "message": "there is too little"}}
        yield SimpleNamespace(outputs=[one], kv_transfer_params=report, metrics=None, num_cached_tokens=0)

    monkeypatch.setattr(Stub, "generate", failing)
    monkeypatch.setattr(Stub, "execute", VLLMClient.execute)
    with pytest.raises(kind, match="there is too little"):
        engine.compile(CHUNK).result(60)
    with pytest.raises(kind, match="there is too little"):
        engine.submit(request()).result()


def test_what_vllm_gives_up_because_it_is_being_stopped_is_no_failure(engine, monkeypatch):
    """A signal to all processes of the server reaches vLLM's first."""
    monkeypatch.setattr(Stub, "execute", VLLMClient.execute)
    engine.client.ending = True
    with pytest.raises(EngineStopped):
        engine.compile(CHUNK).result(60)
    with pytest.raises(EngineStopped):
        engine.submit(request()).result()


def test_a_compile_ends_when_vllm_dies_while_its_chunk_is_written(engine, monkeypatch):
    monkeypatch.setattr(exported, "read_compiled", READ)
    engine.client.go.set()
    compiled = engine.compile(CHUNK)
    until(lambda: (task := engine.compiler._tasks.get(engine.compiler.key(CHUNK))) and task.computed)
    monkeypatch.setattr(engine.client, "dead", True)
    with pytest.raises(EngineStopped, match="died"):
        compiled.result(60)


SLOTS = 2


@pytest.fixture
def queue(engine):
    """Fill all slots of compiles; return what asks for the compile of a chunk that is queued then."""
    engine.compiler._slots = Gate(SLOTS, rows=1)
    for i in range(SLOTS):
        engine.compile(text_chunk(ids(100 + i, 5)))
    until(lambda: engine.client.compiles == SLOTS)

    def ask(chunk, waiting: int = 1):
        future, key = engine.compile(chunk), engine.compiler.key(chunk, BARE)
        until(lambda: (task := engine.compiler._tasks.get(key)) and task.waiting == waiting)
        return future

    yield ask
    engine.client.go.set()


def compiles_of_the_queue(engine, *waited) -> int:
    """Let everything go on to its end; return how many compiles of the queue were run."""
    engine.client.go.set()
    for future in waited:
        future.result(60)
    until(lambda: not engine.compiler._tasks)
    return engine.client.compiles - SLOTS


def test_a_queued_compile_that_nobody_waits_for_any_more_leaves_the_queue(engine, queue):
    for number in range(5):
        queue(text_chunk(ids(number, 5))).cancel()
    until(lambda: len(engine.compiler._tasks) == SLOTS)
    assert compiles_of_the_queue(engine) == 0


def test_a_queued_compile_goes_on_while_somebody_waits_for_it(engine, queue):
    one, other = queue(CHUNK), queue(CHUNK, 2)
    one.cancel()
    assert compiles_of_the_queue(engine, other) == 1


def test_a_chunk_asked_for_again_while_its_compile_leaves_the_queue_is_compiled(engine, queue, monkeypatch):
    left, remove = threading.Event(), compiling.shutil.rmtree
    monkeypatch.setattr(compiling.shutil, "rmtree", lambda *a, **b: left.wait(60) and remove(*a, **b))
    key = engine.compiler.key(CHUNK, BARE)
    queue(CHUNK).cancel()
    until(lambda: engine.compiler._tasks[key].waiting == 0)
    again = engine.client.submit(engine.compiler._compiled(CHUNK, key, None, time.monotonic()))
    engine.client.wait(asyncio.sleep(0))  # it has found the compile
    left.set()
    assert compiles_of_the_queue(engine, again) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_those_who_leave_and_join_while_a_compile_ends_are_counted_as_users_of_its_file(
    engine, monkeypatch, kept
):
    """The last of a compile's work is to remove the folder that vLLM wrote to."""
    ending, end, remove = threading.Event(), threading.Event(), compiling.shutil.rmtree

    def slow(*args, **options):
        ending.set()
        assert end.wait(60)
        remove(*args, **options)

    monkeypatch.setattr(compiling.shutil, "rmtree", slow)
    monkeypatch.setattr(engine._store, "save", Mock(side_effect=StorageFull("no room")))
    engine.client.go.set()
    compiler, key = engine.compiler, engine.compiler.key(CHUNK, BARE)
    ask = lambda: engine.client.submit(compiler._compiled(CHUNK, key, None, time.monotonic()))
    first = ask()
    assert ending.wait(60)
    joined = [ask() for _ in range(2 * kept)]
    engine.client.wait(asyncio.sleep(0))
    first.cancel()
    until(lambda: compiler._tasks[key].waiting == 2 * kept)
    end.set()
    for future in joined:
        spooled = future.result(60).spooled
        assert spooled.path.exists()
        engine.client.loop.call_soon_threadsafe(spooled.drop)
    until(lambda: not compiler.check())


def test_closing_gives_up_compiles_that_wait_or_that_vllm_computes(engine, queue):
    waiting = [queue(text_chunk(ids(number, 5))) for number in range(5)]
    computing = [engine.compile(text_chunk(ids(100 + i, 5))) for i in range(SLOTS)]
    engine.close()
    assert not engine.client.go.is_set() and engine.client.compiles == SLOTS
    for future in (*waiting, *computing):
        with pytest.raises(EngineStopped):
            future.result(60)


def test_closing_gives_up_a_compile_that_has_not_looked_into_the_store_yet(engine, monkeypatch):
    looking, closed, look = threading.Event(), threading.Event(), engine._store.open

    def slow(key):
        looking.set()
        closed.wait(60)
        return look(key)

    monkeypatch.setattr(engine._store, "open", slow)
    compiled = engine.compile(CHUNK)
    assert looking.wait(60)
    monkeypatch.setattr(engine, "_close_own", closed.set)
    engine.close()
    with pytest.raises(EngineStopped):
        compiled.result(60)


def test_closing_waits_for_a_chunk_that_vllm_has_computed_and_keeps_it(engine, monkeypatch):
    reading, read, made = threading.Event(), threading.Event(), exported.read_compiled

    def slow(folder, **options):
        reading.set()
        assert read.wait(60)
        return made(folder, **options)

    monkeypatch.setattr(exported, "read_compiled", slow)
    remove = engine._close_own
    monkeypatch.setattr(engine, "_close_own", lambda: None)
    engine.client.go.set()
    compiled = engine.compile(CHUNK)
    assert reading.wait(60)
    closing = started(engine.close)
    until(lambda: engine.compiler._closing)
    read.set()
    closing.join(60)
    assert compiled.result(60) == 5
    assert engine._store.find([engine.compiler.key(CHUNK, BARE)])
    remove()
