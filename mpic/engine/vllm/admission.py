"""Links and compiles from their arrival to their end, on the scheduler's side: what may start, with how much claimed.

Nothing here raises: an order that cannot be followed becomes plain computing of the chunk in question, or ends its own
request with a code and a sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger

from mpic.engine.vllm.files import HostMemory, Load
from mpic.engine.vllm.steps import CompileEnd, Fault, Linked, LinkStart, StepOrders, StepReport
from mpic.engine.vllm.wire import FIELD, BadOrder, ChunkRef, CompileOrder, LinkOrder, parse
from mpic.link.plan import Ranges, ranges_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

IDLE_SECONDS = 0.005
"""A step without work waits this long for a chunk, so that the engine does not spin while files are read."""


@dataclass
class Ticket:
    """A request with an order.

    Attributes:
        load: its chunks, pinned; None for a compile.
        late: when what is not in memory is computed instead; None until the scheduler asks.
        rows: what is computed, once that is decided.
        chunks: what is linked, or embedded, once that is decided.
        hit: tokens of the prefix cache, once admitted.
        complete: its whole prompt was computed: nothing of it will be written any more.
        fault: why it ends.
    """

    request: Request
    order: LinkOrder | CompileOrder | None
    load: Load | None = None
    late: float | None = None
    rows: np.ndarray | None = None
    chunks: tuple[Linked, ...] = ()
    hit: int | None = None
    complete: bool = False
    fault: Fault | None = None
    blocks: list[int] = field(default_factory=list)
    fallback: list[tuple[int, str]] = field(default_factory=list)
    load_seconds: float = 0.0
    place_seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        """What the caller gets back in ``kv_transfer_params``."""
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
        return {FIELD: body}


def _contained(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method ``(self, ticket, ...)`` whose errors end the ticket's request and nothing else; it returns None then."""

    @wraps(method)
    def contained(self: Admission, ticket: Ticket, *rest: Any) -> Any:
        try:
            return method(self, ticket, *rest)
        except BadOrder as error:
            self.fail(ticket, error.code, error.message)
        except Exception as error:  # in the scheduler it would end the engine, and everybody's requests
            logger.exception("request %s: its order cannot be followed", ticket.request.request_id)
            self.fail(ticket, "internal_error", f"the order could not be followed: {error!r}")
        return None

    return contained


