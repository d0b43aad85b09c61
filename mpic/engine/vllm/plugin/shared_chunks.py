"""Chunks kept once in vLLM's own paged cache for all requests that map them: the scheduler's side (MEPIC, section 3.2).

A *resident* chunk has blocks of its own, from its first token on, with keys as they were compiled. Requests map it in
place (``span_attention``), whatever their policies and wherever it stands in their prompts; vLLM's sequence of such a
request holds only the request's own tokens.

While requests map a chunk, its blocks are held (``ref_cnt``). Afterwards they join the tail of vLLM's free queue: they
count as free and stay readable, and when vLLM takes one of them, the chunk is resident no longer. So chunks, prefixes
and running requests share one memory, from which the least recently used blocks are evicted first.

Requests cannot deadlock. A request pins all of its chunks or none, before vLLM allocates its own blocks, and keeps
them only if vLLM admits it in the same step (``end_step``); so waiting requests hold nothing. If the first request that
could start finds too few blocks, no request behind it starts in that step (``short``). A preempted request gives its
pins up at once, in the same loop of vLLM's that looks for blocks. And a request whose chunks and own tokens together
exceed the cache is refused on arrival, so that every admitted request could run alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mpic.engine.vllm.plugin.host_memory import CachedFile
from mpic.engine.vllm.plugin.step_messages import ChunkFill, ResidentSpan
from mpic.engine.vllm.wire import ChunkRef, LinkOrder, mapped

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

COUNTED = ("mapped", "loaded", "evicted", "waited")
"""Counters: chunks that were mapped without being loaded, and that were loaded; resident ones whose blocks vLLM took;
steps in which the first request that could start found too few blocks."""


class ChunkName(NamedTuple):
    """The identity of a chunk in the cache: the digest of its key, and its number of tokens."""

    key: str
    tokens: int


@dataclass(eq=False)
class ResidentChunk:
    """A chunk in the paged cache.

    Args:
        file: the description of its file: inputs and sink tokens, but no KV.
        blocks: its blocks in order; its first token is the first of the first block.
        source: its KV in host memory, until workers have been told to load it.
        users: requests that pin it.
    """

    name: ChunkName
    file: CachedFile
    blocks: tuple[KVCacheBlock, ...]
    source: CachedFile | None
    users: int = 0

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(block.block_id for block in self.blocks)


def name_of(ref: ChunkRef) -> ChunkName:
    return ChunkName(ref.key, ref.length)


class SharedChunks:
    """The resident chunks of an engine; see the module's docstring.

    Args:
        pool: vLLM's blocks.
        block: tokens per block.

    Attributes:
        short: True from when a request finds too few blocks until the step ends.
        counters: see ``COUNTED``.
    """

    def __init__(self, pool: BlockPool, block: int) -> None:
        self._pool, self._block = pool, block
        self._resident: dict[ChunkName, ResidentChunk] = {}
        self._pins: dict[str, tuple[ResidentChunk, ...]] = {}
        self._tried: list[str] = []  # requests that have pinned in this step
        self.short = False
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self._block)

    def room(self) -> int:
        """Return the maximum number of blocks for one request."""
        return self._pool.num_gpu_blocks - 1  # vLLM keeps one block for itself

    def find(self, ref: ChunkRef) -> ResidentChunk | None:
        return self._resident.get(name_of(ref))

    def pinned(self, request: str) -> dict[ChunkName, ResidentChunk]:
        return {one.name: one for one in self._pins.get(request, ())}

    def held(self) -> int:
        """Return how many blocks hold chunks that requests map."""
        return sum(len(one.blocks) for one in self._resident.values() if one.users)

    def idle(self) -> int:
        """Return how many blocks hold chunks that nobody maps now, and count as free."""
        return sum(len(one.blocks) for one in self._resident.values() if not one.users)

    def pin(
        self,
        request: str,
        wanted: Sequence[tuple[ChunkRef, CachedFile | None]],
        hits: Sequence[KVCacheBlock] = (),
    ) -> bool:
        """Pin the chunks of a request, all or none of them; return False if there are too few blocks.

        Args:
            wanted: the chunks that it maps; those that are not resident have their KV in host memory.
            hits: blocks that vLLM has found for it in the prefix cache. vLLM holds them only once it admits the
                request, so until then they must not be used for a chunk.
        """
        self._pool.touch(hits)
        try:
            return self._pin(request, wanted)
        finally:
            self._pool.free_blocks(reversed(hits))  # in vLLM's order: the last block first

    def _pin(self, request: str, wanted: Sequence[tuple[ChunkRef, CachedFile | None]]) -> bool:
        self.release(request)
        found, missing = {}, {}
        for ref, file in wanted:
            name = name_of(ref)
            if (one := self._resident.get(name)) is not None:
                found[name] = one
            else:
                missing[name] = file
        new = {name: self.blocks(name.tokens) for name in missing}
        idle = sum(len(one.blocks) for one in found.values() if not one.users)
        if idle + sum(new.values()) > self._pool.get_num_free_blocks():
            self.short = True
            self.counters["waited"] += 1
            return False
        for one in found.values():
            if not one.users:
                self._pool.touch(one.blocks)
            one.users += 1
        for name, file in missing.items():
            assert file is not None, "a chunk that is not resident has been read"
            blocks = tuple(self._pool.get_new_blocks(new[name]))
            self._resident[name] = found[name] = ResidentChunk(name, file.without_kv(), blocks, file, 1)
        self._pins[request] = tuple(found.values())
        self._tried.append(request)
        return True

    def release(self, request: str) -> None:
        """Unpin a request's chunks; harmless when repeated."""
        for one in self._pins.pop(request, ()):
            one.users -= 1
            if one.users:
                continue
            if one.source is not None:  # it was never loaded, and never will be
                self._drop(one)
                self._pool.free_blocks(one.blocks)
            elif self._resident.get(one.name) is one:
                self._pool.unpin_blocks(one.blocks, partial(self._taken, one))
            else:  # forgotten in the meantime
                self._pool.free_blocks(one.blocks)

    def end_step(self, admitted: Collection[str]) -> list[ChunkFill]:
        """Unpin the chunks of requests that vLLM did not admit in this step; return the chunks that workers must load
        before the step computes."""
        for request in self._tried:
            if request not in admitted:
                self.release(request)
        loads = []
        for request in self._tried:
            for one in self._pins.get(request, ()):
                self.counters["mapped" if one.source is None else "loaded"] += 1
                if one.source is not None:
                    loads.append(ChunkFill(one.name.key, one.source, one.block_ids))
                    one.source = None
        self._tried, self.short = [], False
        return loads

    def forget(self, blocks: Collection[int]) -> list[str]:
        """Forget resident chunks with some of these blocks, because a worker could not load them; return the requests
        that map them."""
        lost = {one for one in self._resident.values() if one.users and set(one.block_ids) & set(blocks)}
        for one in lost:
            self._drop(one)
        return [request for request, pins in self._pins.items() if not lost.isdisjoint(pins)]

    def _drop(self, one: ResidentChunk) -> None:
        if self._resident.get(one.name) is one:
            del self._resident[one.name]

    def _taken(self, one: ResidentChunk, block: KVCacheBlock) -> None:
        """Forget a chunk when vLLM reuses one of its blocks. Its other blocks stay free until vLLM takes them, too."""
        if self._resident.get(one.name) is one:
            self.counters["evicted"] += 1
        self._drop(one)


def spans(order: LinkOrder, pinned: dict[ChunkName, ResidentChunk]) -> Iterator[ResidentSpan]:
    """Yield the spans of a shared link in prompt order.

    Args:
        pinned: the chunks that it maps.
    """
    for number, lo, hi, row in mapped(order):
        ref = order.chunks[number]
        one = pinned[name_of(ref)]
        yield ResidentSpan(one.block_ids, lo - ref.start, hi - ref.start, ref.base - one.file.sink, row)
