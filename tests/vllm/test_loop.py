"""The engine's event loop, with a stub in vLLM's place that computes nothing."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from engine_kit import ids, prompt_of, request_of, text_chunk, until
from extend_kit import Lookup
from library_tools import make_chunk
from threads_kit import started
from vllm_kit import make_tokenizer

from mpic.config import EngineConfig
from mpic.engine.vllm.frontend import compiled as exported
from mpic.engine.vllm.frontend import compiler as compiling
from mpic.engine.vllm.frontend import engine as module
from mpic.engine.vllm.frontend import spool
from mpic.engine.vllm.frontend.client import VLLMClient
from mpic.engine.vllm.frontend.model import ModelDescription
from mpic.engine.vllm.frontend.prompts import VLLMPrompt
from mpic.errors import (
    CompileFailed,
    DeletedMeanwhile,
    EngineStopped,
    FileNotFound,
    MPICError,
    NoAdapter,
    OutOfMemory,
    StorageFull,
)
from mpic.kv.chunk import ChunkInputs, KVKey, KVShape
from mpic.link import BARE, Wrapping, parse_policy
from mpic.packet.adapter import Adapter

CHUNK = text_chunk(ids(3, 5))
READ = exported.read_compiled


class Stub:
    """Takes the place of ``VLLMClient``. A compile waits for ``go``."""

    context, processor, dead, ending = 1024, None, False, False
    answer = make_tokenizer("llama").encode("abcdefgh", add_special_tokens=False)

    def __init__(self, *_: object) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = started(self.loop.run_forever)
        self.go = threading.Event()
        self.compiles = 0
        self.fallbacks = [[(0, "corrupt")]]  # of the requests to come

    submit, wait = VLLMClient.submit, VLLMClient.wait
    _stop = VLLMClient._stop

    def close(self) -> None:
        self._stop()

    async def render(self, parts: list, salt: str) -> VLLMPrompt:
        return VLLMPrompt(range(5), (), None)

    async def generate(self, prompt: VLLMPrompt, params: object) -> AsyncIterator[SimpleNamespace]:
        """Answers a, b, c, ...; the first output has a report. While ``ending``, every answer is cut short."""
        fallback = self.fallbacks.pop(0) if self.fallbacks else []
        report = {"mpic": {"error": None, "fallback": fallback}}
        for i, token in enumerate(self.answer):
            cut = self.ending and i == 1
            one = SimpleNamespace(
                token_ids=[] if cut else [token], finish_reason="abort" if cut else None, logprobs=None
            )
            rest = {"metrics": None, "num_cached_tokens": 0}
            yield SimpleNamespace(outputs=[one], kv_transfer_params=None if i else report, **rest)
            if cut:
                return

    async def execute(self, prompt: VLLMPrompt, order: object) -> None:
        self.compiles += 1
        await asyncio.to_thread(self.go.wait, 20)


@pytest.fixture
def engine(monkeypatch):
    ends = (KVShape(3, 2, 4), frozenset(), 1, None, make_tokenizer("llama"))
    model = ModelDescription("m", "llama", "a1" * 32, "p", "float32", 1024, *ends)
    monkeypatch.setattr(module, "describe_model", lambda *_: model)
    monkeypatch.setattr(module, "engine_args", lambda *_: None)
    monkeypatch.setattr(module, "VLLMClient", Stub)
    monkeypatch.setattr(module, "_info", lambda *_: SimpleNamespace())
    for test in ("link_test", "shift_test"):  # a stub has no model to test
        monkeypatch.setattr(module, test, lambda *_: None)
    key = KVKey.of(CHUNK.owner, CHUNK.key, model.digest, model.recipe(BARE))
    made = make_chunk(key)
    monkeypatch.setattr(exported, "read_compiled", lambda folder, **_: (made.inputs, made.kv))
    engine = module.VLLMEngine(EngineConfig(engine="vllm"), None, cpu=True)
    yield engine
    engine.client.go.set()
    if not engine._stopping:
        until(lambda: not engine._active)
        engine.check()
        engine.close()


def hold(engine) -> threading.Event:
    """Blocks the loop until the event is set, so that everything posted by then runs at once."""
    go = threading.Event()
    engine.client.loop.call_soon_threadsafe(go.wait, 20)
    return go


def request():
    return request_of(prompt_of(ids(1, 9)), "mpic-4")


@pytest.mark.timeout(30)
def test_a_request_aborted_before_its_first_step_ends_its_stream(engine):
    go = hold(engine)
    stream = engine.submit(request())
    stream.abort()
    go.set()
    assert stream.result().finish_reason == "abort"
    assert engine.counters["finished_abort"] == 1


@pytest.mark.timeout(30)
def test_a_request_that_comes_while_the_engine_closes_ends_with_an_error(engine):
    go = hold(engine)
    stream = engine.submit(request())
    closing = started(engine.close)
    until(lambda: engine._stopping)
    go.set()
    with pytest.raises(EngineStopped):
        stream.result()
    closing.join()


@pytest.mark.timeout(30)
def test_an_answer_that_ends_by_a_stop_string_says_which_chunks_were_computed_instead(engine):
    engine.client.go.set()
    prompt = prompt_of(ids(1, 9), CHUNK, ids(2, 3))
    answer = engine.submit(request_of(prompt, "reuse", 8, stop=("cd",))).result()
    assert (answer.text, answer.finish_reason) == ("ab", "stop")
    [use] = answer.usage.chunks
    assert (use.tier, use.reason, use.reused) == ("none", "corrupt", 0) and answer.usage.reused == 0


@pytest.mark.timeout(30)
def test_a_chunk_that_was_computed_before_a_search_is_not_reported_as_reused_after_it(engine):
    engine.client.go.set()
    found = text_chunk(ids(6, 5))
    lookup = Lookup([0, 0], found)
    lookup.opens, lookup.closes = "b", "c"
    asked = request_of(prompt_of(ids(1, 9), CHUNK, ids(2, 3)), "reuse", 4)
    answer = engine.submit(replace(asked, retrieval=lookup, trace=True)).result()
    usage = answer.usage
    assert len(usage.retrieval) == 1 and len(lookup.calls) == 1
    uses = [(use.tier, use.reason, use.reused, use.recomputed) for use in usage.chunks]
    assert uses == [("none", "corrupt", 0, 5), ("compiled", "new", 5, 0)]
    assert (usage.reused, usage.recomputed) == (5, 5)
    assert "recomputed" in {span.state for span in usage.trace}


@pytest.fixture
def interrupted(engine, monkeypatch):
    """Lets vLLM answer two tokens a request and then, after each, miss a chunk's file, as often as ``times`` says;
    ``asked`` has the prompts and parameters of its requests."""
    seen = SimpleNamespace(times=1, asked=[])

    async def generate(self, prompt, params):
        seen.asked.append((list(prompt.ids), params))
        begun = 2 * (len(seen.asked) - 1)
        cut = len(seen.asked) <= seen.times
        answer = [[token] for token in self.answer[begun : begun + 2 if cut else begun + params.max_tokens]]
        for i, ids_ in enumerate([*answer, []] if cut else answer):
            ends = cut and i == len(answer)
            probabilities = [{token: SimpleNamespace(rank=1, logprob=-token)} for token in ids_]
            one = SimpleNamespace(
                token_ids=ids_, finish_reason="error" if ends else None, logprobs=probabilities
            )
            report = {
                "mpic": {"error": "missing", "message": "gone"} if ends else {"error": None, "prefix_hit": 4}
            }
            metrics = SimpleNamespace(num_preemptions=1, scheduled_ts=1.0, queued_ts=1.0)
            yield SimpleNamespace(
                outputs=[one], kv_transfer_params=report, metrics=metrics, num_cached_tokens=0
            )

    monkeypatch.setattr(Stub, "generate", generate)
    engine.client.go.set()
    return seen


@pytest.mark.timeout(30)
def test_an_answer_whose_chunk_was_lost_when_it_was_preempted_goes_on_where_it_was(engine, interrupted):
    prompt = prompt_of(ids(1, 9), CHUNK, ids(2, 3))
    request = request_of(prompt, "reuse", 6, seed=7, logprobs=1, stop=("f",))
    deltas = list(engine.submit(replace(request, trace=True)))
    given = Stub.answer[:6]
    assert "".join(delta.text for delta in deltas) == "abcde" and deltas[-1].finish_reason == "stop"
    assert [one.token_id for delta in deltas for one in delta.logprobs] == given
    (first, before), (second, after) = interrupted.asked
    assert second == first + given[:2], "the answer so far is part of the prompt"
    assert (before.max_tokens, after.max_tokens) == (6, 4) and before.seed != after.seed
    usage = deltas[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.reused, usage.prefix_hit) == (17, 6, 5, 4)
    assert usage.preemptions == 2 and usage.ttft_ms > 0
    assert usage.trace[-1].end == 17
    assert engine.client.compiles == 1, (
        "the file was still there, and the request has a name of its own for it"
    )


@pytest.mark.timeout(30)
def test_an_answer_that_was_taken_up_again_in_a_call_searches_and_goes_on(engine, interrupted):
    found = text_chunk(ids(6, 5))
    lookup = Lookup([0, 0], found)
    lookup.opens, lookup.closes = "b", "c"
    request = request_of(prompt_of(ids(1, 9), CHUNK, ids(2, 3)), "reuse", 5, seed=7)
    usage = engine.submit(replace(request, retrieval=lookup)).result().usage
    first, again, after = (tokens for tokens, _ in interrupted.asked)
    assert len(lookup.calls) == 1 and again == first + Stub.answer[:2]
    assert after[: len(again) + 1] == [*again, Stub.answer[2]] and str(found.token_ids)[1:-1] in str(after)
    assert len({params.seed for _, params in interrupted.asked}) == 3
    assert (usage.completion_tokens, usage.prompt_tokens) == (5, len(after) - 3)


@pytest.mark.timeout(30)
def test_a_file_system_without_hard_links_costs_a_compile_and_no_answer(engine, interrupted, monkeypatch):
    monkeypatch.setattr(spool.os, "link", Mock(side_effect=OSError(errno.EPERM, "there are none")))
    answer = engine.submit(request_of(prompt_of(ids(1, 9), CHUNK, ids(2, 3)), "reuse", 6)).result()
    assert answer.token_ids == tuple(Stub.answer[:6]) and engine.client.compiles == 2


@pytest.mark.timeout(30)
def test_an_answer_whose_chunks_are_lost_again_and_again_ends(engine, interrupted):
    interrupted.times = 3
    with pytest.raises(MPICError, match="gone"):
        engine.submit(request_of(prompt_of(ids(1, 9), CHUNK, ids(2, 3)), "reuse", 8)).result()
    assert len(interrupted.asked) == 2


def test_an_engine_without_an_adapter_refuses_packets_and_does_not_offer_them(engine, monkeypatch):
    assert {"legolink-K"} == {"packet", "packet-K", "legolink-K"} & set(engine.policies())
    with pytest.raises(NoAdapter, match=r"model m has none.*mpic train packet --model"):
        engine.submit(request_of(prompt_of(ids(1, 6), CHUNK, ids(4, 5)), "packet"))
    with pytest.raises(NoAdapter):
        engine.compile(CHUNK, Wrapping(packet=True)).result(20)
    with pytest.raises(NoAdapter, match="mpic train packet"):
        module.VLLMEngine(EngineConfig(engine="vllm", policy="packet-16"), None, cpu=True)


def test_a_packet_of_an_adapter_that_was_replaced_after_the_start_is_not_kept(engine, monkeypatch):
    """The workers read the adapter's file themselves."""
    soft = Adapter(torch.ones(2, 4), torch.ones(1, 4), "0" * 64)
    monkeypatch.setattr(engine.compiler, "_model", replace(engine.model, adapter=soft))
    bare = ChunkInputs(torch.tensor(CHUNK.token_ids), torch.arange(5)[None], 5, torch.zeros(5, 4))
    engine.client.go.set()
    for header, reason in ((soft.header, None), (soft.header + 1, "another adapter")):
        given = bare.wrap(header, soft.trailer)
        monkeypatch.setattr(
            exported, "read_compiled", lambda *_, given=given, **__: (given, torch.zeros(3, 2, 2, 8, 4))
        )
        compiled = engine.compile(CHUNK, Wrapping(packet=True))
        if reason is None:
            assert compiled.result(20) == 8
            engine.forget(CHUNK)
            continue
        with pytest.raises(CompileFailed, match=reason):
            compiled.result(20)


