"""What runs on the engine's event loop, with a stub in vLLM's place that computes nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from engine_kit import ids, prompt_of, request_of, text_chunk, until
from library_tools import make_chunk
from vllm_kit import make_tokenizer

from mpic.config import EngineConfig
from mpic.engine.vllm import chunks
from mpic.engine.vllm import engine as module
from mpic.engine.vllm.model import Described
from mpic.engine.vllm.talk import Rendered, Talk
from mpic.errors import CompileFailed, EngineStopped
from mpic.kv.chunk import KVKey, KVShape
from mpic.link import parse_policy

CHUNK = text_chunk(ids(3, 5))


class Stub:
    """In ``Talk``'s place. A compile waits for ``go``."""

    context, processor, dead = 1024, None, False

    def __init__(self, *_: object) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.go = threading.Event()
        self.compiles = 0

    wait = Talk.wait
    _stop = Talk._stop

    def close(self) -> None:
        self._stop()

    async def render(self, parts: list, salt: str) -> Rendered:
        return Rendered(range(5), (), None)

    async def run(self, prompt: Rendered, order: object) -> None:
        self.compiles += 1
        await asyncio.to_thread(self.go.wait, 20)


@pytest.fixture
def engine(monkeypatch):
    shape = KVShape(3, 2, 4)
    model = Described(
        "m", "llama", "a1" * 32, "p", "float32", 1024, shape, frozenset(), 1, None, make_tokenizer("llama")
    )
    monkeypatch.setattr(module, "describe", lambda *_: model)
    monkeypatch.setattr(module, "engine_args", lambda *_: None)
    monkeypatch.setattr(module, "Talk", Stub)
    monkeypatch.setattr(module, "_info", lambda *_: SimpleNamespace())
    monkeypatch.setattr(module, "link_test", lambda engine: None)  # a stub has no model to test
    key = KVKey.of(CHUNK.owner, CHUNK.key, model.digest, model.recipe(0))
    made = make_chunk(key)
    monkeypatch.setattr(chunks, "read_compiled", lambda folder: (made.inputs, made.kv))
    engine = module.VLLMEngine(EngineConfig(engine="vllm"), None, cpu=True)
    yield engine
    engine.talk.go.set()
    if not engine._stopping:
        until(lambda: not engine._running)
        engine.check()
        engine.close()


def hold(engine) -> threading.Event:
    """Nothing more runs on the loop until the event is set: all that is posted by then runs in one go."""
    go = threading.Event()
    engine.talk.loop.call_soon_threadsafe(go.wait, 20)
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
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine._stopping)
    go.set()
    with pytest.raises(EngineStopped):
        stream.result()
    closing.join()


def test_an_upload_after_a_deletion_does_not_join_the_compile_of_before(engine):
    first = engine.compile(CHUNK)
    until(lambda: engine.talk.compiles == 1)
    engine.forget(CHUNK)
    again, third = engine.compile(CHUNK), engine.compile(CHUNK)
    time.sleep(0.2)  # they have found the first compile
    engine.talk.go.set()
    assert again.result(20) == third.result(20) == 5
    with pytest.raises(CompileFailed, match="deleted"):
        first.result(20)
    assert engine.talk.compiles == 2
    assert engine._store.find([engine.chunks.key(CHUNK, 0)])


def test_a_chunk_of_a_request_is_counted_once_in_all_its_rounds(engine):
    engine.talk.go.set()
    linked = engine.chunks.link([CHUNK], parse_policy("reuse"))
    for compiled in (5, 0, 0):
        assert engine.talk.wait(engine.chunks.ensure(linked, time.monotonic())) == compiled
    later = engine.chunks.link([CHUNK], parse_policy("reuse"))
    engine.talk.wait(engine.chunks.ensure([*linked, *later], time.monotonic()))
    counted = {name: n for name, n in engine.chunks.counters.items() if name.startswith("chunk")}
    assert counted == {"chunk_requests": 2, "chunk_hits": 1, "chunks_from_compiled": 1, "chunks_from_disk": 1}
