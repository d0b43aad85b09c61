"""Runs a request on the event loop from its arrival to its end, with as many requests to vLLM as it needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from mpic.engine import search
from mpic.engine.accounting import count_answer, count_prompt
from mpic.engine.base import Delta, GenerationRequest, GenerationUsage, Hit, RetrievalRound, TokenLogprob
from mpic.engine.checks import as_failure, check_extends
from mpic.engine.detokenize import detokenize, detokenizer_for
from mpic.engine.grammar import Constraints
from mpic.engine.stream import DeltaStream
from mpic.engine.trace import chunk_uses, trace
from mpic.engine.vllm.frontend.client import VLLMClient, report_of, unfinished
from mpic.engine.vllm.frontend.compiler import ChunkCompiler
from mpic.engine.vllm.frontend.gate import Entered, Gate
from mpic.engine.vllm.frontend.model import ModelDescription
from mpic.engine.vllm.frontend.prepare import PreparedPrompt, PromptPreparer
from mpic.engine.vllm.frontend.prompts import token_prompt
from mpic.engine.vllm.wire import ANSWERED, USER
from mpic.errors import EngineStopped, GrammarTooComplex, MPICError, Unavailable
from mpic.link import LinkPlan
from mpic.prompt.segments import Segment, TextSegment

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

log = logging.getLogger(__name__)
REPLACEABLE = frozenset({"missing", "corrupt", "mismatch"})
"""The connector's codes for files that a fresh compile can replace."""


@dataclass(frozen=True)
class Runtime:
    """The parts of an engine that its requests use. ``searchers`` are the threads that searches run on; ``gate`` lets
    requests into vLLM in turn. vLLM masks tokens itself; ``constraints`` refuse invalid grammars first and check the
    answers, because vLLM ends an answer as if it were complete when it gives up on a grammar."""

    model: ModelDescription
    client: VLLMClient
    compiler: ChunkCompiler
    preparer: PromptPreparer
    searchers: Executor
    counters: Counter[str]
    gate: Gate
    constraints: Constraints


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SEARCHING = "searching"


class Progress(NamedTuple):
    """The next part of an answer.

    Args:
        reason: the finish reason if the answer ends with this part; None when it goes on.
        call: the search that the model calls for after this part, if it does.
    """

    delta: Delta
    reason: str | None = None
    call: str | None = None


