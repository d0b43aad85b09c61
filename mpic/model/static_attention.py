"""The attention of decoding steps of fixed size for one model: static tables for each kind of layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpic.kernels.attention import Write
from mpic.model.hooks import KindCalls
from mpic.model.loaded import LoadedModel
from mpic.model.triton_attention import ModelKernel, TritonAttention


def attention_of(model: LoadedModel) -> TritonAttention:
    """Returns the Triton attention that serves a model, or that would serve it. Raises ModelRefused if Triton cannot
    serve it."""
    if model.triton is not None:
        return model.triton
    softcaps = {facts.softcap for facts in model.layers}
    return TritonAttention(model.shape, model.kinds, model.kind_of, model.device, model.dtype, softcaps)


class StaticKernel(ModelKernel):
    """The kernels of static steps with a fixed number of rows, by kind of layer (``mpic.kernels.triton.static``)."""


class StaticAttention:
    """Static steps of a model over one memory.

    Args:
        attention: the model's attention.
        arena: the memory that holds all keys and values.
        most: rows of the largest step.
    """

    def __init__(self, attention: TritonAttention, arena: torch.Tensor, most: int) -> None:
        from mpic.kernels.triton import launch, static

        self._static, self._attention, self._arena = static, attention, arena
        programs = attention.programs or 2 * launch.multiprocessors(attention.device)
        geometry = attention.geometries[0]
        shape = launch.shape_of(geometry, attention.tiles, programs, attention.least)
        self._partials = static.Partials(static.TableCapacity.of(most, shape), geometry, arena.device)
        self._tables = [
            static.tables_for(one, attention.tiles, most, programs, attention.least, arena, self._partials)
            for one in attention.geometries
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all tables and partial results."""
        partials = sum(t.nbytes for t in self._partials.tensors)
        return partials + sum(tables.nbytes for tables in self._tables)

    def kernels(self, rows: int) -> list[StaticKernel]:
        """Returns the kernels of steps with this number of rows: first for few items without holes, then for others."""
        made = []
        for holes, grid in enumerate(self._static.grids(rows, self._tables[0].shape)):
            steps = [self._static.StaticStep(tables, rows, grid, bool(holes)) for tables in self._tables]
            made.append(StaticKernel(steps, self._attention.kind_of))
        return made

    def fill(self, kernel: StaticKernel, writes: Sequence[Write], kinds: Sequence[KindCalls]) -> bool:
        """Fills the tables for a step; returns False when it does not fit.

        Args:
            writes: the writes of the rows' keys and values.
            kinds: the calls of the rows, by kind of layer.
        """
        attention, arena = self._attention, self._arena
        located = [attention.located(write, arena) for write in writes]
        return all(
            step.fill(attention.calls(kind, calls, arena), located, kind.rotary.rotation)
            for step, kind, calls in zip(kernel.kinds, attention.kinds, kinds, strict=True)
        )

    def advance(self) -> None:
        """Makes all tables those of the same rows one token later."""
        for tables in self._tables:
            tables.advance()
