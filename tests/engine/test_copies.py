"""Loads that are copied to the device beside its computing: a layer's rows attend after that layer's copy and wait for
no other. The device is simulated by copies that happen only when something is ordered after them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from engine_kit import (
    MemoryChunk,
    MemoryStore,
    assert_oracle,
    check_and_close,
    family,
    ids,
    prompt_of,
    submit,
    text_chunk,
    until,
)
from threads_kit import started

from mpic.engine.native.engine import NativeEngine
from mpic.errors import CorruptFile, IntegrityError
from mpic.kv.barrier import LayerBarrier, LoadProgress, LoadSignal
from mpic.kv.copies import CopiedProgress, CudaCopies, copies_for
from mpic.kv.staging import Staging
from mpic.link import Wrapping

CHUNKS = [text_chunk(ids(80 + i, n)) for i, n in enumerate((23, 40))]
PROMPT = prompt_of(ids(3, 5), CHUNKS[0], ids(4, 6), CHUNKS[1], ids(5, 4))


class Late:
    """Makes copies as late as a device may: none happens before something follows it, or a later one."""

    def __init__(self) -> None:
        self.started: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = self.orders = 0
        self.followed: list[int] = []

    def order(self) -> None:
        self.orders += 1

    def buffer(self, shape, dtype):
        made = torch.empty(tuple(shape), dtype=dtype)
        made.view(-1).view(torch.uint8).fill_(255)  # not a number
        return made

    def start(self, target, source):
        self.started.append((target, source))
        return len(self.started)

    def follow(self, mark):
        self.followed.append(mark)
        for target, source in self.started[self.done : mark]:
            target.copy_(source)
        self.done = max(self.done, mark)


@pytest.fixture
def late():
    """An engine whose chunks are stored and not resident, over late copies."""
    engines = []

    def make(name: str = "llama", store: MemoryStore | None = None) -> tuple[NativeEngine, Late]:
        store = store or MemoryStore()
        first = NativeEngine(family(name).loaded, store, pages=128)
        for chunk in CHUNKS:
            first.compile(chunk).result(60)
        first.close()
        engine = NativeEngine(family(name).loaded, store, pages=128)
        engine.pool.arena.fill_(float("nan"))
        engine.transfers.copy_beside(Late(), Staging(2, 4096))
        engine.transfers.patience = 1000.0
        engines.append(engine)
        return engine, engine.transfers._copies

    yield make
    check_and_close(engines)


@pytest.mark.parametrize("policy", ["reuse", "mpic-4", "random-20"])
def test_answers_over_copied_chunks_equal_the_oracle(policy, late):
    engine, copies = late()
    assert_oracle("llama", PROMPT, policy, submit(engine, PROMPT, policy))
    assert copies.orders == len(CHUNKS)
    assert copies.done == len(copies.started) == len(CHUNKS) * engine.model.shape.layers


def test_a_layer_waits_for_its_own_copy_and_for_no_later_one(late, monkeypatch):
    """The first layer is delivered at once and every other one only when a step waits for it."""
    asked = [threading.Event() for _ in range(99)]
    asked[0].set()

    class Asked(MemoryChunk):
        def read_layers(self, destination):
            for layer, values in enumerate(self._chunk.kv):
                assert asked[layer].wait(60)
                destination[layer].copy_(values)
                yield layer

    engine, copies = late(store=MemoryStore(kind=Asked))
    seen = []
    before, wait = LayerBarrier.wait, LoadProgress.wait

    def asking(self, layer, seconds):
        asked[layer].set()
        return wait(self, layer, seconds)

    def watched(self, layer):
        copies.followed.clear()
        before(self, layer)
        if self:
            seen.append((layer, list(copies.followed), [progress._marks for progress in self._loads]))

    monkeypatch.setattr(LoadProgress, "wait", asking)
    monkeypatch.setattr(LayerBarrier, "wait", watched)
    assert_oracle("llama", PROMPT, "mpic-4", submit(engine, PROMPT))
    assert [layer for layer, *_ in seen][:3] == [0, 1, 2]  # the link ran beside its loads
    for layer, followed, marks in seen:
        assert sorted(followed) == sorted(of_gate[layer] for of_gate in marks)


def test_an_answer_without_that_order_would_be_wrong(late, monkeypatch):
    """This shows that the other tests would fail if copies were not ordered."""
    engine, _ = late()
    monkeypatch.setattr(CopiedProgress, "follow", lambda self, layer: None)
    monkeypatch.setattr(CopiedProgress, "settle", lambda self: None)
    with pytest.raises(IntegrityError, match="not numbers"):  # memory that was never written is read
        submit(engine, PROMPT, "reuse").result()


def test_copies_of_a_load_that_failed_are_over_before_its_memory_is_used_again(late):
    """The damaged chunk is compiled into the very extent that its first layers were being copied into."""

    class Half(MemoryChunk):
        def read_layers(self, destination):
            destination[0].fill_(123.0)
            yield 0
            raise CorruptFile("layer 1 is damaged")

    engine, copies = late(store=MemoryStore(kind=Half))
    assert_oracle("llama", PROMPT, "mpic-4", submit(engine, PROMPT))
    assert copies.done == len(copies.started) == len(CHUNKS)


def test_a_layer_that_did_not_arrive_in_time_is_not_followed():
    copies = Late()
    progress = CopiedProgress(LoadSignal(), 3, copies)
    progress.copy((0,), torch.zeros(1), torch.ones(1))
    progress.arrive(0)
    barrier = LayerBarrier([progress], 0.0)
    barrier.wait(0)
    barrier.wait(1)
    assert copies.followed == [1] and barrier.missed == {progress}


def test_only_cuda_copies_beside_its_computing():
    assert copies_for(torch.device("cpu")) is None and copies_for(torch.device("mps")) is None


def test_cuda_copies_select_their_own_device_so_that_no_other_one_gets_a_context(monkeypatch):
    said = []

    @contextmanager
    def entering(what):
        said.append(what)
        yield
        said.append(f"left {what}")

    fakes = {"Stream": lambda device: f"a stream of {device}", "stream": entering, "device": entering}
    fakes |= {"Event": lambda blocking: Mock()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    device = torch.device("cuda:1")
    target = torch.zeros(3)
    CudaCopies(device).start(target, torch.ones(3))
    of = "a stream of cuda:1"
    assert said == [device, of, f"left {of}", f"left {device}"] and target.sum() == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_copies_arrive_in_order():
    device = torch.device("cuda")
    copies = copies_for(device)
    target = torch.zeros(4, 1 << 20, device=device)
    buffer = copies.buffer(target.shape, target.dtype)
    buffer.copy_(torch.arange(4.0)[:, None].expand_as(buffer))
    copies.order()
    for i in range(4):
        copies.follow(copies.start(target[i], buffer[i]))
        assert float(target[i].sum()) == i * (1 << 20)


def test_a_dynamic_policy_decides_over_copies_that_have_happened(late, monkeypatch):
    engine, _ = late()
    ended, loads = [], []
    loaded, decide, settle = engine.transfers._loaded, engine.decider.decide, CopiedProgress.settle

    def deciding(requests, *told):
        loads.extend(linked.resident.progress for request in requests for linked in request.prompt.chunks)
        decide(requests, *told)

    # every copy has been started, and the engine has yet to hear that the loads are over
    monkeypatch.setattr(engine.transfers, "_loaded", lambda *load: ended.append(load))
    monkeypatch.setattr(CopiedProgress, "settle", lambda progress: settle(progress) if loads else None)
    monkeypatch.setattr(engine.decider, "decide", deciding)
    assert_oracle("llama", PROMPT, "cacheblend-20", submit(engine, PROMPT, "cacheblend-20"))
    for load in ended:
        engine._post(lambda load=load: loaded(*load))
    assert len(loads) == len(CHUNKS) and None not in loads


# ---- what lies in page-locked memory, and what is read back


def test_a_chunk_that_lies_in_page_locked_memory_is_copied_from_there(late):
    class Lent(MemoryChunk):
        def lend(self):
            return self._chunk.kv

    engine, copies = late(store=MemoryStore(kind=Lent))
    copies.buffer = None  # nothing is staged
    assert_oracle("llama", PROMPT, "mpic-4", submit(engine, PROMPT, "mpic-4"))
    assert copies.done == len(copies.started) == len(CHUNKS) * engine.model.shape.layers


class SlowReadback:
    """Reads a device's memory only when the test allows it, on the writer's thread."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None

    def mark(self):
        return threading.current_thread().name

    @contextmanager
    def behind(self, mark):
        assert mark.startswith(("mpic-engine", "MainThread", "closing"))
        assert threading.current_thread().name.startswith("mpic-write")
        assert self.go.wait(60)
        yield

    def to_host(self, source, target):
        if self.error is not None:
            raise self.error
        return target.copy_(source)


