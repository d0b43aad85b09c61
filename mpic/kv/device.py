"""The caches in the pool besides running requests: resident chunks and prefix nodes, evicted together by last use."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from mpic.errors import IntegrityError
from mpic.kv.barrier import LoadProgress
from mpic.kv.chunk import ChunkInputs, KVKey
from mpic.kv.pool import Extent, Pool
from mpic.kv.prefix import Node, PrefixCache


class ChunkState(Enum):
    """The life of a chunk in the pool."""

    MISSING = "missing"
    """It has an extent, and nobody fills it yet."""
    LOADING = "loading"
    COMPILING = "compiling"
    READY = "ready"
    FAILED = "failed"
    """It could not be read, or its compiling was abandoned."""


_FOLLOWING = {
    ChunkState.MISSING: {ChunkState.LOADING, ChunkState.COMPILING},
    ChunkState.LOADING: {ChunkState.READY, ChunkState.FAILED},
    ChunkState.COMPILING: {ChunkState.READY, ChunkState.FAILED},
    ChunkState.FAILED: {ChunkState.COMPILING},
    ChunkState.READY: set(),
}


@dataclass(eq=False)
class Resident:
    """A chunk in the pool, immutable once ready and shared by every request that links it.

    Token j of the chunk lies at slot ``first + j`` of the extent (``first`` > 0 behind dropped sink tokens) until a
    press has left ``slots`` of its tokens there, different ones in each layer and head.
    ``refs`` counts requests that link it, jobs that fill it, uploads that wait for it, and its copy to disk while that
    has to wait. ``state`` is where it is in its life, which only ``become`` changes. ``progress`` says which layers are
    there while it is loaded straight into the extent. A chunk that is ``dead`` is seen by nobody but those who have it.
    """

    key: KVKey
    inputs: ChunkInputs
    extent: Extent
    first: int = 0
    state: ChunkState = ChunkState.MISSING
    refs: int = 0
    last_use: float = 0.0
    dead: bool = False
    progress: LoadProgress | None = None

    def become(self, state: ChunkState, progress: LoadProgress | None = None) -> None:
        """Go on to the next state of a chunk's life.

        Args:
            progress: of a load that links may follow.

        Raises:
            IntegrityError: it does not follow the present one.
        """
        if state not in _FOLLOWING[self.state]:
            raise IntegrityError(f"chunk {self.key.chunk} is {self.state.value} and cannot be {state.value}")
        self.state, self.progress = state, progress

    @property
    def ready(self) -> bool:
        """True once all of its KV is there."""
        return self.state is ChunkState.READY

    @property
    def slots(self) -> int:
        """Slots of the chunk's own tokens once it is ready."""
        return self.key.recipe.slots(len(self.inputs))

    @property
    def is_there(self) -> bool:
        """True if rows may attend to it: it is ready, or its last layer has been read."""
        return self.ready or (self.progress is not None and self.progress.complete)

    @property
    def is_pressed(self) -> bool:
        """True where a press leaves fewer slots than the chunk has tokens."""
        return self.slots < len(self.inputs)


