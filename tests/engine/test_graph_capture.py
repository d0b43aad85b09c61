"""The capture of CUDA graphs, over a fake of ``torch.cuda`` that records its calls in order."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from mpic.engine.native.graph_capture import GraphCapture

DEVICE = torch.device("cuda:1")
RUN = ["on cuda:1", "side waits for main", "on side", "work", "waiting: error", "work", "waiting: as before"]
"""The work is run twice beside everything else, the second time so that waiting for the device is an error."""
BEGIN = ["main waits for side", "wait", "give back", "on side", "begin 1 in pool, thread_local"]


class Stream:
    def __init__(self, name, said):
        self.name, self._said = name, said

    def wait_stream(self, other):
        self._said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def said(monkeypatch):
    said: list[str] = []

    class Graph:
        made = 0

        def __init__(self):
            Graph.made += 1
            self.number = Graph.made

        def capture_begin(self, pool, mode):
            said.append(f"begin {self.number} in {pool}, {mode}")

        def capture_end(self):
            said.append(f"end {self.number}")

        def replay(self):
            said.append(f"replay {self.number}")

    @contextmanager
    def entered(what):
        said.append(f"on {getattr(what, 'name', what)}")
        yield

    fakes = {
        "Stream": lambda device: Stream("side", said),
        "current_stream": lambda device: Stream("main", said),
        "graph_pool_handle": lambda: "pool",
        "stream": entered,
        "device": entered,
        "CUDAGraph": Graph,
        "get_sync_debug_mode": lambda: "as before",
        "set_sync_debug_mode": lambda mode: said.append(f"waiting: {mode}"),
        "synchronize": lambda device: said.append("wait"),
        "empty_cache": lambda: said.append("give back"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return said


def test_work_is_run_twice_beside_everything_else_and_then_captured(said):
    out = torch.zeros(3)
    replay = GraphCapture(DEVICE)(lambda: said.append("work") or out)
    assert replay() is out
    assert said == [*RUN, *BEGIN, "work", "end 1", "main waits for side", "replay 1"]


def test_work_that_cuts_itself_becomes_one_graph_for_each_piece_in_the_memory_of_the_others(said):
    def work(cut):
        said.append("work")
        for part in "bc":
            cut()
            said.append(part)

    for replay in GraphCapture(DEVICE).pieces(work):
        replay()
    pieces = [*BEGIN, "work", "end 1", "begin 2 in pool, thread_local", "b", "end 2"]
    pieces += ["begin 3 in pool, thread_local", "c", "end 3", "main waits for side"]
    once = [*RUN[:4], "b", "c", RUN[4], "work", "b", "c", RUN[6]]
    assert said == [*once, *pieces, "replay 1", "replay 2", "replay 3"]


def test_work_that_waits_is_refused_before_a_capture_begins(said):
    """A capture that fails leaves torch's allocator in doubt whether one is under way."""

    def waits():
        said.append("work")
        if "waiting: error" in said:
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        GraphCapture(DEVICE)(waits)
    assert said == RUN


def test_a_capture_that_fails_is_ended(said):
    def fails(cut):
        said.append("work")
        cut()
        if said.count("work") == 3:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        GraphCapture(DEVICE).pieces(fails)
    assert said[-3:] == ["end 1", "begin 2 in pool, thread_local", "end 2"]