def test_an_upload_after_a_deletion_does_not_join_an_earlier_compile(engine):
    first = engine.compile(CHUNK)
    until(lambda: engine.client.compiles == 1)
    engine.forget(CHUNK)
    again, third = engine.compile(CHUNK), engine.compile(CHUNK)
    time.sleep(0.2)  # they have found the first compile
    engine.client.go.set()
    assert again.result(20) == third.result(20) == 5
    with pytest.raises(DeletedMeanwhile):
        first.result(20)
    assert engine.client.compiles == 2
    assert engine._store.find([engine.compiler.key(CHUNK, BARE)])


def test_a_deletion_is_forgotten_when_what_began_before_it_has_ended_whatever_else_runs(engine):
    older = engine.compile(CHUNK)
    until(lambda: engine.client.compiles == 1)
    engine.forget(text_chunk(ids(99, 5)))
    younger = engine.tombstones.begin()
    assert engine.tombstones._times
    engine.client.go.set()
    assert older.result(20) == 5
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
        engine.compile(CHUNK, exists=lambda: engine.forget(CHUNK)).result(20)
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
    assert engine.compile(CHUNK).result(20) == 5
    assert engine.client.wait(engine.compiler.ensure(linked, time.monotonic())) == 0
    assert engine.client.compiles == 1
    assert [(one.stored, one.tier, one.rotary_length) for one in linked] == [(True, "disk", 5)] * 2
    assert engine.compiler.counters["chunk_hits"] == engine.compiler.counters["chunks_from_disk"] == 2


