"""A training prompt: the model's answer under full attention, and the rows that learn to give the same answer.

The student's rows are those of a link under the policy ``packet``: a packet's rows see that packet alone, the request's
own rows see all before them. One forward with a mask gives the same as the engine with compiled packets, because
rotary attention depends on relative positions only (KV Packet, section 3.2; a test compares the two).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from mpic.errors import ModelRefused
from mpic.kv.chunk import ChunkInputs
from mpic.model.hooks import NAME
from mpic.model.loaded import LoadedModel
from mpic.prompt.segments import Prompt, TextSegment

OWN = -1
"""The chunk number of rows that belong to no chunk."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """A prompt with the teacher's answer.

    Args:
        parts: inputs of every segment with embeddings, in order, and whether it is a chunk.
        answer: the greedy answer ``[g]`` under full attention, including the token that ended it.
        teacher: fp32 log-probabilities ``[g, vocabulary]`` from which it was taken.
    """

    parts: tuple[tuple[ChunkInputs, bool], ...]
    answer: torch.Tensor
    teacher: torch.Tensor


@dataclass(frozen=True, eq=False)
class LessonRows:
    """The rows of a forward.

    Args:
        embeds: ``[T, hidden]``.
        positions: ``[p, T]``.
        chunk: ``[T]``, the number of the chunk that a row belongs to (``OWN`` for none).
        deep: a mask ``[T]`` of the rows with DeepStack features, and the features ``[layers, rows, hidden]``; or None.
        rotary_length: rotary positions of all rows.
    """

    embeds: torch.Tensor
    positions: torch.Tensor
    chunk: torch.Tensor
    deep: tuple[torch.Tensor, torch.Tensor] | None
    rotary_length: int

    def mask(self) -> torch.Tensor:
        """Return the attention mask ``[T, T]``, true where a row sees another."""
        seen = torch.ones(len(self.chunk), len(self.chunk), dtype=torch.bool).tril()
        own = self.chunk == OWN
        return seen & (own[:, None] | (self.chunk[:, None] == self.chunk[None]))


def rows_of(
    parts: tuple[tuple[ChunkInputs, bool], ...],
    header: torch.Tensor,
    trailer: torch.Tensor,
    more: torch.Tensor,
) -> LessonRows:
    """Lay out a prompt whose chunks are packets.

    Args:
        header, trailer: ``[any, hidden]``; empty ones lay out the prompt as it is.
        more: ``[any, hidden]`` embeddings of text after the prompt.
    """
    embeds, positions, chunks, features, marks = [], [], [], [], []
    base = 0
    for number, (inputs, is_chunk) in enumerate(parts):
        one = inputs.wrap(header, trailer) if is_chunk else inputs
        embeds.append(one.embeds)
        positions.append(one.positions + base)
        chunks += [number if is_chunk else OWN] * len(one)
        marks += [one.deepstack is not None] * len(one)
        if one.deepstack is not None:
            features.append(one.deepstack)
        base += one.rotary_length
    n = len(more)
    positions.append(torch.arange(n).expand(positions[0].shape[0], n) + base)
    mask = torch.tensor(marks + [False] * n)
    return LessonRows(
        torch.cat([*embeds, more.to(embeds[0])]),
        torch.cat(positions, 1),
        torch.tensor(chunks + [OWN] * n),
        (mask, torch.cat(features, 1)) if features else None,
        base + n,
    )


class Classroom:
    """Runs a frozen model that teaches itself, through transformers and not the engine's attention.

    Raises:
        ModelRefused: layers of the model see less than everything before a row, which one mask for all layers cannot
            express.
    """

    def __init__(self, model: LoadedModel) -> None:
        if not (model.is_plain and model.takes_packets):
            raise ModelRefused(
                f"packets cannot be trained for {model.info.name}: its layers differ, have windows, caps or sinks, or "
                "embeddings of their own"
            )
        self.model = model
        hidden = model.text_config.hidden_size
        self.none = torch.zeros(0, hidden)

    def parts(self, prompt: Prompt) -> tuple[tuple[ChunkInputs, bool], ...]:
        """Return the inputs of a prompt's segments, with embeddings, in host memory."""
        parts = []
        for segment in prompt.segments:
            chunk = None if isinstance(segment, TextSegment) else segment.chunk
            ids = segment.token_ids if chunk is None else chunk.token_ids
            if ids is not None:
                inputs = self.model.text_inputs(ids).embedded(self.model.embed)
            else:
                assert chunk is not None and chunk.load_image is not None
                inputs = self.model.image_inputs(chunk.load_image())
            parts.append((_outside_inference(inputs), chunk is not None))
        return tuple(parts)

    @torch.no_grad()
    def lesson(self, prompt: Prompt, tokens: int) -> Lesson:
        """Answer a prompt greedily under full attention, in at most ``tokens`` tokens."""
        parts = self.parts(prompt)
        rows = rows_of(parts, self.none, self.none, self.none)
        cache = DynamicCache()
        embeds, positions, deep = rows.embeds, rows.positions, rows.deep
        answer, teacher = [], []
        with self._stock():
            while len(answer) < tokens:
                logits = self._run(embeds, positions, deep, cache=cache, keep=1)
                teacher.append(torch.log_softmax(logits[0].float(), -1).cpu())
                token = int(teacher[-1].argmax())
                answer.append(token)
                if token in self.model.eos_ids:
                    break
                embeds = self.model.embed(torch.tensor([token])).cpu()
                positions = torch.full((len(positions), 1), rows.rotary_length + len(answer) - 1)
                deep = None
        return Lesson(parts, torch.tensor(answer), torch.stack(teacher))

    def student(self, lesson: Lesson, header: torch.Tensor, trailer: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities ``[g, vocabulary]`` of the lesson's answer when its chunks are packets.
        Gradients flow to header and trailer."""
        said = self.model.embed(lesson.answer[:-1]).cpu()
        rows = rows_of(lesson.parts, header, trailer, said)
        with self._stock():
            logits = self._run(
                rows.embeds, rows.positions, rows.deep, mask=rows.mask(), keep=len(lesson.answer)
            )
        return torch.log_softmax(logits.float(), -1)

    @contextmanager
    def _stock(self) -> Iterator[None]:
        config = self.model.text_model.config
        config._attn_implementation_internal = "sdpa"
        try:
            yield
        finally:
            config._attn_implementation_internal = NAME

    def _run(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        deep: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        keep: int,
        mask: torch.Tensor | None = None,
        cache: DynamicCache | None = None,
    ) -> torch.Tensor:
        """Return the logits ``[keep, vocabulary]`` of the last rows."""
        model, device = self.model, self.model.device
        placed = positions.to(device)
        if deep is not None:
            marks, features = (part.to(device) for part in deep)
            model.extra_inputs = {"visual_pos_masks": marks[None], "deepstack_visual_embeds": list(features)}
        try:
            out = model.model(
                inputs_embeds=embeds.to(device)[None],
                position_ids=placed[:1] if model.mrope == 1 else placed[:, None],
                attention_mask=None if mask is None else mask.to(device)[None, None],
                past_key_values=cache,
                use_cache=cache is not None,
                logits_to_keep=keep,
            )
        finally:
            model.extra_inputs = {}
        return out.logits[0]


def _outside_inference(inputs: ChunkInputs) -> ChunkInputs:
    """Return the same inputs in tensors that autograd can use."""
    deep = inputs.deepstack
    return ChunkInputs(
        inputs.token_ids,
        inputs.positions.clone(),
        inputs.rotary_length,
        inputs.embeds.clone(),
        None if deep is None else deep.clone(),
    )
