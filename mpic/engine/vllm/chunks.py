"""Chunk files for link orders: found in the store, or compiled by vLLM first. One compile a chunk, however many ask."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from mpic.engine.base import ChunkStore
from mpic.engine.deletions import Deletions
from mpic.engine.vllm.capture import read_compiled
from mpic.engine.vllm.model import Described
from mpic.engine.vllm.talk import Rendered, Talk
from mpic.engine.vllm.wire import CompileOrder
from mpic.errors import CompileFailed, ContextLengthExceeded, CorruptFile, MPICError, NotFound
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKV, KVKey
from mpic.kv.file import write
from mpic.link.plan import Policy
from mpic.model.load import DTYPES

log = logging.getLogger(__name__)
AT_ONCE = 8
"""Compiles under way; each holds a chunk's KV in memory until it is durable."""
SHAPES = 1 << 16


class Shape(NamedTuple):
    """Tokens of a chunk and the rotary positions it takes (0: not known before it is compiled)."""

    tokens: int
    extent: int


class Held:
    """A chunk file outside the store, for ``users`` who each drop it once; then it goes."""

    def __init__(self, path: Path, users: int) -> None:
        self.path, self.users = path, users

    def drop(self) -> None:
        self.users -= 1
        if self.users <= 0:
            self.path.unlink(missing_ok=True)


class Compiled(NamedTuple):
    """A compiled chunk. ``held`` where the store did not keep it: it was deleted meanwhile, or ``unkept`` says why."""

    shape: Shape
    held: Held | None = None
    unkept: MPICError | None = None


SPOOLED = re.compile(r"[0-9a-f]{32}(?:\.safetensors)?")


@dataclass(eq=False)
class Job:
    """A compile under way, when the caller who began it arrived, and how many wait for it."""

    task: asyncio.Task[Compiled]
    arrived: float
    waiting: int = 0


@dataclass(eq=False)
class Linked:
    """One chunk of a request. ``stored`` or ``held``, its file is there, as far as is known. ``counted``: the counters
    have it."""

    chunk: Chunk
    key: KVKey
    ids: tuple[int, ...]
    extent: int
    stored: bool = False
    held: Held | None = None
    rendered: Rendered | None = None
    tier: str = "none"
    reason: str | None = None
    ms: float = 0.0
    counted: bool = False

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def let_go(self) -> None:
        """The request has ended, or the file is no good."""
        if self.held is not None:
            self.held.drop()
        self.held = self.rendered = None


