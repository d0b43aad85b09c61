"""Copies between host memory and a device that computes meanwhile. The device orders them, so the host does not wait.

A load is read piece by piece into pinned memory; each piece is copied on a separate stream and leaves a mark. A step
that is about to attend in layer l makes the *device* wait for the mark of layer l, and the host goes on at once. What
has been compiled goes the other way (``readback.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from mpic.kv.barrier import LoadProgress, LoadSignal
from mpic.kv.page_locked import PAGE_LOCKED


class Copies(Protocol):
    """A queue of copies beside what the device computes. ``buffer``, ``start`` and ``wait`` may be called from any
    thread, the others from the one that gives the device its work."""

    def order(self) -> None:
        """Make copies that start from now on wait for the work queued on the device so far, which may still read the
        memory that they overwrite."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory to copy from; it may be dropped while its copies run."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy from a ``buffer``, or a contiguous part of one, to the device behind all earlier copies and
        return its mark."""

    def start_all(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Start several copies, each ``(target, source)`` as for ``start``, and return the mark of all."""

    def follow(self, mark: Any) -> None:
        """Make work that is queued on the device from now on wait for the copy."""

    def wait(self, mark: Any) -> None:
        """Make the calling thread, which may be any, wait until a copy is done."""


class CudaCopies:
    """A CUDA stream with one event per copy. Torch's host allocator keeps pinned memory allocated until the copies that
    read it are done."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def order(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return PAGE_LOCKED.empty(shape, dtype)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        return self.start_all([(target, source)])

    def start_all(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        # leaving a stream selects the device that was selected before: another one would get a context
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            mark = torch.cuda.Event(blocking=True)  # waiting for it releases the core
            mark.record(self._stream)
        return mark

    def follow(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()


def copies_for(device: torch.device) -> Copies | None:
    """Return the copies of a CUDA device; None for others: host memory is filled directly, and other devices copy when
    a load is done."""
    return CudaCopies(device) if device.type == "cuda" else None


class CopiedProgress(LoadProgress):
    """The progress of a load whose layers are copied: a layer has arrived when all its copies have been started and the
    layers before it have arrived. Several threads may copy and report different layers of one load."""

    def __init__(self, signal: LoadSignal, layers: int, copies: Copies) -> None:
        super().__init__(signal, layers)
        self._copies = copies
        self._marks: dict[int, Any] = {}  # of each layer's latest copy
        self._early: set[int] = set()  # layers that arrived before an earlier one did

    def copy(self, layers: Iterable[int], target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start to copy some layers or a piece of one; return the mark. On a loader thread. Report the layers with
        ``arrive`` when all of their pieces have been verified and started."""
        mark = self._copies.start(target, source)
        for layer in layers:
            self._marks[layer] = mark
        return mark

    def arrive(self, layer: int) -> None:
        with self._signal.changed:
            self._early.add(layer)
            while self.ready in self._early:
                self._early.discard(self.ready)
                super().arrive(self.ready)

    def follow(self, layer: int) -> None:
        self._copies.follow(self._marks[layer])

    def settle(self) -> None:
        for layer in list(self._marks):
            self.follow(layer)
