"""Transfers of chunks between the device and the tier below: reading them into extents, and making compiled ones
durable. All methods run on the engine's thread unless they say otherwise."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from mpic.engine.native.loader import ChunkLoad, LoadQueue
from mpic.engine.native.request import LinkedChunk, Request
from mpic.engine.tombstones import Tombstones
from mpic.errors import EngineStopped, NotFound
from mpic.kv.barrier import LayerBarrier, LoadProgress, LoadSignal
from mpic.kv.chunk import ChunkKV
from mpic.kv.copies import CopiedProgress, copies_for
from mpic.kv.device import DeviceCache, Resident
from mpic.kv.store import ChunkStore

log = logging.getLogger(__name__)


class LoadEnded(NamedTuple):
    """A chunk has been read into its resident's extent from a tier, or could not be read: then ``tier`` is ``compiled``
    and ``reason`` says why, as in ``ChunkUse``."""

    resident: Resident
    tier: str
    reason: str | None


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
        loaders: reading threads.

    Attributes:
        patience: seconds that a step may wait for loads; see ``Scheduler``.
        backlog: bytes of compiled KV that may lie copied, waiting for the writer. What is compiled beyond that stays
            pinned in the pool until it is its turn, so a slow disk makes admission wait and nothing is lost.
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
    ) -> None:
        self.device, self._store, self._tombstones = device, store, tombstones
        self._post, self._emit = post, emit
        self._loaders = LoadQueue(loaders)
        self._signal = LoadSignal()
        self._copies = copies_for(device.pool.arena.device)
        self._writer = ThreadPoolExecutor(1, "mpic-write")
        self._unwritten = 0  # bytes at the writer
        self._returning = 0  # residents that are being copied for it
        self._unsaved: deque[Unsaved] = deque()
        self.loading = 0
        self.counters: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        """True while something is on its way that will free memory or complete a future."""
        return bool(self.loading or self._unsaved or self._returning)

    def _kv(self, resident: Resident) -> torch.Tensor:
        return self.device.pool.view(resident.extent)[:, :, :, resident.first :]

    # ---- reading

    def load(self, linked: LinkedChunk, order: float) -> None:
        """Starts to read a chunk from the store into its resident's extent, which may not move meanwhile.

        Host memory is filled straight from the store; for CUDA each layer is read into pinned memory, unless the store
        has it there already, and copied on a stream of its own. Links may follow either load layer by layer. For
        another device the whole chunk is read into a buffer, which the engine's thread copies at the end.

        Args:
            order: loads of a lower order are read first.
        """
        resident, began = linked.resident, time.monotonic()
        self.device.shape(resident, pressed=True)
        resident.extent.fixed += 1
        self.loading += 1
        self.device.acquire(resident)
        target, copies, progress = self._kv(resident), self._copies, None
        if copies is not None:
            copies.order()
            progress = CopiedProgress(self._signal, target.shape[0], copies)
        elif target.device.type == "cpu":
            progress = LoadProgress(self._signal, target.shape[0])
        resident.progress = progress
        buffers: list[torch.Tensor] = []

        def read() -> Iterator[int]:
            """Reads the chunk on loader threads. A buffer is allocated only when its turn comes."""
            lend = getattr(linked.stored, "lend", None) if copies is not None else None
            memory = lend() if lend is not None else None
            if memory is not None:  # a tier's own, which the device copies from as it lies there
                for layer, source in enumerate(memory):
                    progress.copy(target[layer], source)
                    yield layer
                return
            if copies is not None:
                buffers.append(copies.buffer(target.shape, target.dtype))
            elif progress is None:
                buffers.append(torch.empty(target.shape, dtype=target.dtype))
            for layer in linked.stored.read_layers(buffers[0] if buffers else target):
                if copies is not None:
                    progress.copy(target[layer], buffers[0][layer])
                yield layer

        def arrived(layer: int) -> None:
            if progress is not None:
                progress.arrive(layer)
                if layer == 0:
                    self._post(lambda: None, quiet=True)  # a link may join a step now

        def ended(error: BaseException | None) -> None:
            if progress is not None and error is not None:
                progress.fail()
            self._post(lambda: finish(error), quiet=True)

        def finish(error: BaseException | None) -> None:
            if progress is not None:
                progress.settle()
                error = None if progress.complete else error
            elif error is None:
                target.copy_(buffers[0])
            self._loaded(linked, resident, began, error)

        self._loaders.add(ChunkLoad(order, read(), arrived, ended))

    def _loaded(
        self, linked: LinkedChunk, resident: Resident, began: float, error: BaseException | None
    ) -> None:
        resident.extent.fixed -= 1
        resident.progress = None
        self.loading -= 1
        linked.ms = (time.monotonic() - began) * 1e3
        if error is None:
            self.device.pool.trim(resident.extent)
            resident.ready = True
            linked.tier, reason = linked.stored.tier, None
        else:
            self.device.shape(resident, pressed=False)
            linked.tier = "compiled"
            linked.reason = reason = self._reason(linked, error)
        self._emit(LoadEnded(resident, linked.tier, reason))
        self.device.release(resident)

    def _reason(self, linked: LinkedChunk, error: BaseException) -> str:
        if isinstance(error, NotFound):
            return self._store.missing_reason(linked.key)
        if not isinstance(error, EngineStopped):
            log.warning("chunk %s could not be read and is compiled again: %s", linked.key.chunk, error)
            self.counters["load_failures"] += 1
        return "corrupt"

    def barrier(self, requests: Iterable[Request]) -> LayerBarrier:
        """Returns the barrier of a step with rows of these requests: the loads that it runs beside."""
        if not self.loading:
            return LayerBarrier((), self.patience)
        loads = {linked.resident.progress for request in requests for linked in request.prompt.needed}
        return LayerBarrier(loads - {None}, self.patience)

    def stop_waiting(self) -> None:
        """Ends the waiting of the step under way. May be called from any thread."""
        self._signal.close()

    # ---- writing

    def save(self, resident: Resident, futures: list[Future[int]]) -> None:
        """Copies a compiled chunk to the store in the background (MPIC, section 4.1).

        Args:
            futures: get its token count when it is durable, or the error.
        """
        if self._store is None or resident.dead:
            for future in futures:
                future.set_result(len(resident.inputs))
            return
        self.device.acquire(resident)
        self._unsaved.append(Unsaved(resident, futures, self._tombstones.begin()))
        self._feed_writer()

    def _feed_writer(self) -> None:
        while self._unsaved:
            size = self._kv(self._unsaved[0].resident).nbytes
            if self._unwritten and self._unwritten + size > self.backlog:
                return
            self._hand_over(self._unsaved.popleft())

    def _hand_over(self, unsaved: Unsaved) -> Future[None]:
        """Copies a chunk for the writer and releases it when that is done, which the writer waits for."""
        resident, futures, began = unsaved
        if self._copies is None:
            kv, mark = self._kv(resident).to("cpu", copy=True).contiguous(), None
            self.device.release(resident)
        else:
            kv, mark = self._copies.back(self._kv(resident))
            resident.extent.fixed += 1
            self._returning += 1
        self._unwritten += kv.nbytes
        chunk = ChunkKV(resident.key, resident.inputs, kv)
        return self._writer.submit(self._write, chunk, futures, began, mark, resident)

    def _returned(self, resident: Resident) -> None:
        self._returning -= 1
        resident.extent.fixed -= 1
        self.device.release(resident)

    def _written(self, size: int) -> None:
        self._unwritten -= size
        self._feed_writer()

    def _write(
        self, chunk: ChunkKV, futures: list[Future[int]], began: float, mark: Any, resident: Resident
    ) -> None:
        """Saves a chunk. Runs on the writer thread.

        Args:
            mark: of the copy that brings the chunk's KV, and until whose end it holds the resident; or None.
        """
        try:
            if mark is not None:
                try:
                    self._copies.wait(mark)
                finally:
                    self._post(lambda: self._returned(resident), quiet=True)
            if not self._tombstones.key_since(began, chunk.key):
                self._store.save(chunk)
        except Exception as error:
            log.warning("chunk %s could not be saved: %s", chunk.key.chunk, error)
            self.counters["save_failures"] += 1
            for future in futures:
                future.set_exception(error)
        else:
            for future in futures:
                future.set_result(len(chunk.inputs))
        finally:
            self._tombstones.end()
            self._post(lambda: self._written(chunk.kv.nbytes), quiet=True)

    def close(self) -> None:
        """Stops reading and writes what is unsaved. Called when the engine's thread has ended."""
        self._loaders.close()
        while self._unsaved:  # one copy at a time
            self._hand_over(self._unsaved.popleft()).result()
        self._writer.shutdown(wait=True)
