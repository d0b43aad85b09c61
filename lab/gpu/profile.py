"""Profiles steps: launches, copies and waits, and the share of the time in which the device computes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from mpic.engine.native.engine import NativeEngine
from mpic_lab.bench.workload import Ids, compile_all, decoding, engine_for, first_token, request_of
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.supervise import SectionRun

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
BATCH = 8


def profile(run: SectionRun) -> None:
    """Profiles a link and some decoding steps of a batch of 8, with the default attention and with Triton's."""
    context = Context(run)
    sizes = context.sizes
    model = sizes.models[-1]
    ids = Ids(model.decoder.vocabulary)
    chunks = ids.chunks(sizes.set_chunks, sizes.chunk)
    linked = sizes.chunk * sizes.set_chunks
    batch = 2 if run.quick else BATCH
    loaded, costs = context.model(model)
    for attention in dict.fromkeys((context.attention, "auto")):
        loaded.choose_attention(attention)
        room = linked + (batch + 2) * (linked // 4 + 1024)
        with engine_for(loaded, room, max_running=batch, cuda_graphs="auto") as engine:
            compile_all(engine, chunks)
            for detail in ("cuda_graphs", "piecewise_graphs"):
                run.row("captured", detail, loaded.info.details.get(detail, "off"), None, "")

            def request(tokens: int) -> Any:
                return request_of(ids.spaced(chunks, sizes.text, 8), "mpic-32", tokens)

            for _ in range(2):  # kernels are compiled, and libraries choose their algorithms
                _, usage = first_token(engine, request(4))
            steps_of(engine, lambda: first_token(engine, request(1)))  # the profiler starts
            found = steps_of(engine, lambda: first_token(engine, request(1)))
            cost = costs.prefill(usage)
            step_rows(context, f"link, {linked} linked tokens", attention, found, cost)
            with decoding(engine, [request(40 if run.quick else 200) for _ in range(batch)]) as deltas:
                found = steps_of(engine, lambda: list(islice(deltas, 10)))
            cost = costs.step(batch, linked, linked + batch * 400)
            step_rows(
                context, f"decoding, batch {batch} over the same {linked} tokens", attention, found, cost
            )


def steps_of(engine: NativeEngine, work: Callable[[], Any]) -> dict[str, Any]:
    """Profiles some work and returns its counts per step."""
    cuda = engine.model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    before = engine.stats()["counters"].get("steps", 0)
    with profiler(activities=activities) as recorded:
        began = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize(engine.model.device)
        taken = time.perf_counter() - began
    steps = max(1, engine.stats()["counters"].get("steps", 0) - before)
    kernels: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    spans = []
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            start, end = event.time_range.start, event.time_range.end
            moved = event.name.startswith(("Memcpy", "Memset"))
            counts["copies" if moved else "launches"] += 1
            kernels[event.name] += end - start
            spans.append((start, end))
        elif event.name in WAITS:
            counts["waits"] += 1
    return {"taken": taken, "steps": steps, "kernels": kernels, "counts": counts, "busy": busy(spans)}


def busy(spans: list[tuple[float, float]]) -> float:
    """Returns the microseconds in which at least one of the (start, end) spans runs."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def step_rows(context: Context, shape: str, attention: str, found: dict[str, Any], cost: Any) -> None:
    """Writes rows with the results of ``steps_of``: time, launches, copies and waits per step, busy share, longest
    kernels."""
    steps, taken = found["steps"], found["taken"]
    context.timed("step, profiled", shape, attention, taken / steps, cost, steps=steps)
    if not found["kernels"]:
        context.left_out("launches and busy share", shape, "the profiler saw no device kernels here")
        return
    for name in ("launches", "copies", "waits"):
        context.run.row(f"{name} a step", shape, attention, round(found["counts"][name] / steps, 1))
    context.run.row("busy share of the device", shape, attention, round(found["busy"] / 1e6 / taken, 3))
    for name, micro in found["kernels"].most_common(8):
        context.run.row(
            "time in a kernel a step", shape, f"{attention}: {name[:80]}", round(micro / steps, 1), "us"
        )
