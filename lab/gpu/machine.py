"""The machine of a report, and its ceilings."""

from __future__ import annotations

import math
import platform

import torch

from mpic_lab.eval.processor import processor
from mpic_lab.gpu import host
from mpic_lab.gpu.supervise import SectionRun, installed

PACKAGES = (
    "torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "psutil", "xxhash", "pillow",
    "pytest", "hypothesis",
)  # fmt: skip
QUERY = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,memory.total,pcie.link.gen.max,pcie.link.width.max"


def versions(run: SectionRun) -> None:
    """Write a row for each version first, so that the report has them whatever happens later."""
    run.row("version", "python", platform.python_implementation(), platform.python_version())
    for package in PACKAGES:
        absent = "not installed" if not installed(package.replace("-", "_")) else "unknown"
        run.row("version", package, "installed", host.version(package) or absent)
    run.row("version", "torch built for", "CUDA", str(torch.version.cuda))
    run.row("version", "source", "git", host.commit() or "unknown")
    run.row("machine", "processor", platform.machine(), processor())
    memory = _memory()
    run.row("machine", "memory", "host", memory, "GiB" if memory else "")
    if run.device != "cuda":
        return
    found = host.ask("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader")
    run.row("machine", QUERY, "nvidia-smi", found or "unknown")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    device = torch.cuda.get_device_properties(0)
    run.row("machine", "GPU", f"compute capability {device.major}.{device.minor}", device.name)
    run.row("machine", "multiprocessors", device.name, device.multi_processor_count)
    run.row("machine", "device memory", device.name, round(device.total_memory / 2**30, 1), "GiB")
    run.row("machine", "L2 cache", device.name, round(getattr(device, "L2_cache_size", 0) / 2**20, 1), "MiB")


def measure_ceilings(run: SectionRun) -> None:
    """Measure the rates from which every prediction is made: a copy, a matrix product, both directions of the bus, and
    one launch."""
    from mpic_lab.bench.harness import median_seconds
    from mpic_lab.gpu.context import Context
    from mpic_lab.gpu.roofline import ceilings

    context = Context(run)
    placement, sizes = context.placement, context.sizes
    top = ceilings(placement, sizes.copy_megabytes, sizes.matmul, sizes.kernel_repeats, bus=True)
    for name, what, unit, scale in (
        ("copy", f"{sizes.copy_megabytes} MiB, read and written", "GB/s", 1e9),
        ("matmul", f"{sizes.matmul} x {sizes.matmul}, {placement.dtype}", "TFLOP/s", 1e12),
        ("to_device", "pinned host memory to the device", "GB/s", 1e9),
        ("to_host", "the device to pinned host memory", "GB/s", 1e9),
    ):
        rate = getattr(top, name)
        if math.isfinite(rate):
            run.row("ceiling", what, name, round(rate / scale, 3), unit, ceiling=name, rate=rate)
    small = torch.zeros(1, device=placement.device)

    def launches() -> None:
        for _ in range(1000):
            small.add_(1)

    microseconds = round(median_seconds(launches, placement, 3) * 1e3, 3)  # of one operation
    run.row("launch", "1,000 tiny operations one after the other", "torch", microseconds, "us")


def _memory() -> float | None:
    if not installed("psutil"):
        return None
    import psutil

    return round(psutil.virtual_memory().total / 2**30, 1)