def test_a_chunk_whose_file_was_found_damaged_is_compiled_although_it_has_been_stored(engine):
    engine.client.go.set()
    assert engine.compile(CHUNK).result(20) == 5
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
        engine.compile(CHUNK).result(20)


def test_a_compile_succeeds_although_no_thread_can_be_started_to_clean_up_behind_it(engine, monkeypatch):
    run = asyncio.to_thread

    async def crowded(work, *args, **options):
        if work is compiling.shutil.rmtree:
            raise RuntimeError("can't start new thread")
        return await run(work, *args, **options)

    monkeypatch.setattr(compiling.asyncio, "to_thread", crowded)
    engine.client.go.set()
    assert engine.compile(CHUNK).result(20) == 5
    until(lambda: not engine.compiler.check())


def test_a_chunk_that_there_is_no_memory_to_store_may_be_compiled_again(engine, monkeypatch):
    engine.client.go.set()
    with monkeypatch.context() as short:
        short.setattr(engine._store, "save", Mock(side_effect=MemoryError()))
        with pytest.raises(OutOfMemory):
            engine.compile(CHUNK).result(20)
    assert engine.compile(CHUNK).result(20) == 5


def test_a_chunk_that_is_gone_as_soon_as_it_is_stored_may_be_compiled_again(engine, monkeypatch):
    """Its rows are deleted before its tombstone is set, and what is stored after them is dropped."""
    engine.client.go.set()
    monkeypatch.setattr(engine._store, "save", lambda made: None)
    with pytest.raises(DeletedMeanwhile):
        engine.compile(CHUNK).result(20)


