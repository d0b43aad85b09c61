"""Triton attention for one model: converts a step's writes and calls to tables of offsets, for each kind of layer. The
tables of decoding steps that are captured have a fixed size (``StaticAttention``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from mpic.errors import ModelRefused
from mpic.kernels.attention import SpanCall, Write
from mpic.kv.chunk import KVShape
from mpic.model.hooks import KindCalls, Step
from mpic.model.rotary import Rotary, Unrotated
from mpic.model.trace import LayerKind

if TYPE_CHECKING:
    from mpic.kernels.triton.launch import Geometry, Launches
    from mpic.kernels.triton.step import TritonStep

Entry = TypeVar("Entry", Write, SpanCall)


def refuse_layers(kinds: Sequence[LayerKind]) -> None:
    """Raise ModelRefused if the kernels do not support the layers."""
    lacks = {
        "layers that differ in their heads": len({(kind.heads, kind.kv_heads, kind.dim) for kind in kinds})
        > 1,
        "attention in both directions": any(kind.blocks for kind in kinds),
        "heads whose last dimensions turn": any(getattr(kind.rotary, "start", 0) for kind in kinds),
    }
    missing = [what for what, is_there in lacks.items() if is_there]
    if missing:
        raise ModelRefused(f"attention 'triton' does not take {' or '.join(missing)}")


class ModelKernel(NamedTuple):
    """The kernels of one step, by kind of layer; see ``mpic.model.hooks.StepKernel``.

    Args:
        kinds: the launches of each kind.
        kind_of: the kind of each layer.
    """

    kinds: Sequence[Launches]
    kind_of: Sequence[int]

    def scatter(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.kinds[self.kind_of[layer]].scatter(layer, k, v)

    def attend(
        self, layer: int, q: torch.Tensor, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kinds[self.kind_of[layer]].attend(layer, q, scale, softcap)


class TritonKernel(ModelKernel):
    """Kernels whose tables have the size of one step, and can be advanced."""

    kinds: Sequence[TritonStep]  # ty: ignore[invalid-named-tuple-override] (a narrower type for the same field)

    def advance(self) -> TritonKernel | None:
        """Return the kernels of the same single rows one step later; see ``TritonStep.advance``."""
        advanced = [kind.advance() for kind in self.kinds]
        return None if None in advanced else self


class TritonAttention:
    """Prepares steps for the Triton kernels.

    ``programs``, ``block_programs`` and ``least`` say how finely tiles are cut along their keys
    (``mpic.kernels.triton.tiles.Shape``): so that the device is busy, which is found out when everything that a step
    may launch is compiled.

    Args:
        kinds: the kinds of the model's layers.
        kind_of: the kind of each layer.
        softcaps: whether layers cap their scores; both values are possible in one model.

    Raises:
        ModelRefused: Triton is missing, the device is none it compiles for, its kernels cannot be compiled here, or the
            layers or heads are such that they do not take them.
    """

    programs: int | None = None
    block_programs: int = 0
    least: int = 256

    def __init__(
        self,
        shape: KVShape,
        kinds: Sequence[LayerKind],
        kind_of: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        softcaps: Collection[bool],
    ) -> None:
        refuse_layers(kinds)
        try:
            from mpic.kernels.triton import launch, step, tuning
        except ImportError as error:
            raise ModelRefused(f"attention 'triton' needs the package triton: {error}") from error
        if not launch.available(device):
            raise ModelRefused(f"attention 'triton' needs CUDA and does not run on {device}")
        if shape.head_dim % 16 or shape.head_dim > 256:
            raise ModelRefused(
                f"attention 'triton' takes heads of 16, 32, ... 256 dimensions, not {shape.head_dim}"
            )
        self._launch, self._step = launch, step
        self.kinds, self.kind_of, self.device = kinds, kind_of, device
        self.geometries = [self._geometry(kind, shape.head_dim) for kind in kinds]
        self.tiles = tuning.tiles_for(device, dtype, shape.head_dim)
        if device.type == "cuda":
            try:
                self._warm_up(softcaps, dtype)
            except Exception as error:  # no compiler, no Python headers, too little shared memory
                reason = f"{type(error).__name__}: {error}"
                raise ModelRefused(f"attention 'triton' cannot be compiled here: {reason}") from error

    def _geometry(self, kind: LayerKind, dim: int) -> Geometry:
        rotary = kind.rotary
        half, interleaved = (
            (dim // 2, False) if isinstance(rotary, Unrotated) else (rotary.half, rotary.interleaved)
        )
        return self._launch.Geometry(kind.heads, kind.kv_heads, dim, half, interleaved)

    @property
    def name(self) -> str:
        """The name that ``/health`` shows."""
        return self._launch.name()

    def _warm_up(self, softcaps: Collection[bool], dtype: torch.dtype) -> None:
        from mpic.kernels.triton.warmup import warm_up

        for geometry in dict.fromkeys(self.geometries):
            windows = any(kind.window for kind in self.kinds)
            resident = warm_up(geometry, self.tiles, dtype, self.device, softcaps, windows)
            self.programs = self.programs or resident.singles
            self.block_programs = self.block_programs or resident.blocks

    def prepare(self, step: Step, rows: int) -> TritonKernel:
        """Return the step's tables on the device. Spans stay in place, so nothing is copied."""
        anchor = step.writes[0].span.source.data
        writes = [self.located(write, anchor) for write in step.writes]
        made = [
            self._step.TritonStep(
                self.calls(kind, calls, anchor),
                rows,
                geometry,
                anchor,
                kind.rotary.rotation,
                writes,
                self.tiles,
                self.programs,
                self.least,
                self.block_programs,
            )
            for kind, geometry, calls in zip(self.kinds, self.geometries, step.kinds, strict=True)
        ]
        return TritonKernel(made, self.kind_of)

    def calls(self, kind: LayerKind, calls: KindCalls, anchor: torch.Tensor) -> list[SpanCall]:
        """Return the calls of rows in layers of a kind, in the form from which the tables are made."""
        located = [self.located(call, anchor) for call in calls.calls]
        if isinstance(kind.rotary, Rotary):
            return located
        return [call._replace(span=call.span._replace(base=0)) for call in located]

    def located(self, entry: Entry, anchor: torch.Tensor) -> Entry:
        """Return the entry with a span whose source is its place in memory relative to the anchor."""
        strides = self._step.strides_of(entry.span.source.data, anchor)
        return entry._replace(span=entry.span._replace(source=strides))  # ty: ignore[invalid-explicit-return] (its own class)


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
        """Return the kernels of steps with this number of rows: first for few items without holes, then for others."""
        made = []
        for holes, grid in enumerate(self._static.grids(rows, self._tables[0].shape)):
            steps = [self._static.StaticStep(tables, rows, grid, bool(holes)) for tables in self._tables]
            made.append(StaticKernel(steps, self._attention.kind_of))
        return made

    def fill(self, kernel: StaticKernel, writes: Sequence[Write], kinds: Sequence[KindCalls]) -> bool:
        """Fill the tables for a step; return False when it does not fit.

        Args:
            writes: the writes of the rows' keys and values.
            kinds: the calls of the rows, by kind of layer.
        """
        attention, arena = self._attention, self._arena
        located = [attention.located(write, arena) for write in writes]
        return all(
            step.fill(attention.calls(kind, calls, arena), located, kind.rotary.rotation)  # ty: ignore[missing-attribute] (a static step)
            for step, kind, calls in zip(kernel.kinds, attention.kinds, kinds, strict=True)
        )

    def advance(self) -> None:
        """Make all tables those of the same rows one token later."""
        for tables in self._tables:
            tables.advance()
