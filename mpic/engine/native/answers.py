"""Answers under way: from the logits of a request's last row to its next delta, and to its end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace

import torch

from mpic.engine.base import Delta, RetrievalRound
from mpic.engine.calls import hear
from mpic.engine.checks import as_failure
from mpic.engine.deletions import Deletions
from mpic.engine.native.extend import Extender, Outcome, apply
from mpic.engine.native.lanes import Sequence
from mpic.engine.native.prepare import Preparer
from mpic.engine.native.scheduler import Scheduler
from mpic.engine.trace import chunk_uses, trace

log = logging.getLogger(__name__)


class Answers:
    """The requests of an engine. All methods run on the engine's thread.

    Args:
        post: hands a message to the engine's thread.
        eos: tokens that end an answer.
        released: called when a request has given back what it held.

    Attributes:
        under_way: requests that have arrived and not ended.

    ``counters``: ``generated``, ``tokens_*``, ``finished_*``, ``failed``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        preparer: Preparer,
        deletions: Deletions,
        post: Callable[..., None],
        eos: Container[int],
        released: Callable[[], None],
    ) -> None:
        self._scheduler, self._deletions, self._eos, self._released = scheduler, deletions, eos, released
        self.extender = Extender(preparer, deletions, post, self._found)
        self.under_way: set[Sequence] = set()
        self.counters: Counter[str] = Counter()

    def take(self, sequence: Sequence, logits: torch.Tensor, now: float) -> None:
        """The next token of an answer; what goes wrong is of this request alone."""
        try:
            self._take(sequence, logits, now)
        except Exception as error:
            log.exception("a token could not be taken")
            self.fail(sequence, as_failure(error))

    def abort(self, sequence: Sequence) -> None:
        if sequence in self.under_way:
            self._finish(sequence, "abort")

    def _take(self, sequence: Sequence, logits: torch.Tensor, now: float) -> None:
        token, logprob = sequence.sampler(logits)
        usage = sequence.usage
        if not sequence.first_token:
            sequence.first_token = now
            usage.ttft_ms = (now - sequence.arrived) * 1e3
            usage.queue_ms = (sequence.admitted - sequence.arrived) * 1e3
            usage.load_ms = (max(sequence.ready, sequence.admitted) - sequence.admitted) * 1e3
            usage.link_ms = max(0.0, usage.ttft_ms - usage.queue_ms - usage.load_ms)
        if sequence.resumed:
            usage.retrieval[-1].link_ms = (now - sequence.resumed) * 1e3
            sequence.resumed = 0.0
        sequence.append(token)
        usage.completion_tokens += 1
        self.counters["generated"] += 1
        ends = token in self._eos and not sequence.request.sampling.ignore_eos
        text, call, over = hear(sequence.detokenizer, token, ends)
        reason = "stop" if over else None
        if reason is None and sequence.generated >= sequence.max_tokens:
            reason = "length"
        if reason is None and call is not None:
            reason = self._search(sequence, call)
        logprobs = (logprob,) if logprob is not None else ()
        if reason is None:
            sequence.stream.put(Delta(text, (token,), logprobs))
        else:
            text += sequence.detokenizer.finish()
            reason = "stop" if sequence.detokenizer.stopped else reason
            self._finish(sequence, reason, Delta(text, (token,), logprobs))

    def _search(self, sequence: Sequence, call: str) -> str | None:
        """Pause a request that has made a call, or say why it ends."""
        usage = sequence.usage
        if len(usage.retrieval) >= sequence.request.retrieval.rounds:
            usage.retrieval += (RetrievalRound(call, at=usage.completion_tokens, error="rounds"),)
            return "stop"
        self.extender.begin(sequence, call)
        return None

    def _finish(self, sequence: Sequence, reason: str, last: Delta | None = None) -> None:
        """The end of a request that was not an error; its own tokens enter the prefix cache."""
        usage = sequence.usage
        usage.total_ms = (time.monotonic() - sequence.arrived) * 1e3
        usage.chunks = chunk_uses(sequence.plan, sequence.linked)
        compiled = {one.key: len(one.inputs) for one in sequence.linked if one.tier == "compiled"}
        usage.compiled = sum(compiled.values())
        usage.computed = sequence.prompt_own + sequence.inserted - usage.prefix_hit
        if sequence.request.trace:
            usage.trace = trace(sequence.segments, sequence.plan, sequence.linked, usage.prefix_hit)
        usage.attended = sequence.plan.pairs(usage.prefix_hit, sequence.request.policy.two_step)
        if sequence.first_token:
            for name in ("reused", "recomputed", "prefix_hit", "computed"):
                self.counters[f"tokens_{name}"] += getattr(usage, name)
            self.counters["tokens_requested"] += usage.prompt_tokens
        in_running = sequence in self._scheduler.running
        if in_running and sequence.request.policy.prefix and reason != "abort":
            self._scheduler.room.remember(sequence)
        last = last or Delta("")
        self._release(sequence)
        self.counters[f"finished_{reason}"] += 1
        sequence.stream.put(last._replace(finish_reason=reason, usage=usage))

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        self._release(sequence)
        self.counters["failed"] += 1
        sequence.stream.put(error)

    def _release(self, sequence: Sequence) -> None:
        if sequence in self.under_way:
            self.under_way.remove(sequence)
            self._deletions.end()
        if sequence in self._scheduler.running:
            self._scheduler.release(sequence)
        elif sequence in self._scheduler.waiting:
            self._scheduler.waiting.remove(sequence)
        elif sequence in self._scheduler.parked:
            self._scheduler.parked.remove(sequence)
        self._released()

    def _found(self, sequence: Sequence, outcome: Outcome | Exception) -> None:
        """A search has ended; its request may have been cancelled meanwhile."""
        if sequence not in self.under_way:
            return
        try:
            self._extend(sequence, outcome)
        except Exception as error:  # of this request alone
            log.exception("a request could not be extended")
            self.fail(sequence, as_failure(error))

    def _extend(self, sequence: Sequence, outcome: Outcome | Exception) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        self.extender.count(outcome.round)
        sequence.usage.retrieval += (outcome.round,)
        if outcome.extension is None:
            text = sequence.detokenizer.finish() + (outcome.says or "")
            reason = "length" if outcome.says is None else "stop"
            self._finish(sequence, reason, Delta(text, retrieval=replace(outcome.round)))
            return
        sequence.stream.put(Delta("", retrieval=replace(outcome.round)))
        apply(sequence, outcome.extension)
        sequence.resumed = time.monotonic()
        self._scheduler.resume(sequence, outcome.extension.found)
