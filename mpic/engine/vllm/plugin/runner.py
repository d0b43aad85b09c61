"""Runs links inside vLLM's model runner by permuted tokens and pseudo-sequences (docs/vllm.md, "How it works").

The connector claims all but the link's S computed tokens, so vLLM schedules "the last S" of the prompt's N tokens. Here
the scheduled token i of [N - S, N) is replaced by the computed token number i - (N - S): its id, its position, its
slot. The last token is the prompt's last token either way, so sampling and decoding need no change. To the attention
backend each run of neighbours [a, b) is a row of its own with the request's block table, ``query_len = b - a`` and
``seq_len = b``. Because fresh keys and values are written before each layer's attention, the backend's causal mask is
the mask of selective attention.

A link that maps resident chunks (``SharedLink``) is simpler: vLLM's sequence is its own tokens, and only their
positions are replaced. Its rows go to ``span_attention``.

The sequence index of a computed token is never above that of the scheduled token it replaces, so a step needs no block
that is not allocated yet, and chunks are placed up to the end of the step's scheduled tokens, its *frontier*.

vLLM has two model runners, which share no code. ``LinkRunner`` is the part that both need for links; ``runner_v1`` and
``runner_v2`` call it from vLLM's methods.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata

from mpic.engine.vllm.plugin.active_link import ActiveLink, SharedLink
from mpic.engine.vllm.plugin.key_rotation import KeyRotation
from mpic.engine.vllm.plugin.kv_import import PagedWrite, place_on_cpu
from mpic.engine.vllm.plugin.paged_cache import PagedCache
from mpic.engine.vllm.plugin.placement import Placement, TransferBuffers
from mpic.engine.vllm.plugin.shared_rows import SpanMetadata
from mpic.engine.vllm.plugin.step_messages import ChunkFill, EndReason, StepReport
from mpic.errors import CorruptFile
from mpic.kernels.paged_spans import SharedRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(__name__)


class LinkedRequest(NamedTuple):
    """A request of a step whose scheduled tokens are replaced.

    Args:
        row: its index in the batch.
        offset: its first token in the batch.
        tokens: ``[n]`` places of the computed tokens; for a link that copies, they replace the scheduled tokens.
    """

    row: int
    offset: int
    link: ActiveLink | SharedLink
    tokens: np.ndarray


@dataclass
class LinkStep:
    """The rows of attention in a step with links.

    Args:
        links: the requests with links.
        owners: ``[rows]`` batch index of each row's request, for rows that do not map resident chunks.
        queries, ends: ``[rows]`` int32 query and sequence lengths.
        shared: the rows that map resident chunks.
        others: ``[n]`` int64 indices of the step's tokens outside the shared rows.
    """

    links: list[LinkedRequest]
    owners: np.ndarray
    queries: np.ndarray
    ends: np.ndarray
    shared: list[SharedRows]
    others: torch.Tensor


class PromptInputs(NamedTuple):
    """The inputs of a request's prompt, as the runner has them.

    Args:
        positions: its M-RoPE positions ``[3, N]``, possibly on the device, or None if the model has one position per
            token.
        features: its images, as vLLM describes them.
        encoded: outputs of the vision encoder for images, by their identifiers.
    """

    positions: torch.Tensor | None
    features: Sequence[Any]
    encoded: Mapping[str, torch.Tensor]


class LinkRunner:
    """The part of a model runner that links need. Without a link in the batch it changes nothing.

    A subclass is mixed into vLLM's runner. It calls ``begin_links`` before vLLM adds the step's requests to the batch
    and ``plan_step`` once their tokens are known, passes ``step_metadata`` to the attention backend, and when the step
    has ended calls ``end_placing`` and clears ``_step``.
    """

    # attributes of vLLM's runner
    device: torch.device
    dtype: torch.dtype
    vllm_config: VllmConfig
    attn_groups: list[list[Any]]

    _links: dict[str, ActiveLink | SharedLink]
    _step: LinkStep | None = None
    _placement: Placement | None = None
    _placing: frozenset[str] = frozenset()
    paged: PagedCache
    report: StepReport

    def enable_links(self, paged: PagedCache) -> None:
        """Enable links; call this once the KV cache is allocated.

        Raises:
            ModelRefused: keys with the model's rotary embedding cannot be moved.
        """
        self.rotation = KeyRotation(self.language_model)
        self.paged, self._links, self.report = paged, {}, StepReport()
        self.staging = TransferBuffers(paged.device)

    @property
    def language_model(self) -> nn.Module:
        model = self.get_model()
        return model.get_language_model() if hasattr(model, "get_language_model") else model

    @abstractmethod
    def prompt_inputs(self, request: str) -> PromptInputs:
        """Return the prompt inputs of a request whose prompt the current step completes, without waiting for the
        device."""

    @abstractmethod
    def block_ids(self, request: str) -> list[int]:
        """Return the blocks that a request with a link holds, in order."""

    # a step

    def begin_links(self, scheduler_output: SchedulerOutput) -> None:
        """Forget links whose requests are gone, and start the links that were admitted."""
        self._step = self._placement = None
        if self._links:
            gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
            for request in gone & self._links.keys():
                del self._links[request]
        instructions = scheduler_output.kv_connector_metadata
        if instructions is None:  # steps that warm up vLLM's kernels come from no scheduler
            return
        for load in instructions.loads:
            self._make_resident(load)
        for request, begun in instructions.shared.items():
            try:
                self._links[request] = SharedLink(begun, self.rotation)
            except Exception as error:  # in another process, the file may be gone by now
                self._fail(request, error)
        for request, start in instructions.links.items():
            try:
                self._links[request] = ActiveLink(start, self.paged)
            except Exception as error:  # as above
                self._fail(request, error)

    def _make_resident(self, load: ChunkFill) -> None:
        """Write a resident chunk into its own blocks, with keys as compiled."""
        try:
            kv, tokens = load.file.slice_kv(self.paged.layers, self.paged.heads), load.file.tokens
            slots = self.paged.slots(torch.tensor(load.blocks), torch.arange(tokens))
            place_on_cpu(self.paged, self.rotation, [PagedWrite(kv, slice(0, tokens), tokens, 0, slots)])
        except Exception as error:
            logger.exception("chunk %s cannot be placed", load.key)
            self.report.lost[load.blocks] = _reason(error)

    def _fail(self, request: str, error: Exception) -> None:
        logger.exception("the link of request %s cannot be placed", request)
        self._links.pop(request, None)
        self.report.placed.pop(request, None)
        self.report.faults[request] = _reason(error)

    def plan_step(
        self, requests: Sequence[str], scheduled: np.ndarray, computed: np.ndarray
    ) -> LinkStep | None:
        """Place the chunks that a step's links need, and build the step's rows of attention.

        Args:
            requests: ids in the order of the batch.
            scheduled: ``[requests]`` tokens of each in this step.
            computed: ``[requests]`` tokens of each that precede the scheduled ones.

        Returns:
            The step, also kept as ``_step``; None if no request has a link.
        """
        if not self._links:
            return None
        offsets = np.cumsum(scheduled) - scheduled
        links, shared, writes, owners, queries, ends = [], [], [], [], [], []
        others = np.ones(int(scheduled.sum()), bool)
        for row, request in enumerate(requests):
            count, lo, link = int(scheduled[row]), int(computed[row]), self._links.get(request)
            if isinstance(link, SharedLink):
                rows = slice(int(offsets[row]), int(offsets[row]) + count)
                links.append(LinkedRequest(row, rows.start, link, link.tokens(lo, lo + count)))
                held = self.block_ids(request)[: -(-(lo + count) // self.paged.block)]
                shared.append(SharedRows(rows, lo, np.array(held, np.int32), link.spans))
                others[rows] = False
                continue
            if link is None or lo >= link.length:
                runs = [(lo + count, count)]
            else:
                tokens = link.tokens(lo, lo + count)
                writes += self._advance(request, link, lo + count)
                links.append(LinkedRequest(row, int(offsets[row]), link, tokens))
                cuts = np.flatnonzero(np.diff(tokens) != 1) + 1
                bounds = [0, *cuts.tolist(), count]
                runs = [(int(tokens[b - 1]) + 1, b - a) for a, b in pairwise(bounds)]
            owners += [row] * len(runs)
            ends += [end for end, _ in runs]
            queries += [query for _, query in runs]
        if not links:
            return None
        self._place(writes)
        arrays = np.array(owners), np.array(queries, np.int32), np.array(ends, np.int32)
        self._step = LinkStep(links, *arrays, shared, torch.from_numpy(np.flatnonzero(others)))
        return self._step

    def _advance(self, request: str, link: ActiveLink, frontier: int) -> list[tuple[str, PagedWrite]]:
        blocks = torch.tensor(self.block_ids(request))
        writes = [(request, write) for write in link.advance(frontier, blocks, self.paged)]
        if link.frontier == link.length:
            self.report.placed[request] = link.seconds
            del self._links[request]
        return writes

    def _place(self, writes: list[tuple[str, PagedWrite]]) -> None:
        if not writes:
            return
        begin = time.perf_counter()
        try:
            self._start_placing([write for _, write in writes], frozenset(request for request, _ in writes))
        except Exception as error:  # if raised it would end the engine; this way it ends only these requests
            for request in {request for request, _ in writes}:
                self._fail(request, error)
            return
        seconds = time.perf_counter() - begin
        total = sum(write.count for _, write in writes)
        for request, write in writes:  # placed together: divide the time by tokens
            share = seconds * write.count / total
            if request in self.report.placed:
                self.report.placed[request] += share
            else:
                self._links[request].seconds += share

    def _start_placing(self, writes: list[PagedWrite], requests: frozenset[str]) -> None:
        """Place chunks: on a CPU now, on a GPU while the forward computes."""
        if self.paged.on_cpu:
            place_on_cpu(self.paged, self.rotation, writes)
        else:
            self._placing = requests
            self._placement = Placement(self.paged, self.rotation, writes, self.staging)

    def place_layer(self, layer: int) -> None:
        """Place the step's chunks in a decoder layer that is about to attend (``Placement``). An error ends the
        requests whose chunks are being placed; other requests' rows do not see these chunks."""
        if self._placement is None:
            return
        try:
            self._placement.layer(layer)
        except Exception as error:
            self._fail_placing(error)

    def end_placing(self) -> None:
        """End the placing of a step whose forward is over. If the forward did not ask for some layers, these attended
        without their chunks, which is an error. Safe to call twice."""
        if self._placement is not None and not self._placement.done:
            self._fail_placing(RuntimeError("the forward did not ask for all layers"))
        self._placement = None

    def _fail_placing(self, error: Exception) -> None:
        self._placement = None
        for request in self._placing:
            self._fail(request, error)

    # inputs of the attention backend and the model

    def step_metadata(
        self, step: LinkStep, blocks: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> dict[str, Any]:
        """Return the attention metadata of a step by layer name.

        Args:
            blocks: ``[requests, most blocks]`` int32, on the device.
            slots, positions: ``[tokens]`` of the computed tokens, on the device.
        """
        (group,) = self.attn_groups[0]
        owners, queries, ends = (torch.from_numpy(each) for each in (step.owners, step.queries, step.ends))
        if not step.shared:
            metadata = self.attention_metadata(owners, queries, ends, blocks, slots, positions)
        else:
            stock, others = None, step.others
            if len(owners):
                rest = slots[others], positions[others]
                stock = self.attention_metadata(owners, queries, ends, blocks, *rest)
            metadata = SpanMetadata(stock, others, step.shared)
        return dict.fromkeys(group.layer_names, metadata)

    def attention_metadata(
        self,
        owners: torch.Tensor,
        queries: torch.Tensor,
        ends: torch.Tensor,
        blocks: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> Any:
        """Return the attention backend's metadata for rows of any number of requests.

        Args:
            owners: ``[rows]`` the row of ``blocks`` for each row's request, on the CPU.
            queries: ``[rows]`` int32 number of tokens that each row computes, on the CPU.
            ends: ``[rows]`` int32 sequence index at which each row ends, on the CPU.
            blocks: ``[requests, most blocks]`` int32, on the device.
            slots, positions: ``[tokens]`` of all rows' computed tokens, on the device.
        """
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), queries.cumsum(0, dtype=torch.int32)])
        return self._row_builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts.to(self.device),
                query_start_loc_cpu=starts,
                seq_lens=ends.to(self.device),
                seq_lens_cpu_upper_bound=ends,
                num_reqs=len(ends),
                num_actual_tokens=len(positions),
                max_query_len=int(queries.max()),
                max_seq_len=int(ends.max()),
                block_table_tensor=blocks[owners.to(self.device)],
                slot_mapping=slots,
                causal=True,
                positions=positions,
                is_prefilling=torch.ones(len(ends), dtype=torch.bool),
            ),
        )

    @cached_property
    def _row_builder(self) -> Any:
        """The backend's metadata builder, with buffers for as many rows as a step has tokens. vLLM's own builder has
        room for ``max_num_seqs`` rows only, and captured graphs read its buffers."""
        (group,) = self.attn_groups[0]
        config = copy(self.vllm_config)
        config.scheduler_config = deepcopy(config.scheduler_config)
        config.scheduler_config.max_num_seqs = config.scheduler_config.max_num_batched_tokens
        builder = group.backend.get_builder_cls()
        return builder(group.kv_cache_spec, group.layer_names, config, self.device)

    def with_chunk_embeddings(
        self, embeds: Sequence[torch.Tensor], mask: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Add the images of links to those that vLLM gathered.

        Args:
            embeds: ``[n, width]`` of each image that vLLM gathered, in batch order.
            mask: ``[tokens]`` bool, on the CPU: the tokens that they replace.

        Returns:
            ``embeds`` and ``mask`` with the images of links included.
        """
        if self._step is None:
            return embeds, mask
        linked, parts = torch.zeros_like(mask), []
        for _, offset, link, tokens in self._step.links:
            image, rows = link.embeddings(tokens)
            linked[offset : offset + len(tokens)] = torch.from_numpy(image)
            parts += rows
        if not parts:
            return embeds, mask
        given = torch.cat(parts).to(self.device, self.dtype, non_blocking=True)
        both = mask | linked
        rank = both.cumsum(0) - 1
        rows = given.new_empty(int(both.sum()), given.shape[1])
        rows[rank[linked].to(self.device)] = given
        if embeds:
            rows[rank[mask].to(self.device)] = torch.cat(list(embeds))
        return [rows], both


def _reason(error: Exception) -> EndReason:
    """Return the fault that ends a request whose chunk could not be placed."""
    code = "internal_error"
    if isinstance(error, (CorruptFile, OSError)):
        code = "missing" if isinstance(error, FileNotFoundError) else "corrupt"
    return EndReason.of(error, code, f"a chunk could not be placed: {error!r}")
