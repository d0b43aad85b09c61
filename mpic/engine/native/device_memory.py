"""Device memory: the residents and extents that requests hold, and the chunks that are compiled into it.

A request gets all it needs or nothing. Who goes first is the scheduler's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import islice

import torch

from mpic import memory
from mpic.engine.native.batch import CompileJob, CompileRequest, compile_job
from mpic.engine.native.presser import Presser
from mpic.engine.native.request import LinkedChunk, Request
from mpic.engine.native.transfers import LoadEnded
from mpic.engine.tombstones import Tombstones
from mpic.errors import DeletedMeanwhile, IntegrityError, PoolTooSmall
from mpic.kv.chunk import ChunkKey
from mpic.kv.device import ChunkState, DeviceCache, Resident
from mpic.kv.pool import Extent
from mpic.kv.prefix import own
from mpic.model.bidirectional import Scope
from mpic.model.loaded import LoadedModel

PAGE_SIZE = 16
_SHARE = {"cuda": 0.85, "mps": 0.5, "cpu": 0.25}  # share of the free memory, when the pool has no set size
_CAP_CPU = 8 << 30  # bytes
PREFETCH = 0.25
"""Largest share of the pool that one prefetched chunk may take."""


class DeviceMemory:
    """Allocates device memory for requests and chunks. All methods run on the engine's thread.

    Args:
        device: resident chunks and prefix cache over the pool.
        bos: the token that sinks consist of.
        load: starts to read a stored chunk into its resident's extent; lower orders are read first.
        save: makes a compiled chunk durable that was begun at a time, then sets its token count as the result of the
            futures.
        tombstones: chunks that unfinished requests must not re-insert.
        presser: compresses compiled chunks whose recipe says so.
        scope: the tokens that attend to each other in both directions.

    ``counters``: ``prefetched``, ``tokens_compiled``.
    """

    def __init__(
        self,
        device: DeviceCache,
        bos: int,
        load: Callable[[LinkedChunk, float], None],
        save: Callable[[Resident, list[Future[int]], float], None],
        tombstones: Tombstones,
        presser: Presser,
        scope: Scope | None = None,
    ) -> None:
        self._presser = presser
        self.device, self.pool, self._bos, self._scope = device, device.pool, bos, scope
        self._load, self._save, self._tombstones = load, save, tombstones
        self.jobs: dict[Resident, CompileJob] = {}  # in order of admission
        # links that wait for a load, by its resident; they are not counted by tier yet
        self._loading: Counter[Resident] = Counter()
        self._uploads: dict[Resident, list[CompileRequest]] = {}  # admitted; each holds its resident
        self.counters: Counter[str] = Counter()

    # ---- chunks

    def reserve(
        self, chunks: Sequence[LinkedChunk], tokens: int, arrived: float
    ) -> tuple[bool, Extent | None]:
        """Pin the residents of chunks and reserve an extent. Missing chunks are added, then read or compiled.

        Args:
            tokens: slots of the extent; 0 reserves none.
            arrived: time at which their request arrived.

        Returns:
            Whether everything fits (otherwise nothing is held), and the extent.
        """
        missing: list[LinkedChunk] = []
        added: dict[LinkedChunk, Resident] = {}
        with ExitStack() as undo:

            def hold(resident: Resident) -> None:
                self.device.acquire(resident)
                undo.callback(self.device.release, resident)

            # pinned before anything is allocated, so that the allocation does not evict them
            for linked in chunks:
                resident = self.device.get(linked.key)
                if resident is None:
                    missing.append(linked)
                else:
                    hold(resident)
            if not self._can_hold(missing, tokens):
                return False, None
            extent = self.pool.alloc(tokens) if tokens else None
            if extent is not None:
                undo.callback(self.pool.free, extent)
            elif tokens:
                return False, None
            for linked in missing:
                resident = self.device.get(linked.key)  # a chunk that is linked twice was added a moment ago
                if resident is None:
                    resident = self.device.add(linked.key, linked.inputs)
                    if resident is None:
                        return False, None
                    undo.callback(self.device.drop, resident)
                    added[linked] = resident
                hold(resident)
            undo.callback(self._detach, chunks, added)
            self._attach(chunks, added, arrived)
            undo.pop_all()
        return True, extent

    def _can_hold(self, missing: Sequence[LinkedChunk | CompileRequest], tokens: int, freed: int = 0) -> bool:
        """Return whether an extent and missing chunks fit into the pages that are free or can be freed: nothing is
        evicted for a request that still will not fit."""
        pages, free = self.pages_for(missing, tokens), self.pool.free_pages + freed
        return pages <= free or pages <= free + self.device.evictable_pages()

    def pages_for(self, chunks: Sequence[LinkedChunk | CompileRequest], tokens: int) -> int:
        """Return the pages of chunks, each counted once, and of an extent of so many tokens (0: none)."""
        extents = {linked.key: len(linked.inputs) + linked.key.recipe.sink for linked in chunks}
        return sum(map(self.pool.pages_for, [*extents.values(), *([tokens] if tokens else [])]))

    def would_fit(
        self, chunks: Sequence[LinkedChunk | CompileRequest], tokens: int, without: Sequence[Request]
    ) -> bool:
        """Return whether chunks and an extent would fit if some running requests gave back what they hold."""
        residents = [linked.resident for request in without for linked in request.prompt.needed]
        held = [resident for resident in residents if resident is not None]
        nodes = [node for request in without for node in request.path]
        found = {linked.key: self.device.get(linked.key) for linked in chunks}
        pinned = [resident for resident in found.values() if resident is not None]
        extents = {request.extent for request in without}
        for holder, change in ((held, -1), (pinned, 1)):
            for resident in holder:
                resident.refs += change
        for node in nodes:
            node.pins -= 1
        try:
            extents |= {resident.extent for resident in held if resident.dead and not resident.refs}
            missing = [linked for linked in chunks if found[linked.key] is None]
            return self._can_hold(missing, tokens, sum(extent.pages for extent in extents))
        finally:
            for holder, change in ((held, 1), (pinned, -1)):
                for resident in holder:
                    resident.refs += change
            for node in nodes:
                node.pins += 1

    def _attach(
        self, chunks: Sequence[LinkedChunk], added: dict[LinkedChunk, Resident], arrived: float
    ) -> None:
        """Assign chunks the residents that are held for them, and start to read or compile the new ones."""
        for linked in chunks:
            held = linked.resident = self.device.get(linked.key)
            assert held is not None
            first_time = linked.tier == "none"
            if linked in added:
                if linked.stored is not None:
                    linked.tier = linked.stored.tier
                    self._load(linked, arrived)
                else:
                    linked.tier = "compiled"
                    self._compile(held)
            elif first_time:
                making = "compiled" if held.state is ChunkState.COMPILING else "disk"
                linked.tier = "device" if held.ready else making
            if first_time:
                self.device.counters["chunk_requests"] += 1
                self.device.counters["chunk_hits"] += linked.tier == "device"
                if held.state in (ChunkState.READY, ChunkState.COMPILING):
                    self.device.counters[f"chunks_from_{linked.tier}"] += 1
                else:
                    self._loading[held] += 1
        for linked, resident in added.items():
            if self._tombstones.key_since(arrived, linked.key):
                self.device.drop(resident)

    def _detach(self, chunks: Sequence[LinkedChunk], added: dict[LinkedChunk, Resident]) -> None:
        """Take back what ``_attach`` has begun, where it could not end. Loads that it started end by themselves."""
        for resident in added.values():
            if resident in self.jobs:
                resident.become(ChunkState.FAILED)
                self._end(self.jobs[resident])
        for linked in chunks:
            linked.resident = None

    def prefetch(self, linked: LinkedChunk, arrived: float) -> None:
        """Start to read a stored chunk that no request links yet, if it takes at most ``PREFETCH`` of the pool."""
        resident = self.device.get(linked.key)
        pages = self.pool.pages_for(len(linked.inputs) + linked.key.recipe.sink)
        if resident is not None or pages > self.pool.pages * PREFETCH:
            return
        if self._tombstones.key_since(arrived, linked.key):
            return
        linked.resident = self.device.add(linked.key, linked.inputs)
        if linked.resident is not None:
            self.counters["prefetched"] += 1
            try:
                self._load(linked, arrived)
            except BaseException:
                self.device.drop(linked.resident)
                raise

    def forget(self, owner: str, chunk: ChunkKey) -> None:
        """Hide a deleted chunk. Requests that arrived before may still compute it for themselves, but no other request
        sees it and it is not stored."""
        for key, resident in list(self.device.chunks.items()):
            if (key.owner, key.chunk) == (owner, chunk):
                self.device.drop(resident)
        self.device.prefix.purge((owner, chunk.digest))

    # ---- compile jobs, and the requests and uploads that wait for them

    def admit(self, upload: CompileRequest) -> bool:
        """Compile an uploaded chunk, or join a load or compile of it that is under way. Return whether it fits."""
        if self._tombstones.key_since(upload.arrived, upload.key):
            upload.future.set_exception(DeletedMeanwhile("the chunk was deleted before it was compiled"))
            return True
        resident = self.device.get(upload.key)
        if resident is None:
            resident = self.device.add(upload.key, upload.inputs)
            if resident is None:
                return False
            self._compile(resident)
        if resident.ready:
            self._save(resident, [upload.future], upload.arrived)
        else:
            self.device.acquire(resident)
            self._uploads.setdefault(resident, []).append(upload)
        return True

    def _compile(self, resident: Resident) -> None:
        """Start to compile a resident chunk. The job holds it until it is ready."""
        try:
            job = compile_job(resident.inputs, resident.first, self._bos, self._scope)
            job.extent, job.resident = resident.extent, resident
            self._presser.observe(job)
        except BaseException:
            self.device.drop(resident)  # or later requests would wait for what nobody makes
            raise
        resident.become(ChunkState.COMPILING)
        self.device.acquire(resident)
        job.began = self._tombstones.begin()
        self.jobs[resident] = job

    def _end(self, job: CompileJob) -> None:
        """End a job, whether it has made its chunk or not."""
        del self.jobs[job.resident]
        self._tombstones.end(job.began)
        self.device.release(job.resident)

    def compiled(self, job: CompileJob) -> None:
        """Mark a chunk ready after its last row has run: it can be linked at once, and is saved in the background."""
        resident = job.resident
        self._presser.press(job)
        resident.become(ChunkState.READY)
        self.counters["tokens_compiled"] += len(resident.inputs)
        try:
            self._save(resident, self._take_futures(resident), job.began)
        finally:
            self._end(job)

    def load_ended(self, event: LoadEnded) -> None:
        """Complete the uploads that wait for a chunk once it has been read, and stored where that is left to do. A
        chunk that could not be read is compiled instead."""
        resident = event.resident
        # where a chunk comes from is known when it is there
        self.device.counters[f"chunks_from_{event.tier}"] += self._loading.pop(resident, 0)
        if event.unsaved:
            self._save(resident, self._take_futures(resident), event.began)
        elif resident.ready:
            for future in self._take_futures(resident):
                future.set_result(len(resident.inputs))
        elif resident.refs > 1:  # something waits for it besides the load itself
            self._compile(resident)
        else:
            self.device.drop(resident)

    def fail_compiles(self, error: BaseException) -> None:
        """Abandon all compile jobs, which a failed step may have left half done, and fail everything that waits for a
        chunk."""
        for resident, job in list(self.jobs.items()):
            resident.become(ChunkState.FAILED)
            self._end(job)
            self.device.drop(resident)
        for resident in list(self._uploads):
            for future in self._take_futures(resident):
                future.set_exception(error)

    def _take_futures(self, resident: Resident) -> list[Future[int]]:
        """Return the futures of the uploads that wait for a resident, and release their hold on it."""
        uploads = self._uploads.pop(resident, [])
        for _ in uploads:
            self.device.release(resident)
        return [upload.future for upload in uploads]

    # ---- a request's own tokens

    def move(self, request: Request, bigger: Extent) -> None:
        """Move a request's own tokens to a larger extent."""
        used = request.computed - request.mapped
        old, new = self.pool.view(request.extent), self.pool.view(bigger)
        new[:, :, :, :used] = old[:, :, :, :used]
        self.pool.free(request.extent)
        request.extent = bigger

    def release(self, request: Request) -> None:
        """Free a request's extent and unpin its chunks and prefixes."""
        for linked in request.prompt.needed:
            if linked.resident is not None:  # chunks that a search has just found hold nothing yet
                self.device.release(linked.resident)
                linked.resident = None
        self.device.prefix.unpin(request.path)
        request.path = []
        if request.extent is not None:
            self.pool.free(request.extent)
            request.extent = None
        request.spans, request.mapped, request.computed = [], 0, 0

    def cache_prefix(self, request: Request) -> None:
        """Enter a finished request's own tokens into its prefix namespace, unless a chunk that they were computed over
        has been deleted meanwhile."""
        chunks = request.prompt.chunks
        deleted = any(self._tombstones.key_since(request.arrived, linked.key) for linked in chunks)
        if deleted or any(node.dead for node in request.path):
            return
        end = request.computed
        if len(request.items) > len(request):  # with mapped spans between the own tokens
            places = (i for i, item in enumerate(request.items, 1) if own(item))
            end = next(islice(places, end - 1, None)) if end else 0

        def take(n: int) -> Extent | None:
            first, used = n - request.mapped, request.computed - request.mapped
            if first == 0 and self.pool.pages_for(used) == request.extent.pages:
                extent, request.extent = request.extent, None
                return extent
            if first < 0:
                raise IntegrityError("a request's prefix nodes are no longer found")
            kept = self.pool.alloc(used - first)
            if kept is not None:
                self.pool.view(kept)[:] = self.pool.view(request.extent)[:, :, :, first:used]
            return kept

        names = frozenset((linked.key.owner, linked.key.chunk.digest) for linked in chunks)
        self.device.prefix.insert(request.namespace, request.items[:end], names, take)


def pool_pages(model: LoadedModel, pool_bytes: int = 0, reserved: int = 0) -> int:
    """Return how many pages of ``PAGE_SIZE`` tokens fit ``pool_bytes``. 0 takes a share of the memory that is free on
    the model's device besides ``reserved`` bytes (of host memory what this process may still allocate), but no more
    than 64 full contexts, the most that the largest batch can use.

    Raises:
        PoolTooSmall: not one page fits.
    """
    page = PAGE_SIZE * model.shape.per_token * model.kv_dtype.itemsize
    if pool_bytes:
        if pool_bytes < page:
            raise PoolTooSmall(f"a page of this model takes {page} bytes; the pool was given {pool_bytes}")
        return pool_bytes // page
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = memory.room()
    budget = int(max(0, free - reserved) * _SHARE.get(model.device.type, 0.25))
    if model.device.type == "cpu":
        budget = min(budget, _CAP_CPU)
    return max(1, min(budget // page, 64 * -(-model.context_length // PAGE_SIZE)))
