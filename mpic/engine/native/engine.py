"""The native engine: schedule -> run -> commit on one thread, everything else around it.

The engine's thread is the only one that touches the pool, the scheduler and the model's text layers. Callers' threads
prepare requests (vision encoder, catalogue look-ups), loader threads fill extents from disk, a writer thread makes
compiled chunks durable. All of them talk to the engine through one inbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import ChainMap, Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import torch

from mpic.engine.accounting import Arrivals
from mpic.engine.base import Engine, GenerationRequest
from mpic.engine.checks import as_failure, as_shortage
from mpic.engine.native.ahead import Ahead
from mpic.engine.native.batch import BatchSlice, CompileJob, CompileRequest
from mpic.engine.native.builder import RequestBuilder
from mpic.engine.native.choose import executor_for
from mpic.engine.native.decide import Decider
from mpic.engine.native.device_memory import DeviceMemory
from mpic.engine.native.inbox import Inbox
from mpic.engine.native.linker import ChunkLinker
from mpic.engine.native.loader import loaders_for
from mpic.engine.native.outputs import Outputs
from mpic.engine.native.preparation import Preparation
from mpic.engine.native.presser import Presser, refusal
from mpic.engine.native.request import LinkedChunk, Request
from mpic.engine.native.sampling import Drawing
from mpic.engine.native.scheduler import Scheduler
from mpic.engine.native.stats import stats
from mpic.engine.native.transfers import LoadEnded, Transfers, chunks_arrived
from mpic.engine.stream import DeltaStream
from mpic.engine.tombstones import Tombstones
from mpic.errors import CompileFailed, EngineStopped, MPICError, Unavailable
from mpic.kv.barrier import LayerBarrier
from mpic.kv.chunk import Chunk
from mpic.kv.device import DeviceCache
from mpic.kv.expected import CheckedStore
from mpic.kv.pool import Pool
from mpic.kv.staging import Staging
from mpic.kv.store import ChunkStore
from mpic.link import BARE, Need, Wrapping
from mpic.link.engines import PROVIDES
from mpic.model.loaded import LoadedModel
from mpic.packet.adapter import Adapter
from mpic.press import PRESSES

log = logging.getLogger(__name__)


class NativeEngine(Engine):
    """See ``mpic.engine.base.Engine``.

    Args:
        model: loaded and self-tested.
        store: tier below the device; None keeps chunks in the pool only.
        adapter: the model's adapter, for the policies that need one.
        pages, page_size: size of the pool, and tokens per page.
        budget: maximum number of tokens that a step computes (chunked prefill).
        max_running: maximum number of requests in one batch.
        max_waiting: maximum number of requests that wait for their turn; None: any number.
        loaders: threads that read chunks from the store; 0 chooses by the machine's cores.
        staging: size of the page-locked ring that chunks are read through to a CUDA device; None chooses.
        check_when_idle: verify all invariants whenever nothing runs.
        cuda_graphs: ``on``, ``off``, or ``auto``; see ``cuda_executor.py``.
        ahead: launch decoding steps before the last one's tokens are known (``ahead.py``); None: as the executor says.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: ChunkStore | None = None,
        *,
        adapter: Adapter | None = None,
        pages: int = 1024,
        page_size: int = 16,
        budget: int = 2048,
        max_running: int = 64,
        max_waiting: int | None = None,
        loaders: int = 0,
        staging: Staging | None = None,
        check_when_idle: bool = True,
        cuda_graphs: str = "off",
        ahead: bool | None = None,
    ) -> None:
        self.model, self.info = model, model.info
        self.provides = PROVIDES["native"] - (
            {Need.PACKET} if adapter is None or not model.takes_packets else set()
        )
        self._inbox = Inbox()
        self._post = self._inbox.post
        self.pool = Pool(model.shape, pages, page_size, model.kv_dtype, model.device)
        # checked before any thread runs
        self.executor = executor_for(model, self.pool, budget, max_running, cuda_graphs)
        self.device = DeviceCache(self.pool)
        if store is not None:
            store = CheckedStore(store, model.expected(adapter))  # ty: ignore[invalid-assignment] (its root cannot be set)
        tombstones = self.tombstones = Tombstones()
        post, ended, threads = self._post, self._load_ended, loaders or loaders_for()
        presser = Presser(model, self.device, 0 if adapter is None else len(adapter.trailer))
        self.transfers = Transfers(self.device, store, tombstones, post, ended, threads, presser, staging)
        load, save = self.transfers.load, self.transfers.save
        self.memory = DeviceMemory(self.device, model.bos_id, load, save, tombstones, presser, model.scope)
        self.scheduler = Scheduler(self.memory, budget, max_running)
        self.ahead = Ahead(self.executor, self.scheduler, self.executor.ahead if ahead is None else ahead)
        self.decider = Decider(model, self.pool)
        pace = self.scheduler.pace
        self.linker = ChunkLinker(
            model, adapter, store, self.device, self.tombstones, lambda: pace.seconds_per_row
        )
        self.builder = RequestBuilder(model, store, self.linker, self.pool)
        self.outputs = Outputs(self.scheduler, self.builder, self.tombstones, self._post, model.eos_ids)
        self._check_when_idle, self._max_waiting = check_when_idle, max_waiting
        self.arrivals = Arrivals(self.scheduler.queued, self._may_wait)
        self._counters: Counter[str] = Counter()
        self._more_to_do = True  # a step might find more to do than the last one
        self._broken = ""  # how the device has failed for good
        self._preparation = Preparation()
        self._thread = threading.Thread(target=self._loop, name="mpic-engine", daemon=True)
        self._thread.start()

    # ---- called from any thread

    def submit(self, request: GenerationRequest) -> DeltaStream:
        """See ``Engine.submit``; raises QueueFull when ``max_waiting`` requests wait already (``Arrivals``)."""
        with ExitStack() as undo:
            self.arrivals.enter(request.user)
            undo.callback(self.arrivals.leave, request.user)
            arrived = self.tombstones.begin_existing(request.exists)
            undo.callback(self.tombstones.end, arrived)
            stream = DeltaStream(request.id)
            queued = self.builder.build(request, stream, arrived)
            stream.on_abort = lambda: self._post(lambda: self.outputs.abort(queued), quiet=True)
            stream.on_room = lambda: self._post(lambda: self.scheduler.read(queued), quiet=True)
            self._post(lambda: self._arrive(queued))
            undo.pop_all()
        return stream

    def _may_wait(self) -> int | None:
        """Return how many requests may wait. Unless the queue waits for memory or for a running request to end, the
        limit is raised by the number that could run at once, so that a burst is not refused before the engine has seen
        its first request."""
        if self._max_waiting is None or self.scheduler.blocked:
            return self._max_waiting
        return self._max_waiting + max(0, self.scheduler.max_running - len(self.scheduler.running))

    def presses(self) -> list[str]:
        return [press.syntax for press in PRESSES if refusal(self.model, press) is None]

    def compile(
        self, chunk: Chunk, wrapping: Wrapping = BARE, exists: Callable[[], object] | None = None
    ) -> Future[int]:
        """See ``Engine.compile``; raises EngineStopped itself when the engine has been closed."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # the engine's thread sets its result: no cancelling
        arrived = self.tombstones.begin_existing(exists)
        future.add_done_callback(lambda done: self.tombstones.end(arrived))

        def prepare() -> None:
            try:
                if self._inbox.closed:
                    raise EngineStopped("the engine has been stopped")
                request = self.builder.compile_request(chunk, wrapping, future, arrived)
                if request is not None:
                    self._post(lambda: self.scheduler.add(request))
            except BaseException as error:
                self._preparation.fail(future, as_shortage(error))

        with self._inbox.lock:
            if not self._inbox.closed:
                self._preparation.submit(prepare, future, chunk.load_clip is not None)
                return future
        self.tombstones.end(arrived)
        raise EngineStopped("the engine has been stopped")

    def forget(self, *chunks: Chunk) -> None:
        if not chunks:
            return
        done = threading.Event()

        def drop() -> None:
            try:
                for chunk in chunks:
                    self.memory.forget(chunk.owner, chunk.key)
            finally:
                done.set()

        for chunk in chunks:  # all of them before anything that takes time
            self.tombstones.mark(chunk)
        for chunk in chunks:
            self.linker.forget(chunk)
        self._post(drop, quiet=True)
        while not done.wait(1) and self._thread.is_alive():
            pass

    def prefetch(self, chunk: Chunk, wrapping: Wrapping = BARE) -> None:
        key = self.linker.key(chunk, wrapping)
        if key in self.device.chunks:
            return
        arrived = self.tombstones.begin()
        try:
            linked = self.linker.stored(chunk, key)
        except BaseException:
            self.tombstones.end(arrived)
            raise
        self._post(lambda: self._prefetch(linked, arrived), quiet=True)

    def stats(self) -> dict[str, Any]:
        memory = (self.device, self.memory, self.scheduler, self.transfers)
        steps = (self.decider, self.outputs, self.ahead, self.executor)
        counted = [dict(owner.counters) for owner in (*memory, *steps)]
        return {
            **stats(self.scheduler, self.pool),
            "counters": dict(ChainMap(*counted, dict(self._counters))),
        }

    def ready(self) -> None:
        if self._inbox.closed or not self._thread.is_alive():
            raise EngineStopped("the engine has been stopped")
        if self._broken:
            raise EngineStopped(f"the device does not work any more, restart the server: {self._broken}")

    def check(self) -> None:
        """See ``Engine.check``. Run on the engine's thread between two steps."""
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
        if not self._inbox.close():
            return
        self.transfers.stop_waiting()
        self._thread.join()
        self._preparation.close()
        self.outputs.extender.close()
        self.transfers.close()
        self._inbox.handle()

    # ---- the engine's thread: messages

    def _loop(self) -> None:
        while True:
            if self.scheduler.idle:
                self.executor.forget()
            self._provide_memory()
            stopping = self._inbox.wait(self._has_work)
            self._inbox.handle()
            if stopping:
                break
            try:
                self.step()
            except Exception as error:
                # must not take the server down: fail everything on the device and continue
                log.exception("a step failed")
                self._examine_device()
                self._fail_running(error)
        stopped = EngineStopped("the engine was stopped")
        for request in list(self.outputs.unfinished):
            self.outputs.fail(request, stopped)
        for item in self.scheduler.waiting:
            item.future.set_exception(stopped)  # ty: ignore[missing-union-attribute] (requests failed above, and left)
        self.scheduler.waiting.clear()
        self.memory.fail_compiles(stopped)

    def _has_work(self) -> bool:
        return self._more_to_do and not self.scheduler.idle

    def _provide_memory(self) -> None:
        """Has memory for one more step's tokens ready before they arrive, once there has been a step, as long as there
        is nothing else to do."""
        while self._counters["steps"] and not (self._inbox or self._inbox.closed or self._has_work()):
            if self.transfers.loading or not self.pool.provide(self.scheduler.budget):
                break

    def _arrive(self, request: Request) -> None:
        self.outputs.unfinished.add(request)
        if self._inbox.closed:
            self.outputs.fail(request, EngineStopped("the engine was stopped"))
        else:
            self.scheduler.add(request)
        self.arrivals.leave(request.user)

    def _prefetch(self, linked: LinkedChunk | None, arrived: float) -> None:
        try:
            if linked is not None and not self._inbox.closed:
                self.memory.prefetch(linked, arrived)
        finally:
            self.tombstones.end(arrived)

    def _load_ended(self, event: LoadEnded) -> None:
        self.scheduler.load_ended(event)
        try:
            self.memory.load_ended(event)
        except Exception as error:  # nothing would ever make the chunk that requests wait for
            log.exception("a chunk that could not be read could not be compiled either")
            self._fail_running(error)

    # ---- the engine's thread: steps

    def step(self) -> None:
        """Take one turn: schedule -> run -> commit, or commit the step that was launched ahead."""
        launched = self.ahead.take()
        if launched is not None:
            self._commit(*launched)
        elif not self._run_next():
            return
        if self.scheduler.idle:
            self.ahead.forget()
            if self._check_when_idle:
                self._check()

    def _run_next(self) -> bool:
        """Schedule, run and commit a step; return whether there was one."""
        slices = self.scheduler.schedule()
        if not slices:
            self._more_to_do = self._decide()
            if not self._more_to_do:
                self._refuse_stuck()
            return False
        self._more_to_do = True
        barrier = self.transfers.barrier(s.rows for s in slices if isinstance(s.rows, Request))
        began = time.monotonic()
        logits = self.executor.run(slices, barrier)
        rows = self._commit(slices, logits, barrier)
        if barrier is None:  # else the step's time would be that of the loads
            self.scheduler.pace.measure(rows, time.monotonic() - began)
        self._decide()  # after what was decided before has been computed
        return True

    def _decide(self) -> bool:
        """Let dynamic policies look at the first prompts that wait for it. The rows they choose join the next step."""
        undecided = self.scheduler.undecided()
        if undecided:
            self.decider.decide(undecided, self.scheduler.decided, self._fail_undecided)
        return bool(undecided)

    def _fail_undecided(self, request: Request, error: BaseException) -> None:
        self._examine_device()
        self.outputs.fail(request, error)

    def _commit(
        self, slices: list[BatchSlice], logits: torch.Tensor, barrier: LayerBarrier | None = None
    ) -> int:
        """Record the results of a step, and return the number of its rows; ``logits`` has one row for each slice that
        wants logits, in order."""
        row = computed = 0
        taken: dict[Request, int] = {}  # the requests whose tokens are drawn, with their rows
        for part in slices:
            rows: Any = part.rows
            computed += part.hi - part.lo
            if isinstance(rows, CompileJob):
                rows.computed = part.hi
                if part.hi == len(rows):
                    self.memory.compiled(rows)
                continue
            wants_logits = part.wants_logits  # taking a token changes that
            if barrier is not None and not chunks_arrived(rows, barrier):
                self._counters["rows_thrown_away"] += part.hi - part.lo
            else:
                rows.computed = part.hi
                if wants_logits:
                    taken[rows] = row
            row += wants_logits
        self._counters["steps"] += 1
        self._counters["rows"] += computed
        if not taken:
            # nothing else waits for the device here, and steps would queue up in front of the next request
            self.executor.wait()
            return computed
        if len(taken) < row:
            logits = logits[list(taken.values())]
        # on a GPU the step is still under way
        mask = self.builder.constraints.mask([request.constraint for request in taken])
        drawing = Drawing(logits, [request.sampler for request in taken], mask)
        if len(taken) == len(slices) and barrier is None and not self._inbox:
            self.ahead.launch(slices, drawing)
        choices = drawing.choices()
        if all(isinstance(choice, Exception) for choice in choices):
            self._examine_device()
        now = time.monotonic()
        for request, choice in zip(taken, choices, strict=True):
            self.outputs.take(request, choice, now)
        return computed

    def _examine_device(self) -> None:
        """Find out, after something has failed, whether the device still works: after an error of its own CUDA refuses
        everything for as long as the process lives, so the engine is not ready any more and says so."""
        try:
            self.executor.wait()
        except Exception as error:
            self._broken = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            log.critical("the device does not work any more, restart the server: %s", self._broken)

    def _fail_running(self, error: Exception) -> None:
        """Fail every request and job on the device: nothing that a failed step half wrote may be used again."""
        failure = as_failure(error)
        scheduler = self.scheduler
        self.ahead.forget()
        if not scheduler.running and not scheduler.jobs and scheduler.tried is not None:
            self._refuse(scheduler.tried, failure)  # it could not even be admitted
        for request in list(scheduler.running):
            self.outputs.fail(request, failure)
        self.memory.fail_compiles(self._failure_of_compiles(failure))
        self._more_to_do = True

    def _failure_of_compiles(self, failure: MPICError) -> MPICError:
        """Return the error for requests that wait for chunks when a step has failed. It lets them try again where the
        chunks are not to blame: memory was short for the whole step, or the device needs a restart."""
        if self._broken:
            return EngineStopped(f"the device does not work any more: {self._broken}")
        return failure if isinstance(failure, Unavailable) else CompileFailed(str(failure))

    def _refuse_stuck(self) -> None:
        """Refuse what was tried last if nothing runs, nothing loads, and it still does not fit: it never will."""
        scheduler = self.scheduler
        if (
            scheduler.running
            or scheduler.jobs
            or self.transfers.busy
            or self._inbox
            or scheduler.tried is None
        ):
            return
        available = self.pool.free_pages + self.device.evictable_pages()
        self._refuse(scheduler.tried, self.builder.too_large(scheduler.tried, available))

    def _refuse(self, item: Request | CompileRequest, error: MPICError) -> None:
        """Remove a request or an upload from the queue and fail it."""
        self.scheduler.tried = None
        if isinstance(item, Request):
            self.outputs.fail(item, error)
        else:
            self.scheduler.withdraw(item)
            item.future.set_exception(error)
        self._more_to_do = True

    def _check(self) -> None:
        own = {id(request.extent) for request in self.scheduler.running if request.extent is not None}
        self.device.check(own)
