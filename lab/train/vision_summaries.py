"""First stage: the vision tower learns to express in word embeddings what an image shows.

Targets, per image token, are sums of the language model's word embeddings. The first two rows of patches
are summaries (of every eight tokens: the four quadrants, the count, the digit, and two quadrants again);
every other patch stands for what its own quadrant holds. So an image's first 16 tokens hold everything, twice.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from transformers import LlavaForConditionalGeneration

from mpic_lab.generator.images import Scene, draw_scene, render
from mpic_lab.generator.words import DIGITS, POSITIONS, Split
from mpic_lab.train.batch import Encoder
from mpic_lab.train.initial_weights import IMAGE_CONSTANT, RESERVED
from mpic_lab.train.model import IMAGE_TOKENS, image_features

_SIDE = int(IMAGE_TOKENS**0.5)


class Targets:
    """Word ids [64, 4] that the tokens of a scene stand for; the same word may fill several places."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        rows = [(r // (_SIDE // 2)) * 2 + c // (_SIDE // 2) for r in range(_SIDE) for c in range(_SIDE)]
        self.quadrant = [i % 8 if i % 8 < 4 else rows[i] for i in range(2 * _SIDE)] + rows[2 * _SIDE :]

    def __call__(self, scene: Scene) -> np.ndarray:
        held = {q: (c, s) for q, c, s in scene.objects}
        words = []
        for quadrant in range(4):
            colour, shape = held.get(quadrant, ("nothing", "nothing"))
            words.append([colour, shape, *POSITIONS[quadrant].split()])
        digit = next((s for _, _, s in scene.objects if s in DIGITS), "nothing")
        table = np.array([[self.encoder.word(w) for w in row] for row in words])
        out = table[self.quadrant]
        out[4 : 2 * _SIDE : 8] = [self.encoder.word(w) for w in ("shapes", str(len(held)), "shapes", "many")]
        out[5 : 2 * _SIDE : 8] = [self.encoder.word(w) for w in ("digit", digit, "digit", digit)]
        return out


def draw_batch(
    targets: Targets, rng: random.Random, size: int, split: Split, progress: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pixels and word ids of `size` scenes."""
    scenes = [draw_learnable(rng, split) for _ in range(size)]
    pixels = np.stack([render(s, rng, split) for s in scenes])
    return torch.from_numpy(pixels), torch.from_numpy(np.stack([targets(s) for s in scenes]))


def draw_learnable(rng: random.Random, split: Split) -> Scene:
    """Returns a scene; half of those to learn from are drawn until they hold a digit, which is the hardest thing to
    read."""
    wants = split == "train" and rng.random() < 0.5
    while True:
        scene = draw_scene(rng)
        if not wants or any(shape in DIGITS for _, _, shape in scene.objects):
            return scene


def wanted(model: LlavaForConditionalGeneration, words: torch.Tensor) -> torch.Tensor:
    """Returns sums of word embeddings, with the constant feature of image tokens and no flags."""
    summed = model.model.language_model.embed_tokens.weight.detach()[words].sum(2)
    summed[..., :RESERVED] = 0
    summed[..., 0] = IMAGE_CONSTANT
    return summed


def alignment_loss(
    model: LlavaForConditionalGeneration, pixels: torch.Tensor, words: torch.Tensor
) -> torch.Tensor:
    """Returns the mean squared distance to the targets."""
    return torch.nn.functional.mse_loss(image_features(model, pixels).float(), wanted(model, words))


@torch.no_grad()
def alignment_accuracy(
    model: LlavaForConditionalGeneration, pixels: torch.Tensor, words: torch.Tensor
) -> float:
    """Returns the share of tokens whose nearest words (among those of the batch) are the right ones: all of them."""
    embeddings = model.model.language_model.embed_tokens.weight.detach()
    known = words.unique()
    scores = image_features(model, pixels).float()[..., RESERVED:] @ embeddings[known, RESERVED:].T
    distinct = torch.zeros_like(scores, dtype=torch.bool)
    distinct.scatter_(2, torch.searchsorted(known, words.contiguous()), True)
    lowest_right = scores.masked_fill(~distinct, float("inf")).amin(-1)
    highest_wrong = scores.masked_fill(distinct, float("-inf")).amax(-1)
    return float((lowest_right > highest_wrong).float().mean())
