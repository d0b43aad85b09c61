"""vLLM's scheduler with six additions: users take turns (``turns``); a request that the connector gives up ends with an
error that states the reason; every output of a link carries the connector's report; an image that is compiled stays
encoded until its request ends; an answer that continues in a new request continues in its grammar; and the connector
learns of a preemption while vLLM is still looking for blocks.

A KV connector can end requests only through failed blocks, after a step that computed them, and vLLM's output then
carries no reason. A report in the last output alone would be lost if the caller has seen enough and aborts; a report
sent only once would be lost when vLLM merges outputs, because it keeps that of the last. Everything else is vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from mpic.engine.vllm.plugin.turns import RowTurns
from mpic.engine.vllm.wire import ANSWERED, FIELD

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class LinkScheduler(Scheduler):
    """The scheduler for engines with ``MPICConnector``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turns = RowTurns(self.max_num_scheduled_tokens)
        self._longest = self.scheduler_config.long_prefill_token_threshold

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        waiting = list(self.waiting)
        turn = self._turns.begin(self.running, waiting)
        self.running.sort(key=turn)
        self.waiting.clear()
        self.waiting.extend(sorted(waiting, key=turn))
        rows, held = self._turns.limit(self.running, waiting)
        self.scheduler_config.long_prefill_token_threshold = min(
            filter(None, (self._longest, rows)), default=0
        )
        aside = [request for request in self.running if request.request_id in held]
        self.running = [request for request in self.running if request.request_id not in held]
        self.max_num_active_reqs -= len(aside)  # they keep their positions in the queue
        try:
            scheduled = super().schedule(*args, **options)
        finally:
            self.running += aside
            self.max_num_active_reqs += len(aside)
        self._turns.end(scheduled.num_scheduled_tokens, self.requests)
        return scheduled

    def _preempt_request(self, request: Request, *args: Any, **options: Any) -> None:
        super()._preempt_request(request, *args, **options)
        self.connector.preempted(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        failed = self.connector.executed(model_runner_output.kv_connector_output)
        ended = self.finish_requests(failed, RequestStatus.FINISHED_ERROR) if failed else []
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for output in (one for client in outputs.values() for one in client.outputs):
            if output.kv_transfer_params is None:
                output.kv_transfer_params = self.connector.report(output.request_id)
        for request in ended:
            one = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                kv_transfer_params=failed[request.request_id].report(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(one)
        return outputs

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            if request.structured_output_request is None or not request.sampling_params.extra_args:
                continue
            answered = request.sampling_params.extra_args.pop(
                ANSWERED, 0
            )  # only once, because a preempted request keeps its grammar
            if answered:
                tokens = list(request.prompt_token_ids[-answered:])
                request.structured_output_request.grammar.accept_tokens(name, tokens)
        return super().get_grammar_bitmask(scheduler_output)

    def _free_encoder_inputs(self, request: Request) -> None:
        """Keep the image of a compile order, whose embeddings are exported with the last token of the prompt: a step
        may end between the two, and the next one could evict an image that nobody holds. vLLM releases a request's
        images when the request ends or is preempted. Only a request with a single image may hold it while others wait
        for room, because it needs no further room itself."""
        params = request.kv_transfer_params
        ordered = isinstance(params, Mapping) and params.get(FIELD) is not None
        if not ordered or len(request.mm_features) != 1:
            super()._free_encoder_inputs(request)
