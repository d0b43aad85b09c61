"""Reading a device's memory beside what it computes: behind the mark, through two slots by turns."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mpic.kv.page_locked import PAGE_LOCKED
from mpic.kv.readback import CudaReadback, ReadbackAtOnce, cross, readback_for


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 200])
def test_a_slot_is_filled_again_only_when_what_it_held_has_been_taken_out(count):
    """A copy into a slot happens when its mark is waited for, at the latest when the slot is filled again."""
    source, target = torch.arange(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    slots = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    waited, started = [], 0

    def copied():
        nonlocal started
        number, started = started, started + 1
        assert number < 2 or number - 2 in waited, "the slot is still being read"
        return SimpleNamespace(synchronize=lambda: waited.append(number))

    cross(source, target, slots, copied)
    assert torch.equal(target, source) and waited == list(range(-(-count // 64)))


def test_what_is_read_comes_behind_the_mark_on_a_stream_of_its_own(monkeypatch):
    """A fake of ``torch.cuda`` records its calls in order. The device need not be the current one."""
    said, device = [], torch.device("cuda:1")

    class Stream:
        def __init__(self, device, name="own"):
            self.name = f"{name} stream of {device}"

        def wait_event(self, event):
            said.append(f"{self.name} waits for {event.name}")

    class Event:
        name = "the mark"

        def record(self, stream):
            said.append(f"{self.name} is made on the {stream.name}")

    @contextmanager
    def chosen(what):
        said.append(f"in {getattr(what, 'name', what)}")
        yield

    fakes = {"Stream": Stream, "current_stream": lambda device: Stream(device, "computing"), "Event": Event}
    for name, fake in (fakes | {"device": chosen, "stream": chosen}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    readback = readback_for(device, 4096)
    assert isinstance(readback, CudaReadback) and PAGE_LOCKED._budgets[readback] == 2 * 4096
    mark = readback.mark()
    assert said == ["the mark is made on the computing stream of cuda:1"]
    with readback.behind(mark):
        said.append("reading")
    assert said[1:] == [
        "in cuda:1",
        "in own stream of cuda:1",
        "own stream of cuda:1 waits for the mark",
        "reading",
    ]


def test_a_cpu_has_computed_what_it_was_given():
    assert isinstance(readback_for(torch.device("cpu")), ReadbackAtOnce)
