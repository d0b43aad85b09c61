"""Packed batches of conversations, and what the model predicts for them.

A sample may carry a head length k: then it is computed as a link that recomputes the first k tokens of every chunk
(`mpic_lab.train.packing`); that equals compile + re-rotate + link exactly (tested).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic_lab.generator import Conversation, segments
from mpic_lab.generator.conversation import SPECIAL, Labels
from mpic_lab.train.attention import AttentionBlock, blocked
from mpic_lab.train.model import IMAGE_TOKENS, image_features
from mpic_lab.train.packing import pack_rows


@dataclass
class Example:
    """A tokenized conversation."""

    ids: list[int] = field(default_factory=list)
    target: list[bool] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)
    features: list[int] = field(default_factory=list)  # index into the image tokens of `pixels`, or -1
    # number of tokens of an image in `pixels`; `features` may name only some of them
    image_tokens: int = IMAGE_TOKENS
    chunks: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of every chunk
    answers: list[tuple[int, int]] = field(
        default_factory=list
    )  # [start, end) of every piece to be generated


class Encoder:
    """Tokenizes conversations piece by piece, as a server does: chunks alone, text between them alone.

    Attributes:
        image_tokens: number of tokens of an image.
        labels: place of the labels of chunks.
        pick: chooses the image tokens that a training conversation shows, anew for every image; None: all.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        image_tokens: int = IMAGE_TOKENS,
        labels: Labels = "around",
    ) -> None:
        self.tokenizer, self.image_tokens, self.labels = tokenizer, image_tokens, labels
        self.pick: Callable[[], Sequence[int]] | None = None
        self.image_id = tokenizer.convert_tokens_to_ids(SPECIAL["image"])
        self._cache: dict[str, list[int]] = {}
        self._long: dict[str, list[int]] = {}  # the latest ones

    def ids(self, text: str) -> list[int]:
        """Returns token ids of one piece."""
        found = self._cache.get(text) or self._long.get(text)
        if found is None:
            found = self.tokenizer(text, add_special_tokens=False).input_ids
            if len(text) >= 80:  # of a document that further conversations have too
                self._long[text] = found
                if len(self._long) > 16:
                    del self._long[next(iter(self._long))]
            elif len(self._cache) < 100_000:
                self._cache[text] = found
        return found

    def word(self, text: str) -> int:
        """Returns the id of a word after a space, which is one token."""
        (token,) = self.ids(f" {text}")
        return token

    def __call__(self, conversation: Conversation) -> Example:
        example = Example(image_tokens=self.image_tokens)
        for segment in segments(conversation, self.labels):
            start = len(example.ids)
            if segment.kind == "image":
                before = len(example.pixels) * self.image_tokens
                shown = self.pick() if self.pick else range(self.image_tokens)
                example.pixels.append(segment.content)
                example.ids += [self.image_id] * len(shown)
                example.features += (before + i for i in shown)
            else:
                example.ids += self.ids(segment.content)
                example.features += [-1] * (len(example.ids) - start)
            span = (start, len(example.ids))
            example.target += [segment.target] * (span[1] - start)
            if segment.kind != "text":
                example.chunks.append(span)
            if segment.target:
                example.answers.append(span)
        return example


