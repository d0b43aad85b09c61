"""Page-locked memory stays within its budgets, whatever sizes come and go."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from page_locking import HostAllocator, page_locked
from threads_kit import in_threads

from mpic.kv import copies, readback, staging
from mpic.kv.page_locked import PageLocked, page_locked_bytes

KIB = 1 << 10


class Owner:
    """Holds a budget."""


def test_sizes_are_rounded_up_to_powers_of_two():
    assert [page_locked_bytes(size) for size in (1, 2, 3, 512, 513)] == [1, 2, 4, 512, 1024]


def test_torchs_allocator_alone_grows_with_every_size():
    """The reason for all this, seen with the allocator of these tests."""
    allocator = HostAllocator()
    for size in (KIB, 2 * KIB, 4 * KIB, 8 * KIB):
        blocks = [allocator.allocate((size,), torch.uint8) for _ in range(8 * KIB // size)]
        del blocks
    assert allocator.held == 4 * 8 * KIB


def test_chunks_of_changing_sizes_never_hold_more_than_the_budget():
    memory, allocator = page_locked()
    memory.allow(owner := Owner(), 64 * KIB)
    chosen, kept = random.Random(1), []
    for _ in range(2000):
        size = chosen.randint(1, 24 * KIB)
        while kept and sum(map(page_locked_bytes, map(len, kept))) + page_locked_bytes(size) > 64 * KIB:
            kept.pop(chosen.randrange(len(kept)))
        kept.append(memory.empty((size,), torch.uint8))
        assert memory.held == allocator.held <= 64 * KIB
    assert allocator.most <= 64 * KIB and owner


def test_chunks_of_one_size_are_never_given_back():
    memory, allocator = page_locked()
    memory.allow(owner := Owner(), 8 * KIB)
    kept = []
    for _ in range(100):
        if len(kept) == 8:
            del kept[0]
        kept.append(memory.empty((700,), torch.uint8))
    assert (allocator.made, allocator.emptied) == (8, 0) and owner


def test_freed_blocks_stay_as_long_as_the_budget_and_the_spare_bytes_have_room():
    memory, allocator = page_locked(spare=4 * KIB)
    memory.allow(owner := Owner(), 4 * KIB)
    for size in (KIB, 2 * KIB, 4 * KIB):
        memory.empty((size,), torch.uint8)
    assert (allocator.held, allocator.emptied) == (7 * KIB, 0)
    first = memory.empty((2 * KIB,), torch.uint8)  # a freed one
    assert allocator.made == 3
    second = memory.empty((2 * KIB,), torch.uint8)
    assert (allocator.held, allocator.emptied) == (4 * KIB, 1) and owner
    assert first.data_ptr() != second.data_ptr()


def test_a_view_keeps_its_block_in_use():
    memory, allocator = page_locked()
    memory.allow(owner := Owner(), 2 * KIB)
    whole = memory.empty((4, KIB // 4), torch.uint8)
    layer = whole[1:2]
    del whole
    other = memory.empty((KIB,), torch.uint8)
    assert allocator.made == 2, "the first block is still in use"
    del layer
    again = memory.empty((4, KIB // 4), torch.uint8)
    assert allocator.made == 2 and owner
    assert len(again) + len(other) == 4 + KIB


def test_a_budget_ends_with_its_owner():
    memory, allocator = page_locked()
    memory.allow(owner := Owner(), 8 * KIB)
    memory.empty((KIB,), torch.uint8)
    del owner
    memory.empty((2 * KIB,), torch.uint8)
    assert allocator.held == 2 * KIB


def test_what_is_used_may_exceed_the_budgets_but_nothing_freed_is_kept_beside_it():
    memory, allocator = page_locked()
    memory.allow(owner := Owner(), KIB)
    large = memory.empty((8 * KIB,), torch.uint8)
    memory.empty((KIB,), torch.uint8)
    small = memory.empty((KIB // 2,), torch.uint8)
    assert allocator.held == memory.held == 8 * KIB + KIB // 2
    assert len(large) > len(small) and owner


def test_memory_that_cannot_be_had_is_not_counted():
    allocator = HostAllocator()
    refuse = True

    def allocate(shape, dtype):
        if refuse:
            raise RuntimeError("CUDA error: out of memory")
        return allocator.allocate(shape, dtype)

    memory = PageLocked(allocate, allocator.give_back, spare=0)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of memory"):
            memory.empty((KIB,), torch.uint8)
    refuse = False
    blocks = [memory.empty((KIB,), torch.uint8), memory.empty((2 * KIB,), torch.uint8)]
    assert memory.held == allocator.held == 3 * KIB and len(blocks) == 2


def test_threads_share_one_budget():
    memory, allocator = page_locked()
    memory.allow(owner := Owner(), 4 * 8 * KIB)

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(300):
            memory.empty((chosen.randint(1, 8 * KIB),), torch.uint8)  # each has one block at most

    in_threads(work, range(4))
    assert memory.held <= 4 * 8 * KIB and owner
    # the other threads may each have ended a tensor whose memory the allocator does not have back yet
    assert allocator.most <= (4 + 3) * 8 * KIB


def test_the_staging_ring_and_the_slots_of_a_readback_have_budgets_and_whole_chunks_are_counted(monkeypatch):
    memory, allocator = page_locked()
    for module in (copies, staging, readback):
        monkeypatch.setattr(module, "PAGE_LOCKED", memory)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    back = readback.CudaReadback(torch.device("cuda"), KIB)
    assert memory.held == 0 and len(back._slots) == 2 and memory.held == 2 * KIB
    assert memory._budgets[back] == 2 * KIB
    del back
    on_device = copies.CudaCopies.__new__(copies.CudaCopies)
    ring = staging.StagingRing(on_device, staging.Staging(4, KIB))
    assert memory.held == allocator.held == 4 * KIB
    for _ in range(2):  # of a chunk that cannot be read in parts
        on_device.buffer((3, 100), torch.float32)
        on_device.buffer((7, 100), torch.float32)
    assert allocator.held == 4 * KIB + 4 * KIB and allocator.emptied == 3 and ring.size.slots == 4


def test_torch_has_the_name_that_gives_freed_blocks_back():
    """CPU builds know it only as a name of CUDA builds."""
    assert (
        "def _host_emptyCache() -> None"
        in Path(torch._C.__file__).with_name("_C").joinpath("__init__.pyi").read_text()
    )
