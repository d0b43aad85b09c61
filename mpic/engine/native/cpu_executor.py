"""Steps on the CPU by a decoder's program in C (``mpic.model.program``).

A decoding step is one call, from the requests' last tokens to their logits. One that continues the step before differs
from it in a few numbers, so nothing is made anew for it: the tables are advanced, and the rotations of many steps are
computed at once. Other steps are run layer by layer. What the program does not do (features for layers behind the
first) is left to the model's modules.
"""

from __future__ import annotations

from collections.abc import Sequence

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

ROTATED = 64
"""Steps whose rotations are computed at once."""


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
        self._rotated: list[int] = []  # the positions of the first step whose rotations the decoder has
        self._step = 0  # the last step that was run, counted from that one
        self._advanced = -1  # steps that had advanced the tables by then
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
        is_used = self._used is not None and rows is self._used[0] and writes is self._used[1]
        if is_used and self.tables.advanced == self._advanced + 1 and self._step + 1 < ROTATED:
            self._step += 1  # the rows of the last step, each at the next position
        else:
            positions = _positions(slices)
            if positions is None:
                return None
            if not is_used:
                decoder.use(rows, writes)
                self._used, self._rotated = (rows, writes), []
            self._step = self._rotations_of(decoder, positions)
        self._advanced = self.tables.advanced
        return decoder(tokens, self._step).float()

    def _rotations_of(self, decoder: WholeDecoder, positions: list[int]) -> int:
        """Return the number of the rotations of some positions, which are computed if the decoder has them not."""
        first = self._rotated
        if len(first) == len(positions):
            step = positions[0] - first[0]
            if 0 <= step < ROTATED and all(
                at - one == step for at, one in zip(positions, first, strict=True)
            ):
                return step
        following = (torch.arange(ROTATED)[:, None] + torch.tensor(positions)).flatten()[None]
        tables = self._program.rotations(following)
        decoder.rotate(*(table.view(ROTATED, len(positions), -1) for table in tables))
        self._rotated = positions
        return 0


def _positions(slices: Sequence[BatchSlice]) -> list[int] | None:
    """Return the rows' positions, or None where a row has another on each axis."""
    found = []
    for rows, lo, _ in slices:
        position, *others = rows.positions.numpy()[:, lo].tolist()
        if any(other != position for other in others):
            return None
        found.append(position)
    return found
