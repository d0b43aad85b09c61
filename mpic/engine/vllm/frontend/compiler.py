"""Provides chunk files for link orders: finds them in the store, or has vLLM compile them once for all waiting
requests."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mpic.engine.accounting import oversized_chunk
from mpic.engine.checks import as_shortage
from mpic.engine.tombstones import Tombstones
from mpic.engine.vllm.frontend.chunk_files import ChunkFiles
from mpic.engine.vllm.frontend.chunks import ChunkSizes, CompiledChunk, CompileTask, LinkedChunk
from mpic.engine.vllm.frontend.client import VLLMClient
from mpic.engine.vllm.frontend.compiled import SPOOL, compute
from mpic.engine.vllm.frontend.gate import CONCURRENT_COMPILES, Gate
from mpic.engine.vllm.frontend.model import ModelDescription
from mpic.engine.vllm.frontend.prompts import VLLMPrompt
from mpic.engine.vllm.frontend.spool import Spool
from mpic.errors import (
    CompileFailed,
    CorruptFile,
    DeletedMeanwhile,
    EngineStopped,
    MPICError,
    NotFound,
    OutOfMemory,
)
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKV, KVKey
from mpic.kv.expected import CheckedStore
from mpic.kv.store import ChunkStore, StoredChunk
from mpic.link import BARE, Policy, Wrapping

log = logging.getLogger(__name__)


class ChunkCompiler:
    """Finds and compiles chunks. Its methods run on the event loop unless they say otherwise.

    Attributes:
        sizes: sizes of the chunks seen so far.
        files: the files of the chunks.
        counters: ``tokens_compiled``, ``save_failures``, ``chunk_requests``, ``chunk_hits``, ``chunks_from_*``.
    """

    def __init__(
        self, model: ModelDescription, store: ChunkStore, tombstones: Tombstones, client: VLLMClient
    ) -> None:
        store = CheckedStore(store, model.expected)
        self._model, self._store, self._tombstones, self._client = model, store, tombstones, client
        self.sizes = ChunkSizes()
        self._tasks: dict[KVKey, CompileTask] = {}
        self._slots = Gate(CONCURRENT_COMPILES, rows=1)  # of compiles; rows are not counted
        self._closing = False
        self._spool = Spool(store.root / SPOOL)
        self.files = ChunkFiles(model, store, self._spool, self._slots)
        self.counters: Counter[str] = Counter()

    # ---- from any thread

    def key(self, chunk: Chunk, wrapping: Wrapping = BARE) -> KVKey:
        return KVKey.of(chunk.owner, chunk.key, self._model.digest, self._model.recipe(wrapping))

    def link(self, chunks: Sequence[Chunk], policy: Policy) -> list[LinkedChunk]:
        """Return every chunk with its token ids. An image of unknown size is prepared for the vision encoder, which
        determines how many tokens it takes.

        Raises:
            InvalidImage, UnsupportedModality: an image cannot be prepared.
            NoAdapter: the policy links packets, and the model has no adapter.
        """
        keys = [self.key(chunk, policy.wrapping) for chunk in chunks]
        found = dict(self._store.find(keys)) if keys else {}
        linked = []
        for chunk, key in zip(chunks, keys, strict=True):
            stored = found.get(key)
            packet = sum(self._model.soft_tokens(key.recipe))
            if chunk.token_ids is not None:
                ids = self._model.prompt_ids(chunk.token_ids, key.recipe)
                have = (stored is not None, _beyond_the_disk(stored))
                linked.append(LinkedChunk(chunk, key, ids, len(ids), *have, packet=packet))
                continue
            size, prompt = self.sizes.get(key), None
            if (size is None or not size.rotary_length) and stored is not None:
                try:
                    inputs = stored.inputs
                    size = self.sizes.keep(key, len(inputs), inputs.rotary_length)
                except (NotFound, CorruptFile, OutOfMemory, OSError) as error:
                    log.warning("chunk %s cannot be used as it is stored: %s", chunk.key, error)
                    stored = None
            if size is None:
                prompt = self._client.wait(self._render(chunk, key))
                size = self.sizes.keep(key, len(prompt.ids) - key.recipe.sink, 0)
            ids = self._model.prompt_ids((self._model.image,) * (size.tokens - packet), key.recipe)
            have = (stored is not None, _beyond_the_disk(stored))
            linked.append(
                LinkedChunk(chunk, key, ids, size.rotary_length, *have, prompt=prompt, packet=packet)
            )
        return linked

    def forget(self, chunk: Chunk) -> None:
        """Forget a chunk whose tombstone has been set."""
        self.sizes.forget(chunk)

    # ---- compiling

    async def compile(self, chunk: Chunk, wrapping: Wrapping, arrived: float) -> int:
        """Store a chunk, compiling it if needed; return its number of tokens.

        Raises:
            StorageFull, StorageQuotaExceeded: it was compiled and cannot be stored.
            DeletedMeanwhile: it was deleted before it was stored, or was not kept for another temporary reason.
            CompileFailed: vLLM could not compile it.
            EngineStopped: the engine is being stopped, or vLLM has died.
        """
        key = self.key(chunk, wrapping)
        stored = await asyncio.to_thread(self._store.open, key)
        if stored is not None:
            return len(stored.inputs)
        compiled = await self._compiled(chunk, key, None, arrived)
        if compiled.spooled is not None:
            compiled.spooled.drop()
        if compiled.stored:
            return compiled.size.tokens
        if self._tombstones.key_since(arrived, key):
            raise DeletedMeanwhile("the chunk was deleted before it was compiled")
        # its rows go before its tombstone is set, and other chunks may need its room at once
        raise compiled.unkept or DeletedMeanwhile("the chunk was deleted or evicted as soon as it was stored")

    async def ensure(self, linked: Sequence[LinkedChunk], arrived: float) -> int:
        """Make sure that all these chunks have files; return the number of tokens compiled to that end."""
        missing: dict[KVKey, list[LinkedChunk]] = {}
        farther: dict[KVKey, list[LinkedChunk]] = {}
        unknown: dict[KVKey, list[LinkedChunk]] = {}
        for one in linked:
            if one.farther is not None:
                farther.setdefault(one.key, []).append(one)
            elif not (one.stored or one.spooled or one.reason):  # a file that was found damaged has a reason
                unknown.setdefault(one.key, []).append(one)
        # a compile under way is joined later
        looked = [users for key, users in unknown.items() if key not in self._tasks]
        await asyncio.gather(*map(self.files.bring, farther.values()), *map(self.files.look_again, looked))
        for one in linked:
            hit = one.stored or one.spooled is not None
            if one.tier == "none":
                one.tier = "disk" if hit else "compiled"
            if not one.counted:  # a retry and every round of retrieval call this again
                one.counted = True
                self.counters["chunk_requests"] += 1
                self.counters["chunk_hits"] += hit
                self.counters[f"chunks_from_{one.tier}"] += 1
            if not hit:
                missing.setdefault(one.key, []).append(one)
        compiles = (self._ensure(*item, arrived) for item in missing.items())
        done = await asyncio.gather(*compiles, return_exceptions=True)  # wait for all, even if one fails
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return sum(done)

    async def _ensure(self, key: KVKey, users: list[LinkedChunk], arrived: float) -> int:
        """Compile a chunk once for all its uses in a request; return its number of tokens."""
        began = time.monotonic()
        reason = users[0].reason or await asyncio.to_thread(self._store.missing_reason, key)
        own_file = any(user.own_file for user in users)
        compiled = await self._compiled(users[0].chunk, key, users[0].prompt, arrived, own_file)
        for user in users:
            user.reason, user.tier, user.prompt = reason, "compiled", None
            user.stored, user.spooled = compiled.stored, compiled.spooled
            user.rotary_length, user.ms = compiled.size.rotary_length, (time.monotonic() - began) * 1e3
        if compiled.spooled is not None:
            compiled.spooled.users += len(users) - 1
        elif own_file:  # the compile was joined as it ended
            for user in users:
                self.files.hold(user)
        if compiled.size.tokens != users[0].tokens:
            raise CompileFailed(
                f"a chunk came out of vLLM with {compiled.size.tokens} tokens, not {users[0].tokens}"
            )
        return compiled.size.tokens

    async def _compiled(
        self, chunk: Chunk, key: KVKey, prompt: VLLMPrompt | None, arrived: float, own_file: bool = False
    ) -> CompiledChunk:
        """Wait for the compile of a chunk. Join a compile that is under way, unless the chunk was deleted between the
        start of that compile and this caller's arrival. Cancelling a caller cancels the compile only if it is still
        queued and no other caller waits for it. The caller becomes a user of ``spooled``."""
        while (task := self._tasks.get(key)) is not None and (
            task.cancelled or self._overtaken(task, key, arrived)
        ):
            await asyncio.wait([task.task])
        if task is None:
            if self._closing:
                raise EngineStopped("the engine was stopped")
            work = asyncio.create_task(self._compile(chunk, key, prompt, arrived))
            task = self._tasks[key] = CompileTask(work, arrived)
            work.add_done_callback(lambda done: self._tasks.pop(key).end())  # runs before any caller resumes
        task.waiting += 1
        task.own_file |= own_file
        try:
            return await asyncio.shield(task.task)
        except asyncio.CancelledError:
            task.leave()
            raise

    def _overtaken(self, task: CompileTask, key: KVKey, arrived: float) -> bool:
        """Return whether the chunk was deleted after the compile's caller arrived and before this caller did. The
        result of such a compile is neither stored nor shown to this caller."""
        return self._tombstones.key_since(task.arrived, key) and not self._tombstones.key_since(arrived, key)

    async def _compile(
        self, chunk: Chunk, key: KVKey, prompt: VLLMPrompt | None, arrived: float
    ) -> CompiledChunk:
        sink = key.recipe.sink
        self._tombstones.begin(arrived)  # the caller that started it may leave before it has ended
        folder = uuid.uuid4().hex
        try:
            async with self._slots.turn(chunk.owner, 0):
                task = self._tasks[key]
                task.started = True
                prompt = prompt or await self._render(chunk, key)
                length = len(prompt.ids)
                if length >= self._client.context:
                    raise oversized_chunk(length - sink, sink, self._client.context, length)
                root, computed = self._store.root, task.mark_computed
                inputs, kv = await compute(self._client, root, folder, prompt, sink, chunk.owner, computed)
                self._check(chunk, key, inputs)
                self.counters["tokens_compiled"] += len(inputs)
                made = ChunkKV(key, inputs, kv)
                stored, unkept = await asyncio.to_thread(self._save, made, arrived)
                spooled = None
                if task.own_file or not stored:
                    file = self._store.path(key) if stored else None
                    spooled = await asyncio.to_thread(self._spool.write, made, file)
                size = self.sizes.keep(key, len(inputs), inputs.rotary_length)
                return CompiledChunk(size, stored, spooled, unkept)
        except Exception as error:
            known = as_shortage(error)
            if isinstance(known, OSError):
                raise CompileFailed(f"a compiled chunk could not be handed over: {error}") from error
            raise known  # noqa: B904 - it knows its cause
        finally:
            self._tombstones.end(arrived)
            await self._remove(self._spool.folder / folder)

    async def _remove(self, folder: Path) -> None:
        try:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        except RuntimeError:  # no thread available; raising would hide the compile's result
            shutil.rmtree(folder, ignore_errors=True)

    def _check(self, chunk: Chunk, key: KVKey, inputs: ChunkInputs) -> None:
        """Raise CompileFailed if the inputs are not those of the chunk."""
        before, behind = self._model.soft_tokens(key.recipe)
        own = slice(before, len(inputs) - behind)
        if chunk.token_ids is None and (inputs.token_ids[own] != self._model.image).any():
            raise CompileFailed("an image of this model is more than one token repeated")
        if key.recipe.packet and not self._model.require_adapter().surrounds(inputs):
            raise CompileFailed("vLLM's workers have another adapter: its file was replaced after the start")

    def _save(self, made: ChunkKV, arrived: float) -> tuple[bool, MPICError | None]:
        """Store a chunk. Return whether the store has kept it and, if it could not, the reason."""
        if self._tombstones.key_since(arrived, made.key):
            return False, None
        try:
            self._store.save(made)
            return made.key in self._store.find([made.key]), None
        except MPICError as error:
            log.warning("chunk %s could not be saved: %s", made.key.chunk, error)
            self.counters["save_failures"] += 1
            return False, error

    async def _render(self, chunk: Chunk, key: KVKey) -> VLLMPrompt:
        """Return a prompt of the chunk alone behind its sink tokens, or inside its adapter."""
        before, _ = self._model.soft_tokens(key.recipe)
        soft = self._model.prompt_ids((), key.recipe)
        start = [self._model.bos] * key.recipe.sink
        return await self._client.render([start, soft[:before], chunk, soft[before:]], uuid.uuid4().hex)

    def check(self) -> list[str]:
        """Return the names of spooled files and compiles that must not exist while the engine is idle."""
        return self._spool.names() + [str(key.chunk) for key in self._tasks]

    async def close(self) -> None:
        """Wait for the chunks that vLLM has computed and for reads under way, end all other compiles, and empty the
        spool. Compiles requested later fail."""
        self._closing = True
        for task in self._tasks.values():
            if not task.computed:
                task.task.cancel()
        tasks = [*(task.task for task in self._tasks.values()), *self.files.rechecks.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._spool.close()


def _beyond_the_disk(stored: StoredChunk | None) -> str | None:
    """Return the name of the tier that holds a chunk if it is a tier beyond the disk, else None."""
    return stored.tier if stored is not None and stored.tier not in ("host", "disk") else None
