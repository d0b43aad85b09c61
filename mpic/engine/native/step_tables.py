"""The tables of a step: where each row writes, and what it attends to.

Most steps continue the one before: the same rows that stand alone (decoding), each one own token further. Then the
tables of the last step are advanced: nothing has to be looked up on the host and nothing copied to the device. After
anything else they are made anew, and always for a model with windows, where what a row sees begins elsewhere each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpic.engine.native.batch import BatchSlice
from mpic.engine.native.step_parts import Continuation, Part, calls_of, part_of
from mpic.kernels.attention import SingleRows
from mpic.kernels.writes import RowWrites
from mpic.kv.pool import Pool
from mpic.model.hooks import Step, StepKernel
from mpic.model.loaded import LoadedModel


class StepTables:
    """Makes the tables of one step after the other.

    Attributes:
        made, advanced: steps whose single rows' tables were made, and those for which the last ones were advanced.
    """

    def __init__(self, model: LoadedModel, pool: Pool) -> None:
        self._model, self._pool = model, pool
        self._continuation = Continuation()
        self._writes: RowWrites | None = None
        self._singles: list[SingleRows] = []  # by kind of layer
        self._kernel: StepKernel | None = None
        self.made = self.advanced = 0

    def step(self, slices: Sequence[BatchSlice], starts: Sequence[int]) -> Step:
        """Returns the step of some slices, whose rows begin at ``starts``.

        Blocks of rows attend span by span; rows that stand alone go together, unless the implementation takes whole
        steps and gathers them itself."""
        whole = self._model.triton is not None
        placed = list(zip(slices, starts, strict=True))
        alone = [(part, start) for part, start in placed if part.hi - part.lo == 1]
        blocks = [self._part(*at) for at in placed if whole or at[0].hi - at[0].lo > 1]
        calls = calls_of(blocks, self._model.kinds)
        kinds = [self._model.kind_calls(i, calls[kind.window]) for i, kind in enumerate(self._model.kinds)]
        step = Step([part.write for part in blocks], kinds, self._model.kind_of, self._model.partial)
        if whole:
            if len(alone) == len(slices):
                step.kernel = self._whole(step, alone)
            else:
                self._continuation.forget()
        elif alone:
            singles, step.single_writes = self._together(alone)
            step.kinds = [kind._replace(singles=rows) for kind, rows in zip(kinds, singles, strict=True)]
            if step.single_writes is None:
                step.writes += [self._part(*at).write for at in alone]
        else:
            self._continuation.forget()
        return step

    def forget(self) -> None:
        """Makes the next step's tables anew, whatever its rows are."""
        self._continuation.forget()

    def _continues(self, alone: Sequence[tuple[BatchSlice, int]]) -> bool:
        """Returns whether these rows are the last step's, one token further, and no window moves over what they see."""
        state = (self._pool.moves, self._model.partial, self._model.streams, self._model.triton)
        follows = self._continuation.follows(alone, state)
        return follows and not any(kind.window for kind in self._model.kinds)

    def _together(self, alone: list[tuple[BatchSlice, int]]) -> tuple[list[SingleRows], RowWrites | None]:
        """Returns the tables of the rows that stand alone: by kind of layer what they attend to, and where they write
        (None: as blocks do, since layers differ in their heads)."""
        if self._continues(alone):
            advanced = [rows.advance() for rows in self._singles]
            if None not in advanced:
                self._singles = advanced
                if self._writes is not None:
                    self._writes.advance()
                self.advanced += 1
                return self._singles, self._writes
        self.made += 1
        calls = calls_of([self._part(*at) for at in alone], self._model.kinds)
        kinds = enumerate(self._model.kinds)
        self._singles = [self._model.single_rows(i, calls[kind.window]) for i, kind in kinds]
        self._writes = None if self._model.is_uneven else self._row_writes(alone)
        return self._singles, self._writes

    def _row_writes(self, alone: list[tuple[BatchSlice, int]]) -> RowWrites:
        return RowWrites(
            self._pool.arena,
            [start for _, start in alone],
            [self._pool.kv(part.rows.extent).data for part, _ in alone],
            [part.lo - part.rows.mapped for part, _ in alone],
        )

    def _whole(self, step: Step, alone: list[tuple[BatchSlice, int]]) -> StepKernel:
        """Returns the tables of a step of single rows for an implementation that takes it whole."""
        if self._continues(alone) and (advanced := self._kernel.advance()) is not None:
            self.advanced += 1
        else:
            self.made += 1
            advanced = self._model.triton.prepare(step, len(alone))
        self._kernel = advanced
        return advanced

    def _part(self, part: BatchSlice, start: int) -> Part:
        masks = (
            torch.device("cpu") if self._model.triton is not None else None
        )  # its tables are made on the host
        return part_of(self._pool, part, start, masks)
