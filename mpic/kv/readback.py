"""Copy from a device to host memory while the device computes, without making a step wait.

A step marks the work queued so far. A thread then reads behind that mark, on a stream of its own, through two fixed
page-locked buffers in turn: while one fills, the thread empties the other into ordinary memory. So however much is
read, only these two buffers are locked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch

from mpic.kv.page_locked import PAGE_LOCKED

SLOT_BYTES = 16 << 20


class Readback(Protocol):
    """Reads a device's tensors. ``mark`` is called by the thread that gives the device its work, the rest by one
    other."""

    def mark(self) -> Any:
        """Mark the work queued on the device so far, without waiting."""

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Run the work that the calling thread queues inside the block behind the mark, in parallel with everything
        queued after it."""

    def to_host(self, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Copy to ordinary host memory, and wait for that. Call it inside ``behind``.

        Args:
            target: contiguous; None makes new memory.

        Returns:
            The target.
        """


class ReadbackAtOnce:
    """For a device that has finished its work when a call returns: a CPU."""

    def mark(self) -> None:
        pass

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        yield

    def to_host(self, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        return source.cpu() if target is None else target.copy_(source)


class CudaReadback:
    """A CUDA stream of its own, and two slots of page-locked memory, which are allocated when the first tensor is
    read."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        self._device, self._slot_bytes = device, slot_bytes
        self._stream = torch.cuda.Stream(device)
        PAGE_LOCKED.allow(self, 2 * slot_bytes)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def behind(self, mark: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def to_host(self, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        host = torch.empty(source.shape, dtype=source.dtype) if target is None else target
        if source.device.type != "cuda":
            return host.copy_(source)
        cross(source.contiguous(), host, self._slots, self._copied)
        return host

    @cached_property
    def _slots(self) -> list[torch.Tensor]:
        with torch.inference_mode(False):
            return [PAGE_LOCKED.empty((self._slot_bytes,), torch.uint8) for _ in range(2)]

    def _copied(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # waiting for it releases the core
        event.record(self._stream)
        return event


def cross(source: torch.Tensor, target: torch.Tensor, slots: list[torch.Tensor], copied: Any) -> None:
    """Copy a contiguous device tensor to host memory through slots in turn.

    Args:
        slots: two tensors of bytes in page-locked memory.
        copied: returns a mark of the copies started so far, whose ``synchronize`` waits for them.
    """
    source, target = (tensor.view(-1).view(torch.uint8) for tensor in (source, target))
    under_way: tuple[slice, torch.Tensor, Any] | None = None
    for turn, first in enumerate(range(0, len(source), len(slots[0]))):
        piece = slice(first, min(first + len(slots[0]), len(source)))
        slot = slots[turn % 2][: piece.stop - piece.start]
        slot.copy_(source[piece], non_blocking=True)
        mark = copied()
        if under_way is not None:
            _empty(target, *under_way)
        under_way = piece, slot, mark
    if under_way is not None:
        _empty(target, *under_way)


def _empty(target: torch.Tensor, piece: slice, slot: torch.Tensor, mark: Any) -> None:
    mark.synchronize()
    target[piece].copy_(slot)


def readback_for(device: torch.device, slot_bytes: int = SLOT_BYTES) -> Readback:
    return CudaReadback(device, slot_bytes) if device.type == "cuda" else ReadbackAtOnce()
