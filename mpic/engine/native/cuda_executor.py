"""Steps on CUDA: those of decoding rows from one graph (``static_decode.py``), and in pieces those with blocks of rows
(``piecewise.py``). Others, and all where nothing is captured, run the model's modules.

Before anything is served, a step of either kind is compared with the same rows run by the modules.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mpic.engine.native import piecewise
from mpic.engine.native.batch import BatchSlice, Rows
from mpic.engine.native.executor import TorchExecutor
from mpic.engine.native.graph_capture import GraphCapture
from mpic.engine.native.piecewise import CapturePieces, PiecewiseSteps
from mpic.engine.native.static_decode import Capture, StaticDecode, bucket_sizes
from mpic.errors import IntegrityError, ModelRefused
from mpic.kernels.span import Span
from mpic.kv.barrier import LayerBarrier
from mpic.kv.pool import Extent, Pool
from mpic.model.hooks import Step
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import TOLERANCE, beyond_rounding, relative_error
from mpic.model.structure import RowInputs
from mpic.model.triton_attention import StaticAttention

log = logging.getLogger(__name__)

_GRAPH = 16 << 20
"""Bytes that a graph's launches may take in the driver, to be reserved before any is captured."""
_WORKSPACE = 64 << 20
"""Bytes of the libraries' workspaces while graphs are captured."""


def reserved_bytes(model: LoadedModel, most: int, choice: str, budget: int = 0) -> int:
    """Return an estimate of the device memory that captured steps take: the buffers as they will be allocated, and a
    bound for graphs and for what they compute in. A pool that takes a share of the free memory leaves this much. 0
    where no steps are captured.

    Args:
        most: rows of the largest static step.
        budget: the most rows of a step; 0: only static steps are counted.
    """
    if choice == "off" or model.device.type != "cuda":
        return 0
    try:
        attention = model.triton_attention()
    except ModelRefused:  # the executor reports this
        static = 0
    else:
        nowhere = torch.empty(0, dtype=model.dtype, device="meta")
        static = StaticAttention(attention, nowhere, most).nbytes
        static += _logits_bytes(model, most) + 2 * len(bucket_sizes(most)) * _GRAPH + _WORKSPACE
    return static + (_piecewise_bytes(model, most, budget) if budget else 0)


def _piecewise_bytes(model: LoadedModel, wanted: int, budget: int) -> int:
    """Return the same for pieces of steps of up to ``budget`` rows."""
    sizes, config = piecewise.bucket_sizes(budget), model.text_config
    attended = max(kind.dim * (2 * kind.heads + 2 * kind.kv_heads) for kind in model.kinds)
    # of a layer in half precision: norms in fp32, queries and keys before, while and after they are rotated, the MLP
    wide = getattr(config, "intermediate_size", None) or 0
    wide = max(wide) if isinstance(wide, Sequence) else wide  # of each layer (Gemma 3n)
    computed = 8 * config.hidden_size + 3 * attended + 4 * wide
    rows = sizes[0] * (config.hidden_size + attended + computed) * model.dtype.itemsize
    return rows + _logits_bytes(model, wanted) + len(sizes) * _GRAPH + _WORKSPACE


def _logits_bytes(model: LoadedModel, rows: int) -> int:
    """Return the bytes of logits: kept, of a step in fp32, and as the model gives them."""
    return rows * model.text_config.vocab_size * (2 * 4 + model.dtype.itemsize)


@dataclass
class _Found:
    """The facts about captured steps that the block of ``_measured`` finds out.

    Args:
        rows: rows of the largest step.
        error: largest relative difference from steps that run in the usual way.
    """

    rows: int = 0
    error: float = 0.0


@contextmanager
def _measured(model: LoadedModel, detail: str, what: str, choice: str) -> Iterator[_Found]:
    """Log how long the block takes and how much memory, and keep this, with what the block has found out, as a detail
    of the model. Where it fails, steps run without graphs, and the reason is logged.

    Raises:
        ModelRefused: it failed, and ``choice`` is ``on``.
    """
    before, began, found = _allocated(model.device), time.monotonic(), _Found()
    try:
        yield found
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if choice == "on":
            raise ModelRefused(f"{what} cannot be captured: {reason}") from error
        log.warning("%s run without CUDA graphs, at many times the launches: %s", what, reason)
        model.info.details[detail] = f"off: {reason}"
        return
    taken = (_allocated(model.device) - before) >> 20
    said = f"up to {found.rows} rows, {taken} MiB, relative error {found.error:.1e}"
    log.info("%s are ready after %.1f s: %s", what, time.monotonic() - began, said)
    model.info.details[detail] = f"on: {said}"