@dataclass
class Batch:
    """Padded token ids [B, tokens], and the rows [rows] that the model runs over for them: packed, without padding."""

    ids: torch.Tensor
    target: torch.Tensor
    pixels: torch.Tensor | None  # images, in the order of `feature`
    where: torch.Tensor  # [B, tokens]: the row of each token (0 for padding)
    token: torch.Tensor  # [rows]: index into the flat `ids`
    feature: torch.Tensor  # [rows]: index into the flat image tokens, or -1
    position: torch.Tensor  # [rows]: rotary
    blocks: list[AttentionBlock]

    @property
    def tokens(self) -> int:
        """Rows the model runs over."""
        return len(self.token)

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device."""
        tensors = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        blocks = [b if b.bias is None else replace(b, bias=b.bias.to(device)) for b in self.blocks]
        return replace(self, **tensors, blocks=blocks)


def collate(examples: list[Example], heads: list[int | None] | None = None, shift: bool = True) -> Batch:
    """Puts examples into a batch; `heads[i]` is the k of a PIC sample, None for ordinary causal attention.

    Without `shift`, chunk tokens keep the positions they were compiled at (what linking must not do).
    """
    return collate_branches([[e] for e in examples], heads or [None] * len(examples), shift)


def collate_branches(
    groups: list[list[Example]], heads: list[int | None], shift: bool = True, begins: int = 0
) -> Batch:
    """Puts groups of examples that start alike into a batch: what they share is computed once. `heads[i]` is of group
    i.

    `begins`: begin tokens that stood before every chunk while it was compiled, and were dropped.

    Raises:
        ValueError: examples of a group have the same tokens for different images.
    """
    examples = [e for group in groups for e in group]
    length = max(len(e.ids) for e in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    target = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, e in enumerate(examples):
        ids[row, : len(e.ids)] = torch.tensor(e.ids)
        target[row, : len(e.ids)] = torch.tensor(e.target)
    where = np.zeros((len(examples), length), np.int64)
    token, feature, position = [], [], []
    blocks: list[AttentionBlock] = []
    images: list[np.ndarray] = []
    first = done = 0
    for group, head in zip(groups, heads, strict=True):
        shared = shared_tokens(group)
        rows = pack_rows([len(e.ids) for e in group], [e.chunks for e in group], shared, head, shift, begins)
        common = _images(group[0], shared)
        offsets = []  # start of an example's image tokens among the batch's
        for number, e in enumerate(group):
            offsets.append((len(images) - (common if number else 0)) * e.image_tokens)
            images += e.pixels[common if number else 0 :]
        features = [
            np.where(f >= 0, f + o, -1)
            for f, o in ((np.array(e.features), o) for e, o in zip(group, offsets, strict=True))
        ]
        feature.append(
            np.array([features[e][t] for e, t in zip(rows.example, rows.token, strict=True)], np.int64)
        )
        token.append((done + rows.example) * length + rows.token)
        position.append(rows.position)
        blocks += rows.blocks(first)
        visible = np.flatnonzero(~rows.hidden)
        where[done + rows.example[visible], rows.token[visible]] = first + visible
        where[done : done + len(group), :shared] = where[done, :shared]
        first, done = first + len(rows.token), done + len(group)
    return Batch(
        ids,
        target,
        torch.from_numpy(np.stack(images)) if images else None,
        torch.from_numpy(where),
        *(torch.from_numpy(np.concatenate(x)) for x in (token, feature, position)),
        blocks,
    )


def shared_tokens(group: list[Example]) -> int:
    """Returns how many tokens the examples of a group have in common before the first of them answers (0: a lone
    example).

    Raises:
        ValueError: the same tokens stand for different images.
    """
    if len(group) == 1:
        return 0
    first, *others = group
    shared = min(e.answers[0][0] - 1 for e in group)
    for e in others:
        shared = next((i for i in range(shared) if e.ids[i] != first.ids[i]), shared)
    spans = {span for e in group for span in e.chunks}
    shared = min([shared, *(start for start, end in spans if start < shared < end)])
    if any(e.pixels[i] is not first.pixels[i] for e in others for i in range(_images(first, shared))):
        raise ValueError("examples of a group must share their images")
    return shared


def _images(example: Example, tokens: int) -> int:
    """Returns how many images are among an example's first so many tokens."""
    return len({f // example.image_tokens for f in example.features[:tokens] if f >= 0})


def embed_rows(
    model: LlavaForConditionalGeneration, batch: Batch, features: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns input embeddings [rows, hidden], image features in place (computed unless given: [image tokens,
    hidden])."""
    embeds = model.model.language_model.embed_tokens(batch.ids.reshape(-1)[batch.token])
    if batch.pixels is None:
        return embeds
    if features is None:
        with torch.no_grad():
            features = image_features(model, batch.pixels).flatten(0, 1)
    placed = features[batch.feature.clamp(min=0)].to(embeds.dtype)
    return torch.where((batch.feature >= 0)[:, None], placed, embeds)


def embed(model: LlavaForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Returns input embeddings [B, tokens, hidden], image features in place."""
    return embed_rows(model, batch)[batch.where]


def hidden_rows(
    model: LlavaForConditionalGeneration, batch: Batch, features: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns last hidden states [rows, hidden]; `batch.where` finds a token's."""
    embeds = embed_rows(model, batch, features)
    with blocked(model):
        out = model.model.language_model(
            inputs_embeds=embeds[None],
            position_ids=batch.position[None],
            use_cache=False,
            blocks=batch.blocks,
        )
    return out.last_hidden_state[0]


def answer_loss(model: LlavaForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Returns the cross-entropy of what the model has to generate (answers, search calls, end of answer)."""
    hidden = hidden_rows(model, batch)
    wanted = batch.target[:, 1:]
    logits = model.lm_head(hidden[batch.where[:, :-1][wanted]])
    return torch.nn.functional.cross_entropy(logits.float(), batch.ids[:, 1:][wanted])


@torch.no_grad()
def first_choices(
    model: LlavaForConditionalGeneration,
    batch: Batch,
    examples: list[Example],
    features: torch.Tensor | None = None,
) -> list[list[torch.Tensor]]:
    """Returns for each example and piece to be generated the model's first choice at each token of the piece, given
    what comes before it."""
    spans = [(row, start, end) for row, e in enumerate(examples) for start, end in e.answers]
    wanted = torch.cat([batch.where[row, start - 1 : end - 1] for row, start, end in spans])
    hidden = hidden_rows(model, batch, features=features)
    chosen = model.lm_head(hidden[wanted]).argmax(-1).cpu().split([end - start for _, start, end in spans])
    pieces = iter(chosen)
    return [[next(pieces) for _ in e.answers] for e in examples]


def exact_pieces(example: Example, chosen: list[torch.Tensor]) -> list[bool]:
    """Returns for each piece to be generated whether `chosen` are its tokens."""
    return [c.tolist() == example.ids[s:e] for c, (s, e) in zip(chosen, example.answers, strict=True)]