class DeviceCache:
    """Resident chunks by key, the prefix cache, and least-recently-used eviction over both.

    ``counters``: ``evicted_chunks``, ``evicted_prefixes``, ``chunk_hits`` over ``chunk_requests``, and
    ``chunks_from_TIER``: the same requests by where the chunk came from (``device``, ``compiled``, or the tier that it
    was read from).
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.prefix = PrefixCache(pool.free)
        self.chunks: dict[KVKey, Resident] = {}
        self._dead: list[Resident] = []
        self.counters: Counter[str] = Counter()
        pool.reclaim = self._reclaim

    def residents(self) -> list[Resident]:
        """Return all residents, those that were dropped and are still linked among them."""
        return [*self.chunks.values(), *self._dead]

    def get(self, key: KVKey) -> Resident | None:
        return self.chunks.get(key)

    def add(self, key: KVKey, inputs: ChunkInputs) -> Resident | None:
        """Reserve an extent for a chunk that is about to be compiled (behind its recipe's sink slots) or read; None
        if the pool is full."""
        sink = key.recipe.sink
        extent = self.pool.alloc(len(inputs) + sink)
        if extent is None:
            return None
        resident = Resident(key, inputs, extent, sink, last_use=time.monotonic())
        self.chunks[key] = resident
        return resident

    def shape(self, resident: Resident, pressed: bool) -> None:
        """Lay out a chunk's extent for all of its tokens, or for the slots that a press leaves. Its contents are lost;
        the pages stay reserved, since a chunk that cannot be read is compiled in place."""
        tokens = resident.slots if pressed else len(resident.inputs)
        resident.extent.tokens, resident.extent.kept = resident.first + tokens, None

    def acquire(self, resident: Resident) -> None:
        resident.refs += 1
        resident.last_use = time.monotonic()

    def release(self, resident: Resident) -> None:
        resident.refs -= 1
        if resident.dead and resident.refs == 0:
            self._dead.remove(resident)
            self.pool.free(resident.extent)

    def drop(self, resident: Resident) -> None:
        """Make a chunk invisible at once; its pages are freed when the last request releases it."""
        if resident.dead:
            return
        del self.chunks[resident.key]
        resident.dead = True
        if resident.refs:
            self._dead.append(resident)
        else:
            self.pool.free(resident.extent)

    def evictable_pages(self) -> int:
        """Return the pages that eviction could free now (MEPIC, algorithm 1, admits against free + evictable)."""
        return sum(extent.pages for extent in self._evictable())

    def _evictable(self) -> set[Extent]:
        return {r.extent for r in self._idle_chunks()} | self._idle_prefixes()

    def _idle_chunks(self) -> list[Resident]:
        return [r for r in self.chunks.values() if r.refs == 0 and r.ready]

    def _idle_prefixes(self) -> set[Extent]:
        holders: dict[int, list[Node]] = {}
        pinned: set[int] = set()
        nodes = list(self.prefix.nodes())
        for node in reversed(nodes):  # children come after their parents in ``nodes``
            if node.pins or any(id(child) in pinned for child in node.children.values()):
                pinned.add(id(node))
            if node.shared is not None:
                holders.setdefault(id(node.shared), []).append(node)
        idle = set()
        for group in holders.values():
            shared = group[0].shared
            assert shared is not None  # by what they are grouped
            if len(group) == shared.holders and not any(id(node) in pinned for node in group):
                idle.add(shared.extent)
        return idle

    def _reclaim(self, pages: int) -> bool:
        """Evict least recently used chunks and prefix leaves until ``pages`` fit in one piece; all or nothing."""
        if not self.pool.fits(pages, self._evictable()):
            return False
        while not self.pool.fits(pages):
            chunk = min(self._idle_chunks(), key=lambda r: r.last_use, default=None)
            leaf = min(self.prefix.evictable(), key=lambda n: n.last_use, default=None)
            if leaf is not None and (chunk is None or leaf.last_use <= chunk.last_use):
                self.prefix.evict(leaf)
                self.counters["evicted_prefixes"] += 1
            elif chunk is not None:
                self.drop(chunk)
                self.counters["evicted_chunks"] += 1
            else:
                raise IntegrityError("fewer pages could be evicted than were counted evictable")
        return True

    def check(self, running: AbstractSet[int] = frozenset()) -> None:
        """Verify the pool, the prefix cache, and that every extent has exactly one kind of owner.

        Args:
            running: identities of the extents that running requests own.
        """
        self.pool.check()
        self.prefix.check()
        owned = [id(r.extent) for r in self.residents()]
        owned += [*self.prefix.extents(), *running]
        present = [id(extent) for extent in self.pool.extents]
        if sorted(owned) != sorted(present):
            raise IntegrityError(
                f"{len(present)} extents in the pool but {len(owned)} owned (or two owners of one)"
            )
        for resident in self.chunks.values():
            if resident.refs < 0 or (not resident.ready and resident.refs == 0):
                raise IntegrityError(f"chunk {resident.key.chunk} is neither ready nor being made")