class Request:
    """A running request; see the module's docstring.

    Args:
        arrived: as ``Tombstones.begin`` returned it.
        salt: cache salt for its blocks in vLLM's prefix cache.

    Raises:
        BadRequest: the request is known to fail without computing anything; see ``Engine.submit``.
    """

    def __init__(
        self, runtime: Runtime, spec: GenerationRequest, stream: DeltaStream, arrived: float, salt: str
    ) -> None:
        self.spec, self.stream, self.arrived = spec, stream, arrived
        self.status = Status.WAITING
        self.stopping: EngineStopped | None = None
        self._runtime, self._salt = runtime, salt
        self._detokenizer = detokenizer_for(runtime.model.tokenizer, spec)
        self._constraint = runtime.constraints.begin(spec.grammar) if spec.grammar is not None else None
        self._generated: list[int] = []
        self._usage = GenerationUsage(policy=spec.policy.name)
        asked = spec.sampling.max_tokens
        self._prepared = runtime.preparer.prepare(spec.prompt.segments, spec.policy, salt, asked)
        self._max_tokens = runtime.preparer.room(self._prepared) if asked is None else asked
        self._in_prompt = 0  # tokens generated before the last insertion; they are part of the prompt now
        self._interrupted = 0  # number of requests to vLLM that ended before the answer did
        self._room = asyncio.Event()  # set when the reader takes more of the answer
        self._resumed = 0.0

    async def run(self) -> None:
        """Answer the request; an error ends only its own stream."""
        try:
            self._end(await self._answer())
        except asyncio.CancelledError:
            self.cancelled()
        except Exception as error:
            if not isinstance(error, MPICError):
                log.exception("a request failed")
            self._fail(error)
        finally:
            for chunk in self._prepared.linked:
                if chunk.computed and chunk.reason in REPLACEABLE:
                    self._runtime.counters["load_failures"] += 1
                    self._runtime.compiler.files.recheck_later(chunk)
                chunk.release()

    def read(self) -> None:
        """Let the request go on after a pause for its reader."""
        self._room.set()

    def cancelled(self) -> None:
        """End the stream, because the engine is stopping or the reader has left."""
        if self.stopping is not None:
            self._fail(self.stopping)
        else:
            self._end(Progress(Delta(""), "abort"))

    def _fail(self, error: BaseException) -> None:
        self._runtime.counters["failed"] += 1
        self.stream.put(as_failure(error))

    async def _answer(self) -> Progress:
        """Generate, and search when the model calls; return the last part of the answer."""
        while True:
            async with self._runtime.gate.turn(self.spec.user, self._rows_missing()) as turn:
                progress = await self._generate(turn)
            if progress.call is not None:
                progress = await self._search(progress.call)
            if progress.reason is not None:
                return progress
            await self._until_read()

    async def _until_read(self) -> None:
        """Wait outside vLLM while too much of the answer is unread."""
        while self.stream.full:
            self._room.clear()
            if self.stream.full:  # the reader may have caught up before the event was cleared
                await self._room.wait()

    # ---- generation

    def _rows_missing(self) -> int:
        """Return how many rows the next token takes: those of the request, and those of chunks without a file."""
        prepared = self._prepared
        missing = {one.key: one.tokens for one in prepared.needed if not (one.stored or one.spooled)}
        return prepared.plan.own + len(self._generated) - self._in_prompt + sum(missing.values())

    async def _generate(self, turn: Entered, again: bool = False) -> Progress:
        """Make one request to vLLM, and leave it when the answer ends, the model makes a call, or too much of the
        answer is unread; return the last part. If a chunk's file ends the request, ``again`` starts another, which
        generates the rest."""
        runtime, prepared = self._runtime, self._prepared
        if len(self._generated) > self._in_prompt:
            loop = asyncio.get_running_loop()  # which a thread that prepares a prompt waits for
            prepared = await loop.run_in_executor(runtime.searchers, self._with_inserted, ())
        prompt, order = prepared.plain, None
        if prompt is None:
            self._usage.compiled += await runtime.compiler.ensure(prepared.needed, self.arrived)
            prepared.plan = runtime.preparer.plan(prepared.segments, prepared.linked, self.spec.policy)
            # vLLM counts the tokens of its prompt, in which shared chunks are not
            copied = self.spec.sampling.repetition_penalty != 1
            order = runtime.preparer.order(prepared, self._max_tokens - len(self._generated), copied)
            prompt = token_prompt(order.ids(prepared.ids()), order.salt(self._salt))
        # vLLM would take what has been generated for a part of the prompt
        if self._generated and self.spec.sampling.counts_answers:
            raise Unavailable("the answer was interrupted, and its penalties cannot go on: ask again")
        params = self._params(order.params() if order is not None else None)
        first_token = 0.0
        output, report, earlier, progress, paused = None, {}, {}, Progress(Delta("")), False
        async with aclosing(runtime.client.generate(prompt, params)) as outputs:
            async for output in outputs:
                earlier, report = report, report_of(output) or report
                [completion] = output.outputs
                if completion.token_ids and not first_token:
                    first_token = time.monotonic()
                    turn.answers()
                progress = self._read(completion)
                if progress.reason is not None or progress.call is not None:
                    break
                if progress.delta.token_ids:
                    self.stream.put(progress.delta)
                    if paused := self.stream.full and not self.spec.sampling.counts_answers:
                        break
        ended = paused or progress.reason is not None or progress.call is not None
        if not ended and report.get("error") in REPLACEABLE and not again:
            if first_token:  # the request was preempted while it answered, and the file has since disappeared
                self._interrupted += 1
                self._account(output, earlier, first_token, linked=True)
            await self._recheck(prepared, report)
            return await self._generate(turn, again=True)
        if not ended:
            what, otherwise = "the request could not be computed", MPICError
            if self._constraint is not None and not report.get("error"):
                what, otherwise = "the answer's form takes too much work to follow", GrammarTooComplex
            raise unfinished(what, output, report, otherwise)
        self._account(output, report, first_token, order is not None)
        self._interrupted += paused
        if progress.call is not None:
            self.stream.put(progress.delta)
        return progress

    async def _recheck(self, prepared: PreparedPrompt, report: dict[str, Any]) -> None:
        """Recompile the chunks whose files can no longer be used."""
        log.warning("a chunk's file could not be used and is compiled again: %s", report.get("message"))
        self._runtime.counters["load_failures"] += 1
        for chunk in prepared.needed:
            await self._runtime.compiler.files.recheck(chunk, report["error"])

    def _params(self, order: dict[str, Any] | None) -> SamplingParams:
        s, seed = self.spec.sampling, self.spec.sampling.seed
        begun = len(self._usage.retrieval) + self._interrupted
        extra: dict[str, Any] = {USER: self.spec.user}
        if order is not None:
            extra["kv_transfer_params"] = order
        outputs = None
        if self.spec.grammar is not None:
            outputs = StructuredOutputsParams(grammar=self.spec.grammar.lark)
            extra[ANSWERED] = len(self._generated)
        return SamplingParams(
            max_tokens=self._max_tokens - len(self._generated),
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            repetition_penalty=s.repetition_penalty,
            logit_bias=dict(s.logit_bias) or None,
            # a request that continues must not repeat the same random numbers
            seed=None if seed is None else (seed + begun) & ((1 << 63) - 1),
            logprobs=s.logprobs,
            ignore_eos=s.ignore_eos,
            stop_token_ids=[] if s.ignore_eos else sorted(self._runtime.model.eos),
            detokenize=False,
            skip_reading_prefix_cache=None if self.spec.policy.prefix else True,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=outputs,
            extra_args=extra,
        )

    def _read(self, output: CompletionOutput) -> Progress:
        """Read new tokens up to the end of the answer or a call."""
        self.status = Status.RUNNING
        sampling = self.spec.sampling
        text, ids, logprobs = "", [], []
        reason = call = None
        for i, token in enumerate(output.token_ids):
            final = output.finish_reason == "stop" and i == len(output.token_ids) - 1
            ends = (token in self._runtime.model.eos or final) and not sampling.ignore_eos
            complete = self._constraint is not None and self._constraint.take(token)
            logprob = None
            if output.logprobs is not None:
                logprob = _logprob(token, output.logprobs[i], sampling.logprobs)
                logprobs.append(logprob)
            read = detokenize(self._detokenizer, token, ends, logprob)
            self._generated.append(token)
            ids.append(token)
            text += read.text
            if read.over or complete:
                reason = "stop"
            elif len(self._generated) >= self._max_tokens:
                reason = "length"
            else:
                call = read.call
            if reason is not None or call is not None:
                break
        if reason is None and call is None and output.finish_reason in ("stop", "length"):
            reason = output.finish_reason
        if call is not None and len(self._usage.retrieval) >= self.spec.retrieval.rounds:
            over = search.too_many(self.spec.retrieval, call, len(self._generated))
            self._usage.retrieval += (over,)
            reason, call = "stop", None
        if reason is not None:
            text += self._detokenizer.finish()
            reason = "stop" if self._detokenizer.stopped else reason
        return Progress(Delta(text, tuple(ids), tuple(logprobs)), reason, call)

    # ---- usage

    def _account(
        self, output: RequestOutput, report: dict[str, Any], first_token: float, linked: bool
    ) -> None:
        """Add the report of a finished vLLM request to the usage; times are those of the first request."""
        usage, prepared = self._usage, self._prepared
        for number, code in report.get("fallback") or ():
            chunk = prepared.needed[number]
            chunk.computed, chunk.reason = True, code
        metrics = output.metrics
        if metrics is not None:
            usage.preemptions += metrics.num_preemptions
        if not usage.ttft_ms and first_token:
            load = float(report.get("load_ms") or 0.0)
            waited = 1e3 * (metrics.scheduled_ts - metrics.queued_ts) if metrics is not None else 0.0
            usage.ttft_ms = (first_token - self.arrived) * 1e3
            usage.load_ms = min(load, usage.ttft_ms)
            usage.queue_ms = min(max(0.0, waited - load), usage.ttft_ms - usage.load_ms)
            usage.link_ms = usage.ttft_ms - usage.load_ms - usage.queue_ms
            hit = int(report.get("prefix_hit") or 0) if linked else int(output.num_cached_tokens or 0)
            usage.prefix_hit = sum(
                max(0, min(hit, own.start + own.hi - own.lo) - own.start)
                for own in self._plan_as_computed().own_ranges
            )
        if self._resumed and first_token:
            usage.retrieval[-1].link_ms = (first_token - self._resumed) * 1e3
            self._resumed = 0.0

    def _plan_as_computed(self) -> LinkPlan:
        """Return the plan in which the chunks that vLLM computed instead of linking are recomputed."""
        prepared, plan = self._prepared, self._prepared.plan
        computed = {i for i, chunk in enumerate(prepared.linked) if chunk.computed and plan.reused(i)}
        if not computed or prepared.plain is not None:
            return plan
        decided = list(self.spec.policy.select(plan.places))
        for i in computed:
            decided[i] = ((0, plan.places[i].length),)
        return self._runtime.preparer.plan(prepared.segments, prepared.linked, self.spec.policy, decided)

    def _end(self, last: Progress) -> None:
        """End the stream with the usage."""
        usage, linked = self._usage, self._prepared.linked
        plan = self._plan_as_computed() if usage.ttft_ms else self._prepared.plan
        for i, chunk in enumerate(linked):
            if chunk.computed or (chunk.tier == "disk" and not plan.reused(i)):
                chunk.tier = "none"  # only the embeddings in its file were used, if anything
        count_prompt(usage, plan)
        usage.packet = sum(one.packet for one in linked)
        usage.prompt_tokens -= self._in_prompt
        usage.completion_tokens = len(self._generated)
        usage.total_ms = (time.monotonic() - self.arrived) * 1e3
        usage.computed = usage.prompt_tokens - usage.reused - usage.prefix_hit
        usage.attended = plan.pairs(usage.prefix_hit)
        token_bytes = self._runtime.model.page_token_bytes
        usage.chunks = tuple(
            replace(use, reason=chunk.reason) if chunk.tier == "none" and chunk.reason else use
            for use, chunk in zip(chunk_uses(plan, linked, token_bytes), linked, strict=True)
        )
        if self.spec.trace:
            usage.trace = trace(self._prepared.segments, plan, linked, usage.prefix_hit)
        self._runtime.counters["generated"] += usage.completion_tokens
        count_answer(self._runtime.counters, usage, last.reason)
        stop = self._detokenizer.stop
        self.stream.put(last.delta._replace(finish_reason=last.reason, usage=usage, stop=stop))

    # ---- retrieval

    async def _search(self, call: str) -> Progress:
        """Run the search that the model calls for and insert the result after the call, or end the answer."""
        began = time.monotonic()
        self.status = Status.SEARCHING
        try:
            loop = asyncio.get_running_loop()
            hits, prepared, round = await loop.run_in_executor(self._runtime.searchers, self._extended, call)
        finally:
            self.status = Status.RUNNING
        round.search_ms = (time.monotonic() - began) * 1e3
        search.count(self._runtime.counters, round)
        self._usage.retrieval += (round,)
        if prepared is None:
            nothing = None if hits else self.spec.retrieval.nothing
            text = self._detokenizer.finish() + (nothing or "")
            return Progress(Delta(text, retrieval=replace(round)), "length" if nothing is None else "stop")
        found = Progress(Delta("", retrieval=replace(round)))
        self.stream.put(found.delta)
        self._prepared = prepared
        self._in_prompt = len(self._generated)
        self._max_tokens = min(self._max_tokens, self._in_prompt + self._runtime.preparer.room(prepared))
        self._resumed = time.monotonic()
        return found

    def _extended(self, call: str) -> tuple[list[Hit], PreparedPrompt | None, RetrievalRound]:
        """Return the references that were found, and the prompt with them; run on a search thread."""
        runtime, policy, retrieval = self._runtime, self.spec.policy, self.spec.retrieval

        def link(hit: Hit) -> None:
            if not policy.exact and policy.context:
                runtime.compiler.link([hit.chunk], policy)

        found = search.search(retrieval, call)
        hits, error = search.linkable(found, link)
        hits, prepared, unfit = search.insert(retrieval, hits, self._usage.retrieval, self._with_inserted)
        round = search.ended(retrieval, found, hits, len(self._generated), unfit or error)
        if prepared is not None:
            new = prepared.plan.length - self._prepared.plan.length
            own = prepared.plan.own - self._prepared.plan.own
            round.tokens = new - (len(self._generated) - self._in_prompt)
            round.reused = new - own
        return hits, prepared, round

    def _with_inserted(self, inserted: tuple[Segment, ...]) -> PreparedPrompt:
        """Return the prompt followed by the answer so far and ``inserted``."""
        policy, shorter = self.spec.policy, self._prepared
        answer = TextSegment(tuple(self._generated[self._in_prompt :]))
        segments = (*shorter.segments, answer, *inserted)
        prepared = self._runtime.preparer.prepare(segments, policy, self._salt, None, shorter.linked)
        check_extends(prepared.plan, shorter.plan, policy)
        return prepared


def _logprob(token: int, found: Any, wanted: int | None) -> TokenLogprob:
    """Convert vLLM's ``{token: Logprob}`` of a position: the chosen token's, and the likeliest ones by rank."""
    ranked = sorted((one.rank, id, one.logprob) for id, one in found.items() if one.rank <= (wanted or 0))
    return TokenLogprob(token, found[token].logprob, tuple((id, logprob) for _, id, logprob in ranked))
