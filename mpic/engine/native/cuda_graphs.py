"""Captures decoding steps in CUDA graphs, and decides whether decoding steps run that way.

The captured steps are those of ``static_decode.py``. Before anything is served, one such step is compared with the same
rows run in the usual way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mpic.engine.native.batch import BatchSlice, Rows
from mpic.engine.native.runner import Runner
from mpic.engine.native.static_decode import Capture, StaticDecode, Work, bucket_sizes
from mpic.errors import IntegrityError, ModelRefused
from mpic.kernels.span import Span
from mpic.kv.pool import Extent
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import TOLERANCE, beyond_rounding, relative_error
from mpic.model.static_attention import StaticAttention, attention_of

log = logging.getLogger(__name__)

_GRAPH = 16 << 20
"""Bytes that a graph's launches may take in the driver, to be reserved before any is captured."""
_WORKSPACE = 64 << 20
"""Bytes of the libraries' workspaces while graphs are captured."""


class GraphCapture:
    """Captures steps of one device. Graphs share one pool of memory, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Runs the work twice, so that kernels are compiled and libraries have chosen their algorithms, then captures
        it.

        Raises:
            RuntimeError: the work waits for the device, so it cannot be captured.
        """
        # leaving a stream selects the device that was selected before: another one would get a context
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()
                with _no_waiting():
                    work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # with "thread_local" other threads may copy and allocate meanwhile
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    out = work()
            except BaseException:
                torch.cuda.set_stream(current)  # a capture that fails leaves its own selected
                raise

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Has work that waits for the device raise inside the block.

    During a capture it would fail, too, but then torch's allocator believes until the process ends that a capture is
    under way, and gives no memory back to the device before it says that there is none.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def reserved_bytes(model: LoadedModel, most: int, choice: str) -> int:
    """Returns an upper bound of the device memory that static steps of up to ``most`` rows take: the buffers as they
    will be allocated, and a bound for graphs. A pool that takes a share of the free memory leaves this much. 0 where
    there are no static steps."""
    if choice == "off" or model.device.type != "cuda":
        return 0
    try:
        attention = attention_of(model)
    except ModelRefused:  # `static_decode_for` reports this
        return 0
    nowhere = torch.empty(0, dtype=model.dtype, device="meta")
    logits = most * model.text_config.vocab_size * (2 * 4 + model.dtype.itemsize)
    graphs = 2 * len(bucket_sizes(most)) * _GRAPH
    return StaticAttention(attention, nowhere, most).nbytes + logits + graphs + _WORKSPACE


def static_decode_for(
    runner: Runner, most: int, choice: str, capture: Capture | None = None
) -> StaticDecode | None:
    """Returns the static decoding steps of an engine, or None. The reason is logged where static steps were to be
    expected.

    Args:
        choice: ``on``, ``off``, or ``auto``: on where the device is CUDA and the model's layers allow it.
        capture: replaces the capture by CUDA in tests.

    Raises:
        ModelRefused: ``choice`` is ``on``, and the device or the model does not allow it.
    """
    model, device = runner.model, runner.model.device
    if choice == "off" or (choice == "auto" and device.type != "cuda"):
        return None
    before, began = _allocated(device), time.monotonic()
    try:
        if device.type == "cuda":
            capture = capture or GraphCapture(device)
        decode = StaticDecode(model, runner.pool, most, capture)
        error = compare(decode, runner)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if choice == "on":
            raise ModelRefused(f"decoding steps cannot be captured: {reason}") from error
        log.warning("decoding without CUDA graphs, at many times the launches: %s", reason)
        model.info.details["cuda_graphs"] = f"off: {reason}"
        return None
    taken = (_allocated(device) - before) >> 20
    log.info(
        "decoding steps of %d rows and fewer are ready after %.1f s, %d MiB, relative error %.1e",
        most,
        time.monotonic() - began,
        taken,
        error,
    )
    model.info.details["cuda_graphs"] = f"on: up to {most} rows, {taken} MiB, relative error {error:.1e}"
    return decode


def _allocated(device: torch.device) -> int:
    """Returns the bytes of a device that are in use; 0 on devices where they cannot be counted."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@torch.inference_mode()
def compare(decode: StaticDecode, runner: Runner) -> float:
    """Runs two decoding rows (one, where ``most`` is 1) over a random chunk and random own keys in both ways, then the
    next step, whose tables are advanced. Returns the largest relative difference of the logits.

    Raises:
        IntegrityError: they differ, or the pool has no room for the comparison.
    """
    pool, model = runner.pool, runner.model
    extents = [pool.alloc(tokens) for tokens in (24, 9, 11)]
    try:
        if None in extents:
            raise IntegrityError("the pool is too small to compare decoding steps")
        generator = torch.Generator().manual_seed(3)
        for extent in extents:
            view = pool.view(extent)
            view.copy_(torch.randn(view.shape, generator=generator).to(view.dtype))
        chunk, *own = extents
        rows = [
            _rows(model, chunk, extent, 5 + 2 * number) for number, extent in enumerate(own[: decode.most])
        ]
        difference = 0.0
        for _ in range(2):
            slices = [_next(one) for one in rows]
            # the static step runs first, so that it reads what it has written itself
            got = decode.run(slices)
            if got is None:
                raise IntegrityError("a step of two rows does not fit the tables")
            expected = runner.run(slices)
            difference = max(difference, relative_error(got, expected))
    finally:
        decode.forget()
        decode.counters.clear()
        runner.tables.forget()
        for extent in extents:
            if extent is not None:
                pool.free(extent)
    limit = TOLERANCE.get(model.dtype, 2e-4)
    if not difference <= limit and not difference <= beyond_rounding(model, limit):
        raise IntegrityError(f"decoding steps differ from the usual ones by {difference:.1e}")
    return difference


def _rows(model: LoadedModel, chunk: Extent, extent: Extent, tokens: int) -> Rows:
    """Returns a number of own tokens that see a chunk at a base of its own."""
    ids = [3 + n for n in range(tokens)]
    positions = torch.arange(tokens + 2).expand(model.mrope, -1).contiguous()
    return Rows(ids, positions, extent=extent, spans=[Span(chunk, 2, chunk.tokens, 50 + tokens, 1)])


def _next(rows: Rows) -> BatchSlice:
    """Adds a token and returns its slice."""
    rows.computed = len(rows)
    rows.ids.append(7)
    return BatchSlice(rows, rows.computed, len(rows))
