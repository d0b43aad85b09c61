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
from mpic.kernels.token_decoder import TokenDecoder
from mpic.kernels.writes import RowWrites
from mpic.model.loaded import LoadedModel

AHEAD = 64
"""Steps whose rotations are computed at once."""


class FusedDecode:
    """The decoding steps of a model whose steps are fused (``mpic.model.fused_step``).

    Args:
        tables: those of the runner, which knows by them whether a step continues the one before.

    ``counters``: ``steps_from_tokens``, which the model counts among its ``fused_steps``, too.
    """

    def __init__(self, model: LoadedModel, tables: StepTables) -> None:
        self._model, self._tables = model, tables
        self._used: tuple[TokenDecoder, StreamRows, RowWrites] | None = None
        self._positions: list[int] = []  # of the first step whose rotations are known
        self._turned = 0  # number of steps whose rotations are known
        self.counters: Counter[str] = Counter()

    def forget(self) -> None:
        """Discards the tables, so that the next step makes new ones whatever its rows are."""
        self._tables.forget()

    def run(self, slices: Sequence[BatchSlice], ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """Runs a step if it is one of decoding rows alone, and few enough.

        Args:
            ids: the rows' tokens, where ``slices`` do not have them yet (``Runner.run``).

        Returns:
            ``[rows, vocabulary]`` fp32, valid until the next step; None when the step has to be run in another way.
        """
        fused = self._model.fused
        decoder = None if fused is None else fused.token_decoder()
        if decoder is None or not 0 < len(slices) <= decoder.most_rows:
            return None
        if not all(part.is_decoding for part in slices):
            return None
        tokens = [part.rows.ids[part.lo] for part in slices] if ids is None else ids.tolist()
        positions = _positions(slices)
        if positions is None or min(tokens) < 0 or max(tokens) >= decoder.vocabulary:
            return None
        (rows, *others), writes = self._tables.together([(part, row) for row, part in enumerate(slices)])
        if others or type(rows) is not StreamRows or writes is None:
            return None
        if self._used is None or any(
            a is not b for a, b in zip(self._used, (decoder, rows, writes), strict=True)
        ):
            decoder.use(rows, writes)
            self._used, self._turned = (decoder, rows, writes), 0
        logits = decoder(tokens, self._step(decoder, positions))
        fused.counters["fused_steps"] += 1
        self.counters["steps_from_tokens"] += 1
        return logits.float()

    def _step(self, decoder: TokenDecoder, positions: list[int]) -> int:
        """Returns the number of the rotations of some positions, which are computed if they are not known."""
        step = positions[0] - self._positions[0] if self._turned else -1
        if 0 <= step < self._turned and all(
            at - first == step for at, first in zip(positions, self._positions, strict=True)
        ):
            return step
        following = (torch.arange(AHEAD)[:, None] + torch.tensor(positions)).flatten()[None]
        decoder.turn(*(table.view(AHEAD, len(positions), -1) for table in self._model.fused.turn(following)))
        self._positions, self._turned = positions, AHEAD
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
