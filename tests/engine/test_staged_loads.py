"""Chunks that several threads read from disk through a small ring of staging memory, to a device that copies late."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from engine_kit import until
from library_tools import make_chunk, text_key
from slow_device import SlowDevice
from threads_kit import started

from mpic.durable import FileSystem
from mpic.engine.native.device_load import DeviceLoad
from mpic.engine.native.loader import ChunkLoad, LoadQueue
from mpic.errors import CorruptFile, EngineStopped
from mpic.kv.barrier import LoadSignal
from mpic.kv.copies import CopiedProgress
from mpic.kv.file import ChunkFile
from mpic.kv.staging import Staging, StagingRing
from mpic.library import Library, Limits
from mpic.library.store import host

LAYERS, SLOTS = 6, 33
LAYER = 2 * 2 * SLOTS * 16 * 4  # bytes
SIZES = [Staging(1, 512), Staging(2, 1024), Staging(2, 4096), Staging(3, 1 << 14), Staging(2, 1 << 16)]
"""Pieces of a few slots, of parts of a head, of whole heads, of a layer, of a whole chunk."""
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.slots}x{size.slot_bytes}")


class Slow(FileSystem):
    """Reads that take their time, one of ``delays`` in seconds. Layers of files whose inode is in ``broken`` cannot be
    read."""

    def __init__(self) -> None:
        super().__init__()
        self.random, self.delays, self.broken = random.Random(3), (0.0,), set()

    def read(self, fd, into, offset):
        if self.broken and offset and os.fstat(fd).st_ino in self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(self.random.choice(self.delays))
        return super().read(fd, into, offset)


class Loads:
    """Loads of stored chunks into memory that plays a device's. ``wrong`` gets layers that were reported too early."""

    def __init__(self, store, size: Staging, threads: int) -> None:
        self.store, self.signal = store, LoadSignal()
        self.device = SlowDevice()
        self.ring = StagingRing(self.device, size)
        self.queue = LoadQueue(threads)
        self.fork = self.queue.fork
        self.targets, self.ends, self.progress, self.wrong = {}, {}, {}, []

    def make(self, chunk, order: float = 0.0) -> ChunkLoad:
        key, progress = chunk.key, CopiedProgress(self.signal, LAYERS, self.device)
        extent = torch.full((LAYERS, 2, 2, SLOTS + 3, 16), float("nan"))
        target = extent[:, :, :, 3:]  # as behind sink slots
        self.targets[key], self.progress[key] = target, progress

        def arrived(layer: int) -> None:
            before = progress.ready
            progress.arrive(layer)
            for ready in range(before, progress.ready):  # as a step's barrier does
                progress.follow(ready)
                if not torch.equal(target[ready], chunk.kv[ready]):
                    self.wrong.append((key, ready))

        def ended(error: BaseException | None) -> None:
            beside.ended(error)
            assert key not in self.ends
            self.ends[key] = error

        load = ChunkLoad(order, iter(()), arrived, ended)
        stored, threads = self.store.find([key])[key], self.queue.threads
        beside = DeviceLoad(
            stored, target, progress, self.device, self.ring, threads, lambda *lane: self.fork(load, *lane)
        )
        load.layers = beside.read()
        return load

    def start(self, chunks) -> None:
        for chunk in chunks:
            self.queue.add(self.make(chunk))

    def wait(self) -> None:
        until(lambda: len(self.ends) == len(self.targets))
        for progress in self.progress.values():
            progress.settle()

    def close(self) -> None:
        self.device.go.set()
        self.ring.close()
        self.queue.close()
        self.device.close()


@pytest.fixture
def files():
    return Slow()


@pytest.fixture
def library(tmp_path, files):
    with Library.open(tmp_path, filesystem=files) as library:
        yield library


def save(library, count=8):
    chunks = [make_chunk(text_key(f"text {i}"), SLOTS, LAYERS, 2, 16, seed=i) for i in range(count)]
    for chunk in chunks:
        library.store.save(chunk)
    return chunks


