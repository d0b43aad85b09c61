"""Batches for training, which a process draws itself or which other processes draw beside it.

One core draws 30 to 40 thousand tokens of conversations and images a second. A CPU trains one or two thousand, so there
a process draws its own batches between two steps; a GPU trains more than a core draws, so there other processes draw
ahead.
"""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mpic_lab.generator.tokenizer import build_tokenizer
from mpic_lab.train.batch import Encoder, collate_branches
from mpic_lab.train.generations import GENERATIONS, Stage

AHEAD = 2
"""Batches that each of the other processes draws ahead; a batch is of where its stage was when it was drawn."""


@dataclass(frozen=True)
class Draw:
    """A source of the batches of one stage.

    Attributes:
        generation: generation of the demo model.
        tokens: tokens of a batch.
        begun: where in the base stage's curriculum the run begins.
        whole: True if a vision stage begins with whole images.
    """

    generation: int
    stage: Stage
    tokens: int
    begun: float = 0.0
    whole: bool = False

    def batches(
        self, encoder: Encoder, seed: int, common_seed: int, progress: Callable[[], float]
    ) -> Iterator[Any]:
        """Yields batches without end.

        Args:
            seed, common_seed: the process's own, and one that it has in common with those that train beside it.
            progress: returns how far the stage is, in [0, 1]; asked for every batch.
        """
        generation, stage = GENERATIONS[self.generation], self.stage
        if stage.name == "vision":
            # a tower that has been trained already need not begin with quadrants
            yield from generation.scenes(encoder, seed, lambda: 1.0 if self.whole else progress())
        batches = generation.batches(encoder, seed, common_seed, self.tokens, stage.pic_share)
        drawn = iter(batches)
        while True:
            batches.progress = 1.0 if stage.name == "pic" else self.begun + (1 - self.begun) * progress()
            yield collate_branches(*next(drawn))


class _Drawn(IterableDataset):
    """The batches that one of the other processes draws."""

    def __init__(self, draw: Draw, seed: int, common_seed: int, progress: torch.Tensor) -> None:
        self._draw, self._seeds, self._progress = draw, (seed, common_seed), progress

    def __iter__(self) -> Iterator[Any]:
        torch.set_num_threads(1)
        info = get_worker_info()
        number = info.id if info else 0
        # processes of one number are asked for a batch at the same time, and have the second seed in common
        seeds = [random.Random(f"{seed} {number}").getrandbits(30) for seed in self._seeds]
        encoder = GENERATIONS[self._draw.generation].encoder(build_tokenizer())
        yield from self._draw.batches(encoder, *seeds, lambda: float(self._progress))


def drawn_beside(
    draw: Draw, seed: int, common_seed: int, processes: int, progress: Callable[[], float]
) -> Iterator[Any]:
    """Yields batches that other processes draw ahead, by turns; they end with the iterator.

    Args:
        seed, common_seed: see ``Draw.batches``.
        progress: returns how far the stage is, in [0, 1]; it is asked when a batch is taken.
    """
    allow_descriptors()
    shared = torch.zeros((), dtype=torch.float64).share_memory_()
    shared.fill_(progress())
    # A process that is forked beside CUDA's threads may hang, so these are new interpreters.
    batches = DataLoader(
        _Drawn(draw, seed, common_seed, shared),
        batch_size=None,
        num_workers=processes,
        prefetch_factor=AHEAD,
        multiprocessing_context="spawn",
    )
    for batch in batches:
        yield batch
        shared.fill_(progress())


def allow_descriptors() -> None:
    """Raises the limit of open files as far as the system lets it: every tensor of a batch that waits is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def default_processes(device: torch.device, workers: int = 1) -> int:
    """Returns how many processes draw beside each of ``workers`` that train on such devices: none beside a CPU."""
    if device.type != "cuda":
        return 0
    return max(1, min(12, (os.cpu_count() or 1) // workers - 2))
