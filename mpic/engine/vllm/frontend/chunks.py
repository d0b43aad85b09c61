"""The state of chunks during a request: their files, their compiles, their use in a prompt."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from mpic.engine.vllm.frontend.prompts import VLLMPrompt
from mpic.engine.vllm.frontend.spool import SpooledFile
from mpic.errors import MPICError
from mpic.kv.chunk import Chunk, ChunkKey, KVKey

REMEMBERED_SIZES = 1 << 16


class ChunkSize(NamedTuple):
    """Tokens of a chunk, and the rotary positions it takes (0 until an image has been compiled)."""

    tokens: int
    rotary_length: int


class ChunkSizes:
    """The sizes of the chunks that were seen last. Thread-safe."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[tuple[str, ChunkKey], dict[KVKey, ChunkSize]] = OrderedDict()  # by content
        self._lock = threading.Lock()

    def keep(self, key: KVKey, tokens: int, rotary_length: int) -> ChunkSize:
        """Remember a chunk's size, and return it."""
        size = ChunkSize(tokens, rotary_length)
        with self._lock:
            self._sizes.setdefault((key.owner, key.chunk), {})[key] = size
            while len(self._sizes) > REMEMBERED_SIZES:
                self._sizes.popitem(last=False)
        return size

    def get(self, key: KVKey) -> ChunkSize | None:
        with self._lock:
            return self._sizes.get((key.owner, key.chunk), {}).get(key)

    def forget(self, chunk: Chunk) -> None:
        with self._lock:
            self._sizes.pop((chunk.owner, chunk.key), None)


class CompiledChunk(NamedTuple):
    """A compiled chunk.

    Args:
        stored: True if the store has kept it.
        spooled: the chunk's file outside the store, if the store did not keep it or a request needs a file of its own.
        unkept: the reason why the store did not keep it; None if the chunk was deleted in the meantime.
    """

    size: ChunkSize
    stored: bool
    spooled: SpooledFile | None = None
    unkept: MPICError | None = None


@dataclass(eq=False)
class CompileTask:
    """A compile under way or in the queue.

    Attributes:
        arrived: time of arrival of the caller that started it.
        waiting: number of callers that wait for it.
        started: True once it has left the queue.
        computed: True once vLLM has done its part.
        cancelled: True once it was cancelled in the queue because no caller was waiting any more.
        own_file: True if one of the callers needs a file outside the store.
        spooled: the chunk's file outside the store, once the callers are counted as its users.
    """

    task: asyncio.Task[CompiledChunk]
    arrived: float
    waiting: int = 0
    started: bool = False
    computed: bool = False
    cancelled: bool = False
    own_file: bool = False
    spooled: SpooledFile | None = None

    def mark_computed(self) -> None:
        """Record that vLLM has done its part. From now on the compile runs to its end even if the engine is stopped."""
        self.computed = True

    def end(self) -> None:
        """Make the callers that wait for this finished compile the users of its file."""
        if self.task.cancelled() or self.task.exception() is not None:
            return
        self.spooled = self.task.result().spooled
        if self.spooled is not None:
            self.spooled.users = self.waiting
            if not self.waiting:
                self.spooled.drop()

    def leave(self) -> None:
        """Drop a caller that was cancelled."""
        self.waiting -= 1
        if not self.waiting and not self.started:
            self.cancelled = self.task.cancel()
        if self.spooled is not None:
            self.spooled.drop()


@dataclass(eq=False)
class LinkedChunk:
    """A chunk of a request.

    Args:
        ids: its token ids, as prompts have them.
        rotary_length: rotary positions it takes; 0 while they are not known.
        stored: True if the store has its file, as far as is known.
        farther: the tier beyond the disk that holds it if the disk does not, or None. vLLM's processes read files from
            the disk only.
        spooled: its file outside the store.
        own_file: True if its request needs a file outside the store, where it cannot be evicted.
        prompt: the prompt that compiles the chunk alone.
        packet: number of its tokens that an adapter adds.
        tier, reason, ms: as in ``mpic.engine.base.ChunkUse``; ``reason`` is why it was compiled or computed.
        computed: True if vLLM computed it instead of linking it, in this or an earlier round of the request.
        counted: True if the counters include it.
    """

    chunk: Chunk
    key: KVKey
    ids: tuple[int, ...]
    rotary_length: int
    stored: bool = False
    farther: str | None = None
    spooled: SpooledFile | None = None
    own_file: bool = False
    prompt: VLLMPrompt | None = None
    packet: int = 0
    tier: str = "none"
    reason: str | None = None
    ms: float = 0.0
    computed: bool = False
    counted: bool = False

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def release(self) -> None:
        """Give up the spooled file, because the request has ended or the file cannot be used."""
        if self.spooled is not None:
            self.spooled.drop()
        self.spooled = self.prompt = None
