"""Steps on the CPU by a decoder's program in C (``mpic.model.program``).

A decoding step is one call, from the requests' last tokens to their logits; one that continues the step before takes
that one's tables, advanced. Other steps are run layer by layer. What the program does not do (features for layers
behind the first) is left to the model's modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpic.engine.native.batch import BatchSlice
from mpic.engine.native.executor import TorchExecutor
from mpic.kernels.decoder import WholeDecoder
from mpic.kernels.stream import StreamRows
from mpic.kernels.writes import RowWrites
from mpic.kv.barrier import LayerBarrier
from mpic.kv.pool import Pool
from mpic.model.hooks import Step
from mpic.model.loaded import LoadedModel
from mpic.model.program import Program, Unfused
from mpic.model.structure import RowInputs


class CpuExecutor(TorchExecutor):
    """The steps of a model with a program. ``counters``: ``fused_steps`` of decoding rows, and ``fused_block_steps`` of
    all others that the program runs."""

    def __init__(self, model: LoadedModel, pool: Pool, program: Program) -> None:
        super().__init__(model, pool)
        self._program = program
        self.decoder: WholeDecoder | None = None
        self.what = "a program in C runs the decoder's layers, and decoding steps in one call"
        try:
            self.decoder = program.whole_decoder()
        except Unfused as reason:
            self.what = f"a program in C runs the decoder's layers; no decoding steps in one call: {reason}"
        self._used: tuple[StreamRows, RowWrites] | None = None  # the tables that the decoder has
        self.reuses_logits = self.decoder is not None

    def run(
        self,
        slices: Sequence[BatchSlice],
        barrier: LayerBarrier | None = None,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Executor.run``."""
        if self.decoder is not None and barrier is None and all(part.is_decoding for part in slices):
            logits = self._decoded(self.decoder, slices, ids)
            if logits is not None:
                self._counters["fused_steps"] += 1
                return logits
        return super().run(slices, barrier, ids)

    def forward(
        self, inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor
    ) -> torch.Tensor:
        logits = self._program.run(inputs, positions, step, wanted)
        if logits is None:
            return super().forward(inputs, positions, step, wanted)
        self._counters["fused_block_steps"] += 1
        return logits

    def _decoded(
        self, decoder: WholeDecoder, slices: Sequence[BatchSlice], ids: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run a step of decoding rows in one call; None when there are too many rows, or they do not fit."""
        tokens = [part.rows.ids[part.lo] for part in slices] if ids is None else ids.tolist()
        if not 0 < len(slices) <= decoder.most_rows or min(tokens) < 0 or max(tokens) >= decoder.vocabulary:
            return None
        (rows, *others), writes = self.tables.single_rows([(part, row) for row, part in enumerate(slices)])
        if others or type(rows) is not StreamRows or writes is None:
            return None
        if self._used is None or rows is not self._used[0] or writes is not self._used[1]:
            decoder.use(rows, writes)
            self._used = rows, writes
        positions = np.concatenate([s.rows.positions.numpy()[:, s.lo : s.hi] for s in slices], 1)
        return decoder(tokens, *self._program.rotations(torch.from_numpy(positions))).float()
