"""Triton attention for one model: a step's writes and calls become tables of offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from mpic.errors import ModelRefused
from mpic.kernels.attention import SpanCall, Write
from mpic.kv.chunk import KVShape
from mpic.model.hooks import Step
from mpic.model.rotary import Rotary, Unrotated
from mpic.model.trace import LayerFacts, LayerKind

if TYPE_CHECKING:
    from mpic.kernels.triton.step import TritonStep

Entry = TypeVar("Entry", Write, SpanCall)


def plain_rotary(kinds: Sequence[LayerKind], layers: Sequence[LayerFacts]) -> Rotary:
    """Returns the rotary embedding of a model whose layers are all alike and have nothing special.

    Raises:
        ModelRefused: the kernels do not take this model's layers.
    """
    lacks = {
        "windows": any(kind.window for kind in kinds),
        "attention in both directions": any(kind.blocks for kind in kinds),
        "soft-capping": any(facts.softcap for facts in layers),
        "layers without rotary embedding": any(isinstance(kind.rotary, Unrotated) for kind in kinds),
        "layers that differ in rotary embedding or heads": len(kinds) > 1,
        "heads whose last dimensions turn": any(getattr(kind.rotary, "start", 0) for kind in kinds),
    }
    missing = [what for what, is_there in lacks.items() if is_there]
    if missing:
        raise ModelRefused(f"attention 'triton' does not take {' or '.join(missing)}")
    rotary = kinds[0].rotary
    assert isinstance(rotary, Rotary)
    return rotary


class TritonAttention:
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
        self._step, self._rotary = step, rotary
        self._geometry = step.Geometry(heads, shape.kv_heads, shape.head_dim, rotary.half, rotary.interleaved)
        self.tiles = step.tiles_for(device, dtype, shape.head_dim)

    @property
    def name(self) -> str:
        """The name that ``/health`` shows."""
        return self._step.name(self.tiles)

    def prepare(self, step: Step, rows: int) -> TritonStep:
        """Returns the step's tables on the device. Spans stay where they lie, so nothing is copied."""
        anchor = step.writes[0].span.source.data
        return self._step.TritonStep(
            [self._located(call, anchor) for call in step.kinds[0].calls],
            rows,
            self._geometry,
            anchor,
            self._rotary.rotation,
            [self._located(write, anchor) for write in step.writes],
            self.tiles,
            self.programs,
            self.least,
        )

    def _located(self, entry: Entry, anchor: torch.Tensor) -> Entry:
        """Returns the entry with a span that says where its source lies, as seen from the anchor."""
        strides = self._step.strides_of(entry.span.source.data, anchor)
        return entry._replace(span=entry.span._replace(source=strides))
