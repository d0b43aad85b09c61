"""Chunk files: fetched to the disk, read again when vLLM could not use them, and held in the spool."""

from __future__ import annotations

import asyncio
import logging

import torch

from mpic.engine.vllm.frontend.chunks import LinkedChunk
from mpic.engine.vllm.frontend.gate import Gate
from mpic.engine.vllm.frontend.model import ModelDescription
from mpic.engine.vllm.frontend.spool import Spool
from mpic.engine.vllm.wire import FIRST_SOFT
from mpic.errors import MPICError
from mpic.kv.chunk import KVKey
from mpic.kv.store import ChunkStore, optional
from mpic.model.load import DTYPES

log = logging.getLogger(__name__)


class ChunkFiles:
    """Looks after chunk files. Its methods run on the event loop.

    Args:
        slots: the gate of compiles; a place is held while a chunk's KV is in memory.

    Attributes:
        rechecks: tasks that read files again in the background, by chunk.
    """

    def __init__(self, model: ModelDescription, store: ChunkStore, spool: Spool, slots: Gate) -> None:
        self._model, self._store, self._spool, self._slots = model, store, spool, slots
        self.rechecks: dict[KVKey, asyncio.Task[None]] = {}

    async def bring(self, users: list[LinkedChunk]) -> None:
        """Copy a chunk from a farther tier to the disk, for all uses of it in a request. If it cannot be read or stored
        on the disk, it is compiled."""
        path = self._store.path(users[0].key)
        async with self._slots.turn(users[0].key.owner, 0):
            whole = path.is_file() or await asyncio.to_thread(self._readable, users[0])
        for user in users:
            user.stored = whole and path.is_file()
            user.tier = user.farther if user.stored and user.farther else user.tier
            user.farther = None

    async def look_again(self, users: list[LinkedChunk]) -> None:
        """Find a chunk that has been stored since a request linked it, for all uses of it in the request."""
        key = users[0].key
        if not await asyncio.to_thread(self._store.path(key).is_file):
            return  # ``open`` would count a second miss
        stored = await asyncio.to_thread(self._store.open, key)
        for user in users if stored is not None else ():
            user.stored, user.rotary_length, user.prompt = True, stored.inputs.rotary_length, None

    def file(self, linked: LinkedChunk) -> tuple[str, str]:
        """Return the path and key digest of a chunk that has a file, in the form that orders use."""
        path = linked.spooled.path if linked.spooled is not None else self._store.path(linked.key)
        return str(path.relative_to(self._store.root)), linked.key.digest

    async def recheck(self, linked: LinkedChunk, code: str) -> None:
        """Read a chunk's file again after vLLM could not use one of a request's files. The store moves a damaged file
        aside, and the chunk is compiled again. In either case the request gets a file of its own, because in a store
        without room for all its chunks, each chunk that is saved evicts another."""
        linked.own_file = True
        if not await asyncio.to_thread(self._readable, linked) or not self.hold(linked):
            linked.release()
            linked.stored, linked.reason, linked.tier = False, code, "none"

    def hold(self, linked: LinkedChunk) -> bool:
        """Give a chunk with a stored file a spooled file as well; return False if that is impossible."""
        try:
            linked.spooled = linked.spooled or self._spool.hold(self._store.path(linked.key))
        except OSError as error:
            log.warning("chunk %s cannot be held: %s", linked.key.chunk, error)
        return linked.spooled is not None

    def recheck_later(self, linked: LinkedChunk) -> None:
        """After a request had to compute a chunk because vLLM could not use its file, read that file again in the
        background. The store moves a damaged file aside, and the next request compiles the chunk."""
        key = linked.key
        if linked.spooled is None and key not in self.rechecks:
            task = self.rechecks[key] = asyncio.create_task(self._recheck(linked))
            task.add_done_callback(lambda _: self.rechecks.pop(key))

    async def _recheck(self, linked: LinkedChunk) -> None:
        try:
            async with self._slots.turn(linked.key.owner, 0):
                await asyncio.to_thread(self._readable, linked)
        except MPICError as error:  # the next request that computes it tries again
            log.warning("chunk %s cannot be looked up: %s", linked.key.chunk, error)

    def _readable(self, linked: LinkedChunk) -> bool:
        if linked.spooled is not None:
            return linked.spooled.path.exists()
        stored = self._store.find([linked.key]).get(linked.key)
        if stored is None:
            return False
        size = self._model.shape.extent(linked.tokens)
        ids = torch.tensor(linked.ids)
        optional(stored, "expect", ids.masked_fill(ids >= FIRST_SOFT, 0))  # as files have an adapter's tokens
        try:
            for _ in stored.read_layers(torch.empty(size, dtype=DTYPES[self._model.dtype])):
                pass
            return True
        except (MPICError, OSError) as error:
            log.warning("chunk %s is damaged or gone: %s", linked.key.chunk, error)
        return False
