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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import vllm

from mpic.config import EngineConfig
from mpic.engine.accounting import Arrivals
from mpic.engine.base import Engine, GenerationRequest
from mpic.engine.checks import as_shortage
from mpic.engine.grammar import Constraints
from mpic.engine.stream import DeltaStream
from mpic.engine.tombstones import Tombstones
from mpic.engine.vllm import wire
from mpic.engine.vllm.frontend.client import NO_CLIPS, VLLMClient
from mpic.engine.vllm.frontend.compiler import ChunkCompiler
from mpic.engine.vllm.frontend.gate import Gate
from mpic.engine.vllm.frontend.linktest import link_test
from mpic.engine.vllm.frontend.model import VERIFIED, ModelDescription, describe_model
from mpic.engine.vllm.frontend.options import check_device, engine_args
from mpic.engine.vllm.frontend.prepare import PromptPreparer
from mpic.engine.vllm.frontend.request import Request, Runtime, Status
from mpic.engine.vllm.frontend.shifttest import shift_test
from mpic.errors import EngineStopped, IntegrityError, ModelRefused
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.kv.store import ChunkStore
from mpic.library import Library, Limits
from mpic.link import BARE, Need, Wrapping, named_policy
from mpic.link.engines import PROVIDES
from mpic.model.info import ModelInfo

log = logging.getLogger(__name__)
SEARCHERS = 2
"""Searches at once."""
REMEMBERED_DELETIONS = 1 << 14
"""Maximum number of deleted chunks that are tracked for cache salts. Beyond that, all salts change."""
OWN_BYTES = 8 << 30
"""Budget of compiled chunks on disk for an engine that was given no store."""


