"""Keeps the references in step with a folder or a listing (``mpic.library.copies.sync``), again and again."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from mpic.api.resources import SyncNote, SyncState
from mpic.library.copies.sync import ReferenceSync, SyncResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpic.engine.base import Engine
    from mpic.library import Library, Reference

NOTES = 100
log = logging.getLogger("mpic.server")


class SyncJob:
    """A sync that runs in the background of a server.

    Args:
        source: the folder or the JSONL file.
        seconds: time from the end of a run to the next one.
        compile: compiles a version in the background; called on the event loop.
        ending: whether the server ends.
    """

    def __init__(
        self,
        library: Library,
        engine: Engine,
        source: str,
        seconds: int,
        compile: Callable[[Reference], None],
        ending: Callable[[], bool],
    ) -> None:
        self._library, self._engine = library, engine
        self._source, self._seconds = source, seconds
        self._compile, self._ending = compile, ending
        self._asked = asyncio.Event()
        self._running = False
        self._at: int | None = None
        self._last = SyncResult()

    def begin(self) -> None:
        """Begin a run, or have one follow that which runs now."""
        self._asked.set()

    def state(self) -> SyncState:
        counts = self._last.counts
        return SyncState(
            source=self._source,
            seconds=self._seconds,
            running=self._running or self._asked.is_set(),
            at=self._at,
            problem=self._last.problem,
            notes=tuple(
                SyncNote(where=one.where, message=one.why, code=one.code) for one in self._last.notes[:NOTES]
            ),
            added=counts["added"],
            replaced=counts["replaced"],
            removed=counts["removed"],
            unchanged=counts["unchanged"],
        )

    async def repeat(self) -> None:
        """Run now, and after each pause, until the task is cancelled."""
        loop = asyncio.get_running_loop()

        def changed(reference: Reference) -> None:
            if not self._ending():  # or the next start compiles it
                loop.call_soon_threadsafe(self._compile, reference)

        forget = lambda removed: self._engine.forget(*removed.chunks)
        sync = ReferenceSync(self._library.references, Path(self._source), changed, forget)
        while True:
            self._asked.clear()
            self._running = True
            try:
                self._note(await run_in_threadpool(sync.run, self._ending))
            except Exception:
                log.exception("Syncing references failed and is tried again in %d s.", self._seconds)
                self._last = SyncResult(problem="it failed; the server's log says why")
            finally:
                self._running = False
            self._at = int(self._library.clock())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._seconds)

    def _note(self, result: SyncResult) -> None:
        """Keep the outcome of a run, and log what is new in it."""
        for one in result.notes:
            if one not in self._last.notes:
                log.warning("%s of %s is not a reference: %s", one.where, self._source, one.why)
        if result.problem and result.problem != self._last.problem:
            log.error("Syncing references with %s: %s", self._source, result.problem)
        if any(result.counts[what] for what in ("added", "replaced", "removed")):
            log.info("References were synced with %s: %s", self._source, dict(result.counts))
        self._last = result
