"""Decoding steps on the CPU that are one call, from the requests' last tokens to their logits.

A step in which every row is the next token of a request and which continues the one before differs from it in a few
numbers. So nothing is made anew for it: the tables are advanced, and the rotations of many steps are computed at once.
Everything else takes the runner's other way, which computes the same numbers to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from mpic.engine.native.batch import BatchSlice
from mpic.engine.native.step_tables import StepTables
from mpic.kernels.stream import StreamRows
from mpic.kernels.whole_decoder import WholeDecoder
from mpic.kernels.writes import RowWrites
from mpic.model.fused_layers import StepsInOneCall
from mpic.model.loaded import LoadedModel

ROTATED = 64
"""Steps whose rotations are computed at once."""


class FusedDecode:
    """The decoding steps of a model whose steps are fused (``mpic.model.fused_step``).

    Args:
        tables: those of the runner, which knows by them whether a step continues the one before.

    ``counters``: ``steps_from_tokens``, which the model counts among its ``fused_steps``, too.
    """

    def __init__(self, model: LoadedModel, tables: StepTables) -> None:
        self._model, self._tables = model, tables
        self._fused: StepsInOneCall | None = None
        self._decoder: WholeDecoder | None = None  # of these fused steps
        self._used: tuple[StreamRows, RowWrites] | None = None  # the tables that the decoder has
        self._rotated: list[int] = []  # the positions of the first step whose rotations the decoder has
        self._step = 0  # the last step that was run, counted from that one
        self._advanced = -1  # steps that had advanced the tables by then
        self.counters: Counter[str] = Counter()

    def run(self, slices: Sequence[BatchSlice], ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """Runs a step if it is one of decoding rows alone, and few enough.

        Args:
            ids: the rows' tokens, where ``slices`` do not have them yet (``Runner.run``).

        Returns:
            ``[rows, vocabulary]`` fp32, valid until the next step; None when the step has to be run in another way.
        """
        fused = self._model.fused
        if fused is None or not all(part.is_decoding for part in slices) or not fused.begins_with_tokens():
            return None
        if fused is not self._fused:
            self._fused, self._decoder = fused, fused.whole_decoder()
            self._used, self._rotated = None, []
        decoder = self._decoder
        tokens = [part.rows.ids[part.lo] for part in slices] if ids is None else ids.tolist()
        if not 0 < len(slices) <= decoder.most_rows or min(tokens) < 0 or max(tokens) >= decoder.vocabulary:
            return None
        (rows, *others), writes = self._tables.single_rows([(part, row) for row, part in enumerate(slices)])
        if others or type(rows) is not StreamRows or writes is None:
            return None
        is_used = self._used is not None and rows is self._used[0] and writes is self._used[1]
        if is_used and self._tables.advanced == self._advanced + 1 and self._step + 1 < ROTATED:
            self._step += 1  # the rows of the last step, each at the next position
        else:
            positions = _positions(slices)
            if positions is None:
                return None
            if not is_used:
                decoder.use(rows, writes)
                self._used, self._rotated = (rows, writes), []
            self._step = self._rotations_of(positions)
        self._advanced = self._tables.advanced
        logits = decoder(tokens, self._step)
        fused.counters["fused_steps"] += 1
        self.counters["steps_from_tokens"] += 1
        return logits.float()

    def forget(self) -> None:
        """Discards the tables, which are the runner's."""
        self._tables.forget()

    def _rotations_of(self, positions: list[int]) -> int:
        """Returns the number of the rotations of some positions, which are computed if the decoder has them not."""
        first = self._rotated
        if len(first) == len(positions):
            step = positions[0] - first[0]
            if 0 <= step < ROTATED and all(
                at - one == step for at, one in zip(positions, first, strict=True)
            ):
                return step
        following = (torch.arange(ROTATED)[:, None] + torch.tensor(positions)).flatten()[None]
        tables = self._fused.rotations(following)
        self._decoder.rotate(*(table.view(ROTATED, len(positions), -1) for table in tables))
        self._rotated = positions
        return 0


def _positions(slices: Sequence[BatchSlice]) -> list[int] | None:
    """Returns the rows' positions, or None where a row has another on each axis."""
    found = []
    for rows, lo, _ in slices:
        position, *others = rows.positions.numpy()[:, lo].tolist()
        if any(other != position for other in others):
            return None
        found.append(position)
    return found
