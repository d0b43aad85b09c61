"""Runs an event loop in a thread of its own, to which other threads submit work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from mpic.errors import EngineStopped

T = TypeVar("T")


class LoopThread:
    """Starts the thread and runs the loop until ``stop``.

    Attributes:
        loop: the event loop.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._taking = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. If the loop ends first, the coroutine is cancelled, but never before its first
        step.

        Raises:
            EngineStopped: the loop ends or has ended.
        """
        with self._taking:
            if not self._ended:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise EngineStopped("the engine has been stopped")

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result. Raise what ``submit`` raises."""
        return self.submit(work).result()

    def post(self, call: Callable[[], object]) -> None:
        """Call a function on the loop without waiting for it.

        Raises:
            EngineStopped: the loop ends or has ended.
        """
        with self._taking:
            if self._ended:
                raise EngineStopped("the engine has been stopped")
            self.loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """Refuse further work, cancel all tasks, wait for them, and end the loop and its thread."""
        with self._taking:
            if self._ended:
                return
            self._ended = True
        asyncio.run_coroutine_threadsafe(_end_tasks(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _end_tasks() -> None:
    """Cancel all other tasks, again and again until none is left: a cancelled task may start another one."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
