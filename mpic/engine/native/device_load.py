"""Reading one stored chunk to a device that copies from page-locked memory beside its computing.

Where the chunk lies in such memory already, the device copies from there. Otherwise it is read in parts, by several
threads: into memory that a nearer tier has reserved and then keeps, or, where none takes it, through slots of the
staging ring. What cannot be read in parts goes through one buffer as large as the chunk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import torch

from mpic.kv.copies import CopiedProgress, Copies
from mpic.kv.parts import LayerRange, Piece, PieceReader
from mpic.kv.staging import StagingRing
from mpic.kv.store import LaterChunk, PartedChunk, Reservation, StoredChunk, looked_up, optional

log = logging.getLogger(__name__)


class DeviceLoad:
    """One load. Every method runs on loader threads.

    Args:
        stored: what is read.
        target: ``[layers, 2, kv_heads, n, head_dim]`` on the device; each layer may be strided.
        progress: gets the copies. Arrivals are reported by whoever iterates.
        threads: that there are to read. One of them, and one slot of the ring, are left to other loads, so that a file
            that does not answer does not stop those.
        fork: has another iterator of this load read beside the first; see ``LoadQueue.fork``.
    """

    def __init__(
        self,
        stored: StoredChunk | LaterChunk,
        target: torch.Tensor,
        progress: CopiedProgress,
        copies: Copies,
        ring: StagingRing,
        threads: int,
        fork: Callable[[Iterator[int | None], int], None],
    ) -> None:
        self._stored, self._target, self._progress = stored, target, progress
        self._copies, self._ring, self._fork = copies, ring, fork
        self._readers = max(1, min(threads, ring.size.slots) - 1)
        self._parted: PartedChunk | None = None
        self._reserved: Reservation | None = None
        self._left: Iterator[LayerRange] = iter(())
        self._lock = threading.Lock()  # guards _left

    def read(self) -> Iterator[int | None]:
        """Read the chunk, and fork when it can be read in parts. Yield as ``ChunkLoad.layers`` says; between two
        items nothing is held that another load could wait for.

        Raises:
            NotFound, CorruptFile: as ``StoredChunk.read_layers``.
            ValueError: the stored chunk has another shape or type than the target.
        """
        self._stored = looked_up(self._stored)
        memory = optional(self._stored, "lend")
        if memory is not None:
            yield from self._copy_layers(memory, range(len(memory)))
            return
        parted = self._parted = optional(self._stored, "in_parts", self._ring.size.slot_bytes)
        if parted is None:
            buffer = self._copies.buffer(self._target.shape, self._target.dtype)
            yield from self._copy_layers(buffer, self._stored.read_layers(buffer))
            return
        if (tuple(parted.shape), parted.dtype) != (tuple(self._target.shape), self._target.dtype):
            wanted = f"{tuple(self._target.shape)} {self._target.dtype}"
            raise ValueError(f"the chunk is {tuple(parted.shape)} {parted.dtype}, its place is {wanted}")
        self._reserved = self._reserve()
        self._left = iter(parted.parts)
        for part in parted.parts[1 : self._readers]:
            self._fork(self._lane(parted), part.layers.start)
        yield from self._lane(parted)

    def _reserve(self) -> Reservation | None:
        try:
            return optional(self._stored, "reserve", self._target.shape, self._target.dtype)
        except (RuntimeError, MemoryError) as error:  # the ring has its memory already
            log.warning("a chunk is not kept in host memory: %s", error)
            return None

    def _copy_layers(self, memory: torch.Tensor, layers: Iterator[int] | range) -> Iterator[int]:
        for layer in layers:
            self._progress.copy((layer,), self._target[layer], memory[layer])
            yield layer

    def _lane(self, parted: PartedChunk) -> Iterator[int | None]:
        """Read one part after the other that no other thread has taken."""
        while (part := self._next()) is not None:
            for piece, read in parted.read_part(part):
                self._bring(piece, read)
                if not piece.last:
                    yield None
            yield from part.layers

    def _next(self) -> LayerRange | None:
        with self._lock:
            return next(self._left, None)

    def _bring(self, piece: Piece, read: PieceReader) -> None:
        """Read one piece and start its copy."""
        target = piece.of(self._target)
        if self._reserved is not None:
            memory = piece.of(self._reserved.kv)
            read(memory)
            self._progress.copy(piece.layers, target, memory)
            return
        with self._ring.slot() as slot:
            memory = slot.of(target.shape, target.dtype)
            read(memory)
            slot.mark = self._progress.copy(piece.layers, target, memory)

    def ended(self, error: BaseException | None) -> None:
        """Give back what the load holds, when no thread reads any more."""
        if self._reserved is not None:
            (self._reserved.keep if error is None else self._reserved.drop)()
        if self._parted is not None:
            self._parted.close()