class Admission:
    """The orders under way.

    Args:
        folders: where chunk files and compiled chunks lie.
        patience: seconds that a link waits for its files, from when it could start.
    """

    def __init__(self, config: VllmConfig, host: HostMemory, folders: list[Path], patience: float) -> None:
        self._host, self._folders, self._patience = host, [folder.resolve() for folder in folders], patience
        self._block = config.cache_config.block_size
        self._image_ids = _image_ids(config)
        self._tickets: dict[str, Ticket] = {}
        self._admitted: dict[str, int] = {}
        self._unfinished: dict[str, Ticket] = {}
        self._salts: dict[str, Ticket] = {}
        self._failed: dict[str, Ticket] = {}
        self.manager: KVCacheManager

    # arrival

    def arrive(self, request: Request) -> None:
        """A new request; without an order it is none of ours."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or params.get(FIELD) is None:
            return
        ticket = self._tickets[request.request_id] = Ticket(request, None)
        self._open(ticket)

    @_contained
    def _open(self, ticket: Ticket) -> None:
        request = ticket.request
        order = ticket.order = parse(request.kv_transfer_params, request.num_prompt_tokens)
        if request.prompt_token_ids is None or request.pooling_params is not None:
            raise BadOrder("an order needs a prompt of token ids and an answer of tokens")
        if request.lora_request is not None or request.resumable:
            raise BadOrder("orders do not go together with LoRA adapters or streamed prompts")
        if isinstance(order, CompileOrder):
            self._folder(order)
            return
        if not request.cache_salt:
            raise BadOrder("a link needs a cache_salt: its KV must not be taken for exact KV")
        if request.mm_features:
            raise BadOrder("a link's prompt is token ids alone; its images come from chunk files")
        if request.skip_reading_prefix_cache:
            raise BadOrder(
                "prompt log-probabilities are not known for a link: not all of its tokens are computed"
            )
        ticket.load = self._host.load([(ref.path, ref.key, ref.length) for ref in order.chunks])

    def _folder(self, order: CompileOrder) -> str:
        for folder in self._folders:
            try:
                inside = (folder / order.folder).resolve(strict=True)
            except (OSError, RuntimeError):  # not there, or no name for a file
                continue
            if inside.is_dir() and inside.is_relative_to(folder):
                return str(inside)
        raise BadOrder(f"there is no folder {order.folder} to compile into")

    # admission

    def claim(self, request: Request, hit: int) -> int | None:
        """Tokens beyond the ``hit`` first ones that need no computing; None: ask again."""
        ticket = self._tickets.get(request.request_id)
        if ticket is None or (ticket.fault is None and isinstance(ticket.order, CompileOrder)):
            return 0
        return self._claim(ticket, hit) if ticket.fault is None else None

    @_contained
    def _claim(self, ticket: Ticket, hit: int) -> int | None:
        if ticket.hit is not None:  # preempted meanwhile: everything anew, ahead of others
            self._withdraw(ticket)
            refs = [(ref.path, ref.key, ref.length) for ref in ticket.order.chunks]
            ticket.load = self._host.load(refs, first=True)
        other = self._salts.get(ticket.request.cache_salt, ticket)
        if other is not ticket:  # its blocks are hashed, but not all of their tokens are computed yet
            return None
        if ticket.rows is None and not self._decide(ticket):
            return None
        first = int(np.searchsorted(ticket.rows, hit))
        return max(0, ticket.order.length - (len(ticket.rows) - first) - hit)

    def _decide(self, ticket: Ticket) -> bool:
        """Settle which chunks are linked, when all are in memory or patience is over. True when it is settled."""
        order, load, now = ticket.order, ticket.load, time.monotonic()
        ticket.late = ticket.late or now + self._patience
        if not load.done and now < ticket.late:
            return False
        images = [self._is_image(ticket, ref) for ref in order.chunks]
        if not load.started and any(images):  # there will be room, and only then can it go on
            ticket.late = now + self._patience
            return False
        computed = np.zeros(order.length, bool)
        for lo, hi in order.rows:
            computed[lo:hi] = True
        ids = np.asarray(ticket.request.prompt_token_ids)
        chunks, ticket.fallback, at, base = [], [], 0, 0
        for i, (ref, chunk, image) in enumerate(zip(order.chunks, load.chunks, images, strict=True)):
            here = slice(ref.start, ref.start + ref.length)
            code, reason, inputs = chunk.outcome(ids[here])
            if code == "forbidden" or (image and inputs is None):
                self.fail(ticket, code, reason)
                return False
            if code and not computed[here].all():
                ticket.fallback.append((i, code))
                computed[here] = True
            base += ref.start - at
            if ref.base != base:
                raise BadOrder(f"chunk {i} has base {ref.base}; behind what comes before it, it is {base}")
            at, base = ref.start + ref.length, base + (ref.length if inputs is None else inputs.extent)
            if inputs is not None:
                chunks.append(Linked(chunk, ref.start, ref.length, ref.base))
        if base + order.length - at != order.extent:
            raise BadOrder(f"the order has extent {order.extent}; its parts make {base + order.length - at}")
        ticket.chunks, ticket.rows = tuple(chunks), np.flatnonzero(computed)
        ticket.load_seconds = load.seconds or now - load.asked
        return True

    def _is_image(self, ticket: Ticket, ref: ChunkRef) -> bool:
        """Whether a chunk's tokens cannot be computed from their ids alone."""
        if self._image_ids is None:
            return True
        return not self._image_ids.isdisjoint(
            ticket.request.prompt_token_ids[ref.start : ref.start + ref.length]
        )

    def admitted(self, request: Request, external: int) -> None:
        """Blocks are allocated; ``external`` tokens are ours."""
        ticket = self._tickets.get(request.request_id)
        if ticket is not None and ticket.fault is None:
            self._admitted[request.request_id] = external
            if isinstance(ticket.order, LinkOrder):
                self._salts[request.cache_salt] = ticket

    # a step

    def orders(self, scheduled: SchedulerOutput) -> StepOrders:
        """What the workers must do in a step."""
        made = StepOrders()
        if not self._tickets:
            return made
        for request in scheduled.preempted_req_ids & self._unfinished.keys():
            self._forget_blocks(self._tickets[request])
        if self._admitted or self._unfinished:
            cached = scheduled.scheduled_cached_reqs
            before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            before |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
            for request in before.keys() & (self._admitted.keys() | self._unfinished.keys()):
                frontier = before[request] + scheduled.num_scheduled_tokens[request]
                self._step(self._tickets[request], made, before[request], frontier)
        elif not scheduled.num_scheduled_tokens and not self._failed:
            self._host.wait(IDLE_SECONDS)
        return made

    @_contained
    def _step(self, ticket: Ticket, made: StepOrders, before: int, frontier: int) -> None:
        request, length = ticket.request.request_id, ticket.request.num_prompt_tokens
        external = self._admitted.pop(request, None)
        if external is not None:
            ticket.complete = before >= length
            if ticket.hit is None:
                ticket.hit = before - external
            if ticket.complete:
                self._let_go(ticket)
                return
            self._unfinished[request] = ticket
            if isinstance(ticket.order, LinkOrder):
                rows: Ranges = ranges_of(ticket.rows.tolist())
                made.links[request] = LinkStart(length, before - external, rows, ticket.chunks)
        ticket.blocks = self.manager.get_block_ids(request)[0]
        if isinstance(ticket.order, CompileOrder) and frontier >= length:
            folder = self._folder(ticket.order)
            made.compiles[request] = CompileEnd(folder, ticket.order.skip, tuple(ticket.blocks))
            self._unfinished.pop(request)

    def executed(self, report: StepReport | None) -> None:
        """What the workers say of the step that has just run."""
        for request, fault in (report.faults if report else {}).items():
            if request in self._tickets:
                self.fail(self._tickets[request], *fault)
        for request, seconds in (report.placed if report else {}).items():
            ticket = self._tickets.get(request)
            if ticket is not None and ticket.fault is None:
                ticket.place_seconds, ticket.complete = seconds, True
                self._let_go(ticket)

    # the end

    def fail(self, ticket: Ticket, code: str, message: str) -> None:
        """The request ends with the scheduler's next update."""
        logger.warning("request %s ends: %s (%s)", ticket.request.request_id, message, code)
        ticket.fault = Fault(code, message)
        self._failed[ticket.request.request_id] = ticket

    def take_failed(self) -> dict[str, Ticket]:
        """Requests that must end, once each."""
        failed, self._failed = self._failed, {}
        return failed

    def finished(self, request: Request) -> dict[str, Any] | None:
        """A request ends, before its blocks are freed; what its caller gets back."""
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is None:
            return None
        self._failed.pop(request.request_id, None)
        report = ticket.report()
        self._withdraw(ticket)
        return report

    def _withdraw(self, ticket: Ticket) -> None:
        """Undo an admission: what is half written leaves the prefix cache, the chunks may be dropped."""
        self._forget_blocks(ticket)
        self._let_go(ticket)
        ticket.late, ticket.rows, ticket.hit, ticket.complete = None, None, None, False

    def _forget_blocks(self, ticket: Ticket) -> None:
        """vLLM enters blocks into its prefix cache when it allocates them. Those of a link that ends or is preempted
        before all of its tokens are computed, or that went wrong, must not be found."""
        if isinstance(ticket.order, LinkOrder) and (ticket.fault is not None or not ticket.complete):
            self.manager.evict_blocks(set(ticket.blocks[(ticket.hit or 0) // self._block :]))
        ticket.blocks = []

    def _let_go(self, ticket: Ticket) -> None:
        self._unfinished.pop(ticket.request.request_id, None)
        self._admitted.pop(ticket.request.request_id, None)
        if self._salts.get(ticket.request.cache_salt) is ticket:
            del self._salts[ticket.request.cache_salt]
        if ticket.load is not None:
            self._host.release(ticket.load)


def _image_ids(config: VllmConfig) -> frozenset[int] | None:
    """Ids that stand for what a vision encoder makes; None when they are not known."""
    if not config.model_config.is_multimodal_model:
        return frozenset()
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    found = (getattr(config.model_config.hf_config, name, None) for name in names)
    return frozenset(i for i in found if i is not None) or None
