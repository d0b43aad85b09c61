"""Links in vLLM's second model runner (``vllm.v1.worker.gpu.model_runner``), its default on GPUs.

It keeps the requests' state on the device and leaves model-specific work to a ``ModelState``, so links are mixed into
three classes: the runner, its model state and the state's encoder runner. Like vLLM's CPU build of this runner,
this module uses torch alone: its Triton kernels are vLLM's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from mpic.engine.vllm.plugin.paged_cache import PagedCache
from mpic.engine.vllm.plugin.runner import LinkRunner, PromptInputs
from mpic.errors import ModelRefused

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


class WithoutFullGraphs:
    """vLLM's manager of captured graphs for a step with links: a full graph has one row of attention per request, while
    the pieces of a piecewise graph contain no attention.

    A step with links is not a uniform batch and its queries have no bound, so full graphs of decoding steps never match
    it. In mode ``FULL`` there are full graphs of other steps, too; this class excludes them.
    """

    def __init__(self, manager: CudaGraphManager) -> None:
        self._manager = manager

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, **options: Any
    ) -> BatchExecutionDescriptor:
        options["max_query_len"] = None
        found = self._manager.dispatch(num_reqs, num_tokens, None, **options)
        if found.cg_mode == CUDAGraphMode.FULL:
            return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class LinkModelState(DefaultModelState):
    """Sets positions and attention of a step with links. It replaces the class of an existing model state."""

    runner: LinkRunnerV2

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        step, rope = self.runner._step, self.rope_state
        if step is not None and rope is not None:
            for row, offset, _, tokens in step.links:
                index = async_tensor_h2d(tokens, device=self.device)
                request = int(input_batch.idx_mapping_np[row])
                length = int(req_states.prefill_len.np[request])
                positions = rope.read_prefill_positions(request, length)[:, index]
                rope.positions[:, offset : offset + len(tokens)] = positions
        return inputs

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> dict[str, Any]:
        step = self.runner._step
        if step is None:
            return super().prepare_attn(
                input_batch, cudagraph_mode, block_tables, slot_mappings, *args, **options
            )
        positions = input_batch.positions[: input_batch.num_tokens]
        return self.runner.step_metadata(step, block_tables[0], slot_mappings[0], positions)


class LinkEncoderRunner(EncoderRunner):
    """Adds the images of links to those that ``DefaultModelState`` gathers. It replaces the class of the state's
    encoder runner."""

    runner: LinkRunnerV2

    def gather_mm_embeddings(self, *args: Any, **options: Any) -> tuple[Any, torch.Tensor]:
        return self.runner.with_chunk_embeddings(*super().gather_mm_embeddings(*args, **options))


class LinkRunnerV2(LinkRunner):
    """A mixin for ``GPUModelRunner``, and for the ``CPUModelRunner`` that derives from it.

    vLLM forgets a request that it preempts and adds it again. By then all of it may be in the prefix cache, so that it
    is no longer a link; its M-RoPE positions are kept until it ends.
    """

    _blocks: dict[str, list[int]]
    _positions: dict[str, tuple[torch.Tensor, int]]

    def enable_links(self, paged: PagedCache) -> None:
        super().enable_links(paged)
        self._blocks, self._positions = {}, {}
        state = self.model_state
        if type(state) is not DefaultModelState:
            raise ModelRefused(
                f"linking in vLLM: its inputs are made in a way of their own ({type(state).__name__})"
            )
        state.__class__, state.runner = LinkModelState, self
        if state.supports_mm_inputs:
            state.encoder_runner.__class__, state.encoder_runner.runner = LinkEncoderRunner, self

    def prompt_inputs(self, request: str) -> PromptInputs:
        number = self.req_states.req_id_to_index[request]
        length = int(self.req_states.prompt_len.np[number])
        rope, cache = self.model_state.rope_state, self.encoder_cache
        positions = rope.read_prefill_positions(number, length) if rope is not None else None
        features = cache.mm_features[request] if cache is not None else ()
        return PromptInputs(positions, features, cache.encoder_outputs if cache is not None else {})

    def block_ids(self, request: str) -> list[int]:
        return self._blocks[request]

    # a step

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        self.begin_links(scheduler_output)
        self._blocks = {request: blocks for request, blocks in self._blocks.items() if request in self._links}
        for request in scheduler_output.finished_req_ids & self._positions.keys():
            del self._positions[request]
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            link = self._links.get(request.req_id)
            if link is not None:
                self._blocks[request.req_id] = list(request.block_ids[0])
                if self.model_state.rope_state is not None:
                    self._positions[request.req_id] = link.positions()
        added = {
            request.req_id: len(request.prefill_token_ids) for request in scheduler_output.scheduled_new_reqs
        }
        for request in added.keys() & self._positions.keys():
            self._set_positions(request, added[request])
        if not added.keys().isdisjoint(self._positions):
            self.model_state.apply_staged_writes()

    def _set_positions(self, request: str, length: int) -> None:
        """Replace the M-RoPE positions that vLLM gave a prompt without images of its own; ``length`` is that of the
        prompt and, after a preemption, of the answer so far."""
        positions, delta = self._positions[request]
        answer = torch.arange(positions.shape[1], length) + delta
        positions = torch.cat([positions, answer.expand(len(positions), -1)], 1)
        number = self.req_states.req_id_to_index[request]
        # they are in host memory that the device maps, so let the device write them in stream order
        self.model_state.rope_state.update_prefill_positions(number, positions.to(self.device), delta)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().update_requests(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None and request in self._blocks:
                self._blocks[request] += blocks[0]

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **options: Any) -> Any:
        manager = self.cudagraph_manager
        try:
            return super().execute_model(scheduler_output, *args, **options)
        finally:
            self.end_placing()
            self.cudagraph_manager, self._step = manager, None

    def gather_batch_req_state(self, scheduler_output: SchedulerOutput, dummy_run: bool) -> Any:
        # vLLM calls this last before it chooses the step's graph
        if not dummy_run and not self._links.keys().isdisjoint(scheduler_output.num_scheduled_tokens):
            self.cudagraph_manager = WithoutFullGraphs(self.cudagraph_manager)
        return super().gather_batch_req_state(scheduler_output, dummy_run)

    def prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **options: Any) -> InputBatch:
        batch = super().prepare_inputs(scheduler_output, *args, **options)
        step = self.plan_step(batch.req_ids, batch.num_scheduled_tokens, batch.num_computed_tokens_np)
        if step is not None:
            known = self.req_states.all_token_ids.gpu
            for row, offset, _, tokens in step.links:
                index = async_tensor_h2d(tokens, device=self.device)
                moved = slice(offset, offset + len(tokens))
                batch.positions[moved] = index
                batch.input_ids[moved] = known[int(batch.idx_mapping_np[row]), index]
        return batch