@pytest.mark.parametrize("code, kind", [("out_of_memory", OutOfMemory), ("storage_full", StorageFull)])
def test_what_a_worker_lacks_is_the_error_of_a_compile_and_of_a_request(engine, monkeypatch, code, kind):
    async def failing(self, prompt, params):
        one = SimpleNamespace(token_ids=[], finish_reason="error", logprobs=None)
        report = {"mpic": {"error": code, "message": "there is too little"}}
        yield SimpleNamespace(outputs=[one], kv_transfer_params=report, metrics=None, num_cached_tokens=0)

    monkeypatch.setattr(Stub, "generate", failing)
    monkeypatch.setattr(Stub, "execute", VLLMClient.execute)
    with pytest.raises(kind, match="there is too little"):
        engine.compile(CHUNK).result(20)
    with pytest.raises(kind, match="there is too little"):
        engine.submit(request()).result()


def test_what_vllm_gives_up_because_it_is_being_stopped_is_no_failure(engine, monkeypatch):
    """A signal to all processes of the server reaches vLLM's first."""
    monkeypatch.setattr(Stub, "execute", VLLMClient.execute)
    engine.client.ending = True
    with pytest.raises(EngineStopped):
        engine.compile(CHUNK).result(20)
    with pytest.raises(EngineStopped):
        engine.submit(request()).result()


@pytest.mark.timeout(30)
def test_a_compile_ends_when_vllm_dies_while_its_chunk_is_written(engine, monkeypatch):
    monkeypatch.setattr(exported, "read_compiled", READ)
    engine.client.go.set()
    compiled = engine.compile(CHUNK)
    until(lambda: (task := engine.compiler._tasks.get(engine.compiler.key(CHUNK))) and task.computed)
    monkeypatch.setattr(engine.client, "dead", True)
    with pytest.raises(EngineStopped, match="died"):
        compiled.result(20)


SLOTS = 2