class CudaExecutor(TorchExecutor):
    """The steps of a model with attention on CUDA, captured where ``choice`` allows it. ``counters`` are those of its
    parts.

    Args:
        budget: the most rows of a step.
        most: the most rows of a decoding step, and of one whose logits are wanted.
        choice: ``on``, ``off``, or ``auto``: on where the device is CUDA and the model's layers allow it. The reason is
            logged where captured steps were to be expected.
        capture, capture_pieces: replace the capture by CUDA in tests. Without one nothing is captured on a CPU, where
            decoding steps run as they would be captured.

    Raises:
        ModelRefused: ``choice`` is ``on``, and the device or the model does not allow it.

    Attributes:
        static: runs the decoding steps that fit it; None: none are captured.
        piecewise: runs the other steps that fit it.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: Pool,
        budget: int = 1,
        most: int = 1,
        choice: str = "off",
        capture: Capture | None = None,
        capture_pieces: CapturePieces | None = None,
    ) -> None:
        super().__init__(model, pool)
        on_cuda = self.ahead = model.device.type == "cuda"
        self.static: StaticDecode | None = None
        self.piecewise: PiecewiseSteps | None = None
        if choice == "on" or (choice == "auto" and on_cuda):
            self._capture_decoding(most, choice, capture)
        if choice != "off" and (on_cuda or capture_pieces is not None):
            self._capture_pieces(budget, most, choice, capture_pieces)
        captured = {"decoding steps": self.static, "pieces of other steps": self.piecewise}
        if found := [name for name, steps in captured.items() if steps is not None]:
            self.what, self.reuses_logits = f"CUDA graphs of {' and of '.join(found)}", True

    def _capture_decoding(self, most: int, choice: str, capture: Capture | None) -> None:
        model = self.model
        with _measured(model, "cuda_graphs", "decoding steps", choice) as found:
            if model.device.type == "cuda":
                capture = capture or GraphCapture(model.device)
            made = StaticDecode(model, self.pool, most, capture)
            found.rows, found.error = most, compare(made, self)
            self.static = made

    def _capture_pieces(self, budget: int, wanted: int, choice: str, capture: CapturePieces | None) -> None:
        model, pool = self.model, self.pool
        # a step has no more rows than the pool has slots, some of which the comparison needs for other rows
        room = max(1, pool.pages * pool.page_size - 4 * pool.page_size)
        with _measured(model, "piecewise_graphs", "steps with links", choice) as found:
            capture = capture or GraphCapture(model.device).pieces
            made = PiecewiseSteps(model, min(budget, room), wanted, capture)
            found.rows, found.error = made.most, compare_pieces(made, self)
            self.piecewise = made

    @property
    def counters(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for steps in (self.static, self.piecewise):
            if steps is not None:
                found.update(steps.counters)
        return found

    def run(
        self,
        slices: Sequence[BatchSlice],
        barrier: LayerBarrier | None = None,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Executor.run``."""
        if self.static is not None and barrier is None:
            logits = self.static.run(slices, ids)
            if logits is not None:
                return logits
        return super().run(slices, barrier, ids)

    def forward(
        self, inputs: RowInputs, positions: torch.Tensor, step: Step, wanted: torch.Tensor
    ) -> torch.Tensor:
        if self.piecewise is not None:
            logits = self.piecewise.run(inputs, positions, step, wanted)
            if logits is not None:
                return logits
        return super().forward(inputs, positions, step, wanted)

    def forget(self) -> None:
        super().forget()
        if self.static is not None:
            self.static.forget()


