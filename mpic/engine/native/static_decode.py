"""Decoding steps over memory that stays where it is, captured in CUDA graphs.

A step in which every row is the next token of a request has the same launches each time. Only numbers differ: tokens,
positions, and the tables of the spans that the rows see. These are in buffers that are filled before the step, and the
step of each number of rows (a *bucket*; smaller batches are filled up) is captured once, when the engine starts. So a
step is one launch instead of one for each operation of the model. Without CUDA the same step runs as it would be
captured.

Everything else (links, compiled chunks, batches that do not fit the tables) runs the model's modules.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mpic.engine.native.batch import BatchSlice
from mpic.engine.native.step_tables import StepTables
from mpic.kernels.upload import upload
from mpic.kv.pool import Pool
from mpic.model.hooks import Step
from mpic.model.loaded import LoadedModel
from mpic.model.structure import RowInputs
from mpic.model.triton_attention import StaticAttention, StaticKernel

log = logging.getLogger(__name__)

Work = Callable[[], torch.Tensor]
"""Something the device does over memory that stays where it is; returns the same tensor each time."""

Capture = Callable[[Work], Work]
"""Runs some work once or more, then gives the same without the host's part."""


class Bucket(NamedTuple):
    """The steps of a fixed number of rows.

    Args:
        ids, positions: ``[rows]`` and ``[p, rows]`` int64, filled before each step.
        wanted: ``[rows]`` int64, the rows whose logits are wanted: all. Captured steps read it, and a CUDA graph keeps
            nothing alive that it reads.
        steps: the captured steps, one for each grid of the attention: for few items without holes, and for others.
    """

    rows: int
    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    steps: list[tuple[StaticKernel, Work]]


def bucket_sizes(most: int) -> list[int]:
    """Return the numbers of rows that steps are made for, the largest first: powers of two, and ``most``."""
    sizes = {most, *(1 << n for n in range(most.bit_length()))}
    return sorted(sizes, reverse=True)


class StaticDecode:
    """The decoding steps of a model over a pool.

    Args:
        most: rows of the largest step, before it is reduced to what fits.
        capture: captures each step; None runs it uncaptured.

    Raises:
        ModelRefused: the kernels do not support the model's layers, or not on this device.

    Attributes:
        most: rows of the largest step.

    ``counters``: ``static_steps``, ``static_too_large`` (batches that did not fit the tables).
    """

    def __init__(self, model: LoadedModel, pool: Pool, most: int, capture: Capture | None = None) -> None:
        attention = model.triton_attention()
        self._model, self.most = model, most
        self._attention = StaticAttention(attention, pool.arena, most)
        self._single_n = attention.tiles.single_n
        self._tables = StepTables(model, pool)
        self._left = 0  # number of steps until the tables are cut again
        self._running: Work | None = None
        self._logits: torch.Tensor | None = None
        self.counters: Counter[str] = Counter()
        self._buckets = [self._bucket(rows, capture) for rows in bucket_sizes(most)]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that stay: tables, partial results, logits."""
        return self._attention.nbytes + (0 if self._logits is None else self._logits.nbytes)

    @torch.inference_mode()
    def _bucket(self, rows: int, capture: Capture | None) -> Bucket:
        model, device = self._model, self._model.device
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        positions = torch.zeros(model.mrope, rows, dtype=torch.int64, device=device)
        wanted = torch.arange(rows, device=device)
        steps: list[tuple[StaticKernel, Work]] = []
        for kernel in self._attention.kernels(rows):

            def work(kernel: StaticKernel = kernel) -> torch.Tensor:
                step = Step([], [], model.kind_of, model.partial, kernel)
                found = model.forward(RowInputs(ids, model.embed(ids)), positions, step, wanted)
                if self._logits is None:  # set in the first step, which is not captured
                    self._logits = torch.zeros(self.most, found.shape[1], device=device)
                return self._logits[:rows].copy_(found)

            if capture is not None:
                no_calls = [model.kind_calls(kind, []) for kind in range(len(model.kinds))]
                self._attention.fill(kernel, [], no_calls)
                steps.append((kernel, capture(work)))
            else:
                steps.append((kernel, work))
        return Bucket(rows, ids, positions, wanted, steps)

    def forget(self) -> None:
        """Discard the tables, so that the next step makes new ones whatever its rows are."""
        self._tables.forget()

    @torch.inference_mode()
    def run(self, slices: Sequence[BatchSlice], ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run a step if it is one of decoding rows alone, and fits.

        Args:
            ids: the rows' tokens on the device, where the host does not know them yet (``Executor.run``).

        Returns:
            ``[rows, vocabulary]`` fp32, valid until the next step; None when the step has to be run in another way.
        """
        if not 0 < len(slices) <= self.most or not all(part.is_decoding for part in slices):
            return None
        bucket = min((one for one in self._buckets if one.rows >= len(slices)), key=lambda one: one.rows)
        self._running = self._prepared(slices, bucket)
        if self._running is None:
            self.forget()
            if not self.counters["static_too_large"]:
                log.warning(
                    "%d requests see more than static steps have room for: no CUDA graph", len(slices)
                )
            self.counters["static_too_large"] += 1
            return None
        self._fill(slices, bucket, ids)
        self.counters["static_steps"] += 1
        return self._running()[: len(slices)]

    def _prepared(self, slices: Sequence[BatchSlice], bucket: Bucket) -> Work | None:
        """Fill the tables for a step and return it, or None when the rows do not fit."""
        if self._tables.continues(slices) and self._left > 0:
            self._left -= 1
            self._attention.advance()
            return self._running
        writes, kinds = self._tables.alone(slices)
        self._left = self._single_n
        for kernel, work in bucket.steps:
            if self._attention.fill(kernel, writes, kinds):
                return work
        return None

    def _fill(self, slices: Sequence[BatchSlice], bucket: Bucket, known: torch.Tensor | None) -> None:
        """Copy the rows' tokens and positions into the bucket's buffers; the rows beyond them keep an earlier
        token's."""
        ids = np.array([part.rows.ids[part.lo] for part in slices], np.int64)
        positions = np.concatenate([s.rows.positions.numpy()[:, s.lo : s.hi] for s in slices], 1)
        on_device = upload({"ids": ids, "positions": positions}, self._model.device)
        bucket.ids[: len(slices)].copy_(on_device["ids"] if known is None else known)
        bucket.positions[:, : len(slices)].copy_(on_device["positions"])