@pytest.fixture
def queue(engine):
    """Fills all slots of compiles; returns what asks for the compile of a chunk that is queued then."""
    engine.compiler._slots = asyncio.Semaphore(SLOTS)
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
    """Lets everything go on to its end; returns how many compiles of the queue were run."""
    engine.client.go.set()
    for future in waited:
        future.result(20)
    until(lambda: not engine.compiler._tasks)
    return engine.client.compiles - SLOTS


@pytest.mark.timeout(60)
def test_a_queued_compile_that_nobody_waits_for_any_more_leaves_the_queue(engine, queue):
    for number in range(5):
        queue(text_chunk(ids(number, 5))).cancel()
    until(lambda: len(engine.compiler._tasks) == SLOTS)
    assert compiles_of_the_queue(engine) == 0


@pytest.mark.timeout(60)
def test_a_queued_compile_goes_on_while_somebody_waits_for_it(engine, queue):
    one, other = queue(CHUNK), queue(CHUNK, 2)
    one.cancel()
    assert compiles_of_the_queue(engine, other) == 1


@pytest.mark.timeout(60)
def test_a_chunk_asked_for_again_while_its_compile_leaves_the_queue_is_compiled(engine, queue, monkeypatch):
    left, remove = threading.Event(), compiling.shutil.rmtree
    monkeypatch.setattr(compiling.shutil, "rmtree", lambda *a, **b: left.wait(20) and remove(*a, **b))
    key = engine.compiler.key(CHUNK, BARE)
    queue(CHUNK).cancel()
    until(lambda: engine.compiler._tasks[key].waiting == 0)
    again = engine.client.submit(engine.compiler._compiled(CHUNK, key, None, time.monotonic()))
    engine.client.wait(asyncio.sleep(0))  # it has found the compile
    left.set()
    assert compiles_of_the_queue(engine, again) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kept", [True, False])
def test_those_who_leave_and_join_while_a_compile_ends_are_counted_as_users_of_its_file(
    engine, monkeypatch, kept
):
    """The last of a compile's work is to remove the folder that vLLM wrote to."""
    ending, end, remove = threading.Event(), threading.Event(), compiling.shutil.rmtree

    def slow(*args, **options):
        ending.set()
        assert end.wait(20)
        remove(*args, **options)

    monkeypatch.setattr(compiling.shutil, "rmtree", slow)
    monkeypatch.setattr(engine._store, "save", Mock(side_effect=StorageFull("no room")))
    engine.client.go.set()
    compiler, key = engine.compiler, engine.compiler.key(CHUNK, BARE)
    ask = lambda: engine.client.submit(compiler._compiled(CHUNK, key, None, time.monotonic()))
    first = ask()
    assert ending.wait(20)
    joined = [ask() for _ in range(2 * kept)]
    engine.client.wait(asyncio.sleep(0))
    first.cancel()
    until(lambda: compiler._tasks[key].waiting == 2 * kept)
    end.set()
    for future in joined:
        spooled = future.result(20).spooled
        assert spooled.path.exists()
        engine.client.loop.call_soon_threadsafe(spooled.drop)
    until(lambda: not compiler.check())


@pytest.mark.timeout(60)
def test_closing_gives_up_compiles_that_wait_or_that_vllm_computes(engine, queue):
    waiting = [queue(text_chunk(ids(number, 5))) for number in range(5)]
    computing = [engine.compile(text_chunk(ids(100 + i, 5))) for i in range(SLOTS)]  # they join
    engine.close()
    assert not engine.client.go.is_set() and engine.client.compiles == SLOTS
    for future in (*waiting, *computing):
        with pytest.raises(EngineStopped):
            future.result(20)


@pytest.mark.timeout(60)
def test_closing_waits_for_a_chunk_that_vllm_has_computed_and_keeps_it(engine, monkeypatch):
    reading, read, made = threading.Event(), threading.Event(), exported.read_compiled

    def slow(folder, **options):
        reading.set()
        assert read.wait(20)
        return made(folder, **options)

    monkeypatch.setattr(exported, "read_compiled", slow)
    remove = engine._close_own
    monkeypatch.setattr(engine, "_close_own", lambda: None)
    engine.client.go.set()
    compiled = engine.compile(CHUNK)
    assert reading.wait(20)
    closing = started(engine.close)
    until(lambda: engine.compiler._closing)
    read.set()
    closing.join(20)
    assert compiled.result(20) == 5
    assert engine._store.find([engine.compiler.key(CHUNK, BARE)])
    remove()
