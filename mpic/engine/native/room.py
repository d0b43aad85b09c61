"""Room on the device: the residents and extents that requests hold, and chunks that come to be there.

What is held is held as a whole or not at all. Nothing here decides who goes first; see ``scheduler.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mpic.engine.deletions import Deletions
from mpic.engine.native.lanes import CompileLane, LinkedChunk, Sequence, compile_lane
from mpic.engine.native.spans import namespace
from mpic.errors import IntegrityError
from mpic.kv.chunk import ChunkKey
from mpic.kv.device import DeviceCache, Resident
from mpic.kv.pool import Extent
from mpic.kv.prefix import own

PREFETCH = 0.25
"""Most of the pool that may be given to one chunk on suspicion."""


class Room:
    """Pages of requests and chunks.

    Args:
        device: resident chunks and prefix cache over the pool.
        bos: token for sinks.
        load: starts reading a stored chunk into its resident extent, in an order.
        deletions: chunks that requests under way must not bring back.
    """

    def __init__(
        self,
        device: DeviceCache,
        bos: int,
        load: Callable[[LinkedChunk, float], None],
        deletions: Deletions,
    ) -> None:
        self.device, self.pool, self.bos = device, device.pool, bos
        self.deletions = deletions
        self._load = load
        self.jobs: dict[Resident, CompileLane] = {}  # chunks being compiled, in order of admission
        self.counters: Counter[str] = Counter()

    # ---- chunks

    def hold(
        self, needed: list[LinkedChunk], tokens: int
    ) -> tuple[Extent | None, dict[LinkedChunk, Resident]] | None:
        """Pin the residents of chunks, add those that are missing, and reserve an extent (none for 0 tokens): all of
        it, or nothing and None."""
        held: list[Resident] = []
        added: dict[LinkedChunk, Resident] = {}

        def hold(resident: Resident) -> None:
            self.device.acquire(resident)
            held.append(resident)

        present = [(linked, self.device.get(linked.key)) for linked in needed]
        for _, resident in present:
            if resident is not None:
                hold(resident)  # before anything is allocated, so that it is not evicted to make room
        extent = self.pool.alloc(tokens) if tokens else None
        fits = extent is not None or not tokens
        for linked, resident in present:
            if not fits or resident is not None:
                continue
            resident = self.device.get(linked.key)  # a chunk linked twice was added a moment ago
            if resident is None:
                resident = self.device.add(linked.key, linked.inputs)
                if resident is None:
                    fits = False
                    continue
                added[linked] = resident
            hold(resident)
        if fits:
            return extent, added
        if extent is not None:
            self.pool.free(extent)
        for resident in held:
            self.device.release(resident)
        for resident in added.values():
            self.device.drop(resident)
        return None

    def attach(
        self, sequence: Sequence, needed: list[LinkedChunk], added: dict[LinkedChunk, Resident]
    ) -> None:
        """Give chunks the residents that are held for them, and have those that were added read or compiled."""
        for linked in needed:
            linked.resident = self.device.get(linked.key)
            first_time = linked.tier == "none"
            if linked in added:
                if linked.stored is not None:
                    linked.tier = linked.stored.tier
                    self._load(linked, sequence.arrived)
                else:
                    linked.tier = "compiled"
                    self.start_job(linked.resident)
            elif first_time:
                making = "compiled" if linked.resident in self.jobs else "disk"
                linked.tier = "device" if linked.resident.ready else making
            if first_time:
                self.device.counters["chunk_requests"] += 1
                self.device.counters["chunk_hits"] += linked.tier == "device"
                self.device.counters[f"chunks_from_{linked.tier}"] += 1
        for linked, resident in added.items():
            if self.deletions.key_since(sequence.arrived, linked.key):
                self.device.drop(resident)

    def prefetch(self, linked: LinkedChunk, arrived: float) -> None:
        """Start reading a stored chunk that nobody links yet, if at most ``PREFETCH`` of the pool is needed for it."""
        resident = self.device.get(linked.key)
        pages = self.pool.pages_for(len(linked.inputs) + linked.key.recipe.sink)
        if resident is not None or pages > self.pool.pages * PREFETCH:
            return
        if self.deletions.key_since(arrived, linked.key):
            return
        linked.resident = self.device.add(linked.key, linked.inputs)
        if linked.resident is not None:
            self.counters["prefetched"] += 1
            self._load(linked, arrived)

    def start_job(self, resident: Resident) -> None:
        """Compile a resident chunk; the job holds it until it is ready."""
        lane = compile_lane(resident.inputs, resident.first, self.bos)
        lane.extent, lane.resident = resident.extent, resident
        self.device.acquire(resident)
        self.jobs[resident] = lane

    def forget(self, owner: str, chunk: ChunkKey) -> None:
        """A deleted chunk: requests that came before may still compute it for themselves, but nobody else sees it and
        it is not stored."""
        for key, resident in list(self.device.chunks.items()):
            if (key.owner, key.chunk) == (owner, chunk):
                self.device.drop(resident)
        self.device.prefix.purge((owner, chunk.digest))

    # ---- a request's own tokens

    def move(self, sequence: Sequence, bigger: Extent) -> None:
        """Let a request's own tokens go on in a larger extent."""
        used = sequence.computed - sequence.mapped
        old, new = self.pool.view(sequence.extent), self.pool.view(bigger)
        new[:, :, :, :used] = old[:, :, :, :used]
        self.pool.free(sequence.extent)
        sequence.extent = bigger

    def release(self, sequence: Sequence) -> None:
        """Free a request's extent, unpin its chunks and prefixes."""
        for linked in sequence.needed:
            self.device.release(linked.resident)
            linked.resident = None
        self.device.prefix.unpin(sequence.path)
        sequence.path = []
        if sequence.extent is not None:
            self.pool.free(sequence.extent)
            sequence.extent = None
        sequence.spans, sequence.mapped, sequence.computed = [], 0, 0

    def remember(self, sequence: Sequence) -> None:
        """Enter a finished request's own tokens into its prefix namespace, unless a chunk they were computed over has
        been deleted meanwhile."""
        deleted = any(self.deletions.key_since(sequence.arrived, linked.key) for linked in sequence.linked)
        if deleted or any(node.dead for node in sequence.path):
            return
        known = [i for i, item in enumerate(sequence.items) if own(item)]
        end = known[sequence.computed - 1] + 1 if sequence.computed else 0
        chunks = frozenset((linked.key.owner, linked.key.chunk.digest) for linked in sequence.linked)

        def take(n: int) -> Extent | None:
            at, used = n - sequence.mapped, sequence.computed - sequence.mapped
            if at == 0 and self.pool.pages_for(used) == sequence.extent.pages:
                extent, sequence.extent = sequence.extent, None
                return extent
            if at < 0:
                raise IntegrityError("a request's prefix nodes are no longer found")
            kept = self.pool.alloc(used - at)
            if kept is not None:
                self.pool.view(kept)[:] = self.pool.view(sequence.extent)[:, :, :, at:used]
            return kept

        self.device.prefix.insert(namespace(sequence), sequence.items[:end], chunks, take)
