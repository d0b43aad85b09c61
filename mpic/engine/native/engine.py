"""The native engine: schedule -> run -> commit on one thread, everything else around it.

The engine's thread is the only one that touches the pool, the scheduler and the model's text layers. Callers' threads
prepare requests (vision encoder, catalogue look-ups), loader threads fill extents from disk, a writer thread makes
compiled chunks durable; all of them talk to the engine through one inbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from mpic.engine.base import ChunkStore, Engine, GenerationRequest
from mpic.engine.checks import as_failure
from mpic.engine.deletions import Deletions
from mpic.engine.native.answers import Answers
from mpic.engine.native.chunks import ChunkTraffic
from mpic.engine.native.decide import Decider
from mpic.engine.native.lanes import CompileLane, LinkedChunk, Sequence
from mpic.engine.native.loader import loaders_for
from mpic.engine.native.prepare import Preparer
from mpic.engine.native.room import Room
from mpic.engine.native.runner import Runner, Slice
from mpic.engine.native.scheduler import CompileRequest, Scheduler
from mpic.engine.stream import Stream
from mpic.errors import CompileFailed, EngineStopped, MPICError, QueueFull
from mpic.kv.chunk import Chunk
from mpic.kv.device import DeviceCache
from mpic.kv.gate import Waits
from mpic.kv.pool import Pool
from mpic.model.loaded import LoadedModel

log = logging.getLogger(__name__)


class NativeEngine(Engine):
    """See ``mpic.engine.base.Engine``.

    Args:
        model: loaded and self-tested.
        store: tier below the device; None keeps chunks in the pool only.
        pages, page_size: of the pool.
        budget: most tokens a step computes (chunked prefill).
        max_running: most requests in one batch.
        max_waiting: most requests that wait for their turn; None: any number.
        loaders: threads that read chunks from the store; 0 chooses by the machine's cores.
        check_when_idle: verify all invariants whenever nothing runs.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: ChunkStore | None = None,
        *,
        pages: int = 1024,
        page_size: int = 16,
        budget: int = 2048,
        max_running: int = 64,
        max_waiting: int | None = None,
        loaders: int = 0,
        check_when_idle: bool = True,
    ) -> None:
        self.model, self.info = model, model.info
        self.pool = Pool(model.shape, pages, page_size, model.dtype, model.device)
        self.device = DeviceCache(self.pool)
        self.deletions = Deletions()
        self.traffic = ChunkTraffic(self.device, store, self.deletions, self._post, loaders or loaders_for())
        room = Room(self.device, model.bos_id, self.traffic.start_load, self.deletions)
        self.scheduler = Scheduler(room, budget, max_running)
        self.traffic.scheduler = self.scheduler
        self.runner = Runner(model, self.pool)
        self.decider = Decider(self.runner)
        self.preparer = Preparer(model, store, self.device, self.deletions)
        self.answers = Answers(
            self.scheduler, self.preparer, self.deletions, self._post, model.eos_ids, self._moved
        )
        self._check_when_idle = check_when_idle
        self._max_waiting = max_waiting
        self._arriving = 0  # submitted, not yet seen by the engine's thread; changed under _wake
        self._counters: Counter[str] = Counter()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._progress = True
        self._preparing = ThreadPoolExecutor(1, "mpic-prepare")
        self._thread = threading.Thread(target=self._loop, name="mpic-engine", daemon=True)
        self._thread.start()

    # ---- called from any thread

    def submit(self, request: GenerationRequest) -> Stream:
        """See ``Engine.submit``; raises QueueFull when ``max_waiting`` requests wait already."""
        self._take_place()
        arrived = self.deletions.begin()
        try:
            stream = Stream(request.id)
            sequence = self.preparer.sequence(request, stream, arrived)
            stream.on_abort = lambda: self._post(lambda: self.answers.abort(sequence), quiet=True)
            self._post(lambda: self._arrive(sequence))
        except BaseException:
            self.deletions.end()
            self._leave_place()
            raise
        return stream

    def _take_place(self) -> None:
        """Before anything is prepared, so that a flood costs nothing."""
        with self._wake:
            waiting = self._arriving + len(self.answers.under_way) - len(self.scheduler.running)
            if self._max_waiting is not None and waiting >= self._max_waiting + self._free_places():
                raise QueueFull(
                    f"{waiting} requests are waiting for their turn, and no more may", waiting=waiting
                )
            self._arriving += 1

    def _free_places(self) -> int:
        """Requests that could run at once if there were pages: while nothing waits, the line is not what fills."""
        return (
            0 if self.scheduler.waiting else max(0, self.scheduler.max_running - len(self.scheduler.running))
        )

    def _leave_place(self) -> None:
        with self._wake:
            self._arriving -= 1

    def compile(self, chunk: Chunk, sink: int = 0) -> Future[int]:
        """See ``Engine.compile``; raises EngineStopped itself when the engine has been closed."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # nobody may cancel it: its result is set on the engine's thread
        arrived = self.deletions.begin()
        future.add_done_callback(lambda done: self.deletions.end())

        def prepare() -> None:
            try:
                if self._stopping:
                    raise EngineStopped("the engine has been stopped")
                request = self.preparer.compile_request(chunk, sink, future, arrived)
                if request is not None:
                    self._post(lambda: self.scheduler.add(request))
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            if not self._stopping:
                self._preparing.submit(prepare)
                return future
        self.deletions.end()
        raise EngineStopped("the engine has been stopped")

    def forget(self, chunk: Chunk) -> None:
        done = threading.Event()

        def drop() -> None:
            self.scheduler.room.forget(chunk.owner, chunk.key)
            done.set()

        self.deletions.mark(chunk)
        self.preparer.forget(chunk)
        self._post(drop, quiet=True)
        while not done.wait(1) and self._thread.is_alive():
            pass

    def prefetch(self, chunk: Chunk, sink: int = 0) -> None:
        key = self.preparer.key(chunk, sink)
        if key in self.device.chunks:
            return
        arrived = self.deletions.begin()
        try:
            linked = self.preparer.stored(chunk, key)
        except BaseException:
            self.deletions.end()
            raise
        self._post(lambda: self._prefetch(linked, arrived), quiet=True)

    def stats(self) -> dict[str, Any]:
        chunks = sum(resident.extent.pages for resident in list(self.device.chunks.values()))
        extents = [sequence.extent for sequence in list(self.scheduler.running)]
        running = sum(extent.pages for extent in extents if extent is not None)
        free = self.pool.free_pages
        return {
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "searching": sum(s.searching for s in (*self.scheduler.running, *self.scheduler.parked)),
            "pages": {
                "total": self.pool.pages,
                "free": free,
                "chunks": chunks,
                "running": running,
                "prefix": max(0, self.pool.pages - free - chunks - running),
                "page_size": self.pool.page_size,
                "page_bytes": self.pool.page_bytes,
            },
            "chunks_resident": len(self.device.chunks),
            "counters": {
                name: count
                for owner in (
                    self._counters,
                    self.device.counters,
                    self.scheduler.counters,
                    self.traffic.counters,
                    self.answers.counters,
                    self.answers.extender.counters,
                )
                for name, count in dict(owner).items()
            },
        }

    def ready(self) -> None:
        """See ``Engine.ready``."""
        if self._stopping or not self._thread.is_alive():
            raise EngineStopped("the engine has been stopped")

    def check(self) -> None:
        """Verified on the engine's thread between two steps."""
        result: Future[None] = Future()

        def verify() -> None:
            try:
                self._check()
                result.set_result(None)
            except Exception as error:
                result.set_exception(error)

        self._post(verify)
        result.result(60)

    def close(self) -> None:
        with self._wake:
            if self._stopping:
                return
            self._stopping = True
            self._wake.notify_all()
        self.traffic.stop_waiting()
        self._thread.join()
        self._preparing.shutdown(wait=True)
        self.answers.extender.close()
        self.traffic.close()
        self._handle_messages()

    def _post(self, message: Callable[[], None], quiet: bool = False) -> None:
        with self._wake:
            if self._stopping and not quiet:
                raise EngineStopped("the engine has been stopped")
            self._inbox.append(message)
            self._wake.notify_all()

    # ---- the engine's thread

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not self._stopping and not self._work_left():
                    self._wake.wait()
                stopping = self._stopping
            self._handle_messages()
            if stopping:
                break
            try:
                self.step()
            except Exception as error:  # must not take the server down: fail what was on the device and go on
                log.exception("a step failed")
                self._fail_running(error)
        stopped = EngineStopped("the engine was stopped")
        for sequence in list(self.answers.under_way):
            self.answers.fail(sequence, stopped)
        for request in self.scheduler.waiting:
            request.future.set_exception(stopped)
        self.scheduler.waiting.clear()
        self.traffic.fail(stopped)

    def _handle_messages(self) -> None:
        """Each on its own: one that fails must not take the others with it."""
        with self._wake:
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            try:
                message()
            except Exception:
                log.exception("a message to the engine failed")

    def _arrive(self, sequence: Sequence) -> None:
        self.answers.under_way.add(sequence)
        self._leave_place()
        if self._stopping:
            self.answers.fail(sequence, EngineStopped("the engine was stopped"))
        else:
            self.scheduler.add(sequence)

    def _prefetch(self, linked: LinkedChunk | None, arrived: float) -> None:
        try:
            if linked is not None and not self._stopping:
                self.scheduler.room.prefetch(linked, arrived)
        finally:
            self.deletions.end()

    def _moved(self) -> None:
        """Something was given back: a step may find more to do than the last one."""
        self._progress = True

    def _work_left(self) -> bool:
        """Whether a step could do something now (waiting for a loader is not work)."""
        return self._progress and not self.scheduler.idle

    def step(self) -> None:
        """One turn: schedule -> run -> commit."""
        slices = self.scheduler.schedule()
        admitted = self.scheduler.take_admitted()
        self.traffic.register(admitted)
        decided = self._decide()
        self._progress = bool(slices or admitted or decided)
        if not slices:
            if not self._progress:
                self._refuse_stuck()
            return
        waits = self.traffic.waits(s.lane for s in slices if isinstance(s.lane, Sequence))
        logits = self.runner.run(slices, waits if waits else None)
        self._commit(slices, logits, waits)
        if self._check_when_idle and self.scheduler.idle:
            self._check()

    def _decide(self) -> bool:
        """Let dynamic policies look at their prompts; the rows they choose join the next step."""
        waiting = self.scheduler.undecided()
        for sequence in waiting:
            try:
                self.decider.decide(sequence)
                self.scheduler.decided(sequence)
            except Exception as error:  # of this request alone: nothing has been written
                log.exception("a dynamic policy failed")
                self.answers.fail(sequence, as_failure(error))
        return bool(waiting)

    def _commit(self, slices: list[Slice], logits: torch.Tensor, waits: Waits) -> None:
        row = 0
        now = time.monotonic()
        self._counters["steps"] += 1
        self._counters["rows"] += sum(s.hi - s.lo for s in slices)
        for piece in slices:
            if waits and isinstance(piece.lane, Sequence) and not self._chunks_came(piece.lane, waits):
                self._counters["rows_thrown_away"] += piece.hi - piece.lo
                row += piece.wants_logits
                continue
            piece.lane.computed = piece.hi
            if isinstance(piece.lane, CompileLane):
                if piece.hi == len(piece.lane):
                    self.traffic.compiled(piece.lane)
            elif piece.wants_logits:
                self.answers.take(piece.lane, logits[row], now)
                row += 1

    @staticmethod
    def _chunks_came(sequence: Sequence, waits: Waits) -> bool:
        """Whether every layer of the loads that the request's rows ran beside was there in time."""
        gates = {linked.resident.gate for linked in sequence.needed} - {None}
        sequence.ready = max((sequence.ready, *(gate.ended for gate in gates)))
        return not gates & waits.void

    def _fail_running(self, error: Exception) -> None:
        """Nothing that a failed step half wrote may be reused: every request and job on the device fails."""
        failure = as_failure(error)
        if not self.scheduler.running and not self.scheduler.jobs and self.scheduler.waiting:
            self._refuse(self.scheduler.waiting[0], failure)  # it could not even be admitted
        for sequence in list(self.scheduler.running):
            self.answers.fail(sequence, failure)
        for resident in list(self.scheduler.jobs):
            del self.scheduler.jobs[resident]
            self.device.release(resident)
            self.device.drop(resident)
        self.traffic.fail(CompileFailed(str(failure)))

    def _refuse_stuck(self) -> None:
        """Nothing runs, nothing loads, and the head of the line still does not fit: it never will."""
        busy = self.scheduler.running or self.scheduler.jobs or self.traffic.busy or self._inbox
        if busy or not self.scheduler.waiting:
            return
        head = self.scheduler.waiting[0]
        available = self.pool.free_pages + self.device.evictable_pages()
        self._refuse(head, self.preparer.too_large(head, available))

    def _refuse(self, item: Sequence | CompileRequest, error: MPICError) -> None:
        """Take something out of the line and tell it why."""
        if isinstance(item, Sequence):
            self.answers.fail(item, error)
        else:
            self.scheduler.waiting.remove(item)
            item.future.set_exception(error)
        self._progress = True

    def _check(self) -> None:
        own = {id(s.extent) for s in self.scheduler.running if s.extent is not None}
        self.device.check(own)
