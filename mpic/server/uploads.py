"""What happens to an upload after it is durable: compiled in the background, removed when its time is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from mpic.errors import EngineStopped, FileNotFound, MPICError, OutOfMemory, ReferenceNotFound
from mpic.library.records import SHARED
from mpic.link import parse_policy

if TYPE_CHECKING:
    from mpic.kv.chunk import Chunk
    from mpic.library import File, Reference
    from mpic.server.state import State

AT_ONCE = 32  # compilations handed to the engine at a time; it batches them
EXPIRY_SECONDS = 30.0
PAUSES = (2.0, 10.0, 30.0)
"""Seconds before a compilation for which there was not enough memory is tried again."""
WATCH_SECONDS = 2.0
log = logging.getLogger("mpic.server")


class Uploads:
    """Background work over a library and an engine. Lives on the server's event loop."""

    def __init__(self, state: State) -> None:
        self.library = state.library
        self.engine = state.engine
        self._workers = state.rooms.background
        self.sink = parse_policy(state.config.engine.policy).sink
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Take up what an earlier run left uncompiled, and watch for expiry."""
        for file in await run_in_threadpool(self.library.files.pending):
            self.compile(file)
        for reference in await run_in_threadpool(self.library.references.pending):
            self.compile_reference(reference)
        self._spawn(self._expire())
        self._spawn(self._watch())

    async def stop(self) -> None:
        """Leave the rest for the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def compile(self, file: File) -> None:
        """Compile a file in the background; its state becomes ``ready`` or ``failed``."""
        files, user = self.library.files, file.owner
        chunk_of, set_state = partial(files.chunk, user, file), partial(files.set_state, user, file.id)
        self._spawn(self._compile(user, file.id, chunk_of, set_state))

    def compile_reference(self, reference: Reference) -> None:
        """The same for a reference."""
        shelf = self.library.references
        chunk_of, set_state = partial(shelf.chunk, reference), partial(shelf.set_state, reference)
        self._spawn(self._compile(SHARED, reference.id, chunk_of, set_state))

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compile(
        self, user: str, id: str, chunk_of: Callable[[], Chunk], set_state: Callable[..., None]
    ) -> None:
        for pause in PAUSES:
            try:
                return await self._compile_once(user, id, chunk_of, set_state)
            except OutOfMemory as error:
                log.warning("compiling %s is tried again in %g s: %s", id, pause, error)
            await asyncio.sleep(pause)  # while others may compile
        try:
            await self._compile_once(user, id, chunk_of, set_state)
        except OutOfMemory as error:
            log.error("compiling %s failed: %s", id, error)
            await run_in_threadpool(set_state, "failed", None, error.message)

    async def _compile_once(
        self, user: str, id: str, chunk_of: Callable[[], Chunk], set_state: Callable[..., None]
    ) -> None:
        """Raises OutOfMemory; everything else that goes wrong becomes the file's state."""
        async with self._gate:
            try:
                chunk = await self._workers.call(user, chunk_of)
                future = await run_in_threadpool(self.engine.compile, chunk, self.sink)
                tokens = await asyncio.wrap_future(future)
            except OutOfMemory:
                raise
            except (EngineStopped, FileNotFound, ReferenceNotFound):  # next start; deleted meanwhile
                return
            except Exception as exc:
                log.exception("compiling %s failed", id)
                why = (
                    exc.message
                    if isinstance(exc, MPICError)
                    else "the server made a mistake; its log says more"
                )
                await run_in_threadpool(set_state, "failed", None, why)
            else:
                await run_in_threadpool(set_state, "ready", tokens)

    async def _expire(self) -> None:
        while True:
            try:
                await run_in_threadpool(self._collect)
            except Exception:
                log.exception("removing expired files failed; trying again in %g s", EXPIRY_SECONDS)
            await asyncio.sleep(EXPIRY_SECONDS)

    async def _watch(self) -> None:
        """Log when the library's folder is removed under the server, and when it is back; every write checks too."""
        gone = False
        while True:
            was, gone = gone, await run_in_threadpool(self.library.home.gone)
            if gone and not was:
                log.error(
                    "the library's folder %s was removed or replaced: uploads are refused until it is back, or until "
                    "the server is started again",
                    self.library.root,
                )
            elif was and not gone:
                log.warning("the library's folder %s is back", self.library.root)
            await asyncio.sleep(WATCH_SECONDS)

    def _collect(self) -> None:
        for removed in [*self.library.files.collect_expired(), *self.library.references.collect_retired()]:
            if removed.chunk is not None:
                self.engine.forget(removed.chunk)
        self.library.caches.sweep()
