"""One request from its arrival to its end: as many requests to vLLM as it takes. Runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from mpic.engine import search
from mpic.engine.base import Delta, GenerationRequest, Hit, RetrievalRound, TokenLogprob, Usage
from mpic.engine.calls import hear, reader
from mpic.engine.checks import as_failure, check_extends
from mpic.engine.stream import Stream
from mpic.engine.trace import chunk_uses, trace
from mpic.engine.vllm.prepare import Prepared
from mpic.engine.vllm.talk import report_of
from mpic.errors import EngineStopped, MPICError
from mpic.link.plan import LinkPlan
from mpic.prompt.segments import Segment, TextSegment

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from mpic.engine.vllm.engine import VLLMEngine

log = logging.getLogger(__name__)
GONE = frozenset({"missing", "corrupt", "mismatch"})
"""What the connector says of a file that a fresh compile replaces."""


class FileLost(Exception):
    """A chunk's file was gone or damaged before anything was said."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Asked:
    """One request to vLLM.

    Attributes:
        first: when its first token came, by the monotonic clock; 0 before that.
        last: its newest output.
    """

    first: float = 0.0
    last: RequestOutput | None = None


class Running:
    """See the module.

    Args:
        engine: what it runs on.
        arrived: as ``Deletions.begin`` said.
        salt: of its blocks in vLLM's prefix cache.

    Raises (on making it): what can be known without computing, see ``Engine.submit``.
    """

    def __init__(
        self, engine: VLLMEngine, request: GenerationRequest, stream: Stream, arrived: float, salt: str
    ) -> None:
        self.request, self.stream, self.arrived = request, stream, arrived
        self._engine, self._salt = engine, salt
        self._reader = reader(engine.model.tokenizer, request)
        self._said: list[int] = []
        self._inserted = 0  # tokens of the prompt that retrieval has put in
        self._usage = Usage(policy=request.policy.name)
        asked = request.sampling.max_tokens
        self._prepared = engine.preparer.prepare(request.prompt.segments, request.policy, salt, asked)
        room = engine.preparer.room(self._prepared)
        self._max_tokens = room if asked is None else asked
        self._before = 0  # tokens said before the last insertion: they are in the prompt now
        self._resumed = 0.0
        self.searching = False
        self.started = False
        self.stopping: EngineStopped | None = None

    async def run(self) -> None:
        """To the end, whichever it is."""
        try:
            reason, last = await self._answer()
            self._end(reason, last)
        except asyncio.CancelledError:
            self.cancelled()
        except Exception as error:  # of this request alone
            if not isinstance(error, MPICError):
                log.exception("a request failed")
            self._fail(error)
        finally:
            for one in self._prepared.linked:
                one.let_go()

    def cancelled(self) -> None:
        """End the stream: the engine is being stopped, or the reader wants no more."""
        if self.stopping is not None:
            self._fail(self.stopping)
        else:
            self._end("abort", Delta(""))

    def _fail(self, error: BaseException) -> None:
        self._engine.counters["failed"] += 1
        self.stream.put(as_failure(error))

    async def _answer(self) -> tuple[str, Delta]:
        """Speak, and search when the model calls; gives the reason of the end and the last delta."""
        while True:
            try:
                reason, last, call = await self._speak()
            except FileLost as lost:
                log.warning("a chunk's file could not be used and is compiled again: %s", lost)
                self._engine.counters["load_failures"] += 1
                for one in self._prepared.needed:
                    await self._engine.chunks.doubt(one, lost.code)
                reason, last, call = await self._speak(again=True)
            if reason is not None:
                return reason, last
            ended = await self._search(call)
            if ended is not None:
                return ended

    # ---- speaking

    async def _speak(self, again: bool = False) -> tuple[str | None, Delta, str | None]:
        """One request to vLLM. Without a reason, the model has made a call."""
        engine, prepared = self._engine, self._prepared
        asked = Asked()
        order = None
        if prepared.plain is None:
            self._usage.compiled += await engine.chunks.ensure(prepared.needed, self.arrived)
            prepared.plan = engine.preparer.plan(prepared.segments, prepared.linked, self.request.policy)
            order = engine.preparer.order(prepared)
            prompt = engine.talk.tokens(prepared.ids(), self._salt)
        else:
            prompt = prepared.plain
        params = self._params(order.params() if order is not None else None)
        said = len(self._said)
        reason = call = None
        last = Delta("")
        async with aclosing(engine.talk.speak(prompt, params)) as outputs:
            async for output in outputs:
                asked.last = output
                reason, call, last = self._hear(output, asked)
                if reason is not None or call is not None:
                    break
                if last.token_ids:
                    self.stream.put(last)
        report = report_of(asked.last)
        lost = report.get("error") in GONE
        if lost and not again and len(self._said) == said:
            raise FileLost(report["error"], str(report.get("message")))
        if reason is None and call is None:
            why = report.get("message") or "vLLM ended the request"
            raise MPICError(f"the request could not be computed: {why}", reason=report.get("error"))
        self._account(asked, report, order is not None)
        if call is not None:
            self.stream.put(last)
        return reason, last, call

    def _params(self, order: dict[str, Any] | None) -> SamplingParams:
        s, seed = self.request.sampling, self.request.sampling.seed
        return SamplingParams(
            max_tokens=self._max_tokens - len(self._said),
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            # a request that goes on after a search must not draw the same numbers once more
            seed=None if seed is None else (seed + len(self._usage.retrieval)) & ((1 << 63) - 1),
            logprobs=s.logprobs,
            ignore_eos=s.ignore_eos,
            stop_token_ids=[] if s.ignore_eos else sorted(self._engine.model.eos),
            detokenize=False,
            skip_reading_prefix_cache=None if self.request.policy.prefix else True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": order} if order is not None else None,
        )

    def _hear(self, output: RequestOutput, asked: Asked) -> tuple[str | None, str | None, Delta]:
        """Read new tokens up to the answer's end or a call."""
        self.started = True
        [one] = output.outputs
        if one.token_ids and not asked.first:
            asked.first = time.monotonic()
        text, ids, logprobs = "", [], []
        reason = call = None
        for i, token in enumerate(one.token_ids):
            final = one.finish_reason == "stop" and i == len(one.token_ids) - 1
            ends = (token in self._engine.model.eos or final) and not self.request.sampling.ignore_eos
            heard = hear(self._reader, token, ends)
            self._said.append(token)
            ids.append(token)
            text += heard.text
            if one.logprobs is not None:
                logprobs.append(_logprob(token, one.logprobs[i], self.request.sampling.logprobs))
            if heard.over:
                reason = "stop"
            elif len(self._said) >= self._max_tokens:
                reason = "length"
            elif heard.call is not None:
                call = heard.call
            if reason is not None or call is not None:
                break
        if reason is None and call is None and one.finish_reason in ("stop", "length"):
            reason = one.finish_reason
        if call is not None and len(self._usage.retrieval) >= self.request.retrieval.rounds:
            refused = RetrievalRound(call, at=len(self._said), error="rounds")
            self._usage.retrieval += (refused,)
            reason, call = "stop", None
        if reason is not None:
            text += self._reader.finish()
            reason = "stop" if self._reader.stopped else reason
        return reason, call, Delta(text, tuple(ids), tuple(logprobs))

    # ---- usage

    def _account(self, asked: Asked, report: dict[str, Any], linked: bool) -> None:
        """What vLLM says about the request that has ended; the first one's times are the request's."""
        usage, prepared, output = self._usage, self._prepared, asked.last
        for number, code in report.get("fallback") or ():
            one = prepared.needed[number]
            one.tier, one.reason = "none", code
        metrics = output.metrics
        if metrics is not None:
            usage.preemptions += metrics.num_preemptions
        if not usage.ttft_ms and asked.first:
            load = float(report.get("load_ms") or 0.0)
            waited = 1e3 * (metrics.scheduled_ts - metrics.queued_ts) if metrics is not None else 0.0
            usage.ttft_ms = (asked.first - self.arrived) * 1e3
            usage.load_ms = min(load, usage.ttft_ms)
            usage.queue_ms = min(max(0.0, waited - load), usage.ttft_ms - usage.load_ms)
            usage.link_ms = usage.ttft_ms - usage.load_ms - usage.queue_ms
            hit = int(report.get("prefix_hit") or 0) if linked else int(output.num_cached_tokens or 0)
            runs = self._as_computed().runs
            usage.prefix_hit = sum(max(0, min(hit, run.start + run.hi - run.lo) - run.start) for run in runs)
        if self._resumed and asked.first:
            usage.retrieval[-1].link_ms = (asked.first - self._resumed) * 1e3
            self._resumed = 0.0

    def _as_computed(self) -> LinkPlan:
        """The plan with what fell back to computing as it was done."""
        prepared, plan = self._prepared, self._prepared.plan
        fallen = {i for i, one in enumerate(prepared.linked) if one.tier == "none" and plan.reused(i)}
        if not fallen or prepared.plain is not None:
            return plan
        decided = list(self.request.policy.select(plan.slots))
        for i in fallen:
            decided[i] = ((0, plan.slots[i].length),)
        return self._engine.preparer.plan(prepared.segments, prepared.linked, self.request.policy, decided)

    def _end(self, reason: str, last: Delta) -> None:
        usage, prepared = self._usage, self._prepared
        plan = self._as_computed() if usage.ttft_ms else prepared.plan
        for i, one in enumerate(prepared.linked):
            if one.tier == "disk" and not plan.reused(i):
                one.tier = "none"  # of its file only the embeddings were used
        usage.completion_tokens = len(self._said)
        usage.total_ms = (time.monotonic() - self.arrived) * 1e3
        usage.prompt_tokens = plan.length - self._before
        usage.reused = plan.length - plan.own
        usage.recomputed = sum(slot.length for slot in plan.slots) - usage.reused
        usage.computed = usage.prompt_tokens - usage.reused - usage.prefix_hit
        usage.attended = plan.pairs(usage.prefix_hit)
        usage.chunks = tuple(
            replace(use, reason=one.reason) if one.tier == "none" and one.reason else use
            for use, one in zip(chunk_uses(plan, prepared.linked), prepared.linked, strict=True)
        )
        if self.request.trace:
            usage.trace = trace(prepared.segments, plan, prepared.linked, usage.prefix_hit)
        self._engine.finished(usage, reason)
        self.stream.put(last._replace(finish_reason=reason, usage=usage))

    # ---- retrieval

    async def _search(self, call: str) -> tuple[str, Delta] | None:
        """Look up what the model asked for and put it behind the call; or how the answer ends."""
        began = time.monotonic()
        self.searching = True
        try:
            found, prepared, round = await self._engine.search(partial(self._extended, call))
        finally:
            self.searching = False
        round.search_ms = (time.monotonic() - began) * 1e3
        search.count(self._engine.counters, round)
        self._usage.retrieval += (round,)
        if prepared is None:
            nothing = None if found else self.request.retrieval.nothing
            text = self._reader.finish() + (nothing or "")
            return "length" if nothing is None else "stop", Delta(text, retrieval=replace(round))
        self.stream.put(Delta("", retrieval=replace(round)))
        self._prepared = prepared
        self._before = len(self._said)
        self._max_tokens = min(self._max_tokens, len(self._said) + self._engine.preparer.room(prepared))
        self._resumed = time.monotonic()
        return None

    def _extended(self, call: str) -> tuple[list[Hit], Prepared | None, RetrievalRound]:
        """On a search thread."""
        engine, request, retrieval = self._engine, self.request, self.request.retrieval

        def link(hit: Hit) -> None:
            if not request.policy.exact and request.policy.context:
                engine.chunks.link([hit.chunk], request.policy)

        found = search.search(retrieval, call)
        hits, error = search.linkable(found, link)
        hits, prepared, unfit = search.insert(retrieval, hits, self._usage.retrieval, self._extension)
        round = search.ended(found, hits, len(self._said), unfit or error)
        if prepared is not None:
            new = prepared.plan.length - self._prepared.plan.length
            own = prepared.plan.own - self._prepared.plan.own
            round.tokens = new - (len(self._said) - self._before)
            round.reused = new - own
        return hits, prepared, round

    def _extension(self, inserted: tuple[Segment, ...]) -> Prepared:
        policy = self.request.policy
        said = TextSegment(tuple(self._said[self._before :]))
        segments = (*self._prepared.segments, said, *inserted)
        prepared = self._engine.preparer.prepare(segments, policy, self._salt, None, self._prepared.linked)
        check_extends(prepared.plan, self._prepared.plan, policy)
        return prepared


def _logprob(token: int, found: Any, wanted: int | None) -> TokenLogprob:
    """vLLM's ``{token: Logprob}`` of a position: the chosen one's, and the most likely ones by rank."""
    ranked = sorted((one.rank, id, one.logprob) for id, one in found.items() if one.rank <= (wanted or 0))
    return TokenLogprob(token, found[token].logprob, tuple((id, logprob) for _, id, logprob in ranked))
