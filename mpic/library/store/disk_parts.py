"""A chunk of the disk tier that several threads read at the same time; see ``mpic.kv.store.PartedChunk``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch

from mpic.errors import CorruptFile
from mpic.kv.file import ChunkFile
from mpic.kv.parts import LayerRange, Piece, PieceReader


class DiskParts:
    """An open chunk file in parts.

    Args:
        own: ``close`` closes the file.
        most: bytes of the largest piece.
        failed: called with the error of the file, once, by the thread that finds it first.
        count: called with the bytes of every piece that was read.
    """

    def __init__(
        self,
        file: ChunkFile,
        own: bool,
        most: int,
        failed: Callable[[CorruptFile | OSError], None],
        count: Callable[[int], None],
    ) -> None:
        self._file, self._own, self._failed, self._count = file, own, failed, count
        self._told = threading.Lock()  # taken for good with the first error
        self.shape = file.shape.extent(file.slots)
        self.dtype = file.dtype
        self.parts = file.parts(most)

    def read_part(self, part: LayerRange) -> Iterator[tuple[Piece, PieceReader]]:
        for piece, read in self._file.read_part(part):
            yield piece, partial(self._read, read)

    def _read(self, read: PieceReader, memory: torch.Tensor) -> None:
        try:
            read(memory)
        except (CorruptFile, OSError) as error:
            if self._told.acquire(blocking=False):
                self._failed(error)
            raise
        self._count(memory.nbytes)

    def close(self) -> None:
        if self._own:
            self._file.close()
