"""Compiles uploads and references once they are durable, removes expired uploads, and watches the library's folder."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from starlette.concurrency import run_in_threadpool

from mpic.cancel import Cancelled, until
from mpic.errors import (
    DeletedMeanwhile,
    EngineStopped,
    FileNotFound,
    MPICError,
    ReferenceNotFound,
    StorageFull,
    Unavailable,
)
from mpic.http.errors import INTERNAL
from mpic.library.records import SHARED
from mpic.link import BARE, named_policy

if TYPE_CHECKING:
    from concurrent.futures import Future

    from mpic.kv.chunk import Chunk
    from mpic.library import File, Reference
    from mpic.server.state import State
    from mpic.server.sync import SyncJob

AT_ONCE = 32
"""Chunks that are given to the engine at a time, which batches them. Clips do not count: decoding one takes minutes."""
PER_USER, CLIPS_PER_USER = 8, 2
"""Files and clips of one user that are compiled at a time. The further ones wait, while other users have their turn."""
EXPIRY_SECONDS = 30.0
PAUSES = (2.0, 10.0, 30.0)
"""Seconds before a compilation for which there was not enough memory, disk or time, or whose content was deleted as
another file, is tried again. Recording an outcome is tried again after the last of them for as long as it fails."""
RETRIED = (Unavailable, StorageFull, DeletedMeanwhile)
"""Failures of a compilation that may be none the next time."""
WATCH_SECONDS = 2.0
SAVE_SECONDS = 5.0
FORGET_SECONDS = 3600.0
log = logging.getLogger("mpic.server")


class CompileOutcome(NamedTuple):
    """The outcome of a compilation: the new state, the number of tokens, and a sentence about what went wrong."""

    state: Literal["ready", "failed"]
    tokens: int | None = None
    error: str | None = None


def _unless_ready(item: File | Reference, set_state: Callable[..., None]) -> Callable[..., None]:
    """Return a function that records an outcome, but not that what was ready could not be compiled again: the next use
    may succeed."""

    def record(state: str, *more: object) -> None:
        if state == "ready" or item.state != "ready":
            set_state(state, *more)

    return record


class BackgroundJobs:
    """Background work over a library and an engine. It lives on the server's event loop."""

    def __init__(self, state: State) -> None:
        self.library = state.library
        self.engine = state.engine
        self.savings = state.savings
        self._parted = state.parted
        self._threads = state.pools.background
        policy = named_policy(state.config.engine.policy)
        self.wrapping = BARE if policy is None else policy.wrapping
        self._press = state.config.engine.press
        self._compilations = asyncio.Semaphore(AT_ONCE)
        self._prefetching: set[str] = set()
        self._turns: WeakValueDictionary[tuple[str, bool], asyncio.Semaphore] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = threading.Event()
        search = state.config.retrieval
        self.sync: SyncJob | None = None
        if search.sync_references:
            from mpic.server.sync import SyncJob  # most servers have none, and need not wait for its imports

            source = search.sync_references, search.sync_seconds
            self.sync = SyncJob(
                self.library, self.engine, *source, self.compile_reference, self._ending.is_set
            )

    async def start(self) -> None:
        """Compile files that an earlier run left uncompiled, and start to watch for expiry."""
        for file in await run_in_threadpool(self.library.files.pending):
            self.compile(file)
        for reference in await run_in_threadpool(self.library.references.pending):
            self.compile_reference(reference)
        self._spawn(self._expire())
        self._spawn(self._watch())
        self._spawn(self._save())
        self._spawn(self._forget())
        if self.sync is not None:
            self._spawn(self.sync.repeat())

    async def stop(self) -> None:
        """Stop; the next start continues."""
        self._ending.set()  # the threads end at their next checkpoint, and their tasks wait for that
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def compile(self, file: File, prefetch: bool = False) -> None:
        """Compile a file in the background; its state becomes ``ready`` or ``failed``.

        Args:
            prefetch: bring its chunks to the device then.
        """
        files, user = self.library.files, file.owner
        chunks_of = partial(files.chunks, user, file)
        set_state = _unless_ready(file, partial(files.set_state, user, file.id))
        exists = partial(files.get, user, file.id)
        once = partial(self._compile_once, user, file.id, chunks_of, exists, file.kind == "video", prefetch)
        self._begin(file.id, once, set_state, prefetch)

    def compile_reference(self, reference: Reference, prefetch: bool = False) -> None:
        """Compile a reference in the background, as ``compile`` does a file."""
        shelf = self.library.references
        set_state = _unless_ready(reference, partial(shelf.set_state, reference))
        chunks_of = lambda: [shelf.chunk(reference)]
        exists = partial(shelf.get, reference.id)
        once = partial(self._compile_once, SHARED, reference.id, chunks_of, exists, False, prefetch)
        self._begin(reference.id, once, set_state, prefetch)

    def _begin(
        self,
        id: str,
        once: Callable[[], Awaitable[CompileOutcome | None]],
        set_state: Callable[..., None],
        prefetch: bool,
    ) -> None:
        """Begin to compile something, unless it is being prefetched already: that may be asked for any number of
        times."""
        if not prefetch:
            return self._spawn(self._compile(id, once, set_state))

        async def prefetched() -> None:
            try:
                await self._compile(id, once, set_state)
            finally:
                self._prefetching.discard(id)

        if id not in self._prefetching:
            self._prefetching.add(id)
            self._spawn(prefetched())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compile(
        self, id: str, once: Callable[[], Awaitable[CompileOutcome | None]], set_state: Callable[..., None]
    ) -> None:
        """Compile until it does not fail for one of the reasons in ``RETRIED``, and record the outcome. ``once`` is
        ``_compile_once``."""
        for pause in PAUSES:
            try:
                return await self._record(id, await once(), set_state)
            except RETRIED as error:
                log.warning("Compiling %s failed and is tried again in %g s: %s", id, pause, error)
            await asyncio.sleep(pause)  # while others may compile
        try:
            outcome = await once()
        except RETRIED as error:
            log.error("Compiling %s failed: %s", id, error)
            outcome = CompileOutcome("failed", error=error.message)
        await self._record(id, outcome, set_state)

    async def _compile_once(
        self,
        user: str,
        id: str,
        chunks_of: Callable[[], list[Chunk]],
        exists: Callable[[], object],
        clip: bool,
        prefetch: bool,
    ) -> CompileOutcome | None:
        """Compile once, when it is the user's turn. Return None if there is nothing to record. Raise the errors in
        ``RETRIED``; any other becomes the file's state.

        Args:
            exists: raises FileNotFound or ReferenceNotFound once it was deleted, which ends the compiling.
        """
        turn = self._turns.setdefault((user, clip), asyncio.Semaphore(CLIPS_PER_USER if clip else PER_USER))
        async with turn:
            try:
                tokens = 0
                for chunk in await self._threads.call(user, self._until_stopped, chunks_of):
                    async with nullcontext() if clip else self._compilations:
                        tokens += await self._compile_chunk(chunk, exists)
                        if prefetch:
                            await run_in_threadpool(
                                self.engine.prefetch, chunk.pressed(None, self._press), self.wrapping
                            )
            except (EngineStopped, FileNotFound, ReferenceNotFound, Cancelled):
                # it is left for the next start, or was deleted meanwhile
                return None
            except RETRIED:
                raise
            except Exception as exc:
                log.exception("Compiling %s failed.", id)
                return CompileOutcome("failed", error=exc.message if isinstance(exc, MPICError) else INTERNAL)
            return CompileOutcome("ready", tokens)

    async def _record(self, id: str, outcome: CompileOutcome | None, set_state: Callable[..., None]) -> None:
        """Record an outcome. This is repeated until it succeeds, because otherwise the file would be compiling until
        the next start."""
        if outcome is None:
            return
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
            try:
                return await run_in_threadpool(set_state, *outcome)
            except Exception as error:
                what = f"That {id} is {outcome.state} could not be recorded"
                log.error("%s, which is tried again in %g s: %s", what, pause, error)
            await asyncio.sleep(pause)

    async def _compile_chunk(self, chunk: Chunk, exists: Callable[[], object]) -> int:
        """Compile a chunk, unless the file was deleted while its earlier chunks were compiled; return its number of
        tokens.

        Raises:
            DeletedMeanwhile: another file with this content was deleted. Its rows go before its chunks are forgotten,
                so this file, which was uploaded in between, may be asked for before that.
            MPICError: see ``Engine.compile`` and ``exists``.
        """
        try:
            return await asyncio.wrap_future(await run_in_threadpool(self._compile_existing, chunk, exists))
        except DeletedMeanwhile:
            await run_in_threadpool(exists)  # raises if it was this file that was deleted
            raise

    def _compile_existing(self, chunk: Chunk, exists: Callable[[], object]) -> Future[int]:
        return self.engine.compile(chunk.pressed(None, self._press), self.wrapping, exists)

    def _until_stopped(self, chunks_of: Callable[[], list[Chunk]]) -> list[Chunk]:
        with until(self._ending):
            return chunks_of()

    async def _expire(self) -> None:
        while True:
            try:
                self._parted.expire()
                await run_in_threadpool(self._collect)
            except Exception:
                log.exception("Removing expired files failed and is tried again in %g s.", EXPIRY_SECONDS)
            await asyncio.sleep(EXPIRY_SECONDS)

    async def _watch(self) -> None:
        """Log when the library's folder is removed and when it is back; every write checks this too."""
        gone = False
        while True:
            was, gone = gone, await run_in_threadpool(self.library.folder.gone)
            if gone and not was:
                log.error(
                    "The library's folder %s was removed or replaced. Uploads are refused until it is back, or until "
                    "the server is started again.",
                    self.library.root,
                )
            elif was and not gone:
                log.warning("The library's folder %s is back.", self.library.root)
            await asyncio.sleep(WATCH_SECONDS)

    async def _save(self) -> None:
        """Write the savings ledger."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            try:
                await run_in_threadpool(self.savings.flush)
            except MPICError as error:
                log.warning(
                    "The savings could not be written and are tried again in %g s: %s", SAVE_SECONDS, error
                )
            except Exception:
                log.exception("Writing the savings failed and is tried again in %g s.", SAVE_SECONDS)

    async def _forget(self) -> None:
        """Forget deletions and evicted chunks that are old, of which a server that runs for long sees many."""
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            try:
                await run_in_threadpool(self.library.forget_gone)
            except Exception:
                log.exception("Forgetting old deletions failed and is tried again in %g s.", FORGET_SECONDS)

    def _collect(self) -> None:
        files, references = self.library.files, self.library.references
        removed = [*files.collect_expired(), *references.collect_expired(), *references.collect_retired()]
        self.engine.forget(*(chunk for one in removed for chunk in one.chunks))
        self.engine.forget(*self.library.expire_kv())
        self.library.caches.sweep()
