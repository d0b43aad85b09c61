"""The staging ring: its memory is allocated once, no slot is used again before its copy is done, and all come back."""

from __future__ import annotations

import threading

import pytest
import torch
from slow_device import SlowDevice

from mpic.errors import EngineStopped
from mpic.kv import staging
from mpic.kv.staging import Staging, StagingRing, staging_for


@pytest.fixture
def device():
    device = SlowDevice()
    yield device
    device.go.set()
    device.close()


def send(ring, device, target, value) -> None:
    with ring.slot() as slot:
        slot.mark = device.start(target, slot.of(target.shape, target.dtype).fill_(value))


def test_a_slot_is_filled_again_only_after_its_copy(device):
    ring, target = StagingRing(device, Staging(2, 64)), torch.zeros(40, 8)
    for i in range(40):
        send(ring, device, target[i], i)
    ring.close()
    assert torch.equal(target, torch.arange(40.0)[:, None].expand(40, 8))
    assert device.allocated == 2 * 64


def test_without_that_order_bytes_would_be_wrong(device, monkeypatch):
    monkeypatch.setattr(device, "wait", lambda mark: None)
    ring, target = StagingRing(device, Staging(2, 64)), torch.zeros(40, 8)
    device.go.clear()
    for i in range(40):
        send(ring, device, target[i], i)
    device.go.set()
    device.close()
    assert not torch.equal(target, torch.arange(40.0)[:, None].expand(40, 8))


def test_whoever_waits_gets_the_slot_of_a_reader_that_fails(device):
    ring, target = StagingRing(device, Staging(1, 64)), torch.zeros(8)
    waiting = threading.Thread(target=send, args=(ring, device, target, 3.0))
    with pytest.raises(OSError, match="bad"), ring.slot():
        waiting.start()
        raise OSError("bad")
    waiting.join(60)
    ring.close()
    assert not waiting.is_alive() and bool((target == 3).all())


def test_a_piece_that_does_not_fit_gives_its_slot_back(device):
    ring = StagingRing(device, Staging(1, 64))
    with pytest.raises(ValueError, match="does not fit"), ring.slot() as slot:
        slot.of((17,), torch.float32)
    assert ring.held == 0
    ring.close()


def test_a_copy_that_went_wrong_is_an_error_for_whoever_wants_its_slot_and_loses_no_slot(device):
    ring, target = StagingRing(device, Staging(1, 64)), torch.zeros(8)
    send(ring, device, target, 1.0)
    device.broken = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="lost"):
            send(ring, device, target, 2.0)
    device.broken = False
    send(ring, device, target, 2.0)
    ring.close()
    assert bool((target == 2).all())


def test_closing_refuses_who_waits_and_waits_for_readers_and_copies(device):
    ring, targets = StagingRing(device, Staging(1, 64)), torch.zeros(2, 8)
    device.go.clear()
    entered, refused = threading.Event(), []

    def late() -> None:
        entered.set()
        try:
            send(ring, device, targets[1], 9.0)
        except EngineStopped:
            refused.append(True)

    waiting, closing = threading.Thread(target=late), threading.Thread(target=ring.close)
    with ring.slot() as slot:
        waiting.start()
        assert entered.wait(60)
        closing.start()
        waiting.join(60)
        assert refused and closing.is_alive()
        slot.mark = device.start(targets[0], slot.of((8,), torch.float32).fill_(1.0))
    closing.join(0.05)
    assert closing.is_alive(), "the copy still reads the slot"
    device.go.set()
    closing.join(60)
    assert not closing.is_alive() and bool((targets[0] == 1).all()) and not targets[1].any()
    ring.close()
    with pytest.raises(EngineStopped), ring.slot():
        pass


@pytest.mark.parametrize(
    ("free", "host_bytes", "slot"),
    [
        (1 << 40, 0, 64 << 20),
        (64 << 30, 8 << 30, 64 << 20),
        (16 << 30, 8 << 30, 16 << 20),
        (24 << 30, 0, 16 << 20),
        (1 << 40, 256 << 20, 2 << 20),
        (100 << 20, 0, 64 << 10),
    ],
)
def test_the_ring_is_smaller_where_there_is_less_memory(free, host_bytes, slot, monkeypatch):
    monkeypatch.setattr(staging.memory, "room", lambda: free)
    assert staging_for(host_bytes=host_bytes) == Staging(16, slot)
    assert staging_for(3, 1 << 18, host_bytes) == Staging(3, 1 << 18)
    assert Staging(3, 1 << 18).bytes == 3 << 18
