"""The rotation by minus a base, which is found at load time by observing the model.

The model rotates queries and keys itself, at the positions a step gives it. Only the extra rotation of a query by
``-base``, for spans that lie elsewhere, is ours (``docs/design.md``, "Rotation on the query side"). The dimensions of a
layer's heads that turn, their pairs and their frequencies are not read from configurations: the same tokens are run at
shifted positions, and the rotation is the one that explains how the layer's keys have changed (``trace.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mpic.errors import ModelRefused
from mpic.kernels.attention import QueryRotation, rotate
from mpic.kernels.upload import send, upload

_KEPT = 4096
"""Bases whose rotations are kept on the device."""
_CHANGING = {
    "dynamic": "dynamic NTK changes the rotary frequencies with the length of the prompt",
    "longrope": "LongRoPE changes the rotary frequencies with the length of the prompt",
}


class Rotary:
    """The query rotations of layers with the same rotary embedding.

    Args:
        frequencies: ``[half]`` fp64, the angle of each pair of dimensions per position; negative where a model turns
            the other way.
        interleaved: True where dimensions (2i, 2i + 1) are pairs, False where (i, i + half) are.
        start: the first dimension that turns.
    """

    def __init__(
        self,
        frequencies: torch.Tensor,
        interleaved: bool = False,
        start: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.frequencies, self.interleaved, self.start = frequencies, interleaved, start
        self._device = torch.device(device)
        self._rows: dict[int, int] = {}
        self._table = torch.empty(2, 0, len(frequencies), device=device)

    @property
    def half(self) -> int:
        """Half of the rotary dimension."""
        return len(self.frequencies)

    def rotation(self, base: int) -> QueryRotation | None:
        """Return the rotation of queries that makes a span compiled at 0 appear at ``base``; None for base 0."""
        if base == 0:
            return None
        [row] = self._rows_of([base])
        return QueryRotation(self._table[0, row], self._table[1, row], self.interleaved, self.start)

    def rotations(self, bases: Sequence[int]) -> QueryRotation | None:
        """Return the rotations by minus several bases, stacked; None when all bases are 0."""
        if not any(bases):
            return None
        rows = upload({"rows": np.array(self._rows_of(bases))}, self._device)["rows"]
        return QueryRotation(self._table[0][rows], self._table[1][rows], self.interleaved, self.start)

    def explains(self, before: torch.Tensor, after: torch.Tensor, shift: int, limit: float) -> bool:
        """Return whether ``after [heads, rows, head_dim]`` is ``before`` at positions that are ``shift`` larger."""
        back = rotate(after, self._of(-shift * self.frequencies))
        return float((back - before).abs().max()) <= limit * max(float(before.abs().max()), 1e-30)

    # A normal tensor, because later callers may write the table inside or outside of inference mode.
    @torch.inference_mode(False)
    def _rows_of(self, bases: Sequence[int]) -> list[int]:
        """Return the rows of the rotations by these bases in the table, ``cos, sin [2, capacity, half]`` on the
        device, after adding new ones. Rotations that were returned earlier keep the table they were taken from."""
        new = [base for base in dict.fromkeys(bases) if base not in self._rows]
        if len(self._rows) + len(new) > self._table.shape[1]:
            new = list(dict.fromkeys(bases))
            self._rows = {}
            self._table = torch.empty(2, max(_KEPT, len(new)), self.half, device=self._device)
        if new:
            angle = -torch.tensor(new, dtype=torch.float64)[:, None] * self.frequencies
            first = len(self._rows)
            made = send(torch.stack([angle.cos(), angle.sin()]).float(), self._device)
            self._table[:, first : first + len(new)] = made
            self._rows |= {base: first + i for i, base in enumerate(new)}
        return [self._rows[base] for base in bases]

    def _of(self, angle: torch.Tensor) -> QueryRotation:
        cos, sin = angle.cos().float().to(self._device), angle.sin().float().to(self._device)
        return QueryRotation(cos, sin, self.interleaved, self.start)


class Unrotated:
    """The rotation of layers without rotary embedding, in which a span looks the same at every place."""

    def rotation(self, base: int) -> None:
        return None

    def rotations(self, bases: Sequence[int]) -> None:
        return None


def refuse_changing(model: nn.Module) -> None:
    """Raise ModelRefused if a rotary embedding's frequencies depend on the length of the prompt."""
    for module in model.modules():
        types: Any = getattr(module, "rope_type", None)
        for kind in types.values() if isinstance(types, dict) else (types,):
            if kind in _CHANGING:
                raise ModelRefused(
                    f"rope type '{kind}': {_CHANGING[kind]}, so a compiled chunk would not fit"
                )


def candidates(model: nn.Module, head_dim: int, device: torch.device) -> Iterator[Rotary]:
    """Yield every rotation of heads of a size by frequencies that the model holds."""
    found: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        if "inv_freq" not in name.rpartition(".")[2] or "original" in name:
            continue
        frequencies = buffer.detach().cpu().double().flatten()
        if not any(torch.equal(frequencies, other) for other in found):
            found.append(frequencies)
    for frequencies in found:
        spare = head_dim - 2 * len(frequencies)
        if spare < 0:
            continue
        for start, sign, interleaved in itertools.product({0, spare}, (1, -1), (False, True)):
            yield Rotary(sign * frequencies, interleaved, start, device)
