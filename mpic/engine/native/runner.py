"""A step on the device: pack the scheduled rows of a batch, run the model once, return logits."""

from __future__ import annotations

import numpy as np
import torch

from mpic.engine.native.batch import BatchSlice, CompileJob
from mpic.engine.native.fused_decode import FusedDecode
from mpic.engine.native.piecewise import PiecewiseSteps
from mpic.engine.native.static_decode import StaticDecode
from mpic.engine.native.step_tables import StepTables
from mpic.kernels.upload import send, upload
from mpic.kv.barrier import LayerBarrier
from mpic.kv.pool import Pool
from mpic.model.hooks import Observed
from mpic.model.loaded import LoadedModel
from mpic.model.structure import RowInputs


class Runner:
    """Builds and runs packed forwards. ``run`` does not wait for the device (``tests/engine/test_device_syncs.py``).

    Args:
        pool: the pool; None if only ``inputs`` is used.

    Attributes:
        static: runs the decoding steps that fit it; None: every step is a packed forward.
        piecewise: runs the other steps that fit it.
    """

    def __init__(self, model: LoadedModel, pool: Pool | None) -> None:
        self.model, self.pool = model, pool
        self.tables = StepTables(model, pool) if pool is not None else None
        self.static: StaticDecode | FusedDecode | None = None
        self.piecewise: PiecewiseSteps | None = None

    def run(
        self, slices: list[BatchSlice], barrier: LayerBarrier | None = None, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs one forward of all slices.

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
        if self.static is not None and barrier is None:
            logits = self.static.run(slices, ids)
            if logits is not None:
                return logits
        wanted, starts, total = [], [], 0
        for part in slices:
            starts.append(total)
            total += part.hi - part.lo
            if part.wants_logits:
                wanted.append(total - 1)
        positions = np.concatenate([s.rows.positions.numpy()[:, s.lo : s.hi] for s in slices], 1)
        table = upload({"positions": positions, "wanted": np.array(wanted, np.int64)}, self.model.device)
        inputs = self.inputs(slices, starts) if ids is None else RowInputs(ids, self.model.embed(ids))
        step = self.tables.step(slices, starts)
        step.barrier, step.observed = barrier, observed_rows(slices, starts)
        arguments = (inputs, table["positions"], step, table["wanted"])
        if self.piecewise is not None:
            logits = self.piecewise.run(*arguments)
            if logits is not None:
                return logits
        return self.model.forward(*arguments)

    @property
    def reuses_logits(self) -> bool:
        """True if a step may overwrite the logits of the one before it."""
        return self.static is not None or self.piecewise is not None

    def forget(self) -> None:
        """Lets go of the last step's requests, with what their users have sent, once there is nothing left to do."""
        for tables in (self.tables, self.static):
            if tables is not None:
                tables.forget()

    def wait(self) -> None:
        """Waits until the device has finished its work."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    def inputs(self, slices: list[BatchSlice], starts: list[int]) -> RowInputs:
        """Returns the inputs of a step's rows."""
        device = self.model.device
        ids = torch.tensor([i for s in slices for i in s.rows.ids[s.lo : s.hi]], dtype=torch.int64)
        embeds = self.model.embed(ids)
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


def observed_rows(slices: list[BatchSlice], starts: list[int]) -> list[tuple[slice, Observed]]:
    """Returns the rows of a step whose queries a press looks at: the last ones of its chunk."""
    found = []
    for (rows, lo, hi), start in zip(slices, starts, strict=True):
        if isinstance(rows, CompileJob) and rows.observed is not None:
            first = max(lo, len(rows) - rows.observed.count)
            if first < hi:
                found.append((slice(start + first - lo, start + hi - lo), rows.observed))
    return found