def read_slowly(engine) -> SlowReadback:
    """Has an engine's compiled chunks read back slowly; nothing is allocated for them to be copied through."""
    copies, readback = Late(), SlowReadback()
    engine.transfers.copy_beside(copies, Staging(2, 4096), readback)
    copies.buffer = None
    return readback


def test_compiled_chunks_are_read_back_while_the_engine_goes_on_and_stay_where_they_are(make_engine):
    chunk, store = text_chunk(ids(90, 40)), MemoryStore()
    engine = make_engine(store=store, pages=24, page_size=8)
    readback = read_slowly(engine)
    future = engine.compile(chunk)
    try:
        for i in range(4):  # in the end they need the chunk's pages
            prompt = prompt_of(ids(91 + i, 20))
            assert len(submit(engine, prompt, "full", 60).result().token_ids) == 60
        assert engine.transfers.busy and not future.done() and not store.chunks
        [resident] = engine.device.chunks.values()
        assert resident.extent.fixed == 1 and resident.refs == 1
    finally:
        readback.go.set()
    assert future.result(60) == 40
    until(lambda: not engine.transfers.busy)
    assert (resident.extent.fixed, resident.refs) == (0, 0)
    other = MemoryStore()
    make_engine(store=other).compile(chunk).result(60)
    [saved], [expected] = store.chunks.values(), other.chunks.values()
    # in steps of another size some processors round otherwise
    torch.testing.assert_close(saved.kv, expected.kv, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sink", [0, 4])
def test_a_chunk_behind_start_tokens_is_read_back_without_them(make_engine, sink):
    """Its part of the extent is strided."""
    made = []
    for slowly in (False, True):
        store = MemoryStore()
        engine = make_engine(store=store)
        if slowly:
            read_slowly(engine).go.set()
        engine.compile(text_chunk(ids(90, 40)), Wrapping(sink)).result(60)
        made += store.chunks.values()
    assert torch.equal(made[0].kv, made[1].kv)


def test_a_chunk_that_cannot_be_read_back_is_not_saved_and_can_still_be_linked(make_engine):
    store = MemoryStore()
    engine = make_engine(store=store)
    readback = read_slowly(engine)
    readback.error = RuntimeError("the copy failed")
    readback.go.set()
    with pytest.raises(RuntimeError, match="the copy failed"):
        engine.compile(CHUNKS[0]).result(60)
    until(lambda: not engine.transfers.busy)
    assert not store.chunks and engine.stats()["counters"]["save_failures"] == 1
    [resident] = engine.device.chunks.values()
    assert (resident.extent.fixed, resident.refs) == (0, 0) and resident.ready
    prompt = prompt_of(ids(3, 5), CHUNKS[0], ids(4, 6))
    assert_oracle("llama", prompt, "mpic-4", submit(engine, prompt))


def test_closing_waits_for_what_is_read_back(make_engine):
    store = MemoryStore()
    engine = make_engine(store=store)
    readback = read_slowly(engine)
    futures = [engine.compile(text_chunk(ids(95 + i, 40))) for i in range(3)]
    until(lambda: engine.transfers._returning == 3)
    closing = started(engine.close, name="closing")
    readback.go.set()
    closing.join(60)
    assert len(store.chunks) == 3 and all(future.result(60) == 40 for future in futures)
    assert not any(chunk.kv.isnan().any() for chunk in store.chunks.values())
