"""Transfers between pool and store: compiled chunks are written, however slow the writer; the oldest reads come
first."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from engine_kit import MemoryStore, ids, prompt_of, request_of, text_chunk, until
from threads_kit import started

from mpic.engine.native.loader import ChunkLoad, LoadQueue, loaders_for
from mpic.errors import EngineStopped, IntegrityError, OutOfMemory
from mpic.kv.device import ChunkState, Resident

# ---- what is written


class SlowWriter(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def save(self, chunk):
        assert self.go.wait(60)
        super().save(chunk)


def test_compiled_chunks_wait_pinned_in_the_pool_for_a_slow_writer_and_all_are_stored(make_engine):
    store = SlowWriter()
    engine = make_engine(store=store, pages=24)
    engine.transfers.backlog = 1  # one chunk at the writer, whatever its size
    chunks = [text_chunk(ids(200 + i, 40)) for i in range(8)]  # 5 pages each: four fit at most
    futures = [engine.compile(chunk) for chunk in chunks]
    try:
        until(lambda: len(engine.transfers._unsaved) == 4)  # and one at the writer, no longer pinned
        time.sleep(0.05)
        assert len(engine.transfers._unsaved) == 4 and not any(future.done() for future in futures)
    finally:
        store.go.set()
    assert [future.result(60) for future in futures] == [40] * 8
    assert {key.chunk for key in store.chunks} == {chunk.key for chunk in chunks}
    until(lambda: not engine.transfers.busy)


def test_closing_writes_what_is_compiled_and_not_yet_at_the_writer(make_engine):
    store = SlowWriter()
    engine = make_engine(store=store)
    engine.transfers.backlog = 1
    futures = [engine.compile(text_chunk(ids(200 + i, 40))) for i in range(4)]
    try:
        until(lambda: len(engine.transfers._unsaved) == 3)
    except AssertionError:
        store.go.set()
        raise
    closing = started(engine.close)
    store.go.set()
    closing.join(60)
    assert len(store.chunks) == 4 and all(future.result(60) == 40 for future in futures)


def test_a_chunk_that_cannot_be_copied_for_the_writer_is_not_saved_still_serves_and_holds_up_no_other(
    make_engine, monkeypatch
):
    store = MemoryStore()
    engine = make_engine(store=store)
    engine.transfers.backlog = 1
    first, second = (text_chunk(ids(200 + i, 40)) for i in range(2))
    to = torch.Tensor.to

    def scarce(tensor, *args, **options):
        if options.get("copy") and "cpu" in args:
            raise RuntimeError("can't allocate memory: you tried to allocate 1000000 bytes")
        return to(tensor, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", scarce)
        with pytest.raises(OutOfMemory):
            engine.compile(first).result(60)
    until(lambda: not engine.transfers._unwritten)
    [resident] = engine.device.chunks.values()
    assert (resident.ready, resident.refs, engine.tombstones._unfinished) == (True, 0, [])
    assert engine.stats()["counters"]["save_failures"] == 1
    for chunk in (second, first):
        assert engine.compile(chunk).result(60) == 40
    assert {key.chunk for key in store.chunks} == {first.key, second.key}


# ---- the life of a chunk in the pool


def test_a_chunk_that_cannot_be_read_fails_and_is_compiled(make_engine, monkeypatch):
    store, chunk, lives = MemoryStore(), text_chunk(ids(200, 40)), []
    make_engine(store=store).compile(chunk).result(60)
    become = Resident.become
    monkeypatch.setattr(
        Resident, "become", lambda self, state, *more: (lives.append(state.value), become(self, state, *more))
    )
    ask = lambda: (
        make_engine(store=store).submit(request_of(prompt_of(chunk, ids(1, 5)), "reuse", 2)).result()
    )
    answer = ask()
    assert lives == ["loading", "ready"]
    lives.clear()
    store.damage(next(iter(store.chunks)))
    assert ask().token_ids == answer.token_ids
    assert lives == ["loading", "failed", "compiling", "ready"]


@pytest.mark.parametrize("life", [["ready"], ["loading", "compiling"], ["compiling", "ready", "loading"]])
def test_a_step_that_a_chunks_life_does_not_have_is_an_error(life):
    resident = Resident(SimpleNamespace(chunk="x"), None, None)
    *before, last = map(ChunkState, life)
    for state in before:
        resident.become(state)
    with pytest.raises(IntegrityError, match=f"cannot be {life[-1]}"):
        resident.become(last)
    assert resident.state is (before or [ChunkState.MISSING])[-1]


# ---- the queue of reads


def test_the_oldest_requests_layers_are_read_first_and_its_chunks_grow_side_by_side():
    read, done, go = [], queue.Queue(), threading.Event()

    def layers(name):
        for layer in range(3):
            read.append((name, layer))
            yield layer

    def blocked():
        go.wait(60)
        yield 0

    loads = LoadQueue(1)
    loads.add(ChunkLoad(0.0, blocked(), lambda layer: None, done.put))
    for order, name in ((2.0, "young"), (1.0, "a"), (1.0, "b")):
        loads.add(ChunkLoad(order, layers(name), lambda layer: None, done.put))
    go.set()
    assert [done.get(timeout=60) for _ in range(4)] == [None] * 4
    loads.close()
    old = [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert read == [*old, ("young", 0), ("young", 1), ("young", 2)]


def test_closing_the_queue_ends_every_load_once():
    ends, go = queue.Queue(), threading.Event()

    def endless():
        while True:
            go.wait(60)
            yield 0

    loads = LoadQueue(2)
    for _ in range(5):
        loads.add(ChunkLoad(0.0, endless(), lambda layer: None, ends.put))
    go.set()
    loads.close()
    assert [type(ends.get(timeout=60)) for _ in range(5)] == [EngineStopped] * 5 and ends.empty()


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (8, 4), (96, 8)])
def test_loader_threads_follow_the_cores(cores, threads):
    assert loaders_for(cores) == threads
