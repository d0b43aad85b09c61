"""Profiles an engine's steps with torch's profiler and says which part of a step took how long.

Every operation counts for the part it runs in, with the time that its own children do not take. Parts are marked by
wrapping methods of one engine while it is profiled, so nothing of this is in the engine's way otherwise.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiler

from mpic.engine.native import executor
from mpic.engine.native.cpu_executor import CpuExecutor
from mpic.engine.native.engine import NativeEngine
from mpic.kernels.decoder import BlockLayers, WholeDecoder
from mpic.kernels.linear import LinearKernel, Product
from mpic.kernels.linear_tiles import LinearTilesKernel
from mpic.model import hooks, program

STEP = "step"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
PACKED = ("aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm_for_cpu")
ATTENTION, MATRIX, FUSED, OTHER, MODEL, TABLES, SCHEDULING, RESULTS, LOOP = (
    "attention",
    "matrix products",
    "all layers in one call, or from tokens to logits",
    "norms, rotary, activations, copies",
    "Python of the model",
    "step tables and inputs",
    "scheduling",
    "sampling and results",
    "rest of the step",
)
PARTS = (MATRIX, ATTENTION, FUSED, OTHER, MODEL, TABLES, SCHEDULING, RESULTS, LOOP)
_LAYER = "layer "


@dataclass
class StepProfile:
    """The time that the profiled steps took, in seconds of all steps together.

    Attributes:
        steps: how many there were.
        total: from the beginning to the end of every step.
        parts: by name of ``PARTS``.
        layers: of each decoder layer, everything in it included; none of a model whose steps are fused
            (``mpic.model.program``). Decoding ones have one part for products, attention and the rest of all layers.
        operations: of the matrix products with 16- or 32-bit weights.
        bytes: that these products read and wrote, every matrix once a product.
    """

    steps: int = 0
    total: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    layers: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    operations: float = 0.0
    bytes: float = 0.0


def profile_steps(engine: NativeEngine, work: Callable[[], Any]) -> StepProfile:
    """Profiles the steps that an engine takes while ``work`` runs; steps that compute nothing do not count."""
    products = _ProductCounts()
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the engine has its own
    with (
        _marked(engine, products),
        profiler(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            with_flops=True,
            experimental_config=every_thread,
        ) as recorded,
    ):
        work()
    found = summarize(recorded.events(), engine.model.dtype.itemsize)
    found.operations += products.operations
    found.bytes += products.bytes
    return found


def python_seconds(engine: NativeEngine, work: Callable[[], Any]) -> list[float]:
    """Returns the processor time of an engine's thread in each step that it takes while ``work`` runs, without what it
    spends inside the kernels of fused decoding. No profiler runs meanwhile."""
    found: list[float] = []
    inside, step = [0.0], engine.step

    def in_kernel(call: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            began = time.thread_time()
            out = call(*args)
            inside[0] += time.thread_time() - began
            return out

        return kernel

    def timed() -> None:
        before, began = inside[0], time.thread_time()
        step()
        found.append(time.thread_time() - began - (inside[0] - before))

    with ExitStack() as stack:
        for owner in (WholeDecoder, LinearKernel, LinearTilesKernel):
            stack.enter_context(patch.object(owner, "__call__", in_kernel(owner.__call__)))
        stack.enter_context(patch.object(engine, "step", timed))
        work()
    return found


class _ProductCounts:
    """Counts what the kernels for products do, of which torch's profiler knows nothing."""

    def __init__(self) -> None:
        self.operations = self.bytes = 0

    def counted(self, multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def product(kernel: Any, x: torch.Tensor, weight: torch.Tensor, *bias_and_out: Any) -> torch.Tensor:
            with record_function(MATRIX):
                out = multiply(kernel, x, weight, *bias_and_out)
            self._add(x, weight, out)
            return out

        return product

    def counted_blocks(self, multiply: Callable[..., None]) -> Callable[..., None]:
        def together(
            kernel: Any, x: torch.Tensor, products: Sequence[Product], outs: Sequence[torch.Tensor]
        ) -> None:
            with record_function(MATRIX):
                multiply(kernel, x, products, outs)
            for by, out in zip(products, outs, strict=True):
                self._add(x, by.weight, out)

        return together

    def _add(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self.operations += 2 * out.numel() * weight.shape[1]
        self.bytes += x.nbytes + weight.nbytes + out.nbytes


@contextmanager
def _marked(engine: NativeEngine, products: _ProductCounts) -> Iterator[None]:
    places: list[tuple[Any, str, str]] = [
        (engine, "step", STEP),
        (engine, "_commit", RESULTS),
        (engine.scheduler, "schedule", SCHEDULING),
        (executor, "row_inputs", TABLES),
        (engine.executor.tables, "step", TABLES),
        (engine.executor.tables, "single_rows", TABLES),
        (engine.executor, "forward", MODEL),
        *([(engine.executor, "_decoded", MODEL)] if isinstance(engine.executor, CpuExecutor) else []),
        (hooks, "attend_layer", ATTENTION),
        (WholeDecoder, "__call__", FUSED),
        (program, "_attend", ATTENTION),
        (BlockLayers, "_between", OTHER),
    ]
    if not isinstance(engine.executor, CpuExecutor):
        layers = enumerate(engine.model.text_model.layers)
        places += [(layer, "forward", f"{_LAYER}{n}") for n, layer in layers]
    with ExitStack() as stack:
        for owner, name, mark in places:
            stack.enter_context(patch.object(owner, name, _in_mark(getattr(owner, name), mark)))
        counted = products.counted(LinearKernel.__call__)
        stack.enter_context(patch.object(LinearKernel, "__call__", counted))
        blocks = products.counted_blocks(LinearTilesKernel.__call__)
        stack.enter_context(patch.object(LinearTilesKernel, "__call__", blocks))
        yield


def _in_mark(function: Callable[..., Any], mark: str) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(mark):
            return function(*args, **kwargs)

    return marked


def summarize(events: Sequence[Any], itemsize: int) -> StepProfile:
    """Adds up the events of the steps in which the model ran.

    Args:
        events: torch's ``FunctionEvent``, of all threads.
        itemsize: bytes of a number of the model.
    """
    found = StepProfile()
    threads: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    for mine in threads.values():
        mine.sort(key=lambda e: (e.time_range.start, -e.time_range.end))
        for step in _steps(mine):
            if any(event.name == MODEL for event in step):
                _add_step(found, step, itemsize)
    return found


def _steps(events: list[Any]) -> Iterator[list[Any]]:
    """Yields the events of each step in the order of their begin, the step itself first."""
    step: list[Any] = []
    for event in events:
        if event.name == STEP:
            if step:
                yield step
            step = [event]
        elif step and event.time_range.start < step[0].time_range.end:
            step.append(event)
    if step:
        yield step


def _add_step(found: StepProfile, step: list[Any], itemsize: int) -> None:
    found.steps += 1
    found.total += _seconds(step[0])
    own: Counter[int] = Counter()  # by place in `step`
    part: list[str] = []
    open_events: list[int] = []
    for number, event in enumerate(step):
        while open_events and step[open_events[-1]].time_range.end <= event.time_range.start:
            open_events.pop()
        around = part[open_events[-1]] if open_events else LOOP
        part.append(_part(event, around))
        own[number] += _seconds(event)
        if open_events:
            own[open_events[-1]] -= _seconds(event)
        open_events.append(number)
        if event.name.startswith(_LAYER):
            found.layers[int(event.name.removeprefix(_LAYER))] += _seconds(event)
        if part[-1] == MATRIX and event.name in PRODUCTS:
            found.operations += event.flops
            found.bytes += itemsize * sum(_numbers(shape) for shape in event.input_shapes)
    for number, seconds in own.items():
        found.parts[part[number]] += seconds


def _part(event: Any, around: str) -> str:
    """Returns the part that an event's own time belongs to, given that of the event around it."""
    name = event.name
    if name == STEP:
        return LOOP
    if name in (ATTENTION, MATRIX, FUSED, OTHER, MODEL, TABLES, SCHEDULING, RESULTS):
        return name
    if around not in (MODEL, MATRIX, OTHER):
        return around
    if name in (*PRODUCTS, *PACKED):
        return MATRIX
    return MODEL if name.startswith(_LAYER) else OTHER


def _seconds(event: Any) -> float:
    return (event.time_range.end - event.time_range.start) / 1e6


def _numbers(shape: Sequence[int]) -> int:
    """Returns how many numbers a tensor of this shape has; arguments that are no tensors have an empty shape."""
    count = 1 if shape else 0
    for size in shape:
        count *= size
    return count