class Chunks:
    """Methods run on the event loop unless they say otherwise.

    ``counters``: ``tokens_compiled``, ``save_failures``, ``chunk_requests``, ``chunk_hits``, ``chunks_from_...``.
    """

    def __init__(self, model: Described, store: ChunkStore, deletions: Deletions, talk: Talk) -> None:
        self._model, self._store, self._deletions, self._talk = model, store, deletions, talk
        self._shapes: OrderedDict[KVKey, Shape] = OrderedDict()
        self._jobs: dict[KVKey, Job] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._spool = store.root / "spool"
        self._spool.mkdir(parents=True, exist_ok=True)
        self._clear_spool()  # what a crash has left
        self.counters: Counter[str] = Counter()

    # ---- from any thread

    def key(self, chunk: Chunk, sink: int) -> KVKey:
        return KVKey.of(chunk.owner, chunk.key, self._model.digest, self._model.recipe(sink))

    def link(self, chunks: Sequence[Chunk], policy: Policy) -> list[Linked]:
        """Every chunk with its tokens, from the nearest place. An image of which nothing is known is prepared for the
        vision encoder, which tells how many tokens it takes.

        Raises:
            InvalidImage, UnsupportedModality: it cannot be prepared.
        """
        keys = [self.key(chunk, policy.sink) for chunk in chunks]
        found = dict(self._store.find(keys)) if keys else {}
        linked = []
        for chunk, key in zip(chunks, keys, strict=True):
            stored = found.get(key)
            if chunk.token_ids is not None:
                ids = tuple(chunk.token_ids)
                linked.append(Linked(chunk, key, ids, len(ids), stored is not None))
                continue
            shape, rendered = self._shapes.get(key), None
            if (shape is None or not shape.extent) and stored is not None:
                try:
                    shape = self._learn(key, stored.inputs)
                except (NotFound, CorruptFile, OSError) as error:
                    log.warning("chunk %s cannot be used as it is stored: %s", chunk.key, error)
                    stored = None
            if shape is None:
                rendered = self._talk.wait(self._render(chunk, key))
                shape = Shape(len(rendered.ids) - key.recipe.sink, 0)
                self._shapes[key] = shape
            ids = (self._model.image,) * shape.tokens
            linked.append(Linked(chunk, key, ids, shape.extent, stored is not None, rendered=rendered))
        return linked

    def _learn(self, key: KVKey, inputs: ChunkInputs) -> Shape:
        shape = self._shapes[key] = Shape(len(inputs), inputs.extent)
        while len(self._shapes) > SHAPES:
            self._shapes.popitem(last=False)
        return shape

    def forget(self, chunk: Chunk) -> None:
        """The deletion must have been marked before."""
        for key in [k for k in list(self._shapes) if (k.owner, k.chunk) == (chunk.owner, chunk.key)]:
            self._shapes.pop(key, None)

    # ---- compiling

    async def compile(self, chunk: Chunk, sink: int, arrived: float) -> int:
        """Have a chunk stored; gives its tokens.

        Raises:
            StorageFull, StorageQuotaExceeded: it was compiled and cannot be stored.
            CompileFailed: it was deleted meanwhile, or vLLM could not.
        """
        key = self.key(chunk, sink)
        stored = await asyncio.to_thread(self._store.open, key)
        if stored is not None:
            return self._learn(key, stored.inputs).tokens
        compiled = await self._compiled(chunk, key, None, arrived)
        if compiled.held is None:
            return compiled.shape.tokens
        compiled.held.drop()
        if self._deletions.key_since(arrived, key):
            raise CompileFailed("the chunk was deleted before it was compiled")
        raise compiled.unkept or CompileFailed("the chunk was not kept by the store")

    async def ensure(self, linked: Sequence[Linked], arrived: float) -> int:
        """Have the files of all these chunks there, compiling what is missing; gives how many tokens were."""
        missing: dict[KVKey, list[Linked]] = {}
        for one in linked:
            hit = one.stored or one.held is not None
            if one.tier == "none":
                one.tier = "disk" if hit else "compiled"
            if not one.counted:  # a retry and every round of retrieval come here again
                one.counted = True
                self.counters["chunk_requests"] += 1
                self.counters["chunk_hits"] += hit
                self.counters[f"chunks_from_{one.tier}"] += 1
            if not hit:
                missing.setdefault(one.key, []).append(one)
        began = time.monotonic()

        async def one_chunk(key: KVKey, users: list[Linked]) -> int:
            reason = users[0].reason or await asyncio.to_thread(self._store.missing_reason, key)
            compiled = await self._compiled(users[0].chunk, key, users[0].rendered, arrived)
            for user in users:
                user.reason, user.tier, user.rendered = reason, "compiled", None
                user.stored, user.held = compiled.held is None, compiled.held
                user.extent, user.ms = compiled.shape.extent, (time.monotonic() - began) * 1e3
            if compiled.held is not None:
                compiled.held.users += len(users) - 1
            if compiled.shape.tokens != users[0].tokens:
                raise CompileFailed(
                    f"a chunk came out of vLLM with {compiled.shape.tokens} tokens, not {users[0].tokens}"
                )
            return compiled.shape.tokens

        compiles = (one_chunk(*item) for item in missing.items())
        done = await asyncio.gather(*compiles, return_exceptions=True)  # none is left under way
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return sum(done)

    def file(self, linked: Linked) -> tuple[str, str]:
        """Path and key digest of a chunk that is there, as orders have them."""
        path = linked.held.path if linked.held is not None else self._store.path(linked.key)
        return str(path.relative_to(self._store.root)), linked.key.digest

    async def doubt(self, linked: Linked, code: str) -> None:
        """vLLM could not use one of a request's files. What the store can no longer read whole, it moves aside, and it
        is compiled again."""
        if not await asyncio.to_thread(self._good, linked):
            linked.let_go()
            linked.stored, linked.reason, linked.tier = False, code, "none"

    def _good(self, linked: Linked) -> bool:
        if linked.held is not None:
            return linked.held.path.exists()
        stored = self._store.find([linked.key]).get(linked.key)
        if stored is None:
            return False
        shape = self._model.shape
        size = (shape.layers, 2, shape.kv_heads, linked.tokens, shape.head_dim)
        try:
            if len(stored.inputs) == linked.tokens:
                for _ in stored.read_layers(torch.empty(size, dtype=DTYPES[self._model.dtype])):
                    pass
                return True
        except (MPICError, OSError) as error:
            log.warning("chunk %s is damaged or gone: %s", linked.key.chunk, error)
        return False

    async def _compiled(
        self, chunk: Chunk, key: KVKey, rendered: Rendered | None, arrived: float
    ) -> Compiled:
        """Wait for the compile of a chunk: the one that is under way, unless a deletion lies between it and this
        caller. Nobody who waits can cancel it. The caller is a user of ``held``."""
        # what a job computes that began before the deletion is neither stored nor for who came after it
        while (job := self._jobs.get(key)) is not None and self._overtaken(job, key, arrived):
            await asyncio.wait([job.task])
        if job is None:
            task = asyncio.create_task(self._compile(chunk, key, rendered, arrived))
            job = self._jobs[key] = Job(task, arrived)
            task.add_done_callback(lambda done: self._jobs.pop(key))
        job.waiting += 1
        try:
            return await asyncio.shield(job.task)
        except asyncio.CancelledError:
            job.waiting -= 1
            if job.task.done() and not job.task.cancelled() and job.task.exception() is None:
                held = job.task.result().held
                if held is not None:
                    held.drop()
            raise

    def _overtaken(self, job: Job, key: KVKey, arrived: float) -> bool:
        """Whether the chunk was deleted after the job's caller arrived and before this one did."""
        return self._deletions.key_since(job.arrived, key) and not self._deletions.key_since(arrived, key)

    async def _compile(self, chunk: Chunk, key: KVKey, rendered: Rendered | None, arrived: float) -> Compiled:
        sink = key.recipe.sink
        self._deletions.begin()
        folder = self._spool / uuid.uuid4().hex
        try:
            async with self._turns:
                rendered = rendered or await self._render(chunk, key)
                if len(rendered.ids) >= self._talk.context:
                    raise ContextLengthExceeded(
                        f"a chunk has {len(rendered.ids) - sink} tokens{f' and {sink} before it' if sink else ''}; "
                        f"the model's context is {self._talk.context}",
                        prompt_tokens=len(rendered.ids),
                        context_length=self._talk.context,
                    )
                await asyncio.to_thread(folder.mkdir)
                order = CompileOrder(str(folder.relative_to(self._store.root)), sink)
                await self._talk.run(rendered, order)
                inputs, kv = await asyncio.to_thread(read_compiled, folder)
                if chunk.token_ids is None and (inputs.token_ids != self._model.image).any():
                    raise CompileFailed("an image of this model is more than one token repeated")
                self.counters["tokens_compiled"] += len(inputs)
                made = ChunkKV(key, inputs, kv)
                path, unkept = await asyncio.to_thread(self._keep, made, arrived)
                held = Held(path, self._jobs[key].waiting) if path is not None else None
                if held is not None and held.users == 0:
                    held.drop()
                return Compiled(self._learn(key, inputs), held, unkept)
        except MPICError:
            raise
        except OSError as error:
            raise CompileFailed(f"a compiled chunk could not be handed over: {error}") from error
        finally:
            self._deletions.end()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _keep(self, made: ChunkKV, arrived: float) -> tuple[Path | None, MPICError | None]:
        """Store a chunk; one that the store does not keep lies in the spool for those who wait for it."""
        unkept = None
        if not self._deletions.key_since(arrived, made.key):
            try:
                self._store.save(made)
                if made.key in self._store.find([made.key]):
                    return None, None
            except MPICError as error:
                log.warning("chunk %s could not be saved: %s", made.key.chunk, error)
                self.counters["save_failures"] += 1
                unkept = error
        path = self._spool / f"{uuid.uuid4().hex}.safetensors"
        write(path, made)
        return path, unkept

    async def _render(self, chunk: Chunk, key: KVKey) -> Rendered:
        """A chunk alone behind its sink, as vLLM takes it."""
        return await self._talk.render([[self._model.bos] * key.recipe.sink, chunk], uuid.uuid4().hex)

    def check(self) -> list[str]:
        """Names of what should not be there while nothing runs."""
        return [path.name for path in self._spool.iterdir()] + [str(key.chunk) for key in self._jobs]

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*(job.task for job in self._jobs.values()), return_exceptions=True)
        self._clear_spool()
        with suppress(OSError):  # it is gone already, or holds somebody else's files
            self._spool.rmdir()

    def _clear_spool(self) -> None:
        """Remove what this class puts there, and nothing else."""
        for path in self._spool.glob("*"):
            if SPOOLED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
