"""Conversations -> token batches, with the mask of the PIC-aware phase.

A sample may carry a head length k: then chunk tokens from the k-th on see only their own chunk, as they do
when a chunk is compiled alone and linked with its first k tokens recomputed. The first k tokens then exist
twice: the recomputed copy, which sees the whole prompt, and a *ghost*, the compiled copy, which only its own
chunk sees. `mask` states who sees whom; it equals compile + re-rotate + link exactly (tested).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic.data.generator import Conversation, segments
from mpic.data.generator.conversation import SPECIAL
from mpic.train.model import IMAGE_TOKENS, image_features

GLOBAL, LOCAL, GHOST, PADDING = 0, 1, 2, 3  # what a row of the packed sequence is


@dataclass
class Example:
    """One tokenized conversation."""

    ids: list[int] = field(default_factory=list)
    target: list[bool] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of every chunk
    answers: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of every piece to be said


class Encoder:
    """Tokenizes conversations piece by piece, as a server does: chunks alone, text between them alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.image_id = tokenizer.convert_tokens_to_ids(SPECIAL["image"])
        self._cache: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Token ids of one piece."""
        found = self._cache.get(text)
        if found is None:
            found = self.tokenizer(text, add_special_tokens=False).input_ids
            if len(self._cache) < 100_000 and len(text) < 80:
                self._cache[text] = found
        return found

    def __call__(self, conversation: Conversation) -> Example:
        example = Example()
        for segment in segments(conversation):
            start = len(example.ids)
            if segment.kind == "image":
                example.pixels.append(segment.content)
                example.ids += [self.image_id] * IMAGE_TOKENS
            else:
                example.ids += self.ids(segment.content)
            span = (start, len(example.ids))
            example.target += [segment.target] * (span[1] - start)
            if segment.kind != "text":
                example.chunks.append(span)
            if segment.target:
                example.answers.append(span)
        return example


@dataclass
class Batch:
    """Padded token ids; `source`, `role` and `chunk` [B, rows] describe the rows of a PIC batch (else None)."""

    ids: torch.Tensor
    target: torch.Tensor
    pixels: torch.Tensor | None
    source: torch.Tensor | None = None
    role: torch.Tensor | None = None
    chunk: torch.Tensor | None = None
    position: torch.Tensor | None = None  # rotary positions of the rows where they differ from `source`

    @property
    def tokens(self) -> int:
        """Rows the model runs over, padding and ghosts included."""
        return (self.ids if self.source is None else self.source).numel()

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(*(v if v is None else v.to(device) for v in vars(self).values()))


def collate(examples: list[Example], heads: list[int | None] | None = None, shift: bool = True) -> Batch:
    """Pads examples into a batch; `heads[i]` is the k of a PIC sample, None for ordinary causal attention.

    Without `shift`, chunk tokens keep the positions they were compiled at (what linking must not do).
    """
    length = max(len(e.ids) for e in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    target = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, e in enumerate(examples):
        ids[row, : len(e.ids)] = torch.tensor(e.ids)
        target[row, : len(e.ids)] = torch.tensor(e.target)
    images = [p for e in examples for p in e.pixels]
    batch = Batch(ids, target, torch.from_numpy(np.stack(images)) if images else None)
    if heads and any(k is not None for k in heads):
        _add_rows(batch, examples, heads, shift)
    return batch


def _add_rows(batch: Batch, examples: list[Example], heads: list[int | None], shift: bool) -> None:
    rows, length = batch.ids.shape
    ghosts = [
        [(p, c) for c, (s, e) in enumerate(x.chunks, 1) for p in range(s, min(s + k, e))]
        if k is not None
        else []
        for x, k in zip(examples, heads, strict=True)
    ]
    width = length + max(map(len, ghosts))
    source = np.zeros((rows, width), np.int64)
    role = np.full((rows, width), PADDING, np.int8)
    chunk = np.zeros((rows, width), np.int16)
    start_of = np.zeros((rows, width), np.int64)
    source[:, :length] = np.arange(length)
    for row, (x, k, ghost) in enumerate(zip(examples, heads, ghosts, strict=True)):
        role[row, : len(x.ids)] = GLOBAL
        for c, (start, end) in enumerate(x.chunks if k is not None else [], 1):
            role[row, min(start + k, end) : end] = LOCAL
            chunk[row, start:end] = c
            start_of[row, min(start + k, end) : end] = start
        for j, (position, c) in enumerate(ghost, length):
            source[row, j], role[row, j], chunk[row, j] = position, GHOST, c
            start_of[row, j] = x.chunks[c - 1][0]
    batch.source, batch.role, batch.chunk = map(torch.from_numpy, (source, role, chunk))
    batch.position = batch.source if shift else torch.from_numpy(source - start_of)


def mask(batch: Batch) -> torch.Tensor:
    """[B, 1, rows, rows], True where a row sees another."""
    assert batch.source is not None and batch.role is not None and batch.chunk is not None
    source, role, chunk = batch.source, batch.role, batch.chunk
    own = (role == LOCAL) | (role == GHOST)
    seen_by_prompt = (role == GLOBAL) | (role == LOCAL)
    prompt = (role == GLOBAL)[:, :, None] & seen_by_prompt[:, None, :]
    local = own[:, :, None] & own[:, None, :] & (chunk[:, :, None] == chunk[:, None, :])
    visible = (prompt | local) & (source[:, None, :] <= source[:, :, None])
    visible |= torch.eye(source.shape[1], dtype=torch.bool, device=source.device)
    return visible[:, None]


def embed(model: LlavaForConditionalGeneration, batch: Batch, tune_vision: bool = False) -> torch.Tensor:
    """Input embeddings [B, tokens, hidden], image features in place."""
    embeds = model.model.language_model.embed_tokens(batch.ids)
    if batch.pixels is None:
        return embeds
    with torch.set_grad_enabled(torch.is_grad_enabled() and tune_vision):
        features = image_features(model, batch.pixels)
    where = (batch.ids == model.config.image_token_id)[..., None].expand_as(embeds)
    return embeds.masked_scatter(where, features.reshape(-1, features.shape[-1]).to(embeds.dtype))


def hidden_states(
    model: LlavaForConditionalGeneration, batch: Batch, tune_vision: bool = False
) -> torch.Tensor:
    """Last hidden states [B, tokens, hidden] under the batch's attention (ghost rows are dropped)."""
    embeds = embed(model, batch, tune_vision)
    if batch.source is None:
        positions = torch.arange(embeds.shape[1], device=embeds.device)[None].expand(len(embeds), -1)
        attention = None
    else:
        positions, attention = batch.position, mask(batch)
        embeds = embeds.gather(1, batch.source[..., None].expand(-1, -1, embeds.shape[-1]))
    out = model.model.language_model(
        inputs_embeds=embeds, position_ids=positions, attention_mask=attention, use_cache=False
    )
    return out.last_hidden_state[:, : batch.ids.shape[1]]


def answer_loss(
    model: LlavaForConditionalGeneration, batch: Batch, tune_vision: bool = False
) -> torch.Tensor:
    """Cross-entropy of what the model has to say (answers, search calls, end of answer)."""
    hidden = hidden_states(model, batch, tune_vision)[:, :-1]
    wanted = batch.target[:, 1:]
    logits = model.lm_head(hidden[wanted])
    return torch.nn.functional.cross_entropy(logits.float(), batch.ids[:, 1:][wanted])


@torch.no_grad()
def exact_answers(
    model: LlavaForConditionalGeneration, batch: Batch, examples: Iterable[Example]
) -> list[list[bool]]:
    """Per example and piece to be said: is every token of it the model's first choice (as in greedy decoding)?"""
    hidden = hidden_states(model, batch)
    out = []
    for row, example in enumerate(examples):
        spans = []
        for start, end in example.answers:
            choice = model.lm_head(hidden[row, start - 1 : end - 1]).argmax(-1)
            spans.append(bool((choice == batch.ids[row, start:end]).all()))
        out.append(spans)
    return out
