"""Snapshots of a compiled chunk's first-layer inputs, taken in the step that computes its last tokens and read later.

A step must not wait for the device, and after it other requests overwrite the state of this one. So the step keeps
tensors that nothing changes any more, and queues the remaining work on the device; ``inputs`` reads the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpic.engine.vllm.wire import FIRST_SOFT
from mpic.kernels.upload import send
from mpic.kv.chunk import ChunkInputs

if TYPE_CHECKING:
    from mpic.engine.vllm.plugin.runner import LinkRunner, PromptInputs
    from mpic.engine.vllm.plugin.step_messages import ChunkExport


class _Embedded(NamedTuple):
    """The embeddings of a prompt with images, or of a packet, on the device.

    Args:
        parts: pairs of token indices ``[m]``, on the host, and their rows ``[m, width]``.
        width: width of the first layer's input; a wider row also carries DeepStack features at its end.
    """

    parts: list[tuple[torch.Tensor, torch.Tensor]]
    width: int


class PromptSnapshot(NamedTuple):
    """See the module's docstring.

    Args:
        token_ids: ``[n]``, without the tokens in front that are not exported; an adapter's tokens have placeholders, as
            in files (``ChunkInputs.wrap``).
        positions: M-RoPE positions ``[3, n]`` from 0, possibly on the device; None if they are 0 to n - 1.
        embedded: None for a prompt of text alone.
        dtype: dtype of the embeddings.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor | None
    embedded: _Embedded | None
    dtype: torch.dtype

    def inputs(self, to_host: Callable[[torch.Tensor], torch.Tensor]) -> ChunkInputs:
        """Return the inputs. It waits for the device."""
        n = len(self.token_ids)
        positions, rotary_length = torch.arange(n)[None], n
        if self.positions is not None:
            positions = to_host(self.positions).to(torch.int64)
            rotary_length = int(positions.max()) + 1
        embeds = deepstack = None
        if self.embedded is not None:
            width = self.embedded.width
            widest = max(part.shape[-1] for _, part in self.embedded.parts)
            rows = torch.zeros(n, max(width, widest), dtype=self.dtype)
            for index, part in self.embedded.parts:
                rows[index, : part.shape[-1]] = to_host(part)
            embeds = rows[:, :width]
            if rows.shape[1] > width:
                deepstack = rows[:, width:].view(n, -1, width).transpose(0, 1)
        return ChunkInputs(self.token_ids, positions, rotary_length, embeds, deepstack)


def snapshot(runner: LinkRunner, request: str, export: ChunkExport) -> PromptSnapshot:
    """Take the inputs of a prompt that the current step computes to its end. All ranks of the first pipeline stage must
    call this together, because they share the table of embeddings in parts."""
    prompt, skip, length = runner.prompt_inputs(request), export.skip, len(export.token_ids)
    ids = torch.tensor(export.token_ids[skip:], dtype=torch.int64)
    positions = None
    if prompt.positions is not None:
        # make a new tensor: another request reuses the old memory
        positions = prompt.positions[:, skip:length] - skip
    soft = ids >= FIRST_SOFT
    embedded = None
    if prompt.features or soft.any():
        embedded = _embedded(runner, prompt, ids, skip)
    return PromptSnapshot(ids.masked_fill(soft, 0), positions, embedded, runner.dtype)


def _embedded(runner: LinkRunner, prompt: PromptInputs, ids: torch.Tensor, skip: int) -> _Embedded:
    """Return the embeddings of tokens ``ids [n]`` that follow ``skip`` others."""
    words, parts = torch.ones(len(ids), dtype=torch.bool), []
    for feature in prompt.features:
        place = feature.mm_position
        index = torch.arange(place.offset, place.offset + place.length)
        index = (index if place.is_embed is None else index[place.is_embed]) - skip
        parts.append((index, prompt.encoded[feature.identifier]))
        words[index] = False
    if words.any():
        table = runner.language_model.embed_input_ids
        parts.append((torch.nonzero(words)[:, 0], table(send(ids[words], runner.device))))
    return _Embedded(parts, runner.vllm_config.model_config.hf_text_config.hidden_size)
