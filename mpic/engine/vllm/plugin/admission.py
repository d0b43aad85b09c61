"""Tracks requests with orders on the scheduler's side, and decides which may start and how many of their tokens need no
computing.

Nothing here raises. A chunk that cannot be linked is computed; an order that cannot be followed ends its own request
with a code and a sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger

from mpic.engine.vllm.plugin.host_memory import CachedFile, FileLoad, HostMemory
from mpic.engine.vllm.plugin.order_checks import check_request, check_shared
from mpic.engine.vllm.plugin.shared_chunks import SharedChunks, spans
from mpic.engine.vllm.plugin.step_messages import (
    ChunkExport,
    EndReason,
    LinkStart,
    PlacedChunk,
    SharedStart,
    StepInstructions,
    StepReport,
)
from mpic.engine.vllm.wire import FIELD, BadOrder, ChunkRef, CompileOrder, LinkOrder, mapped, parse
from mpic.link import Ranges, ranges_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

IDLE_SECONDS = 0.005
"""Seconds that a step without work waits for a chunk, so that the engine does not spin while files are read."""


@dataclass
class TrackedRequest:
    """A request with an order.

    Attributes:
        load: its pinned chunks; None for a compile, and for a shared link that needs no files.
        loaded: for a shared link, the number of chunks that were not resident.
        loading: for a shared link, the numbers of the chunks in ``load``.
        late: the time after which chunks that are not in memory are computed; None until the scheduler first asks.
        rows: sequence indices that are computed, once decided.
        chunks: chunks that are linked or whose embeddings are used, once decided.
        hit: number of leading prompt tokens that were all found in the prefix cache or mapped, once admitted.
        complete: True once its whole prompt has been computed, after which no chunk is written any more.
        fault: the reason why it must end; None if it need not.
        blocks: its blocks of the paged cache, in order.
        fallback: number and error code of each chunk that is computed instead of linked.
        final_report: the report that its outputs carry, once its prompt is complete.
    """

    request: Request
    order: LinkOrder | CompileOrder | None
    load: FileLoad | None = None
    loading: frozenset[int] = frozenset()
    loaded: int = 0
    late: float | None = None
    rows: np.ndarray | None = None
    chunks: tuple[PlacedChunk, ...] = ()
    hit: int | None = None
    complete: bool = False
    fault: EndReason | None = None
    blocks: list[int] = field(default_factory=list)
    fallback: list[tuple[int, str]] = field(default_factory=list)
    load_seconds: float = 0.0
    place_seconds: float = 0.0
    final_report: dict[str, Any] | None = None

    @property
    def shared(self) -> bool:
        """True for a link that maps resident chunks."""
        return isinstance(self.order, LinkOrder) and self.order.shared

    def report(self) -> dict[str, Any]:
        """Return the report that the caller receives in ``kv_transfer_params``."""
        body: dict[str, Any] = {"error": None, "message": ""}
        if self.fault is not None:
            body = {"error": self.fault.code, "message": self.fault.message}
        if isinstance(self.order, LinkOrder):
            rows, hit = self.rows, self.hit or 0
            computed = int((rows >= hit).sum()) if rows is not None else 0
            body |= {
                "prefix_hit": hit,
                "recomputed": computed,
                "reused": self.order.length - hit - computed if rows is not None else 0,
                "load_ms": 1e3 * self.load_seconds,
                "place_ms": 1e3 * self.place_seconds,
                "fallback": self.fallback,
            }
            if self.order.shared:
                body["loaded"] = self.loaded
        return {FIELD: body}


def _contained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make an error in a method ``(self, tracked, ...)`` end only that request; the method then returns None."""

    @wraps(method)
    def contained(self: Admission, tracked: TrackedRequest, *rest: Any) -> Any:
        try:
            return method(self, tracked, *rest)
        except BadOrder as error:
            self.fail(tracked, error.code, error.message)
        except Exception as error:  # if the scheduler raised it, the engine and all requests would end
            logger.exception("request %s: its order cannot be followed", tracked.request.request_id)
            message = f"the order could not be followed: {error!r}"
            self.fail(tracked, *EndReason.of(error, "internal_error", message))
        return None

    return contained


