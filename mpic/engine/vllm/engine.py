"""The vLLM engine: our ``Engine`` over vLLM's, with the same libraries, policies and answers as the native one."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import vllm

from mpic.config import EngineConfig
from mpic.engine.base import ChunkStore, Engine, GenerationRequest, ModelInfo, Usage
from mpic.engine.deletions import Deletions
from mpic.engine.stream import Stream
from mpic.engine.vllm import wire
from mpic.engine.vllm.chunks import Chunks
from mpic.engine.vllm.linktest import link_test
from mpic.engine.vllm.model import VERIFIED, Described, describe
from mpic.engine.vllm.options import check_device, engine_args
from mpic.engine.vllm.prepare import Preparer
from mpic.engine.vllm.running import Running
from mpic.engine.vllm.talk import Talk
from mpic.errors import EngineStopped, IntegrityError, ModelRefused, QueueFull
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.library import Library, Limits
from mpic.prompt.segments import ChunkSegment, Prompt

log = logging.getLogger(__name__)
T = TypeVar("T")
SEARCHERS = 2
OWN_BYTES = 8 << 30
"""Budget of compiled chunks on disk for an engine that was given no store."""


class VLLMEngine(Engine):
    """See ``mpic.engine.base.Engine``. ``mpic.engine.vllm.options.prepare_environment`` must have been called.

    Args:
        config: its ``engine`` is vllm.
        store: where compiled chunks lie; None: in a folder that goes with the engine.
        cpu: whether vLLM's build is one for CPUs.
        host_bytes: for chunk files in host memory; 0: the connector's own choice.

    Raises:
        ModelRefused: the model cannot be right.
        ConfigError: vLLM refuses an option, or did not start.
    """

    def __init__(
        self, config: EngineConfig, store: ChunkStore | None, cpu: bool, host_bytes: int = 0
    ) -> None:
        check_device(config, cpu)
        self._own: Library | None = None
        self._config = config
        self.model = describe(config, cpu, store.root / "models.json" if store is not None else None)
        if store is None:
            folder = Path(tempfile.mkdtemp(prefix="mpic-chunks-"))
            self._own = Library.open(folder, Limits(disk_bytes=OWN_BYTES))
            store = self._own.store
        self._store = store
        self._secret = os.urandom(32)
        self._generations: Counter[tuple[str, ChunkKey]] = Counter()
        self.deletions = Deletions()
        self.counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._arriving = 0  # submitted, not yet seen by the loop; changed under _lock
        self._running: dict[Running, asyncio.Task[None]] = {}
        self._stopping = False
        self._searchers = ThreadPoolExecutor(SEARCHERS, "mpic-search")
        try:
            args = engine_args(config, self.model, cpu, store.root, host_bytes)
            self.talk = Talk(args, self.model.image)
        except BaseException:
            self._close_own()
            raise
        try:
            self._check_processor()
            self.chunks = Chunks(self.model, store, self.deletions, self.talk)
        except BaseException:
            self.talk.close()
            self._close_own()
            raise
        self.preparer = Preparer(self.model, self.chunks, self.talk)
        self.info = _info(config, self.model, self.talk, cpu)
        try:
            link_test(self)
        except BaseException:
            self.close()
            raise
        for counters in (self.counters, self.chunks.counters):
            counters.clear()  # they count what users have asked

    def _check_processor(self) -> None:
        """Images must look the same to both engines, or a chunk would not be what a plain prefill computes."""
        ours, theirs = getattr(self.model.processor, "image_processor", None), self.talk.processor
        if ours is not None and (type(ours) is not type(theirs) or ours.to_dict() != theirs.to_dict()):
            raise ModelRefused(
                f"vLLM prepares images with {type(theirs).__name__} and other settings than this model's own "
                f"{type(ours).__name__}"
            )

    # ---- called from any thread

    def submit(self, request: GenerationRequest, passing: Chunk | None = None) -> Stream:
        """See ``Engine.submit``; raises QueueFull when ``max_waiting`` requests wait already.

        Args:
            passing: a chunk that is compiled for this request and kept nowhere.
        """
        self._take_place()
        arrived = self.deletions.begin()
        if passing is not None:
            self.deletions.mark(passing)
        try:
            self.preparer.check(request)
            stream = Stream(request.id)
            running = Running(self, request, stream, arrived, self._salt(request))
            stream.on_abort = lambda: self._post(lambda: self._abort(running))
            self._post(lambda: self._begin(running), quiet=False)
        except BaseException:
            self.deletions.end()
            self._leave_place()
            raise
        return stream

    def _take_place(self) -> None:
        """Before anything is prepared, so that a flood costs nothing."""
        self.ready()
        with self._lock:
            here = self._arriving + len(self._running)
            if here >= self._config.max_running + self._config.max_waiting:
                waiting = here - self._config.max_running
                raise QueueFull(
                    f"{waiting} requests are waiting for their turn, and no more may", waiting=waiting
                )
            self._arriving += 1

    def _leave_place(self) -> None:
        with self._lock:
            self._arriving -= 1

    def _salt(self, request: GenerationRequest) -> str:
        """Of a request's blocks. What was computed with a chunk before it was deleted is not found after."""
        policy, prompt = request.policy, request.prompt
        if policy.exact or not policy.context:
            return wire.salt(self._secret, request.user, *self._deleted(prompt))
        keys = [self.chunks.key(chunk, policy.sink).digest for chunk in prompt.chunks]
        nonce = [os.urandom(16).hex()] if request.retrieval is not None else []
        recipe = self.model.recipe(policy.sink).digest
        return wire.salt(
            self._secret, request.user, policy.name, recipe, *keys, *self._deleted(prompt), *nonce
        )

    def _deleted(self, prompt: Prompt) -> list[str]:
        """How often each chunk that is in the prompt, and was ever deleted, has been."""
        found = []
        for segment in prompt.segments:
            if isinstance(segment, ChunkSegment):
                times = self._generations.get((segment.chunk.owner, segment.chunk.key))
                if times:
                    found.append(f"{segment.chunk.owner} {segment.chunk.key.digest} {times}")
        return found

    def compile(self, chunk: Chunk, sink: int = 0) -> Future[int]:
        """See ``Engine.compile``; raises EngineStopped itself when the engine has been closed."""
        self.ready()
        arrived = self.deletions.begin()

        async def compiled() -> int:
            try:
                return await self.chunks.compile(chunk, sink, arrived)
            finally:
                self.deletions.end()

        work = compiled()
        try:
            return asyncio.run_coroutine_threadsafe(work, self.talk.loop)
        except RuntimeError as error:
            work.close()
            self.deletions.end()
            raise EngineStopped("the engine has been stopped") from error

    def prefetch(self, chunk: Chunk, sink: int = 0) -> None:
        """Has the system read the chunk's file ahead."""
        key = self.chunks.key(chunk, sink)
        if key not in self._store.find([key]) or not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError), self._store.path(key).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def forget(self, chunk: Chunk) -> None:
        self.deletions.mark(chunk)
        self._generations[chunk.owner, chunk.key] += 1
        self.chunks.forget(chunk)
        if self._own is not None:
            with self._own.store.lock:
                with self._own.catalog.write() as db:
                    rows = self._own.store.drop(db, chunk.owner, chunk.key)
                self._own.store.erase(rows)

    def stats(self) -> dict[str, Any]:
        requests = list(self._running)
        running = sum(one.started and not one.searching for one in requests)
        gauges = self.talk.gauges
        used = max((one.usage for one in gauges), default=0.0)
        blocks = self.talk.blocks
        counters = self.counters + self.chunks.counters
        counters["preemptions"] = sum(one.preemptions for one in gauges)
        return {
            "waiting": len(requests) + self._arriving - running - sum(one.searching for one in requests),
            "running": running,
            "searching": sum(one.searching for one in requests),
            "pages": {
                "total": blocks,
                "free": blocks - round(used * blocks),
                "running": round(used * blocks),
                "page_size": self.talk.block_size,
                "page_bytes": self.talk.block_size * self.model.page_token_bytes,
            },
            "counters": dict(counters),
        }

    def ready(self) -> None:
        """See ``Engine.ready``."""
        if self._stopping:
            raise EngineStopped("the engine has been stopped")
        if self.talk.dead:
            raise EngineStopped("vLLM's engine has died; start the server again")

    def check(self) -> None:
        if self._running or self._arriving:
            return
        left = self.chunks.check()
        if left and not self._running and not self._arriving:
            raise IntegrityError(f"nothing runs, and there still are {', '.join(left)}")

    def close(self) -> None:
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        self.talk.wait(self._stop())
        self._searchers.shutdown(wait=True, cancel_futures=True)
        self.talk.close()
        self._close_own()

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.close()
            shutil.rmtree(self._own.root, ignore_errors=True)

    def _post(self, message: Callable[[], None], quiet: bool = True) -> None:
        """Run something on the loop."""
        try:
            self.talk.loop.call_soon_threadsafe(message)
        except RuntimeError as error:
            if not quiet:
                raise EngineStopped("the engine has been stopped") from error

    # ---- on the loop

    def _begin(self, running: Running) -> None:
        task = asyncio.create_task(running.run())
        self._running[running] = task
        self._leave_place()
        task.add_done_callback(lambda done: self._ended(running, done))
        if self._stopping:
            running.stopping = EngineStopped("the engine was stopped")
            task.cancel()

    def _ended(self, running: Running, done: asyncio.Task[None]) -> None:
        del self._running[running]
        self.deletions.end()
        if done.cancelled():  # before its first step: from then on it ends by itself
            running.cancelled()

    def _abort(self, running: Running) -> None:
        task = self._running.get(running)
        if task is not None:
            task.cancel()

    async def _stop(self) -> None:
        tasks = list(self._running.items())
        for running, task in tasks:
            running.stopping = EngineStopped("the engine was stopped")
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        await self.chunks.close()

    async def search(self, work: Callable[[], T]) -> T:
        """Run something on a search thread."""
        return await asyncio.get_running_loop().run_in_executor(self._searchers, work)

    def finished(self, usage: Usage, reason: str) -> None:
        """A request has come to an end that was not an error."""
        self.counters[f"finished_{reason}"] += 1
        self.counters["generated"] += usage.completion_tokens
        if usage.ttft_ms:
            for name in ("reused", "recomputed", "prefix_hit", "computed"):
                self.counters[f"tokens_{name}"] += getattr(usage, name)
            self.counters["tokens_requested"] += usage.prompt_tokens


def _info(config: EngineConfig, model: Described, talk: Talk, cpu: bool) -> ModelInfo:
    return ModelInfo(
        name=model.name,
        digest=model.digest,
        family=model.family,
        context_length=talk.context,
        dtype=model.dtype,
        device="cpu" if cpu else "cuda",
        modalities=("text", "image") if model.image is not None else ("text",),
        attention=talk.attention,
        details={
            "engine": "vllm",
            "vllm": vllm.__version__,
            "verified": model.family in VERIFIED,
            "tensor_parallel_size": config.tensor_parallel_size,
            "pipeline_parallel_size": config.pipeline_parallel_size,
            **model.shape._asdict(),
        },
    )
