"""Prepares chunks to be compiled, off the engine's thread: they are tokenized, or decoded and encoded.

Clips have a thread of their own, because decoding one takes minutes and texts and images must not wait for that. Nor
does closing wait for it: a clip's future fails at once, and its thread ends with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from mpic.errors import EngineStopped

Job = Callable[[], None]


class Preparation:
    """The threads. Jobs of a kind run one after the other."""

    def __init__(self) -> None:
        self._ordinary = ThreadPoolExecutor(1, "mpic-prepare")
        self._clips: SimpleQueue[tuple[Job, Future[Any]] | None] = SimpleQueue()
        self._unprepared: set[Future[Any]] = set()  # of clips
        self._lock = threading.Lock()
        threading.Thread(target=self._run_clips, name="mpic-prepare-clips", daemon=True).start()

    def submit(self, job: Job, future: Future[Any], is_clip: bool) -> None:
        """Run a job when its turn comes.

        Args:
            future: what the job prepares for; the job sets its exception itself through ``fail``.
        """
        if not is_clip:
            self._ordinary.submit(job)
            return
        with self._lock:
            self._unprepared.add(future)
        self._clips.put((job, future))

    def fail(self, future: Future[Any], error: BaseException) -> None:
        """Set a future's exception, unless ``close`` has done so."""
        with self._lock:
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Wait for texts and images, and fail the futures of clips that are not prepared yet."""
        self._clips.put(None)
        with self._lock:
            unprepared = list(self._unprepared)
        for future in unprepared:
            self.fail(future, EngineStopped("the engine has been stopped"))
        self._ordinary.shutdown(wait=True)

    def _run_clips(self) -> None:
        while (item := self._clips.get()) is not None:
            job, future = item
            if not future.done():
                job()
            with self._lock:
                self._unprepared.discard(future)
