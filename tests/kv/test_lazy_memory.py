"""Memory that is provided before it is touched: nothing in it changes, and the system has it."""

from __future__ import annotations

import ctypes
import mmap

import psutil
import pytest
import torch

from mpic.kv import lazy_memory
from mpic.kv.chunk import KVShape
from mpic.kv.lazy_memory import LazyMemory
from mpic.kv.pool import Pool

pytestmark = pytest.mark.skipif(not LazyMemory.exists_here(), reason="memory is not provided lazily here")


def kernel_provides() -> bool:
    """Ask the kernel itself, so that code which fails to ask is not taken for a kernel that cannot."""
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 21), dtype=torch.uint8)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise(memory.data_ptr(), 1 << 21, 23) == 0


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(not kernel_provides(), reason="MADV_POPULATE_WRITE came with Linux 5.14")
def test_what_lies_behind_the_used_part_is_provided_slice_by_slice_and_no_more():
    memory = LazyMemory(64 << 20, torch.uint8)
    before, slices = resident(), 0
    while memory.provide(5 << 20, 20 << 20):
        slices += 1
    assert slices == 11 and memory.provided == 26 << 20  # from 4 MiB, where the used part's last slice begins
    assert 18 << 20 < resident() - before < 30 << 20
    assert not memory.provide(0, 1 << 20)
    while memory.provide(60 << 20, 100 << 20):
        slices += 1
    assert memory.provided == 64 << 20 and slices == 13


def test_nothing_that_is_kept_changes():
    memory = LazyMemory(8 << 20, torch.uint8)
    memory.tensor[: 3 << 20] = 7
    while memory.provide(0, 8 << 20):
        pass
    assert memory.tensor[: 3 << 20].eq(7).all() and memory.tensor[3 << 20 :].eq(0).all()


def test_a_kernel_that_cannot_is_asked_once(monkeypatch):
    memory, asked = LazyMemory(8 << 20, torch.uint8), []
    monkeypatch.setattr(memory, "_madvise", lambda address, size, advice: asked.append(size) or -1)
    assert not memory.provide(0, 8 << 20) and not memory.provide(0, 8 << 20)
    assert len(asked) == 1


def test_a_pool_provides_behind_its_last_extent():
    shape = KVShape(2, 2, 64, 2)
    pool = Pool(shape, 1 << 14, 16, torch.float32)
    extent = pool.alloc(5000)
    pool.view(extent).fill_(3.0)
    while pool.provide(2000):
        pass
    used = pool.pages_for(5000) * pool.page_bytes
    assert used + pool.pages_for(2000) * pool.page_bytes <= pool._lazy.provided
    assert pool.view(extent).eq(3.0).all()
    assert getattr(mmap, "MADV_POPULATE_WRITE", 23) == lazy_memory._POPULATE_WRITE