def _allocated(device: torch.device) -> int:
    """Return the bytes of a device that are in use; 0 on devices where they cannot be counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # what torch has kept for itself is not in use
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@torch.inference_mode()
def compare(decode: StaticDecode, executor: CudaExecutor) -> float:
    """Run two decoding rows (one, where ``most`` is 1) over a random chunk and random own keys in both ways, then the
    next step, whose tables are advanced. Return the largest relative difference of the logits.

    Raises:
        IntegrityError: they differ, or the pool has no room for the comparison.
    """
    errors: list[float] = []
    try:
        with _random_rows(executor, (5, 7)[: decode.most]) as rows:
            for _ in range(2):
                slices = [_next(one) for one in rows]
                # the static step runs first, so that it reads what it has written itself
                got = decode.run(slices)
                if got is None:
                    raise IntegrityError("a step of two rows does not fit the tables")
                errors.append(relative_error(got, executor.run(slices)))
    finally:
        decode.forget()
        decode.counters.clear()
    return _within_rounding(executor.model, errors, "decoding steps")


@torch.inference_mode()
def compare_pieces(steps: PiecewiseSteps, executor: CudaExecutor) -> float:
    """Run a block of rows over a random chunk and a decoding row in both ways, with every bucket as empty as it can
    be, and NaN in the buffers of the rows that fill it up. Return the largest relative difference of their logits, and
    of the keys and values that they write in any layer.

    Raises:
        IntegrityError: they differ, or the pool has no room for the comparison.
    """
    errors: list[float] = []
    try:
        for below in (*steps.sizes[1:], 2):
            # with the decoding row, a row more than fit the bucket below
            with _random_rows(executor, (0, 7), block=below) as (block, row):
                slices = [BatchSlice(block, 0, below), _next(row)]
                steps.fill(float("nan"))
                executor.piecewise = steps
                logits, written = executor.run(slices).clone(), _written(executor, slices)
                executor.piecewise = None
                errors.append(relative_error(logits, executor.run(slices)))
                errors += map(relative_error, written, _written(executor, slices))
        if steps.counters["piecewise_steps"] != len(steps.sizes):
            raise IntegrityError("steps of some rows do not fit the pieces")
    finally:
        executor.piecewise = None
        steps.fill(0.0)
        steps.counters.clear()
    return _within_rounding(executor.model, errors, "steps in pieces")


def _written(executor: CudaExecutor, slices: Sequence[BatchSlice]) -> list[torch.Tensor]:
    """Return the keys and the values of each layer that slices have written, in fp32."""
    views = [executor.pool.view(part.rows.extent)[:, :, :, part.lo : part.hi] for part in slices]
    return [x for part in torch.cat(views, 3).float() for x in part]


def _within_rounding(model: LoadedModel, errors: Sequence[float], what: str) -> float:
    """Return the largest error. Raise IntegrityError if it cannot come from rounding, or one is not a number."""
    difference = float(torch.tensor(errors).max())  # NaN if one is, unlike Python's own
    limit = TOLERANCE.get(model.dtype, 2e-4)
    if not difference <= limit and not difference <= beyond_rounding(model, limit):
        raise IntegrityError(f"{what} differ from the usual ones by {difference:.1e}")
    return difference


@contextmanager
def _random_rows(executor: CudaExecutor, computed: Sequence[int], block: int = 0) -> Iterator[list[Rows]]:
    """Give rows over one random chunk, of which so many own tokens have been computed, with random keys and values.

    Args:
        block: number of tokens of those of which none have.

    Raises:
        IntegrityError: the pool has no room.
    """
    pool, tokens = executor.pool, [n or block for n in computed]
    extents: list[Any] = [pool.alloc(n) for n in (24, *(own + 4 for own in tokens))]
    try:
        if None in extents:
            raise IntegrityError("the pool is too small to compare steps")
        generator = torch.Generator().manual_seed(3)
        for extent in extents:
            view = pool.view(extent)
            view.copy_(torch.randn(view.shape, generator=generator).to(view.dtype))
        chunk, *own = extents
        yield [_rows(executor.model, chunk, *one) for one in zip(own, tokens, strict=True)]
    finally:
        executor.tables.forget()
        for extent in extents:
            if extent is not None:
                pool.free(extent)


def _rows(model: LoadedModel, chunk: Extent, extent: Extent, tokens: int) -> Rows:
    """Return a number of own tokens that see a chunk at a base of its own."""
    ids = [3 + n % 7 for n in range(tokens)]
    positions = torch.arange(tokens + 2).expand(model.mrope, -1).contiguous()
    return Rows(ids, positions, extent=extent, spans=[Span(chunk, 2, chunk.tokens, 50 + tokens, 1)])


def _next(rows: Rows) -> BatchSlice:
    """Add a token and return its slice."""
    rows.computed = len(rows)
    rows.ids.append(7)
    return BatchSlice(rows, rows.computed, len(rows))
