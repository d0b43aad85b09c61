"""Chunks between the device and the tier below: reading them into extents, what happens when one has been compiled,
and making it durable. All methods run on the engine's thread unless they say otherwise."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpic.engine.base import ChunkStore
from mpic.engine.deletions import Deletions
from mpic.engine.native.lanes import CompileLane, LinkedChunk, Sequence
from mpic.engine.native.loader import Load, LoadQueue
from mpic.errors import EngineStopped, NotFound
from mpic.kv.chunk import ChunkKV
from mpic.kv.copies import CopiedGate, copies_for
from mpic.kv.device import DeviceCache, Resident
from mpic.kv.gate import Gates, Waits

if TYPE_CHECKING:
    from mpic.engine.native.scheduler import CompileRequest, Scheduler

log = logging.getLogger(__name__)


class Unsaved(NamedTuple):
    """A compiled chunk that waits, pinned in the pool, for the writer; who waits for it to be durable; since when."""

    resident: Resident
    futures: list[Future[int]]
    began: float


class ChunkTraffic:
    """Loader threads, the writer thread, and who waits for them.

    Args:
        device: residents and the pool.
        store: the tier below, or None.
        post: hands a message to the engine's thread.
        loaders: reading threads.

    Attributes:
        patience: seconds that a step may wait for loads; see ``Scheduler.join``.
        backlog: bytes of compiled KV that may lie copied, waiting for the writer. What is compiled beyond that stays
            pinned in the pool until it is its turn, so a slow disk makes admission wait and nothing is lost.

    ``counters``: ``tokens_compiled``, ``load_failures``, ``save_failures``.
    """

    scheduler: Scheduler
    patience = 1.0
    backlog = 256 << 20

    def __init__(
        self,
        device: DeviceCache,
        store: ChunkStore | None,
        deletions: Deletions,
        post: Callable[..., None],
        loaders: int,
    ) -> None:
        self.device, self._store, self._deletions, self._post = device, store, deletions, post
        self._loaders = LoadQueue(loaders)
        self._gates = Gates()
        self._copies = copies_for(device.pool.arena.device)
        self._writer = ThreadPoolExecutor(1, "mpic-write")
        self._unwritten = 0  # bytes at the writer
        self._unsaved: deque[Unsaved] = deque()
        self._awaited: dict[Resident, list[CompileRequest]] = {}
        self.loading = 0
        self.counters: Counter[str] = Counter()

    def start_load(self, linked: LinkedChunk, order: float) -> None:
        """Have a resident's extent filled from the store; the extent may not move meanwhile.

        Host memory is filled straight from the store; for CUDA each layer is read into pinned memory and copied on a
        stream of its own. Links may follow either load layer by layer. For another device the whole chunk is read into
        a buffer, which the engine's thread copies at the end.

        Args:
            order: what the oldest request needs is read first.
        """
        resident, began = linked.resident, time.monotonic()
        resident.extent.fixed += 1
        self.loading += 1
        self.device.acquire(resident)
        target = self._kv(resident)
        copies, gate = self._copies, None
        if copies is not None:
            copies.order()
            gate = CopiedGate(self._gates, target.shape[0], copies)
        elif target.device.type == "cpu":
            gate = self._gates.new(target.shape[0])
        resident.gate = gate
        buffers: list[torch.Tensor] = []

        def beside() -> Iterator[int]:
            buffer = copies.buffer(target.shape, target.dtype)
            for layer in linked.stored.read_layers(buffer):
                gate.copy(target[layer], buffer[layer])
                yield layer

        def through_host() -> Iterator[int]:
            buffers.append(torch.empty(target.shape, dtype=target.dtype))
            yield from linked.stored.read_layers(buffers[0])

        def arrived(layer: int) -> None:
            if gate is not None:
                gate.open(layer)
                if layer == 0:
                    self._post(lambda: None, quiet=True)  # a link may join a step now

        def ended(error: BaseException | None) -> None:
            if gate is not None and error is not None:
                gate.fail()
            self._post(lambda: loaded(error), quiet=True)

        def loaded(error: BaseException | None) -> None:
            if gate is not None:
                gate.settle()
            if error is None and buffers:
                target.copy_(buffers[0])
            self._loaded(linked, resident, began, None if gate is not None and gate.complete else error)

        if copies is not None:
            layers = beside()
        else:
            layers = linked.stored.read_layers(target) if gate is not None else through_host()
        self._loaders.add(Load(order, layers, arrived, ended))

    def _loaded(
        self, linked: LinkedChunk, resident: Resident, began: float, error: BaseException | None
    ) -> None:
        resident.extent.fixed -= 1
        resident.gate = None
        self.loading -= 1
        now = time.monotonic()
        linked.ms = (now - began) * 1e3
        if error is None:
            linked.tier = linked.stored.tier
            resident.ready = True
            for sequence in self.scheduler.running:
                for other in sequence.linked:
                    if other.resident is resident:
                        sequence.ready = now
                        if other.tier == "disk":  # it came while another's load was under way
                            other.tier = linked.tier
            self._resolve(resident, len(resident.inputs))
        else:
            self._load_failed(linked, resident, error)
        self.device.release(resident)

    def _load_failed(self, linked: LinkedChunk, resident: Resident, error: BaseException) -> None:
        """Compile the chunk instead, for those who wait for it; what they have computed over it was thrown away."""
        reason = "corrupt"
        if isinstance(error, NotFound):
            reason = self._store.missing_reason(linked.key)
        elif not isinstance(error, EngineStopped):
            log.warning("chunk %s could not be read and is compiled again: %s", linked.key.chunk, error)
            self.counters["load_failures"] += 1
        for sequence in self.scheduler.running:
            for other in sequence.needed:
                if other.resident is resident:
                    other.tier, other.reason = "compiled", reason
        linked.tier, linked.reason = "compiled", reason
        if resident.refs > 1:  # beside this load, somebody waits for it
            self.scheduler.room.start_job(resident)
        else:
            self.device.drop(resident)

    def waits(self, sequences: Iterable[Sequence]) -> Waits:
        """The loads that a step with rows of these requests runs beside."""
        if not self.loading:
            return Waits((), self.patience)
        gates = {linked.resident.gate for sequence in sequences for linked in sequence.needed}
        return Waits(gates - {None}, self.patience)

    def register(self, admitted: list[tuple[CompileRequest, Resident]]) -> None:
        """Compile requests that have just been admitted wait for the resident they hold."""
        for request, resident in admitted:
            self._awaited.setdefault(resident, []).append(request)
            if resident.ready:
                self._save(resident, self._take(resident))

    def _take(self, resident: Resident) -> list[Future[int]]:
        """The futures of those who wait for a resident; they let go of it."""
        requests = self._awaited.pop(resident, [])
        for _ in requests:
            self.device.release(resident)
        return [request.future for request in requests]

    def _resolve(self, resident: Resident, tokens: int) -> None:
        for future in self._take(resident):
            future.set_result(tokens)

    def compiled(self, lane: CompileLane) -> None:
        """A chunk's last row has run: it serves at once and is copied to disk in the background (MPIC, section 4.1)."""
        resident = lane.resident
        del self.scheduler.jobs[resident]
        resident.ready = True
        self.counters["tokens_compiled"] += len(resident.inputs)
        self._save(resident, self._take(resident))
        self.device.release(resident)

    def _save(self, resident: Resident, futures: list[Future[int]]) -> None:
        n = len(resident.inputs)
        if self._store is None or resident.dead:
            for future in futures:
                future.set_result(n)
            return
        self.device.acquire(resident)
        self._unsaved.append(Unsaved(resident, futures, self._deletions.begin()))
        self._feed_writer()

    def _feed_writer(self) -> None:
        while self._unsaved:
            size = self._kv(self._unsaved[0].resident).nbytes
            if self._unwritten and self._unwritten + size > self.backlog:
                return
            self._hand_over(self._unsaved.popleft())

    def _hand_over(self, unsaved: Unsaved) -> Future[None]:
        """Copy a chunk for the writer and let go of it."""
        resident, futures, began = unsaved
        kv = self._kv(resident).to("cpu", copy=True).contiguous()
        self.device.release(resident)
        self._unwritten += kv.nbytes
        chunk = ChunkKV(resident.key, resident.inputs, kv)
        return self._writer.submit(self._write, chunk, futures, began)

    def _kv(self, resident: Resident) -> torch.Tensor:
        return self.device.pool.view(resident.extent)[:, :, :, resident.first :]

    def _written(self, size: int) -> None:
        self._unwritten -= size
        self._feed_writer()

    def _write(self, chunk: ChunkKV, futures: list[Future[int]], began: float) -> None:
        """On the writer thread."""
        try:
            if not self._deletions.key_since(began, chunk.key):
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
            self._deletions.end()
            self._post(lambda: self._written(chunk.kv.nbytes), quiet=True)

    @property
    def busy(self) -> bool:
        """Whether something is on its way that will make room or answer somebody."""
        return bool(self.loading or self._unsaved)

    def stop_waiting(self) -> None:
        """The step under way waits for no load any more. From any thread."""
        self._gates.close()

    def fail(self, error: BaseException) -> None:
        """Fail everybody who waits for a compile."""
        for resident in list(self._awaited):
            for future in self._take(resident):
                future.set_exception(error)

    def close(self) -> None:
        """Stop reading and write what is unsaved. From the thread that closes the engine, after its loop has ended."""
        self._loaders.close()
        while self._unsaved:  # one copy at a time
            self._hand_over(self._unsaved.popleft()).result()
        self._writer.shutdown(wait=True)
