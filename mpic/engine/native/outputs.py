"""The outputs of requests: turns each new token into a delta, and ends requests."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace

from mpic.engine import search
from mpic.engine.accounting import count_answer
from mpic.engine.base import Delta, TokenLogprob
from mpic.engine.checks import as_failure
from mpic.engine.detokenize import detokenize
from mpic.engine.native.builder import RequestBuilder
from mpic.engine.native.extend import Extender, SearchOutcome, apply
from mpic.engine.native.request import Request, Status
from mpic.engine.native.sampling import Choice
from mpic.engine.native.scheduler import Scheduler
from mpic.engine.tombstones import Tombstones
from mpic.engine.trace import chunk_uses, trace
from mpic.errors import BadRequest

log = logging.getLogger(__name__)


class Outputs:
    """The requests of an engine that have not ended. All methods run on the engine's thread.

    Args:
        post: sends a message to the engine's thread.
        eos: tokens that end an answer.

    Attributes:
        unfinished: requests that have arrived and not ended.

    ``counters``: ``generated``, ``tokens_*``, ``finished_*``, ``failed``, ``retrieval_*``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        builder: RequestBuilder,
        tombstones: Tombstones,
        post: Callable[..., None],
        eos: Container[int],
    ) -> None:
        self._scheduler, self._tombstones, self._eos = scheduler, tombstones, eos
        self.extender = Extender(builder, tombstones, post, self._searched)
        pool = scheduler.memory.pool
        self._token_bytes = pool.shape.per_token * pool.arena.element_size()
        self.unfinished: set[Request] = set()
        self.counters: Counter[str] = Counter()

    def take(self, request: Request, choice: Choice | Exception, now: float) -> None:
        """Take the next token of an answer. An error fails this request alone."""
        try:
            if isinstance(choice, Exception):
                raise choice
            self._take(request, *choice, now)
        except Exception as error:
            if not isinstance(error, BadRequest):
                log.exception("a token could not be taken")
            self.fail(request, as_failure(error))

    def abort(self, request: Request) -> None:
        """End a request whose client no longer waits for it, unless it has ended already."""
        if request in self.unfinished:
            self._finish(request, "abort")

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error."""
        self._release(request)
        self.counters["failed"] += 1
        request.stream.put(error)

    def _take(self, request: Request, token: int, logprob: TokenLogprob | None, now: float) -> None:
        self._record_times(request, now)
        request.append(token)
        self.counters["generated"] += 1
        ends = token in self._eos and not request.spec.sampling.ignore_eos
        complete = request.constraint is not None and request.constraint.take(token)
        text, call, over = detokenize(request.detokenizer, token, ends, logprob)
        reason = "stop" if over or complete else None
        if reason is None and request.left <= 0:
            reason = "length"
        if reason is None and call is not None:
            reason = self._search(request, call)
        logprobs = (logprob,) if logprob is not None else ()
        if reason is None:
            request.stream.put(Delta(text, (token,), logprobs))
        else:
            text += request.detokenizer.finish()
            reason = "stop" if request.detokenizer.stopped else reason
            self._finish(request, reason, Delta(text, (token,), logprobs))

    @staticmethod
    def _record_times(request: Request, now: float) -> None:
        usage, times = request.usage, request.times
        if not times.first_token:
            times.first_token = now
            usage.ttft_ms = (now - request.arrived) * 1e3
            usage.queue_ms = (times.admitted - request.arrived) * 1e3
            usage.load_ms = (max(times.ready, times.admitted) - times.admitted) * 1e3
            usage.link_ms = max(0.0, usage.ttft_ms - usage.queue_ms - usage.load_ms)
        if times.resumed:
            usage.retrieval[-1].link_ms = (now - times.resumed) * 1e3
            times.resumed = 0.0

    def _search(self, request: Request, call: str) -> str | None:
        """Pause a request that has made a call, or return the reason why it ends."""
        usage, retrieval = request.usage, request.spec.retrieval
        assert retrieval is not None  # only such requests search
        if len(usage.retrieval) >= retrieval.rounds:
            usage.retrieval += (search.too_many(retrieval, call, usage.completion_tokens),)
            return "stop"
        request.become(Status.SEARCHING)
        self.extender.begin(request, call)
        return None

    def _finish(self, request: Request, reason: str, last: Delta | None = None) -> None:
        """End a request normally. Its own tokens enter the prefix cache."""
        usage, prompt = request.usage, request.prompt
        usage.total_ms = (time.monotonic() - request.arrived) * 1e3
        usage.chunks = chunk_uses(prompt.plan, prompt.chunks, self._token_bytes)
        usage.compiled = sum({c.key: c.tokens for c in prompt.chunks if c.tier == "compiled"}.values())
        usage.computed = request.own_prompt - usage.prefix_hit
        usage.packet = sum(c.packet for c in prompt.chunks)
        if request.spec.trace:
            usage.trace = trace(prompt.segments, prompt.plan, prompt.chunks, usage.prefix_hit)
        usage.attended = prompt.plan.pairs(usage.prefix_hit, [c.removed for c in prompt.chunks])
        if request.status.admitted and prompt.plan.prefix and reason != "abort":
            self._scheduler.memory.cache_prefix(request)
        self._release(request)
        count_answer(self.counters, usage, reason)
        ended = (last or Delta(""))._replace(finish_reason=reason, usage=usage, stop=request.detokenizer.stop)
        request.stream.put(ended)

    def _release(self, request: Request) -> None:
        if request in self.unfinished:
            self.unfinished.remove(request)
            self._tombstones.end(request.arrived)
            self._scheduler.remove(request)

    def _searched(self, request: Request, outcome: SearchOutcome | Exception) -> None:
        """Go on after a search. The request may have been cancelled meanwhile."""
        if request not in self.unfinished:
            return
        try:
            self._resume(request, outcome)
        except Exception as error:  # the error concerns this request alone
            log.exception("a request could not be extended")
            self.fail(request, as_failure(error))

    def _resume(self, request: Request, outcome: SearchOutcome | Exception) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        search.count(self.counters, outcome.round)
        request.usage.retrieval += (outcome.round,)
        if outcome.extension is None:
            text = request.detokenizer.finish() + (outcome.says or "")
            reason = "length" if outcome.says is None else "stop"
            self._finish(request, reason, Delta(text, retrieval=replace(outcome.round)))
            return
        request.stream.put(Delta("", retrieval=replace(outcome.round)))
        apply(request, outcome.extension)
        request.times.resumed = time.monotonic()
        self._scheduler.resume(request, outcome.extension.found)
