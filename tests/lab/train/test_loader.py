"""Batches that other processes draw beside a training process are drawn from the same data, for where the stage is."""

import os
import resource
import time
from contextlib import closing, suppress

import psutil
import torch

from mpic_lab.train import loader
from mpic_lab.train.generations import FIRST
from mpic_lab.train.loader import Draw, default_processes, drawn_beside

BASE = next(stage for stage in FIRST.stages if stage.name == "base")
VISION = next(stage for stage in FIRST.stages if stage.name == "vision")


def test_processes_draw_batches_of_the_asked_size_and_end_with_the_iterator():
    before = set(psutil.Process().children(recursive=True))
    with closing(drawn_beside(Draw(1, BASE, 256), 5, 5, 2, lambda: 0.0)) as drawn:
        batches = [next(drawn) for _ in range(4)]
        assert len(set(psutil.Process().children(recursive=True)) - before) >= 2
    assert all(0 < batch.tokens <= 256 and batch.target.any() for batch in batches)
    # each process draws with a seed of its own
    assert len({tuple(batch.ids.flatten().tolist()) for batch in batches}) == 4
    patience = time.monotonic() + 20
    while any("spawn_main" in command for command in _commands(before)):
        assert time.monotonic() < patience
        time.sleep(0.1)


def _commands(before):
    """Yields the command lines of processes that this one has started meanwhile, and that have not ended."""
    for child in set(psutil.Process().children(recursive=True)) - before:
        with suppress(psutil.Error):
            yield " ".join(child.cmdline())


def test_they_draw_for_the_progress_of_the_stage():
    """The vision stage begins with quadrants of images, which are half as wide."""
    progress = [0.0]
    with closing(drawn_beside(Draw(2, VISION, 256), 5, 5, 1, lambda: progress[0])) as drawn:
        first = next(drawn)[0].shape
        progress[0] = 1.0
        last = [next(drawn)[0].shape for _ in range(6)][-1]
    assert (first[1], last[1]) == (168, 336)


def test_a_gpu_has_them_and_a_cpu_draws_between_its_steps(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert default_processes(torch.device("cuda")) == 12
    assert default_processes(torch.device("cuda"), workers=2) == 6
    assert default_processes(torch.device("cpu")) == 0
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert default_processes(torch.device("cuda")) == 1


def test_the_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    loader.allow_descriptors()
    assert given == [(4096, 4096)]
