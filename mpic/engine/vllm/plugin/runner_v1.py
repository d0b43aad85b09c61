"""Links in vLLM's first model runner (``vllm.v1.worker.gpu_model_runner``, and the CPU's, which derives from it)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode

from mpic.engine.vllm.plugin.active_link import SharedLink
from mpic.engine.vllm.plugin.runner import LinkedRequest, LinkRunner, PromptInputs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher


class WithoutFullGraphs:
    """vLLM's dispatcher of captured graphs for a step with links. A full graph has one row of attention per request;
    the pieces of a piecewise graph contain no attention and are used as always.

    vLLM itself excludes full graphs for a batch through ``invalid_modes`` (encoder outputs, spec decoding), but its
    model runner has no argument for that.
    """

    def __init__(self, dispatcher: CudagraphDispatcher) -> None:
        self._dispatcher = dispatcher

    def dispatch(self, *args: Any, **options: Any) -> Any:
        options["invalid_modes"] = {*(options.get("invalid_modes") or ()), CUDAGraphMode.FULL}
        return self._dispatcher.dispatch(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)


class LinkRunnerV1(LinkRunner):
    """A mixin for ``GPUModelRunner`` or ``CPUModelRunner``."""

    def prompt_inputs(self, request: str) -> PromptInputs:
        state = self.requests[request]
        positions = state.mrope_positions if self.uses_mrope else None
        return PromptInputs(positions, state.mm_features, self.encoder_cache)

    def block_ids(self, request: str) -> list[int]:
        return self.requests[request].block_ids[0]

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self.begin_links(scheduler_output)
        return super()._update_states(scheduler_output)

    def _init_mrope_positions(self, req_state: Any) -> None:
        link = self._links.get(req_state.req_id)
        if isinstance(link, SharedLink):
            req_state.mrope_positions, req_state.mrope_position_delta = link.own_positions()
            return
        if link is not None:
            req_state.mrope_positions, req_state.mrope_position_delta = link.positions()
            return
        super()._init_mrope_positions(req_state)

    def execute_model(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_model(*args, **options)
        finally:
            self.end_placing()
            self._step = None  # runs between steps (warm-up, idle ranks) have no links

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        batch = self.input_batch
        computed = batch.num_computed_tokens_cpu[: batch.num_reqs]
        step = self.plan_step(batch.req_ids, num_scheduled_tokens, computed)
        if step is not None:
            copied = [linked for linked in step.links if not linked.link.shared]
            for linked in copied:
                self._move(linked)
            if copied:
                query_start = self.query_start_loc.gpu[: batch.num_reqs + 1]
                positions = self.positions[: int(num_scheduled_tokens.sum())]
                batch.block_table.compute_slot_mapping(batch.num_reqs, query_start, positions)
            for _, offset, link, tokens in step.links:
                if link.shared:  # slots follow vLLM's sequence, positions the prompt
                    self.positions[offset : offset + len(tokens)] = torch.from_numpy(tokens)
        return prepared

    def _move(self, linked: LinkedRequest) -> None:
        """Replace the ids and positions of scheduled tokens by those of the computed tokens."""
        row, offset, link, tokens = linked
        index = torch.from_numpy(tokens)
        batch = slice(offset, offset + len(tokens))
        self.positions[batch] = index.to(self.device)
        self.input_ids.gpu[batch] = self.input_batch.token_ids_cpu_tensor[row, index].to(self.device)
        if self.uses_mrope:
            prompt = int(np.searchsorted(tokens, link.length))
            positions = self.requests[self.input_batch.req_ids[row]].mrope_positions[:, index[:prompt]]
            self.mrope_positions.gpu[:, offset : offset + prompt] = positions.to(self.mrope_positions.gpu)

    def _determine_batch_execution_and_padding(self, *args: Any, **options: Any) -> Any:
        if self._step is None:
            return super()._determine_batch_execution_and_padding(*args, **options)
        dispatcher = self.cudagraph_dispatcher
        self.cudagraph_dispatcher = WithoutFullGraphs(dispatcher)
        try:
            return super()._determine_batch_execution_and_padding(*args, **options)
        finally:
            self.cudagraph_dispatcher = dispatcher

    def _build_attention_metadata(self, **options: Any) -> Any:
        if self._step is None:
            return super()._build_attention_metadata(**options)
        blocks = self.input_batch.block_table[0].get_device_tensor(self.input_batch.num_reqs)
        (slots,) = options["slot_mappings"].values()
        return self.step_metadata(self._step, blocks, slots, self.positions[: options["num_tokens"]]), None

    def _gather_mm_embeddings(self, scheduler_output: SchedulerOutput, shift_computed_tokens: int = 0) -> Any:
        return self.with_chunk_embeddings(
            *super()._gather_mm_embeddings(scheduler_output, shift_computed_tokens)
        )
