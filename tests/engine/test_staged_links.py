"""Links over chunks on disk that are read through a staging ring which is smaller than a chunk, on a device that copies
late: the same answers as the oracle's, whatever goes wrong with files and requests meanwhile."""

from __future__ import annotations

import random
import threading
import time
from unittest.mock import Mock

import pytest
from engine_kit import assert_oracle, family, ids, prompt_of, submit, text_chunk, until
from slow_device import SlowDevice
from threads_kit import started

from mpic.config import ConfigError
from mpic.durable import FileSystem
from mpic.engine.native.engine import NativeEngine
from mpic.kv.staging import Staging
from mpic.library import Library
from mpic.link import Wrapping

CHUNKS = [text_chunk(ids(180 + i, n)) for i, n in enumerate((23, 40, 17, 31))]
RING = Staging(2, 512)


def prompts() -> list:
    a, b, c, d = CHUNKS
    return [
        prompt_of(ids(3, 5), a, ids(4, 6), b, ids(5, 4)),
        prompt_of(c, ids(6, 3), a, d, ids(7, 5)),
        prompt_of(ids(8, 9), d, c, b, ids(9, 4)),
    ]


@pytest.fixture
def linked(tmp_path):
    """An engine over a library on disk that has the chunks, with nothing resident, and the library."""
    opened = []

    def make(wrapping: Wrapping | None = None, name: str = "llama", **options):
        library = Library.open(tmp_path)
        first = NativeEngine(family(name).loaded, library.store, pages=128)
        for chunk in CHUNKS:
            first.compile(chunk, *([wrapping] if wrapping else [])).result(60)
        first.close()
        engine = NativeEngine(family(name).loaded, library.store, pages=128, loaders=3, **options)
        engine.pool.arena.fill_(float("nan"))
        device = SlowDevice()
        engine.transfers.copy_beside(device, RING)
        engine.transfers.patience = 1000.0
        opened.append((engine, device, library))
        return engine, device, library

    yield make
    for engine, device, library in opened:
        device.go.set()
        engine.close()
        device.close()
        library.close()


@pytest.mark.parametrize(
    "name, policy",
    [
        ("llama", "reuse"),
        ("llama", "mpic-4"),
        ("llama", "legolink-0"),
        ("deepseek", "reuse"),
        ("deepseek", "mpic-4"),
    ],
)
def test_answers_of_requests_that_share_chunks_and_slots_equal_the_oracle(name, policy, linked):
    """DeepSeek's chunks are latents, in which the values are the keys."""
    engine, device, library = linked(Wrapping(4) if policy == "legolink-0" else None, name)
    streams = [submit(engine, prompt, policy) for prompt in prompts()]
    for prompt, stream in zip(prompts(), streams, strict=True):
        assert_oracle(name, prompt, policy, stream)
    engine.check()
    ring = engine.transfers._ring
    assert device.allocated == RING.bytes and ring.held == 0, "chunks took no memory of their own"
    assert library.store.stats()["bytes_read"] > 4 * RING.bytes


def test_a_damaged_file_costs_a_compile_and_its_slots_go_to_the_others(linked):
    engine, _, library = linked()
    path = library.store.path(engine.linker.key(CHUNKS[0]))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    streams = [submit(engine, prompt) for prompt in prompts()]
    for prompt, stream in zip(prompts(), streams, strict=True):
        assert_oracle("llama", prompt, "mpic-4", stream)
    assert engine.stats()["counters"]["load_failures"] == 1 and engine.transfers._ring.held == 0
    engine.check()


class Unsteady(FileSystem):
    """Reads of KV come late, and every fortieth with a wrong bit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random, self.lock, self.reads, self.wrong = random.Random(seed), threading.Lock(), 7 * seed, 0

    def read(self, fd, into, offset):
        done = super().read(fd, into, offset)
        if len(into) <= RING.slot_bytes and offset >= 4096:
            with self.lock:
                self.reads += 1
                wrong = self.reads % 40 == 0
                self.wrong += wrong
                pause = self.random.choice([0, 0, 0.001, 0.003])
            time.sleep(pause)
            if wrong:
                into[len(into) // 2] ^= 4
        return done


@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_late_or_wrong_from_the_disk_answers_equal_the_oracle(seed, linked):
    engine, _, library = linked(budget=16 if seed else 512)
    library.store._filesystem = files = Unsteady(seed)
    engine.transfers.patience = (0.0, 0.002, 1000.0)[seed]
    policies = ["reuse", "mpic-4", "cacheblend-30"]
    streams = [submit(engine, *asked) for asked in zip(prompts(), policies, strict=True)]
    for prompt, policy, stream in zip(prompts(), policies, streams, strict=True):
        assert_oracle("llama", prompt, policy, stream)
    engine.check()
    assert engine.stats()["counters"]["load_failures"] > 0 and files.wrong > 0
    assert engine.transfers._ring.held == 0


def test_page_locked_memory_that_cannot_be_had_is_an_error_of_the_configuration(linked):
    engine, device, _ = linked()
    device.buffer = Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    with pytest.raises(ConfigError, match=r"2 x 512 bytes .*set staging_slots or staging_slot_bytes lower"):
        engine.transfers.copy_beside(device, RING)


def test_requests_that_are_aborted_while_their_chunks_are_read_leave_them_right_for_the_next(linked):
    engine, device, _ = linked()
    device.go.clear()
    streams = [submit(engine, prompt) for prompt in prompts()]
    until(lambda: engine.transfers._ring.held == RING.slots)
    for stream in streams[:2]:
        stream.abort()
    device.go.set()
    for stream in streams[:2]:
        stream.result()
    for prompt in prompts()[:2]:
        assert_oracle("llama", prompt, "mpic-4", submit(engine, prompt))
    assert_oracle("llama", prompts()[2], "mpic-4", streams[2])
    engine.check()


def test_an_engine_that_is_closed_while_chunks_are_read_ends_with_all_copies_done(linked):
    engine, device, _ = linked()
    device.go.clear()
    streams = [submit(engine, prompt) for prompt in prompts()]
    until(lambda: engine.transfers._ring.held == RING.slots)
    closing = started(engine.close)
    until(lambda: engine._inbox.closed)
    device.go.set()
    closing.join(60)
    assert not closing.is_alive()
    for stream in streams:
        with pytest.raises(Exception, match="stopped"):
            stream.result()
    assert device._work.empty() and not engine.transfers._ring._free