def damage(library, chunk, layer) -> None:
    """Change a bit of a layer in a chunk's file."""
    path = library.store.path(chunk.key)
    raw = bytearray(path.read_bytes())
    raw[raw.index(chunk.kv[layer].numpy().tobytes()) + LAYER // 2] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def loads():
    made = []

    def make(store, size=SIZES[2], threads=4) -> Loads:
        made.append(Loads(store, size, threads))
        return made[-1]

    yield make
    for one in made:
        one.close()


@sizes
def test_more_loads_than_slots_of_chunks_larger_than_the_ring_all_arrive(size, library, loads, files):
    chunks = save(library)
    files.delays = (0.0, 0.0005)
    run = loads(library.store, size, threads=5)
    run.start(chunks)
    run.wait()
    assert not run.wrong and set(run.ends.values()) == {None}
    for chunk in chunks:
        assert torch.equal(run.targets[chunk.key], chunk.kv) and run.progress[chunk.key].complete
    assert run.ring.held == 0 and run.device.allocated == size.bytes, "nothing else was staged"
    assert library.store.stats()["bytes_read"] == sum(chunk.kv.nbytes for chunk in chunks)


@sizes
def test_a_load_that_is_suspended_anywhere_holds_no_slot(size, library, loads):
    """So that loads cannot wait for each other's slots. Here all of them stand somewhere in their chunks, and one
    thread goes on with any of them: a slot that one kept would stop it for ever in a ring of one."""
    chunks, draw, moved = save(library), random.Random(1), 0
    run = loads(library.store, size)
    lanes = []
    run.fork = lambda load, layers, first: lanes.append((load, layers))
    for chunk in chunks:
        load = run.make(chunk)
        lanes.append((load, load.layers))
    while lanes:
        load, layers = lanes[index := draw.randrange(len(lanes))]
        layer = next(layers, -1)
        moved += 1
        assert run.ring.held == 0
        if layer == -1:
            lanes.pop(index)
        elif layer is not None:
            load.arrived(layer)
    assert moved > len(chunks) * LAYERS and not run.wrong
    for chunk in chunks:
        assert torch.equal(run.targets[chunk.key], chunk.kv)


@sizes
def test_a_damaged_layer_ends_its_load_alone_and_once_and_its_slot_comes_back(size, library, loads):
    chunks = save(library)
    bad = {chunks[1].key: 0, chunks[4].key: 3, chunks[6].key: 5}
    for chunk in chunks:
        if chunk.key in bad:
            damage(library, chunk, bad[chunk.key])
    damage(library, chunks[4], 2)  # several threads find the file bad
    run = loads(library.store, size)
    run.start(chunks)
    run.wait()
    assert not run.wrong and run.ring.held == 0
    for chunk in chunks:
        if chunk.key in bad:
            assert isinstance(run.ends[chunk.key], CorruptFile)
            assert run.progress[chunk.key].ready <= bad[chunk.key]
        else:
            assert run.ends[chunk.key] is None and torch.equal(run.targets[chunk.key], chunk.kv)
    assert library.store.stats()["corrupt"] == len(bad)


@sizes
def test_a_file_that_cannot_be_read_ends_its_load_once_and_its_slot_comes_back(size, library, loads, files):
    chunks = save(library)
    files.broken.add(library.store.path(chunks[1].key).stat().st_ino)
    run = loads(library.store, size)
    run.start(chunks)
    run.wait()
    assert not run.wrong and run.ring.held == 0
    assert [isinstance(run.ends[chunk.key], OSError) for chunk in chunks] == [
        i == 1 for i in range(len(chunks))
    ]
    assert library.store.stats()["unreadable"] == 1 and library.store.stats()["corrupt"] == 0


def test_several_threads_read_one_chunk(library, loads, files):
    """The first of them is held up in the file, and the rest of the chunk is read meanwhile."""
    [chunk] = save(library, 1)
    first = threading.Lock()
    run = loads(library.store, Staging(4, 1 << 14), threads=3)
    read = files.read

    def arrived() -> int:
        progress = run.progress[chunk.key]
        return progress.ready + len(progress._early)

    def slow(fd, into, offset):
        if len(into) == LAYER and first.acquire(blocking=False):
            until(lambda: arrived() == LAYERS - 1)
        return read(fd, into, offset)

    files.read = slow
    run.start([chunk])
    run.wait()
    assert run.ends == {chunk.key: None} and not run.wrong
    assert torch.equal(run.targets[chunk.key], chunk.kv)


def test_a_file_that_does_not_answer_stops_no_other_load(library, loads, files):
    chunks, answer, read = save(library), threading.Event(), files.read
    hung = library.store.path(chunks[0].key).stat().st_ino

    def hang(fd, into, offset):
        if os.fstat(fd).st_ino == hung and len(into) <= 4096 < offset:  # not its header
            assert answer.wait(60)
        return read(fd, into, offset)

    files.read = hang
    run = loads(library.store, Staging(3, 4096), threads=3)
    run.start(chunks)
    until(lambda: len(run.ends) == len(chunks) - 1)
    assert run.ring.held > 0 and chunks[0].key not in run.ends
    answer.set()
    run.wait()
    assert set(run.ends.values()) == {None} and not run.wrong


def test_closing_ends_every_load_once_and_copies_are_over_before_the_memory_is_gone(library, loads, files):
    chunks = save(library)
    run = loads(library.store, Staging(2, 1024), threads=3)
    run.device.go.clear()
    run.start(chunks)
    until(lambda: run.ring.held == 2)
    closing = started(run.close)
    closing.join(60)
    assert not closing.is_alive() and not run.ring._free
    assert len(run.ends) == len(chunks)
    assert {type(error) for error in run.ends.values()} <= {EngineStopped, type(None)}
    assert run.device._work.empty()


# ---- the host tier's own memory


@pytest.fixture
def pinned(tmp_path, files, monkeypatch):
    """A library with a tier in page-locked memory, which is ordinary memory here."""
    monkeypatch.setattr(host, "memory_for", lambda shape, dtype, page_locked: torch.empty(shape, dtype=dtype))
    opened = []

    def make(host_bytes):
        opened.append(Library.open(tmp_path, Limits(host_bytes=host_bytes), filesystem=files, host="pinned"))
        return opened[-1]

    yield make
    for library in opened:
        library.check()
        library.close()


def test_a_chunk_is_read_straight_into_the_host_tier_and_copied_from_there(pinned, loads):
    library = pinned(1 << 30)
    for chunk in (chunks := save(library)):
        library.store._tiers[0]._remove(chunk.key)
    run = loads(library.store, Staging(1, 4096))
    run.ring.slot = None  # no slot is asked for
    run.start(chunks)
    run.wait()
    assert set(run.ends.values()) == {None} and not run.wrong
    for chunk in chunks:
        assert torch.equal(run.targets[chunk.key], chunk.kv)
        kept = library.store.find([chunk.key])[chunk.key]
        assert kept.tier == "host" and torch.equal(kept.lend(), chunk.kv)
    assert library.store.stats()["bytes_read"] == sum(chunk.kv.nbytes for chunk in chunks)


def test_what_the_host_tier_refuses_goes_through_the_ring(pinned, loads):
    library = pinned(1)
    chunks = save(library)
    run = loads(library.store, Staging(2, 4096))
    run.start(chunks)
    run.wait()
    assert set(run.ends.values()) == {None} and not run.wrong
    assert library.store.tiers()["host"]["chunks"] == 0
    assert library.store.tiers()["host"]["refused"] == 2 * len(chunks)  # when they were saved, and now


def test_without_page_locked_memory_for_the_host_tier_the_ring_is_used_and_its_bytes_come_back(
    pinned, loads, monkeypatch, caplog
):
    library = pinned(1 << 30)
    for chunk in (chunks := save(library, 3)):
        library.store._tiers[0]._remove(chunk.key)
    monkeypatch.setattr(host, "memory_for", Mock(side_effect=RuntimeError("CUDA error: out of memory")))
    run = loads(library.store)
    run.start(chunks)
    run.wait()
    assert set(run.ends.values()) == {None} and not run.wrong
    assert library.store.tiers()["host"]["bytes"] == 0 and "not kept in host memory" in caplog.text


def test_the_host_tier_keeps_nothing_of_a_damaged_or_a_deleted_chunk_and_its_bytes_come_back(
    pinned, loads, monkeypatch
):
    library = pinned(1 << 30)
    chunks = save(library, 3)
    tier = library.store._tiers[0]
    for chunk in chunks:
        tier._remove(chunk.key)
    damage(library, chunks[0], 3)
    run, go, read = loads(library.store), threading.Event(), ChunkFile._read_piece
    monkeypatch.setattr(ChunkFile, "_read_piece", lambda *told: go.wait(60) and read(*told))
    run.start(chunks)
    until(lambda: len(tier._copying) > 0)
    tier.drop(chunks[1].key.owner, chunks[1].key.chunk)
    go.set()
    run.wait()
    assert isinstance(run.ends[chunks[0].key], CorruptFile)
    assert run.ends[chunks[1].key] is None and torch.equal(run.targets[chunks[1].key], chunks[1].kv)
    assert list(tier._chunks) == [chunks[2].key]
