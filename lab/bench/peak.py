"""Measures the peak memory of some work beyond what the process held before."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from mpic_lab.bench.harness import BenchDevice

T = TypeVar("T")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(work: Callable[[], T], placement: BenchDevice) -> tuple[T, int | None]:
    """Run some work. Return its result, and the bytes at its peak beyond those before: device memory on CUDA, resident
    memory of this process on Linux, None if neither can be measured.

    Memory that was freed earlier but not returned to the system does not show up when it is reused, so measure the
    first run of the work.
    """
    if placement.device.type == "cuda":
        torch.cuda.synchronize(placement.device)
        torch.cuda.reset_peak_memory_stats(placement.device)
        before = torch.cuda.memory_allocated(placement.device)
        result = work()
        return result, torch.cuda.max_memory_allocated(placement.device) - before
    before_here = _reset()
    result = work()
    after = _field("VmHWM")
    known = before_here is not None and after is not None
    return result, max(0, after - before_here) if known else None


def _reset() -> int | None:
    """Reset the process's peak to its current memory, and return that in bytes."""
    with suppress(OSError):  # there is no /proc, or the system does not let a process do this
        _RESET.write_text("5")
        return _field("VmRSS")
    return None


def _field(name: str) -> int | None:
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None