class VLLMEngine(Engine):
    """See ``mpic.engine.base.Engine``. ``frontend.options.prepare_environment`` must have been called before.

    Args:
        config: a configuration whose ``engine`` is vllm.
        store: the store of compiled chunks; None for a temporary folder that is removed with the engine.
        cpu: True if vLLM's build is one for CPUs.
        host_bytes: bytes of chunk files in host memory; None for the connector's own choice.

    Raises:
        ModelRefused: the model's answers would be wrong.
        NoAdapter, AdapterRefused: the configured policy needs an adapter, and there is none, or it cannot be used.
        ConfigError: vLLM refuses an option, or did not start.
    """

    provides = PROVIDES["vllm"]

    def __init__(
        self, config: EngineConfig, store: ChunkStore | None, cpu: bool, host_bytes: int | None = None
    ) -> None:
        check_device(config, cpu)
        self._config = config
        self.model = describe_model(config, cpu, store.root / "models.json" if store is not None else None)
        if (policy := named_policy(config.policy)) is not None and policy.wrapping.packet:
            self.model.require_adapter()
        if self.model.adapter is None:
            self.provides = self.provides - {Need.PACKET}
        self._secret = os.urandom(32)
        self._deleted_times: Counter[tuple[str, ChunkKey]] = Counter()
        self._deleting = threading.Lock()  # guards changes to the two attributes above
        self.tombstones = Tombstones()
        self.counters: Counter[str] = Counter()
        self._active: dict[Request, asyncio.Task[None]] = {}
        self._gate = Gate(config.max_running, config.step_tokens)
        self._arrivals = Arrivals(self._waiting, self._may_wait)
        self._stopping = False
        self._stop_once = threading.Lock()
        self._own: Library | None = None
        with ExitStack() as undo:
            undo.callback(self._close_own)
            if store is None:
                folder = Path(tempfile.mkdtemp(prefix="mpic-chunks-"))
                self._own = Library.open(folder, Limits(disk_bytes=OWN_BYTES))
                store = self._own.store
            self._store = store
            args = engine_args(config, self.model, cpu, store.root, host_bytes)
            soft = len(self.model.adapter) if self.model.adapter is not None else 0
            self.client = VLLMClient(args, self.model.image, soft)
            undo.callback(self.client.close)
            self._check_processor()
            self.compiler = ChunkCompiler(self.model, store, self.tombstones, self.client)
            undo.pop_all()
        preparer, searchers = (
            PromptPreparer(self.compiler, self.client, config.vllm_sharing),
            ThreadPoolExecutor(SEARCHERS, "mpic-search"),
        )
        constraints = Constraints(self.model.tokenizer, self.model.eos, vocabulary=0)
        self._runtime = Runtime(
            self.model,
            self.client,
            self.compiler,
            preparer,
            searchers,
            self.counters,
            self._gate,
            constraints,
        )
        self.info = _info(config, self.model, self.client, cpu)
        try:
            link_test(self.model, self.submit)
            shift_test(self.model, self.client, store.root)
        except BaseException:
            self.close()
            raise
        for counters in (self.counters, self.compiler.counters):
            counters.clear()  # do not count the self-test among users' requests

    def _check_processor(self) -> None:
        """Refuse a model whose images vLLM prepares differently, because its chunks would differ from a plain
        prefill."""
        ours, theirs = getattr(self.model.processor, "image_processor", None), self.client.processor
        if ours is not None and (type(ours) is not type(theirs) or ours.to_dict() != theirs.to_dict()):
            raise ModelRefused(
                f"vLLM prepares images with {type(theirs).__name__} and other settings than this model's own "
                f"{type(ours).__name__}"
            )

    # ---- called from any thread

    def submit(self, request: GenerationRequest, passing: Chunk | None = None) -> DeltaStream:
        """See ``Engine.submit``; raises QueueFull when ``max_waiting`` requests wait already (``Arrivals``).

        Args:
            passing: a chunk that is compiled for this request only and not kept.
        """
        self.ready()
        with ExitStack() as undo:
            self._arrivals.enter(request.user)
            undo.callback(self._arrivals.leave, request.user)
            arrived = self.tombstones.begin_existing(request.exists)
            undo.callback(self.tombstones.end, arrived)
            if passing is not None:
                self.tombstones.mark(passing)
            self._runtime.preparer.check(request)
            stream = DeltaStream(request.id)
            active = Request(self._runtime, request, stream, arrived, self._salt(request))
            stream.on_abort = lambda: self._post(lambda: self._abort(active))
            stream.on_room = lambda: self._post(active.read)
            self.client.post(lambda: self._begin(active))
            undo.pop_all()
        return stream

    def _waiting(self) -> Counter[str]:
        return Counter(active.spec.user for active in list(self._active)) - self._gate.inside()

    def _may_wait(self) -> int:
        """Return how many requests may wait. Count free places as well, so that a burst is not refused before the loop
        has seen its first request."""
        return self._config.max_waiting + max(0, self._gate.places - self._gate.inside().total())

    def _salt(self, request: GenerationRequest) -> str:
        """Return the cache salt for a request's KV blocks. It changes with every deletion of one of the prompt's
        chunks, so that KV computed with a deleted chunk is not found afterwards."""
        policy, chunks = request.policy, request.prompt.chunks
        deleted = []
        for chunk in chunks:
            times = self._deleted_times.get((chunk.owner, chunk.key))
            if times:
                deleted.append(f"{chunk.owner} {chunk.key.digest} {times}")
        if policy.exact or not policy.context:
            return wire.cache_salt(self._secret, request.user, *deleted)
        keys = [self.compiler.key(chunk, policy.wrapping).digest for chunk in chunks]
        nonce = [os.urandom(16).hex()] if request.retrieval is not None else []
        recipe = self.model.recipe(policy.wrapping).digest
        return wire.cache_salt(self._secret, request.user, policy.name, recipe, *keys, *deleted, *nonce)

    def compile(
        self, chunk: Chunk, wrapping: Wrapping = BARE, exists: Callable[[], object] | None = None
    ) -> Future[int]:
        """See ``Engine.compile``; raises EngineStopped itself when the engine has been closed."""
        self.ready()
        arrived = self.tombstones.begin_existing(exists)

        async def compiled() -> int:
            try:
                return await self.compiler.compile(chunk, wrapping, arrived)
            except asyncio.CancelledError:
                if self._stopping:
                    raise EngineStopped("the engine was stopped") from None
                raise
            except Exception as error:
                raise as_shortage(error)  # noqa: B904 - it knows its cause
            finally:
                self.tombstones.end(arrived)

        try:
            return self.client.submit(compiled())
        except EngineStopped:
            self.tombstones.end(arrived)
            raise

    def prefetch(self, chunk: Chunk, wrapping: Wrapping = BARE) -> None:
        """Ask the operating system to read the chunk's file ahead."""
        key = self.compiler.key(chunk, wrapping)
        if key not in self._store.find([key]) or not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError), self._store.path(key).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def forget(self, *chunks: Chunk) -> None:
        for chunk in chunks:  # delete all of them before any step that takes time
            self.tombstones.mark(chunk)
            self._count_deletion(chunk)
        for chunk in chunks:
            self.compiler.forget(chunk)
        if self._own is not None and chunks:
            with self._own.store.lock:
                with self._own.catalog.write() as db:
                    rows = [row for one in chunks for row in self._own.store.drop(db, one.owner, one.key)]
                self._own.store.erase(rows)

    def _count_deletion(self, chunk: Chunk) -> None:
        with self._deleting:
            self._deleted_times[chunk.owner, chunk.key] += 1
            if len(self._deleted_times) > REMEMBERED_DELETIONS:
                # change the secret first: ``_salt`` reads it last, so the old secret is never combined with the emptied
                # deletions
                self._secret = os.urandom(32)
                self._deleted_times = Counter()

    def stats(self) -> dict[str, Any]:
        status = Counter(request.status for request in list(self._active))
        gauges, blocks = self.client.gauges, self.client.blocks
        used = round(max((one.kv_usage for one in gauges), default=0.0) * blocks)
        counters = self.counters + self.compiler.counters
        counters["preemptions"] = sum(one.preemptions for one in gauges)
        return {
            "waiting": status[Status.WAITING] + self._arrivals.count,
            "running": status[Status.RUNNING],
            "searching": status[Status.SEARCHING],
            "pages": {
                "total": blocks,
                "free": blocks - used,
                "running": used,
                "page_size": self.client.block_size,
                "page_bytes": self.client.block_size * self.model.page_token_bytes,
            },
            "counters": dict(counters),
        }

    def ready(self) -> None:
        if self._stopping:
            raise EngineStopped("the engine has been stopped")
        if self.client.dead:
            raise EngineStopped("vLLM's engine has died; start the server again")

    def check(self) -> None:
        if self._active or self._arrivals.count:
            return
        left = self.compiler.check()
        if left and not self._active and not self._arrivals.count:
            raise IntegrityError(f"nothing runs, but these are left: {', '.join(left)}")

    def close(self) -> None:
        with self._stop_once:
            if self._stopping:
                return
            self._stopping = True
        with ExitStack() as closing:  # end vLLM's processes even if an earlier step fails
            closing.callback(self._close_own)
            closing.callback(self.client.close)
            closing.callback(self._runtime.searchers.shutdown, wait=True, cancel_futures=True)
            self.client.wait(self._stop())

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.close()
            shutil.rmtree(self._own.root, ignore_errors=True)

    def _post(self, message: Callable[[], None]) -> None:
        with suppress(EngineStopped):  # the loop has stopped, so the request has ended
            self.client.post(message)

    # ---- on the loop

    def _begin(self, active: Request) -> None:
        task = asyncio.create_task(active.run())
        self._active[active] = task
        self._arrivals.leave(active.spec.user)
        task.add_done_callback(lambda done: self._ended(active, done))
        if self._stopping:
            active.stopping = EngineStopped("the engine was stopped")
            task.cancel()

    def _ended(self, active: Request, done: asyncio.Task[None]) -> None:
        del self._active[active]
        self.tombstones.end(active.arrived)
        if done.cancelled():  # cancelled before its first step; later, it ends its stream itself
            active.cancelled()

    def _abort(self, active: Request) -> None:
        task = self._active.get(active)
        if task is not None:
            task.cancel()

    async def _stop(self) -> None:
        tasks = list(self._active.items())
        for active, task in tasks:
            active.stopping = EngineStopped("the engine was stopped")
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        await self.compiler.close()


def _info(config: EngineConfig, model: ModelDescription, client: VLLMClient, cpu: bool) -> ModelInfo:
    return ModelInfo(
        name=model.name,
        digest=model.digest,
        family=model.family,
        context_length=client.context,
        dtype=model.dtype,
        device="cpu" if cpu else "cuda",
        modalities=("text", "image") if model.image is not None else ("text",),
        attention=client.attention,
        no_clips=NO_CLIPS,
        details={
            "engine": "vllm",
            "vllm": vllm.__version__,
            "verified": model.family in VERIFIED,
            "tensor_parallel_size": config.tensor_parallel_size,
            "pipeline_parallel_size": config.pipeline_parallel_size,
            **({"packet": model.adapter.digest} if model.adapter is not None else {}),
            **model.shape._asdict(),
        },
    )
