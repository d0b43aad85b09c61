"""A device that copies beside its computing, later than it is told to. A copy reads what lies in its source when it
happens, so that memory that was used again too early arrives as wrong bytes."""

from __future__ import annotations

import queue
import random
import threading
import time
from contextlib import contextmanager

import torch
from threads_kit import started

WAIT = 60.0  # seconds after which a test that waits has failed


class LateDevice:
    """``Readback`` of a device that computes what it was given when ``computed`` is set.

    Attributes:
        readers: names of the threads that read.
    """

    def __init__(self) -> None:
        self.computed = threading.Event()
        self.readers: set[str] = set()
        self.error: Exception | None = None

    def mark(self):
        return self.computed

    @contextmanager
    def behind(self, mark):
        assert mark.wait(WAIT)
        yield

    def to_host(self, source):
        self.readers.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return source.clone()


class SlowDevice:
    """``mpic.kv.copies.Copies`` on a thread of its own. Computing is done by the thread that gives the work, so to be
    ordered behind a copy is to wait for it.

    Args:
        delays: seconds before a copy happens, one of which is drawn for each.

    Attributes:
        allocated: bytes of the buffers that were asked for.
        done: copies that have happened.
    """

    def __init__(self, delays=(0.0, 0.001), seed: int = 0) -> None:
        self.allocated = self.done = 0
        self.go = threading.Event()
        self.go.set()
        self.broken = False
        self._random, self._delays = random.Random(seed), delays
        self._work: queue.Queue = queue.Queue()
        self._thread = started(self._copy, daemon=True)

    @torch.inference_mode()  # in which vLLM's steps run
    def _copy(self) -> None:
        while (item := self._work.get()) is not None:
            copies, mark = item
            assert self.go.wait(WAIT)
            time.sleep(self._random.choice(self._delays))
            for target, source in copies:
                target.copy_(source)
                self.done += 1
            mark.set()

    def order(self) -> None:
        pass

    def buffer(self, shape, dtype):
        made = torch.empty(tuple(shape), dtype=dtype)
        made.view(-1).view(torch.uint8).fill_(255)  # not a number, in any type
        self.allocated += made.nbytes
        return made

    def start(self, target, source):
        return self.start_all([(target, source)])

    def start_all(self, copies):
        mark = threading.Event()
        self._work.put((list(copies), mark))
        return mark

    def follow(self, mark) -> None:
        assert mark.wait(WAIT)

    def wait(self, mark) -> None:
        if self.broken:
            raise RuntimeError("the device is lost")
        assert mark.wait(WAIT)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(WAIT)
