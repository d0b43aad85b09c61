"""Loader threads, and which piece of which chunk they read next."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpic.errors import EngineStopped

_END: Any = object()


def loaders_for(cores: int | None = None) -> int:
    """Return the number of loader threads: half of the cores, 2 to 8. Reading and verifying is about as fast as
    memory, so a few threads saturate a disk, and the other cores are needed for the computation that goes on
    meanwhile."""
    return min(8, max(2, (cores or os.cpu_count() or 2) // 2))


@dataclass(eq=False)
class ChunkLoad:
    """A chunk to be read.

    Args:
        order: loads of a lower order go first; the request's time of arrival.
        layers: reads what comes next and gives the number of the layer that is in place with it, or None for a piece
            that completes none; see ``StoredChunk.read_layers``.
        arrived: called with the number of each layer, on a loader thread.
        ended: called once at the end, when no thread reads any more, with what went wrong first or None, on a loader
            thread.
    """

    order: float
    layers: Iterator[int | None]
    arrived: Callable[[int], None]
    ended: Callable[[BaseException | None], None]
    lanes: int = field(default=1, init=False)
    """Iterators of the load that have not ended; guarded by the queue."""
    error: BaseException | None = field(default=None, init=False)


class _ReadOrder(NamedTuple):
    """The order in which threads take work: the lowest comes first."""

    order: float
    layer: int
    number: int
    load: ChunkLoad
    layers: Iterator[int | None]


class LoadQueue:
    """Threads that read chunks piece by piece.

    The oldest request's chunks go first, and among those the lowest layer: the chunks of one prompt fill side by side,
    so that its link can begin when the first layers are in place and never waits long for the next. A load may be
    forked, so that several threads read one chunk.
    """

    def __init__(self, threads: int) -> None:
        self._waiting: list[_ReadOrder] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"mpic-load-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def threads(self) -> int:
        return len(self._threads)

    def add(self, load: ChunkLoad) -> None:
        with self._changed:
            self._push(load, load.layers)

    def fork(self, load: ChunkLoad, layers: Iterator[int | None], first: int) -> None:
        """Let another thread read layers of a load, from about number ``first`` on, in parallel. The reader of the
        load calls this on its loader thread."""
        with self._changed:
            load.lanes += 1
            self._push(load, layers, first)

    def _push(self, load: ChunkLoad, layers: Iterator[int | None], first: int = 0) -> None:
        heapq.heappush(self._waiting, _ReadOrder(load.order, first, next(self._numbers), load, layers))
        self._changed.notify()

    def close(self) -> None:
        """Stop: finish the reads under way and end all other loads with EngineStopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for turn in self._waiting:
            self._end(turn, EngineStopped("the engine was stopped"))
        self._waiting.clear()

    def _end(self, turn: _ReadOrder, error: BaseException | None) -> None:
        """End one iterator of a load, and the load with its last one."""
        load = turn.load
        close = getattr(turn.layers, "close", None)
        if close is not None:
            close()  # what it holds is given back now, not when it is collected
        with self._changed:
            load.error = load.error or error
            load.lanes -= 1
            ended = load.lanes == 0
        if ended:
            load.ended(load.error)

    def _work(self) -> None:
        again: _ReadOrder | None = None
        while True:
            with self._changed:
                if again is not None:  # no other thread is woken, since this one takes a load itself
                    heapq.heappush(self._waiting, again)
                    again = None
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                turn = heapq.heappop(self._waiting)
            again = self._advance(turn)

    def _advance(self, turn: _ReadOrder) -> _ReadOrder | None:
        """Take one turn; return the next one of the same iterator, or None when it has ended."""
        if turn.load.error is not None:  # another thread has found it bad
            self._end(turn, None)
            return None
        try:
            layer = next(turn.layers, _END)
            if isinstance(layer, int):
                turn.load.arrived(layer)
        except Exception as error:
            self._end(turn, error)
            return None
        if layer is _END:
            self._end(turn, None)
            return None
        reached = turn.layer if layer is None else layer + 1
        return turn._replace(layer=reached, number=next(self._numbers))
