"""Captures work of one device in CUDA graphs: as a whole (decoding steps), or cut into pieces (steps with blocks of
rows)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mpic.engine.native.piecewise import Cut, Piece
from mpic.engine.native.static_decode import Work


class GraphCapture:
    """Captures steps of one device. Its graphs share one pool of memory, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Capture the work in one graph; see ``pieces``."""
        found: list[torch.Tensor] = []
        (replay,) = self.pieces(lambda cut: found.append(work()))
        out = found[-1]

        def play() -> torch.Tensor:
            replay()
            return out

        return play

    def pieces(self, work: Callable[[Cut], None]) -> list[Piece]:
        """Run the work twice without cutting it, so that kernels are compiled and libraries have chosen their
        algorithms, then capture it, a graph for each of its pieces.

        Raises:
            RuntimeError: the work waits for the device, so it cannot be captured.
        """
        # leaving a stream selects the device that was selected before: another one would get a context
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            self._run_twice(lambda: work(lambda: None), current)
            # what these runs have taken goes back to the device; a capture takes from the graphs' own pool
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            with torch.cuda.stream(self._stream):
                graphs = self._captured(work)
            current.wait_stream(self._stream)
        return [graph.replay for graph in graphs]

    def _captured(self, work: Callable[[Cut], None]) -> list[torch.cuda.CUDAGraph]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # with "thread_local" other threads may copy and allocate meanwhile
            graphs[-1].capture_begin(self._pool, "thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        begin()
        try:
            work(cut)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture has been broken off
                graphs[-1].capture_end()
            raise
        graphs[-1].capture_end()
        return graphs

    def _run_twice(self, work: Callable[[], object], current: torch.cuda.Stream) -> None:
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
            with _no_waiting():
                work()
        current.wait_stream(self._stream)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Make work that waits for the device raise inside the block.

    During a capture it would fail, too, but torch's allocator would then believe for the rest of the process that a
    capture is under way, and never give memory back to the device.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
