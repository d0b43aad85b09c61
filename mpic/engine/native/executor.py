"""A step on the device. An ``Executor`` is given the rows of a batch, which are scheduled and whose KV has a place, and
returns logits. ``choose.py`` chooses it once, when an engine is made:

- ``TorchExecutor`` runs the model's modules: any model on any device, slow and obvious.
- ``CpuExecutor`` (``cpu_executor.py``) runs a decoder's program in C.
- ``CudaExecutor`` (``cuda_executor.py``) replays CUDA graphs, and lets steps be launched ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from mpic.engine.native.batch import BatchSlice, CompileJob
from mpic.engine.native.step_tables import StepTables
from mpic.kernels.upload import send, upload
from mpic.kv.barrier import LayerBarrier
from mpic.kv.pool import Pool
from mpic.model.hooks import Observed, Step
from mpic.model.loaded import LoadedModel
from mpic.model.structure import RowInputs


class Executor(ABC):
    """Runs the steps of a model over a pool. No method but ``wait`` waits for the device
    (``tests/engine/test_device_syncs.py``).

    Attributes:
        ahead: whether a step may be launched before the last one's tokens are known (``ahead.py``).
        reuses_logits: whether a step may overwrite the logits of the one before it.
        what: what it does and why, in a line for the log and for ``/health``.
    """

    ahead = reuses_logits = False
    what = ""

    def __init__(self, model: LoadedModel, pool: Pool) -> None:
        self.model, self.pool = model, pool
        self._counters: Counter[str] = Counter()

    @property
    def counters(self) -> Counter[str]:
        """The steps that were run in each of its ways."""
        return self._counters

    @abstractmethod
    def run(
        self,
        slices: Sequence[BatchSlice],
        barrier: LayerBarrier | None = None,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step of all slices.

        Every layer writes the rows' keys and values before any row attends, so a link row may see chunks that are
        compiled by other rows of the same step.

        Args:
            barrier: loads that the step follows: every layer waits for the same layer of each load before any row
                attends.
            ids: the rows' tokens ``[rows]`` int64 on the device, where the host does not know them yet; they are
                tokens of text.

        Returns:
            ``[w, vocabulary]`` fp32 on the device, one row for each slice that wants logits, in order; valid until the
            next step.
        """

    @abstractmethod
    def forget(self) -> None:
        """Let go of the last step's requests, with what their users have sent, once there is nothing left to do."""

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()


class TorchExecutor(Executor):
    """Packs the rows and runs the model's modules once (``mpic.model.hooks``). The others do what it does."""

    what = "torch runs the model's modules"

    def __init__(self, model: LoadedModel, pool: Pool) -> None:
        super().__init__(model, pool)
        self.tables = StepTables(model, pool)

    def run(
        self,
        slices: Sequence[BatchSlice],
        barrier: LayerBarrier | None = None,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Executor.run``."""
        wanted, starts, total = [], [], 0
        for part in slices:
            starts.append(total)
            total += part.hi - part.lo
            if part.wants_logits:
                wanted.append(total - 1)
        positions = np.concatenate([s.rows.positions.numpy()[:, s.lo : s.hi] for s in slices], 1)
        table = upload({"positions": positions, "wanted": np.array(wanted, np.int64)}, self.model.device)
        inputs = (
            row_inputs(self.model, slices, starts) if ids is None else RowInputs(ids, self.model.embed(ids))
        )
        step = self.tables.step(slices, starts)
        step.barrier, step.observed = barrier, observed_rows(slices, starts)
        return self.forward(inputs, table["positions"], step, table["wanted"])

    def forward(
        self, inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run packed rows; see ``LoadedModel.forward``."""
        return self.model.forward(inputs, positions, step, wanted)

    def forget(self) -> None:
        self.tables.forget()


def row_inputs(model: LoadedModel, slices: Sequence[BatchSlice], starts: Sequence[int]) -> RowInputs:
    """Return the inputs of a step's rows."""
    device = model.device
    ids = torch.tensor([i for s in slices for i in s.rows.ids[s.lo : s.hi]], dtype=torch.int64)
    embeds = model.embed(ids)
    if not any(s.rows.embedded for s in slices):
        return RowInputs(ids, embeds)
    embeds = embeds.clone()
    mask = torch.zeros(len(ids), dtype=torch.bool)
    features = []
    for part, offset in zip(slices, starts, strict=True):
        for start, values, deep in part.rows.embedded:
            lo, hi = max(part.lo, start), min(part.hi, start + len(values))
            if lo >= hi:
                continue
            rows = slice(offset + lo - part.lo, offset + hi - part.lo)
            embeds[rows] = send(values[lo - start : hi - start], device)
            if deep is not None:
                mask[rows] = True
                features.append(send(deep[:, lo - start : hi - start], device).to(embeds.dtype))
    if not features:
        return RowInputs(ids, embeds)
    return RowInputs(ids, embeds, (send(mask, device), torch.cat(features, 1)))


def observed_rows(slices: Sequence[BatchSlice], starts: Sequence[int]) -> list[tuple[slice, Observed]]:
    """Return the rows of a step whose queries a press looks at: the last ones of its chunk."""
    found = []
    for (rows, lo, hi), start in zip(slices, starts, strict=True):
        if isinstance(rows, CompileJob) and rows.observed is not None:
            first = max(lo, len(rows) - rows.observed.count)
            if first < hi:
                found.append((slice(start + first - lo, start + hi - lo), rows.observed))
    return found
