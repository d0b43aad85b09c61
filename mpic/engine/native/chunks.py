"""Chunks between the device and the tier below: reading them into extents, what happens when one has been compiled,
and making it durable. All methods run on the engine's thread unless they say otherwise."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from mpic.engine.base import ChunkStore
from mpic.engine.native.deletions import Deletions
from mpic.engine.native.lanes import CompileLane, LinkedChunk
from mpic.errors import NotFound
from mpic.kv.chunk import ChunkKV
from mpic.kv.device import DeviceCache, Resident

if TYPE_CHECKING:
    from mpic.engine.native.scheduler import CompileRequest, Scheduler

log = logging.getLogger(__name__)


class ChunkTraffic:
    """Loader threads, the writer thread, and who waits for them.

    Args:
        device: residents and the pool.
        store: the tier below, or None.
        post: hands a message to the engine's thread.
        loaders: reading threads.

    ``counters``: ``tokens_compiled``, ``load_failures``, ``save_failures``.
    """

    scheduler: Scheduler

    def __init__(
        self,
        device: DeviceCache,
        store: ChunkStore | None,
        deletions: Deletions,
        post: Callable[..., None],
        loaders: int,
    ) -> None:
        self.device, self._store, self._deletions, self._post = device, store, deletions, post
        self._loaders = ThreadPoolExecutor(loaders, "mpic-load")
        self._writer = ThreadPoolExecutor(1, "mpic-write")
        self._awaited: dict[Resident, list[CompileRequest]] = {}
        self.loading = 0
        self.counters: Counter[str] = Counter()

    def start_load(self, linked: LinkedChunk) -> None:
        """Fill a resident's extent from disk on a loader thread; the extent may not move meanwhile."""
        resident, began = linked.resident, time.monotonic()
        resident.extent.fixed += 1
        self.loading += 1
        self.device.acquire(resident)
        target = self.device.pool.view(resident.extent)[:, :, :, resident.first :]
        self._loaders.submit(self._read, linked, resident, target, began)

    def _read(self, linked: LinkedChunk, resident: Resident, target: torch.Tensor, began: float) -> None:
        """On a loader thread. Straight into the extent where it is contiguous host memory, else through a buffer that
        the engine's thread copies."""
        error: BaseException | None = None
        buffer = target
        try:
            if not target.is_contiguous() or target.device.type != "cpu":
                pinned = target.device.type == "cuda"
                buffer = torch.empty(target.shape, dtype=target.dtype, pin_memory=pinned)
            for _ in linked.stored.read_layers(buffer):
                pass
        except Exception as caught:
            error = caught

        def loaded() -> None:
            if error is None and buffer is not target:
                target.copy_(buffer)
            self._loaded(linked, resident, began, error)

        self._post(loaded, quiet=True)

    def _loaded(
        self, linked: LinkedChunk, resident: Resident, began: float, error: BaseException | None
    ) -> None:
        resident.extent.fixed -= 1
        self.loading -= 1
        now = time.monotonic()
        linked.ms = (now - began) * 1e3
        if error is None:
            linked.tier = linked.stored.tier
            resident.ready = True
            for sequence in self.scheduler.running:
                if any(other.resident is resident for other in sequence.linked):
                    sequence.ready = now
            self._resolve(resident, len(resident.inputs))
        else:
            linked.tier = "compiled"
            if isinstance(error, NotFound):
                linked.reason = self._store.missing_reason(linked.key)
            else:
                log.warning("chunk %s could not be read and is compiled again: %s", linked.key.chunk, error)
                self.counters["load_failures"] += 1
                linked.reason = "corrupt"
            if resident.refs > 1:  # beside this load, somebody waits for it
                self.scheduler.start_job(resident)
            else:
                self.device.drop(resident)
        self.device.release(resident)

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
        kv = (
            self.device.pool.view(resident.extent)[:, :, :, resident.first :]
            .to("cpu", copy=True)
            .contiguous()
        )
        self._writer.submit(
            self._write, ChunkKV(resident.key, resident.inputs, kv), futures, self._deletions.begin()
        )

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

    def fail(self, error: BaseException) -> None:
        """Fail everybody who waits for a compile."""
        for resident in list(self._awaited):
            for future in self._take(resident):
                future.set_exception(error)

    def close(self) -> None:
        """Wait for reads and writes under way. From the thread that closes the engine, after its loop has ended."""
        self._loaders.shutdown(wait=True)
        self._writer.shutdown(wait=True)
