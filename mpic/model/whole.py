"""A step for an implementation that takes it as a whole: hooks' writes and calls become tables of offsets."""

from __future__ import annotations

import torch

from mpic.errors import ModelRefused
from mpic.kernels.spans import Shift
from mpic.kv.chunk import KVShape
from mpic.model.hooks import Layers, Step
from mpic.model.rotary import Rotary


class TritonSteps:
    """Prepares steps for the Triton kernels.

    ``programs`` and ``least`` say how finely tiles are cut along their keys (``mpic.kernels.triton.tiles.Shape``).

    Args:
        heads: query heads.

    Raises:
        ModelRefused: Triton is missing, the device is none it compiles for, or the heads have a size that the
            kernels do not take.
    """

    programs: int | None = None
    least: int = 256

    def __init__(
        self, shape: KVShape, heads: int, rotary: Rotary, device: torch.device, dtype: torch.dtype
    ) -> None:
        try:
            from mpic.kernels.triton import step
        except ImportError as error:
            raise ModelRefused(f"attention 'triton' needs the package triton: {error}") from error
        if not step.available(device):
            raise ModelRefused(f"attention 'triton' needs CUDA and does not run on {device}")
        if shape.head_dim % 16 or shape.head_dim > 256:
            raise ModelRefused(
                f"attention 'triton' takes heads of 16, 32, ... 256 dimensions, not {shape.head_dim}"
            )
        self._step = step
        self._geometry = step.Geometry(heads, shape.kv_heads, shape.head_dim, rotary.half, rotary.interleaved)
        self.tiles = step.tiles_for(device, dtype, shape.head_dim)

    @property
    def name(self) -> str:
        """For ``/health``."""
        return self._step.name(self.tiles)

    def __call__(self, step: Step, rows: int) -> object:
        """The step's tables on the device. Pieces of one extent lie where their views say, so nothing is copied."""
        anchor = step.writes[0].piece.kv
        shifts: list[Shift] = []
        index: dict[int, int] = {}
        calls = []
        for call in step.calls:
            shift = 0
            if call.shift is not None:
                shift = index.get(id(call.shift), 0)
                if not shift:
                    shifts.append(call.shift)
                    shift = index[id(call.shift)] = len(shifts)
            where = self._where(call.piece, anchor)
            calls.append(self._step.Call(call.rows.start, call.rows.stop, where, call.causal, shift))
        writes = [(w.rows.start, w.rows.stop, self._where(w.piece, anchor)) for w in step.writes]
        return self._step.Prepared(
            calls, rows, self._geometry, anchor, shifts, writes, self.tiles, self.programs, self.least
        )

    def _where(self, piece: Layers, anchor: torch.Tensor) -> object:
        first = piece.kv[0]
        return self._step.kv_of(first[0], first[1], anchor, piece.kv.stride(0))
