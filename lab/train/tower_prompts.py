"""Prompts that a tower is trained on: pictures, then several questions that do not see each other.

Every question with its answer stands behind the same pictures, at the positions that it would have alone; a mask hides
the others. So the pictures, most of the tokens, are computed once for all of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from mpic_lab.generator.scenes import GRID, Picture, describe, draw_picture, pick
from mpic_lab.generator.words import draw_handles

IMAGE = -1
"""Stands for an image token in `Batch.ids`."""
TOKENS = GRID * GRID
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_ORDINALS = ("first", "second", "third", "fourth")
_BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n"
_END = "<|im_end|>"
_OTHER = 0.2
"""Weight of a token of an answer that does not decide."""


class QuestionIds(NamedTuple):
    """A question about a picture, in ids; `key` says which tokens of the answer decide."""

    kind: str
    question: list[int]
    answer: list[int]
    key: range


@dataclass
class PicturePrompt:
    """Pictures, the ids of the prompt up to the question, and the questions."""

    pictures: list[Picture]
    before: list[int]
    asked: list[QuestionIds]


@dataclass
class Batch:
    """Samples for the language model: `b` prompts of `t` tokens, `n` tokens of answers.

    Attributes:
        ids: `[b, t]`, with `IMAGE` where an image token goes.
        positions: `[b, t]`.
        mask: `[b, 1, t, t]`, added to scores.
        where: row and token before each token of an answer, `[n, 2]`.
        answers: their ids, `[n]`.
        weights: their weights in the loss, `[n]`.
        asked: (kind, tokens of the answer that decide, as a range into `n`) of every question.
        pictures: in the order of their tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    where: torch.Tensor
    answers: torch.Tensor
    weights: torch.Tensor
    asked: list[tuple[str, range]]
    pictures: list[Picture]


class Writer:
    """Writes samples in the ids of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids = cache(lambda text: tokenizer(text, add_special_tokens=False).input_ids)

    def sample(self, rng: random.Random, count: int, questions: int) -> PicturePrompt:
        """Return a sample of `count` pictures with up to `questions` questions on each."""
        pictures = [draw_picture(rng) for _ in range(count)]
        named = rng.random() < 0.25
        names = draw_handles(rng, count, "train") if named else [str(i + 1) for i in range(count)]
        before = list(self.ids(_BEFORE))
        for name in names:
            before += [*self.ids(f"Image {name}:"), *[IMAGE] * TOKENS, *self.ids("\n")]
        asked = []
        for i, picture in enumerate(pictures):
            chosen = pick(picture, rng, questions)
            if rng.random() < 0.3:
                chosen[-1] = describe(picture, rng)
            for question in chosen:
                text = question.text
                if count > 1 or rng.random() < 0.1:
                    ordinal = [] if named else [f"In the {_ORDINALS[i]} image, "]
                    choices = [f"In image {names[i]}, ", *ordinal]
                    text = rng.choice(choices) + text[0].lower() + text[1:]
                spoken = (question.before, question.key, question.after + _END)
                said, key, rest = (list(self.ids(part)) for part in spoken)
                decides = range(len(said), len(said) + len(key))
                ids = list(self.ids(text + _AFTER))
                asked.append(QuestionIds(question.kind, ids, said + key + rest, decides))
        return PicturePrompt(pictures, before, asked)


def collate(samples: Sequence[PicturePrompt]) -> Batch:
    """Return samples as one batch, padded behind."""
    lengths = [len(s.before) + sum(len(q.question) + len(q.answer) for q in s.asked) for s in samples]
    shape = len(samples), max(lengths)
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    block = torch.full(shape, -1)
    where, answers, weights, asked = [], [], [], []
    for row, sample in enumerate(samples):
        at = first = len(sample.before)
        ids[row, :at] = torch.tensor(sample.before)
        positions[row, :at] = torch.arange(at)
        block[row, :at] = 0
        for number, (kind, question, answer, key) in enumerate(sample.asked):
            end = at + len(question) + len(answer)
            ids[row, at:end] = torch.tensor(question + answer)
            positions[row, at:end] = first + torch.arange(end - at)
            block[row, at:end] = number + 1
            begin = len(answers)
            where += [(row, at + len(question) - 1 + i) for i in range(len(answer))]
            answers += answer
            decides = kind != "describe"
            weights += [1.0 if decides and i in key else _OTHER for i in range(len(answer))]
            asked.append((kind, range(begin + key.start, begin + key.stop)))
            at = end
    before, own = block[:, None, :] == 0, block[:, :, None] == block[:, None, :]
    seen = torch.ones(shape[1], shape[1], dtype=torch.bool).tril() & (before | own)
    mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.bfloat16).min)[:, None]
    return Batch(
        ids,
        positions,
        mask,
        torch.tensor(where),
        torch.tensor(answers),
        torch.tensor(weights),
        asked,
        [picture for sample in samples for picture in sample.pictures],
    )
