"""First stage of the second generation: every image token says in word embeddings what its own patch shows.

No token says anything of the rest of the image: a patch that an object covers says its colour, its shape and the
quadrant it is in, any other one "nothing" and the quadrant.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from transformers import LlavaForConditionalGeneration

from mpic.data.generator.images import LARGE, Scene, render_large
from mpic.data.generator.words import POSITIONS, Split
from mpic.train.batch import Encoder
from mpic.train.model import image_features
from mpic.train.structure import IMAGE_CONSTANT
from mpic.train.structure2 import FLAG_SIZE, RESERVED, VALUE, code_features, patch_codes
from mpic.train.vision import draw_learnable

COVERED = 0.25  # of a patch: more, and it shows the object


class Targets:
    """Word ids [patches, 4] that the tokens of a scene stand for."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.side = int(encoder.image_tokens**0.5)

    def __call__(self, scene: Scene, cover: np.ndarray) -> np.ndarray:
        half, patch = self.side // 2, LARGE // self.side
        held = {q: (c, s) for q, c, s in scene.objects}
        share = cover.reshape(self.side, patch, self.side, patch).mean((1, 3))
        out = np.zeros((self.side, self.side, 4), np.int64)
        for quadrant in range(4):
            rows, columns = (slice(i * half, (i + 1) * half) for i in divmod(quadrant, 2))
            cell = out[rows, columns]
            cell[..., 2:] = [self.word(w) for w in POSITIONS[quadrant].split()]
            cell[..., :2] = self.word("nothing")
            if quadrant in held:
                cell[share[rows, columns] > COVERED, :2] = [self.word(w) for w in held[quadrant]]
        return out.reshape(-1, 4)

    def word(self, text: str) -> int:
        """The id of a word after a space."""
        (token,) = self.encoder.ids(f" {text}")
        return token


def draw_batch(
    targets: Targets, rng: random.Random, size: int, split: Split
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels and word ids of `size` scenes, and which patches show an object."""
    scenes = [draw_learnable(rng, split) for _ in range(size)]
    drawn = [render_large(s, rng, split) for s in scenes]
    words = np.stack([targets(s, cover) for s, (_, cover) in zip(scenes, drawn, strict=True)])
    shown = words[..., 0] != targets.word("nothing")
    return torch.from_numpy(np.stack([pixels for pixels, _ in drawn])), *map(torch.from_numpy, (words, shown))


def wanted(model: LlavaForConditionalGeneration, words: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """Sums of word embeddings, with the constant feature of image tokens, the value flag and the code of the patch."""
    summed = model.model.language_model.embed_tokens.weight.detach()[words].sum(2)
    summed[..., :RESERVED] = 0
    summed[..., 0] = IMAGE_CONSTANT
    summed[..., VALUE] = FLAG_SIZE * shown
    summed[..., list(code_features(model))] = patch_codes(model).to(summed.device)
    return summed


def alignment_loss(
    model: LlavaForConditionalGeneration, pixels: torch.Tensor, words: torch.Tensor, shown: torch.Tensor
) -> torch.Tensor:
    """Mean squared distance to the targets; the patches of objects count as much as all others together."""
    error = (image_features(model, pixels).float() - wanted(model, words, shown)).square().mean(-1)
    return 0.5 * (error[shown].mean() + error[~shown].mean())


@torch.no_grad()
def alignment_accuracy(
    model: LlavaForConditionalGeneration, pixels: torch.Tensor, words: torch.Tensor, shown: torch.Tensor
) -> float:
    """Share of objects' patches nearer to the right colour and shape than to any other of the batch."""
    embeddings = model.model.language_model.embed_tokens.weight.detach()
    features = range(RESERVED, code_features(model)[0])
    found = image_features(model, pixels).float()[..., features]
    right = torch.ones_like(shown)
    for place in (0, 1):
        known = words[..., place].unique()
        scores = found @ embeddings[known][:, features].T
        right &= known[scores.argmax(-1)] == words[..., place]
    return float(right[shown].float().mean())
