"""Transfers of chunks between the device and the tier below: reading them into extents, and making compiled ones
durable. All methods run on the engine's thread unless they say otherwise."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from mpic.engine.checks import as_shortage
from mpic.engine.native.device_load import DeviceLoad
from mpic.engine.native.loader import ChunkLoad, LoadQueue
from mpic.engine.native.presser import Presser
from mpic.engine.native.request import LinkedChunk, Request
from mpic.engine.tombstones import Tombstones
from mpic.errors import EngineStopped, NotFound
from mpic.kv.barrier import LayerBarrier, LoadProgress, LoadSignal
from mpic.kv.chunk import ChunkInputs, ChunkKV, KVKey
from mpic.kv.copies import CopiedProgress, Copies, copies_for
from mpic.kv.device import ChunkState, DeviceCache, Resident
from mpic.kv.readback import Readback, readback_for
from mpic.kv.staging import Staging, StagingRing, staging_for
from mpic.kv.store import ChunkStore, looked_up, optional

log = logging.getLogger(__name__)


class LoadEnded(NamedTuple):
    """Reports that a chunk has been read into its resident's extent, or could not be read. In the second case ``tier``
    is ``compiled`` and ``reason`` says why, as in ``ChunkUse``. ``began`` is when the load was begun, as ``Tombstones``
    count it. ``unsaved``: what was read has been pressed, and its new form is not stored yet."""

    resident: Resident
    tier: str
    reason: str | None
    began: float
    unsaved: bool = False


class Unsaved(NamedTuple):
    """A compiled chunk that waits, pinned in the pool, for the writer; ``futures`` get its token count then."""

    resident: Resident
    futures: list[Future[int]]
    began: float


class Transfers:
    """Loader threads and the writer thread.

    Args:
        device: residents and the pool.
        store: the tier below, or None.
        post: hands a message to the engine's thread.
        emit: called on the engine's thread when a load has ended, while it still holds the resident.
        loaders: threads that read files, and as many for a remote store.
        presser: compresses a chunk whose uncompressed form has been read.
        staging: size of the ring that chunks are read through to a CUDA device; None chooses.

    Attributes:
        patience: seconds that a step may wait for loads; see ``Scheduler``.
        backlog: bytes of compiled KV that may wait at the writer. What is compiled beyond that stays pinned in the pool
            until it is its turn, so a slow disk makes admission wait and nothing is lost.
        loading: loads under way.

    ``counters``: ``load_failures``, ``save_failures``.
    """

    patience = 1.0
    backlog = 256 << 20

    def __init__(
        self,
        device: DeviceCache,
        store: ChunkStore | None,
        tombstones: Tombstones,
        post: Callable[..., None],
        emit: Callable[[LoadEnded], None],
        loaders: int,
        presser: Presser,
        staging: Staging | None = None,
    ) -> None:
        self._presser = presser
        self.device, self._store, self._tombstones = device, store, tombstones
        self._post, self._emit = post, emit
        self._ring: StagingRing | None = None
        self.copy_beside(copies_for(device.pool.arena.device), staging)  # may raise, so before threads
        self._loaders = LoadQueue(loaders)
        self._distant: LoadQueue | None = None  # made when it is first needed
        self._signal = LoadSignal()
        self._writer = ThreadPoolExecutor(1, "mpic-write")
        self._unwritten = 0  # bytes at the writer
        self._returning = 0  # residents that are being copied for it
        self._unsaved: deque[Unsaved] = deque()
        self.loading = 0
        self.counters: Counter[str] = Counter()

    def copy_beside(
        self, copies: Copies | None, staging: Staging | None = None, readback: Readback | None = None
    ) -> None:
        """Set how chunks reach the device, before any is loaded or saved, and allocate the ring. None: host memory is
        filled directly, and other devices copy when a load is done.

        Args:
            readback: how chunks come back from there; None chooses by the device.

        Raises:
            ConfigError: there is not so much page-locked memory.
        """
        self._copies, self._readback = copies, readback
        if copies is None:
            return
        self._readback = readback or readback_for(self.device.pool.arena.device)
        size = staging or staging_for()
        try:
            self._ring = StagingRing(copies, size)
        except RuntimeError as error:
            # here: the GPU report runs where its dependencies are missing
            from mpic.config import ConfigError

            says = f"{size.slots} x {size.slot_bytes} bytes of page-locked memory cannot be had ({error})"
            raise ConfigError(
                f"{says}: set staging_slots or staging_slot_bytes lower", param="staging_slot_bytes"
            ) from error
        log.info("chunks are read through %d slots of %d KiB, page-locked", size.slots, size.slot_bytes >> 10)

    @property
    def busy(self) -> bool:
        """True while something is on its way that will free memory or complete a future."""
        return bool(self.loading or self._unsaved or self._returning)

    def _kv(self, resident: Resident) -> torch.Tensor:
        return self.device.pool.view(resident.extent)[:, :, :, resident.first :]

    # ---- reading

    def load(self, linked: LinkedChunk, order: float) -> None:
        """Start to read a chunk from the store into its resident's extent, which may not move meanwhile.

        Host memory is filled straight from the store. For CUDA it is copied from page-locked memory on a stream of its
        own (``DeviceLoad``). Links may follow either load layer by layer. For another device the whole chunk is read
        into a buffer, which the engine's thread copies at the end. An uncompressed form is pressed then, for which
        links wait; ``emit`` has what is left saved.

        Args:
            order: loads of a lower order are read first.
        """
        resident, began = linked.resident, self._tombstones.begin()
        optional(linked.stored, "expect", linked.inputs.token_ids)
        self.device.shape(resident, pressed=not linked.uncompressed)
        resident.extent.fixed += 1
        self.loading += 1
        self.device.acquire(resident)
        target = self._kv(resident)
        beside: DeviceLoad | None = None
        buffer: list[torch.Tensor] = []  # allocated only when its turn comes
        progress: LoadProgress | None = None

        def arrived(layer: int) -> None:
            if progress is not None:
                progress.arrive(layer)
                if layer == 0:
                    self._post(lambda: None, quiet=True)  # a link may join a step now

        def ended(error: BaseException | None) -> None:
            if beside is not None:
                try:
                    beside.ended(error)
                except Exception:  # the load itself has ended, and those who wait for it must learn of that
                    log.exception("what a load held could not be given back")
            if progress is not None and error is not None:
                progress.fail()
            self._post(lambda: finish(error), quiet=True)

        def finish(error: BaseException | None) -> None:
            try:
                if progress is not None:
                    progress.settle()
                    error = None if progress.complete else error
                elif error is None:
                    target.copy_(buffer[0])
            except Exception as failed:  # as if it could not be read: the chunk is compiled
                error = failed
            self._loaded(linked, resident, began, error)

        def read() -> Iterator[int | None]:
            if progress is None:
                buffer.append(torch.empty(target.shape, dtype=target.dtype))
            assert linked.stored is not None  # it is loaded
            stored = looked_up(linked.stored)
            yield from stored.read_layers(target if progress is not None else buffer[0])

        load = ChunkLoad(order, read(), arrived, ended)
        try:
            queue = self._queue_of(linked)
            if self._copies is not None:
                self._copies.order()
                progress, beside = self._read_beside(linked, target, load, queue)
                load.layers = beside.read()
            elif target.device.type == "cpu":
                progress = LoadProgress(self._signal, target.shape[0])
            resident.become(ChunkState.LOADING, None if linked.uncompressed else progress)
            queue.add(load)
        except BaseException:
            self._let_go(resident)
            if resident.state is ChunkState.LOADING:
                resident.become(ChunkState.FAILED)
            self.device.release(resident)
            self._tombstones.end(began)
            raise

    def _queue_of(self, linked: LinkedChunk) -> LoadQueue:
        """Return the threads that read a chunk. Those of a tier beyond the disk are others, because its store may keep
        them waiting."""
        assert linked.stored is not None  # it is asked about chunks that are read
        if linked.stored.tier in ("host", "disk"):
            return self._loaders
        if self._distant is None:
            self._distant = LoadQueue(self._loaders.threads)
        return self._distant

    def _read_beside(
        self, linked: LinkedChunk, target: torch.Tensor, load: ChunkLoad, queue: LoadQueue
    ) -> tuple[CopiedProgress, DeviceLoad]:
        assert self._copies is not None and self._ring is not None and linked.stored is not None
        progress = CopiedProgress(self._signal, target.shape[0], self._copies)
        threads, fork = queue.threads, partial(queue.fork, load)
        return progress, DeviceLoad(linked.stored, target, progress, self._copies, self._ring, threads, fork)

    def _loaded(
        self, linked: LinkedChunk, resident: Resident, began: float, error: BaseException | None
    ) -> None:
        self._let_go(resident)
        if error is None and linked.uncompressed:
            try:
                self._presser.press_read(resident)
            except Exception as failed:  # as if it could not be read: the chunk is compiled
                error = failed
        linked.ms = (time.monotonic() - began) * 1e3
        if error is None:
            self.device.pool.trim(resident.extent)
            resident.become(ChunkState.READY)
            linked.tier, reason = linked.stored.tier, None  # ty: ignore[missing-union-attribute] (it was loaded)
        else:
            resident.become(ChunkState.FAILED)
            self.device.shape(resident, pressed=False)
            linked.tier = "compiled"
            linked.reason = reason = self._reason(linked, error)
        try:
            unsaved = resident.ready and linked.uncompressed
            self._emit(LoadEnded(resident, linked.tier, reason, began, unsaved))
        finally:
            self.device.release(resident)
            self._tombstones.end(began)

    def _let_go(self, resident: Resident) -> None:
        """End what a load does to a resident's extent while it runs."""
        resident.extent.fixed -= 1
        self.loading -= 1

    def _reason(self, linked: LinkedChunk, error: BaseException) -> str:
        if isinstance(error, NotFound):
            try:
                return self._store.missing_reason(linked.key)  # ty: ignore[missing-union-attribute] (it was loaded from it)
            except Exception:
                # a busy catalogue, say: whoever waits for the chunk must learn that it is compiled
                log.exception("the store could not say why chunk %s is missing", linked.key.chunk)
                return "corrupt"
        if not isinstance(error, EngineStopped):
            log.warning("chunk %s could not be read and is compiled again: %s", linked.key.chunk, error)
            self.counters["load_failures"] += 1
        return getattr(error, "reason", "corrupt")

    def barrier(self, requests: Iterable[Request]) -> LayerBarrier | None:
        """Return the barrier of a step with rows of these requests: the loads that it runs beside, or None."""
        if not self.loading:
            return None
        loads = {linked.resident.progress for request in requests for linked in request.prompt.needed}
        loads.discard(None)
        return LayerBarrier(loads, self.patience) if loads else None

    def stop_waiting(self) -> None:
        """End the waiting of the step under way. May be called from any thread."""
        self._signal.close()

    # ---- writing

    def save(self, resident: Resident, futures: list[Future[int]], began: float) -> None:
        """Copy a compiled chunk to the store in the background (MPIC, section 4.2), unless it has been deleted since
        its KV was begun.

        Args:
            futures: get its token count when it is durable, or the error.
            began: when its KV was begun, which the tombstones know as unfinished.
        """
        if self._store is None or resident.dead:
            for future in futures:
                future.set_result(len(resident.inputs))
            return
        self.device.acquire(resident)
        self._unsaved.append(Unsaved(resident, futures, self._tombstones.begin(began)))
        self._feed_writer()

    def _feed_writer(self) -> None:
        while self._unsaved:
            size = self._kv(self._unsaved[0].resident).nbytes
            if self._unwritten and self._unwritten + size > self.backlog:
                return
            self._hand_over(self._unsaved.popleft())

    def _hand_over(self, unsaved: Unsaved) -> Future[None]:
        """Give a chunk to the writer. Host memory is copied at once. Elsewhere the writer reads the resident, which it
        releases then: this thread allocates nothing and waits for nothing."""
        resident, futures, began = unsaved
        view = self._kv(resident)
        self._unwritten += view.nbytes
        if self._readback is None:
            copied: Future[torch.Tensor] = Future()
            try:
                copied.set_result(view.to("cpu", copy=True).contiguous())
            except Exception as error:  # there is no memory: the writer reports it as what it could not save
                copied.set_exception(error)
            self.device.release(resident)
            read: Callable[[], torch.Tensor] = copied.result
        else:
            resident.extent.fixed += 1
            self._returning += 1
            read = partial(self._read_back, resident, view, self._readback.mark())
        about = (resident.key, resident.inputs, view.nbytes)
        return self._writer.submit(self._write, *about, read, futures, began)

    def _read_back(self, resident: Resident, view: torch.Tensor, mark: Any) -> torch.Tensor:
        """Return a resident's KV in host memory. Run on the writer thread, behind the ``mark`` of the work that has
        computed it."""
        try:
            kv = torch.empty(view.shape, dtype=view.dtype)
            assert self._readback is not None  # it gave the mark
            with self._readback.behind(mark):
                for layer, target in zip(view, kv, strict=True):  # a layer may be strided
                    self._readback.to_host(layer, target)
            return kv
        finally:
            self._post(lambda: self._returned(resident), quiet=True)

    def _returned(self, resident: Resident) -> None:
        self._returning -= 1
        resident.extent.fixed -= 1
        self.device.release(resident)

    def _written(self, size: int) -> None:
        self._unwritten -= size
        self._feed_writer()

    def _write(
        self,
        key: KVKey,
        inputs: ChunkInputs,
        size: int,
        read: Callable[[], torch.Tensor],
        futures: list[Future[int]],
        began: float,
    ) -> None:
        """Save a chunk of ``size`` bytes, whose KV ``read`` returns in host memory. Run on the writer thread."""
        try:
            kv = read()
            if not self._tombstones.key_since(began, key):
                assert self._store is not None
                self._store.save(ChunkKV(key, inputs, kv))
        except Exception as error:
            log.warning("chunk %s could not be saved: %s", key.chunk, error)
            self.counters["save_failures"] += 1
            for future in futures:
                future.set_exception(as_shortage(error))
        else:
            for future in futures:
                future.set_result(len(inputs))
        finally:
            self._tombstones.end(began)
            self._post(lambda: self._written(size), quiet=True)

    def close(self) -> None:
        """Stop reading and write what is unsaved. Called when the engine's thread has ended."""
        if self._ring is not None:
            try:
                self._ring.close()  # who waits for a slot ends now
            except RuntimeError:  # the device is lost; what is compiled can still be written
                log.exception("copies to the device did not end")
        for queue in (self._loaders, self._distant):
            if queue is not None:
                queue.close()
        while self._unsaved:  # one copy at a time
            self._hand_over(self._unsaved.popleft()).result()
        self._writer.shutdown(wait=True)


def chunks_arrived(request: Request, barrier: LayerBarrier) -> bool:
    """Return whether every layer that the request's rows attended to was loaded in time."""
    loads = {linked.resident.progress for linked in request.prompt.needed} - {None}
    request.times.ready = max((request.times.ready, *(load.ended for load in loads)))
    return not loads & barrier.missed