class Admission:
    """Admits requests with orders.

    Args:
        folders: folders of chunk files and compiled chunks.
        patience: seconds that a link waits for its files, counted from when it could start.
        most_rows: maximum rows of attention of a link; a link with more is computed whole, because the attention
            backend treats each row as a sequence with its own block table.
        soft: trained tokens that the workers' embedding layer knows.
        sharing: accept orders of shared links.

    Attributes:
        shared: the resident chunks; None if sharing is off.
    """

    def __init__(
        self,
        config: VllmConfig,
        host: HostMemory,
        folders: list[Path],
        patience: float,
        most_rows: int,
        soft: int = 0,
        sharing: bool = False,
    ) -> None:
        self._config, self._sharing = config, sharing
        self.shared: SharedChunks | None = None
        self._host, self._folders = host, [folder.resolve() for folder in folders]
        self._patience, self._most_rows, self._soft = patience, most_rows, soft
        self._image_ids = _image_ids(config)
        self._tracked: dict[str, TrackedRequest] = {}
        self._admitted: dict[str, int] = {}  # claimed tokens, until the step's instructions
        self._unfinished: dict[str, TrackedRequest] = {}  # admitted, prompts not fully computed
        self._failed: dict[str, TrackedRequest] = {}  # requests to end with the scheduler's next update
        self._exports: set[str] = set()  # requests whose blocks are kept until the workers have read them
        self.manager: KVCacheManager

    def bind(self, manager: KVCacheManager) -> None:
        """Take the manager of the paged cache, and keep a link's blocks out of the prefix cache until all of the link
        is computed. vLLM would register them on allocation, and other links with the same salt, which may start in the
        same step, would read blocks that are not written yet."""
        self.manager = manager
        if self._sharing:
            self.shared = SharedChunks(manager.block_pool, self._config.cache_config.block_size)
        enter = manager.coordinator.cache_blocks

        def enter_complete(request: Request, tokens: int) -> None:
            tracked = self._tracked.get(request.request_id)
            if (
                tracked is None
                or tracked.complete
                or tracked.shared
                or isinstance(tracked.order, CompileOrder)
            ):
                enter(request, tokens)

        manager.coordinator.cache_blocks = enter_complete

    # arrival

    def arrive(self, request: Request) -> None:
        """Register a new request; requests without an order are left to vLLM."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or params.get(FIELD) is None:
            return
        tracked = self._tracked[request.request_id] = TrackedRequest(request, None)
        self._open(tracked)

    @_contained
    def _open(self, tracked: TrackedRequest) -> None:
        request = tracked.request
        order = tracked.order = parse(request.kv_transfer_params, request.num_prompt_tokens)
        check_request(request, order, self._soft)
        if isinstance(order, CompileOrder):
            self._folder(order)
        elif order.shared:
            check_shared(
                request, order, self.shared, self._config.model_config.max_model_len, self._most_rows
            )
            self._load_missing(tracked)
        else:
            tracked.load = self._load(order.chunks)

    def _load(self, chunks: Iterable[ChunkRef], first: bool = False) -> FileLoad:
        return self._host.load([(ref.path, ref.key, ref.length) for ref in chunks], first)

    def _folder(self, order: CompileOrder) -> str:
        """Return the absolute path of the folder that an order's chunk is written to."""
        for folder in self._folders:
            try:
                inside = (folder / order.folder).resolve(strict=True)
            except (OSError, RuntimeError):  # the folder does not exist, or its name is not valid
                continue
            if inside.is_dir() and inside.is_relative_to(folder):
                return str(inside)
        raise BadOrder(f"there is no folder {order.folder} to compile into")

    # admission

    def claim(self, request: Request, hit: int) -> int | None:
        """Return how many tokens after the first ``hit`` need no computing; None if the scheduler must ask again
        later."""
        if self.shared is not None and self.shared.short:
            return None
        tracked = self._tracked.get(request.request_id)
        if tracked is None or (tracked.fault is None and isinstance(tracked.order, CompileOrder)):
            return 0
        if tracked.fault is not None:
            return None
        return self._claim_shared(tracked, hit) if tracked.shared else self._claim(tracked, hit)

    @_contained
    def _claim(self, tracked: TrackedRequest, hit: int) -> int | None:
        if hit >= tracked.order.length:  # preempted while it answered; its prompt is still cached
            return 0
        if tracked.hit is not None:  # it was preempted: it starts again, ahead of others
            self._withdraw(tracked)
            tracked.load = self._load(tracked.order.chunks, first=True)
        if tracked.rows is None and not self._decide(tracked):
            return None
        first = int(np.searchsorted(tracked.rows, hit))
        return max(0, tracked.order.length - (len(tracked.rows) - first) - hit)

    def _decide(self, tracked: TrackedRequest) -> bool:
        """Decide which chunks are linked, once all are in memory or patience is over; return True when decided."""
        order, load, now = tracked.order, tracked.load, time.monotonic()
        tracked.late = tracked.late or now + self._patience
        if not load.done and now < tracked.late:
            return False
        images = [self._is_image(tracked, ref) for ref in order.chunks]
        # it needs its images, and memory for them will become free
        if not load.started and any(images):
            tracked.late = now + self._patience
            return False
        if any(image and chunk.unopened for image, chunk in zip(images, load.chunks, strict=True)):
            return False
        computed = np.zeros(order.length, bool)
        for lo, hi in order.rows:
            computed[lo:hi] = True
        ids = np.asarray(tracked.request.prompt_token_ids)
        chunks, tracked.fallback, at, base = [], [], 0, 0
        for i, (ref, chunk, image) in enumerate(zip(order.chunks, load.chunks, images, strict=True)):
            tokens = slice(ref.start, ref.start + ref.length)
            code, reason, inputs = chunk.outcome(ids[tokens])
            if code == "forbidden" or (image and inputs is None):
                self.fail(tracked, code, reason)
                return False
            if code and not computed[tokens].all():
                tracked.fallback.append((i, code))
                computed[tokens] = True
            base += ref.start - at
            _check_base(i, ref, base)
            at, base = ref.start + ref.length, base + (ref.length if inputs is None else inputs.rotary_length)
            if inputs is not None:
                chunks.append(PlacedChunk(chunk, ref.start, ref.length, ref.base))
        _check_extent(order, base + order.length - at)
        rows = np.flatnonzero(computed)
        if np.count_nonzero(np.diff(rows) != 1) >= self._most_rows:
            known = {i for i, _ in tracked.fallback}
            spans = (slice(ref.start, ref.start + ref.length) for ref in order.chunks)
            linked = [i for i, tokens in enumerate(spans) if i not in known and not computed[tokens].all()]
            tracked.fallback += [(i, "rows") for i in linked]
            rows = np.arange(order.length)
        tracked.chunks, tracked.rows = tuple(chunks), rows
        tracked.load_seconds = load.seconds or now - load.asked
        return True

    @_contained
    def _claim_shared(self, tracked: TrackedRequest, hit: int) -> int | None:
        """Return 0 once all files that a shared link needs are read and its chunks are pinned; None before. Chunks of a
        shared link are never computed instead: a link whose file cannot be used ends."""
        order, load = tracked.order, self._load_missing(tracked)
        if load is not None and not load.done:
            return None
        read = dict(zip(sorted(tracked.loading), load.chunks if load is not None else (), strict=True))
        for chunk in read.values():
            if chunk.state == "failed":
                self.fail(tracked, chunk.code, chunk.reason)
                return None
        resident = map(self.shared.find, order.chunks)
        known = [read[i] if one is None or i in read else one.file for i, one in enumerate(resident)]
        if not tracked.chunks:
            self._check_places(tracked, known)
        places = zip(order.chunks, known, strict=True)
        tracked.chunks = tuple(
            PlacedChunk(chunk.without_kv(), ref.start, ref.length, ref.base) for ref, chunk in places
        )
        numbers = dict.fromkeys(number for number, *_ in mapped(order))
        wanted = [(order.chunks[number], read.get(number)) for number in numbers]
        hits = self.manager.get_computed_blocks(tracked.request)[0].blocks[0] if hit else ()
        return 0 if self.shared.pin(tracked.request.request_id, wanted, hits) else None

    def _load_missing(self, tracked: TrackedRequest) -> FileLoad | None:
        """Have the non-resident chunks of a shared link read, and return the load. If more chunks are missing than
        before, request all of them anew: two loads that hold some chunks while they wait for memory could block each
        other for ever."""
        order = tracked.order
        from_cache = {number for number, *_ in mapped(order) if self.shared.find(order.chunks[number])}
        missing = frozenset(range(len(order.chunks))) - from_cache
        if not missing <= tracked.loading:
            again, tracked.loading = tracked.load, tracked.loading | missing
            if again is not None:
                self._host.release(again)
            chunks = [order.chunks[number] for number in sorted(tracked.loading)]
            tracked.load = self._load(chunks, first=again is not None or tracked.request.num_preemptions > 0)
        return tracked.load

    def _check_places(self, tracked: TrackedRequest, known: list[CachedFile]) -> None:
        """Raise BadOrder unless a shared link's tokens, places and bases match those of its chunks."""
        order = tracked.order
        places = np.concatenate([np.arange(lo, hi) for lo, hi in order.rows])
        ids, at, base = np.asarray(tracked.request.prompt_token_ids[: len(places)]), 0, 0
        for i, (ref, chunk) in enumerate(zip(order.chunks, known, strict=True)):
            inputs = chunk.inputs
            lo, hi = np.searchsorted(places, (ref.start, ref.start + ref.length))
            if not np.array_equal(inputs.token_ids.numpy()[places[lo:hi] - ref.start], ids[lo:hi]):
                raise BadOrder(f"{ref.path} holds other tokens than the prompt")
            base += ref.start - at
            _check_base(i, ref, base)
            at, base = ref.start + ref.length, base + inputs.rotary_length
        _check_extent(order, base + order.length - at)

    def _is_image(self, tracked: TrackedRequest, ref: ChunkRef) -> bool:
        """Return whether a chunk's tokens cannot be computed from their ids alone."""
        if self._image_ids is None:
            return True
        return not self._image_ids.isdisjoint(
            tracked.request.prompt_token_ids[ref.start : ref.start + ref.length]
        )

    def admitted(self, request: Request, external: int) -> None:
        """Record that blocks have been allocated, for ``external`` claimed tokens among others."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.fault is None:
            self._admitted[request.request_id] = external

    # a step

    def instructions(self, scheduled: SchedulerOutput) -> StepInstructions:
        """Return the workers' instructions for a step."""
        made, admitted = StepInstructions(), set(self._admitted)
        if self._tracked or self._exports:
            self._instruct(made, scheduled)
        if self.shared is not None:
            made.loads = self.shared.end_step(admitted)
        return made

    def _instruct(self, made: StepInstructions, scheduled: SchedulerOutput) -> None:
        for request in scheduled.preempted_req_ids & self._unfinished.keys():
            self._tracked[request].blocks = []
        if self._admitted or self._unfinished:
            cached = scheduled.scheduled_cached_reqs
            before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            before |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
            for request in before.keys() & (self._admitted.keys() | self._unfinished.keys()):
                frontier = before[request] + scheduled.num_scheduled_tokens[request]
                self._step(self._tracked[request], made, before[request], frontier)
        elif not scheduled.num_scheduled_tokens and not self._failed and (self._exports or self._reading()):
            self._host.wait(IDLE_SECONDS)  # vLLM keeps stepping, without a pause, until the exports are done

    def _reading(self) -> bool:
        """Return whether a link cannot start before files are read. With pipeline parallelism, links that are
        generating may have steps under way while nothing can be scheduled."""
        links = (tracked for tracked in self._tracked.values() if tracked.rows is None)
        return any(tracked.load is not None and not tracked.load.done for tracked in links)

    @_contained
    def _step(self, tracked: TrackedRequest, made: StepInstructions, before: int, frontier: int) -> None:
        request, length = tracked.request.request_id, tracked.request.num_prompt_tokens
        external = self._admitted.pop(request, None)
        if tracked.shared:
            self._start_shared(tracked, made, before)
            return
        if external is not None:
            tracked.complete = before >= length
            if tracked.hit is None:
                tracked.hit = before - external
            if tracked.complete:
                self._unpin(tracked)
                return
            self._unfinished[request] = tracked
            if isinstance(tracked.order, LinkOrder):
                rows: Ranges = ranges_of(tracked.rows.tolist())
                made.links[request] = LinkStart(length, before - external, rows, tracked.chunks)
        tracked.blocks = self.manager.get_block_ids(request)[0]
        if isinstance(tracked.order, CompileOrder) and frontier >= length:
            folder = self._folder(tracked.order)
            ids = tracked.request.prompt_token_ids
            made.exports[request] = ChunkExport(folder, tracked.order.skip, ids, tuple(tracked.blocks))
            self._exports.add(request)
            self._unfinished.pop(request)

    def _start_shared(self, tracked: TrackedRequest, made: StepInstructions, before: int) -> None:
        order, request = tracked.order, tracked.request.request_id
        tracked.rows = np.concatenate([np.arange(lo, hi) for lo, hi in order.rows])
        tracked.hit = int(tracked.rows[before]) if before < len(tracked.rows) else order.length
        pinned = self.shared.pinned(request)
        tracked.loaded = sum(one.source is not None for one in pinned.values())
        found = tuple(spans(order, pinned))
        made.shared[request] = SharedStart(order.length, order.rows, found, tracked.chunks)
        if tracked.load is not None:
            tracked.load_seconds = tracked.load.seconds or 0.0
            self._host.release(tracked.load)
        tracked.load, tracked.loading = None, frozenset()

    def preempted(self, request: Request) -> None:
        """Unpin the chunks of a request that vLLM preempts, inside vLLM's loop that looks for free blocks."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.shared:
            self._withdraw(tracked)

    def _lose(self, blocks: tuple[int, ...], reason: EndReason) -> None:
        """End the requests that map a chunk that could not be loaded, and keep their computed blocks out of the prefix
        cache."""
        for request in self.shared.forget(blocks):
            self.manager.evict_blocks(set(self.manager.get_block_ids(request)[0]))
            self.fail(self._tracked[request], *reason)

    def executed(self, report: StepReport | None) -> dict[str, TrackedRequest]:
        """Record the workers' report of a step; return the requests that must end now, by id."""
        for request, fault in (report.faults if report else {}).items():
            if request in self._tracked:
                self.fail(self._tracked[request], *fault)
        for blocks, reason in (report.lost if report else {}).items():
            self._lose(blocks, reason)
        for request, seconds in (report.placed if report else {}).items():
            tracked = self._tracked.get(request)
            if tracked is not None and tracked.fault is None:
                tracked.place_seconds, tracked.complete = seconds, True
                if tracked.blocks:  # otherwise it has been preempted in the meantime
                    self.manager.cache_blocks(tracked.request, tracked.order.length)
                self._unpin(tracked)
        failed, self._failed = self._failed, {}
        return failed

    def report(self, request: str) -> dict[str, Any] | None:
        """Return the report of a link that keeps generating; None for other requests. It is built once for all
        tokens."""
        tracked = self._tracked.get(request)
        if tracked is None or tracked.fault is not None or not isinstance(tracked.order, LinkOrder):
            return None
        if tracked.final_report is None:
            tracked.final_report = tracked.report()
        return tracked.final_report

    # the prompt is complete

    def fail(self, tracked: TrackedRequest, code: str, message: str) -> None:
        """Mark a request to end with the scheduler's next update."""
        logger.warning("request %s ends: %s (%s)", tracked.request.request_id, message, code)
        tracked.fault = EndReason(code, message)
        # otherwise vLLM would skip ``claim`` and compute the request to its end
        tracked.request.skip_reading_prefix_cache = False
        self._failed[tracked.request.request_id] = tracked

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that ends. Return whether its blocks must be kept until workers have read them
        (``released``), and the report for its caller."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self._failed.pop(request.request_id, None)
        report = tracked.report()
        self._withdraw(tracked)
        return request.request_id in self._exports, report

    def released(self, requests: Iterable[str]) -> None:
        """Record that all workers have read the blocks of requests that had ended; vLLM frees them now."""
        self._exports.difference_update(requests)

    def _withdraw(self, tracked: TrackedRequest) -> None:
        """Undo an admission, and unpin the chunks."""
        tracked.blocks = []
        self._unpin(tracked)
        tracked.late, tracked.rows, tracked.hit, tracked.complete = None, None, None, False
        tracked.final_report = None

    def _unpin(self, tracked: TrackedRequest) -> None:
        self._unfinished.pop(tracked.request.request_id, None)
        self._admitted.pop(tracked.request.request_id, None)
        if tracked.load is not None:
            self._host.release(tracked.load)
        if tracked.shared and self.shared is not None:
            self.shared.release(tracked.request.request_id)
            tracked.load, tracked.loading = None, frozenset()


def _check_base(number: int, ref: ChunkRef, base: int) -> None:
    if ref.base != base:
        raise BadOrder(f"chunk {number} has base {ref.base}, but what precedes it ends at {base}")


def _check_extent(order: LinkOrder, extent: int) -> None:
    if extent != order.extent:
        raise BadOrder(f"the order has extent {order.extent}; its parts add up to {extent}")


def _image_ids(config: VllmConfig) -> frozenset[int] | None:
    """Return the ids of the tokens that stand for images; None if they are unknown."""
    if not config.model_config.is_multimodal_model:
        return frozenset()
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    found = (getattr(config.model_config.hf_config, name, None) for name in names)
    return frozenset(i for i in found if i is not None) or None
