"""A running answer as the caller sees it: deltas from the engine's thread, read synchronously or asynchronously."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

from mpic.engine.base import Delta

UNREAD = 2048
"""Most tokens and alternatives to them (``top_logprobs``) that wait for the reader, about half a megabyte; the engine
goes on with the answer when half of them have been read."""


class DeltaStream:
    """Implements ``GenerationStream`` for one reader; the engine's thread is the only writer.

    Args:
        id: the request's.
        on_abort: asks the engine to end the request; set by the engine.
        on_room: tells the engine that a stream that was ``full`` is not any more; set by the engine.
    """

    def __init__(self, id: str, on_abort: Callable[[], None] = lambda: None) -> None:
        self.id = id
        self.on_abort = on_abort
        self.on_room: Callable[[], None] = lambda: None
        self._items: SimpleQueue[Delta | BaseException] = SimpleQueue()
        self._closed = False  # the writer has given the last delta
        self._over = False  # the reader has taken it
        self._wake: Callable[[], None] | None = None
        self._written = self._read = 0  # sizes of the deltas; one belongs to the writer, one to the reader
        self._full = False

    @property
    def full(self) -> bool:
        """Return whether more than ``UNREAD`` tokens wait, so that the writer should pause. Only the writer may ask:
        once it has been told to pause, ``on_room`` is called when there is room again."""
        if self._written - self._read <= (UNREAD // 2 if self._full else UNREAD):
            return False
        self._full = True
        # looked at again: a reader who came in between did not see that
        return self._written - self._read > UNREAD // 2

    def put(self, item: Delta | BaseException) -> None:
        """Give the reader its next delta. An exception, or a delta with a finish reason, ends the stream."""
        if self._closed:
            return
        self._closed = _is_last(item)
        self._written += _size(item)
        self._items.put(item)
        wake = self._wake  # looked up behind the item: a reader who came in between finds that
        if wake is not None:
            wake()

    def abort(self) -> None:
        self.on_abort()

    def __iter__(self) -> Iterator[Delta]:
        while not self._over:
            yield self._taken(self._items.get())

    async def __aiter__(self) -> AsyncIterator[Delta]:
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the reader's loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(event.set)

        self._wake = wake
        while not self._over:
            event.clear()
            try:
                item = self._items.get_nowait()
            except Empty:
                await event.wait()
                continue
            yield self._taken(item)

    def _taken(self, item: Delta | BaseException) -> Delta:
        self._over = _is_last(item)
        self._read += _size(item)
        if self._full and self._written - self._read <= UNREAD // 2:
            self._full = False
            self.on_room()
        if isinstance(item, BaseException):
            raise item
        return item

    def result(self) -> Delta:
        """Wait for the end. Return the whole answer as one Delta."""
        text, ids, logprobs, delta = [], [], [], Delta("")
        for delta in self:
            text.append(delta.text)
            ids += delta.token_ids
            logprobs += delta.logprobs
        return delta._replace(
            text="".join(text), token_ids=tuple(ids), logprobs=tuple(logprobs), retrieval=None
        )


def _is_last(item: Delta | BaseException) -> bool:
    return isinstance(item, BaseException) or item.finish_reason is not None


def _size(item: Delta | BaseException) -> int:
    if isinstance(item, BaseException):
        return 0
    return len(item.token_ids) + sum(len(logprob.top) for logprob in item.logprobs)
