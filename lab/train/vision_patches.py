"""First stage of the second generation: every image token stands, in word embeddings, for what its own patch shows.

No token stands for anything else in the image: a patch that an object covers stands for its colour, its shape and the
quadrant it is in, any other one for "nothing" and the quadrant. All of them stand for the background, each of the 27
by a code of its own.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from transformers import LlavaForConditionalGeneration

from mpic_lab.generator.images import BACKGROUNDS, LARGE, Scene, render_large
from mpic_lab.generator.words import POSITIONS, Split
from mpic_lab.train.batch import Encoder
from mpic_lab.train.initial_weights import IMAGE_CONSTANT
from mpic_lab.train.model import image_features
from mpic_lab.train.sink_weights import (
    FLAG_SIZE,
    IMAGE,
    RESERVED,
    VALUE,
    background_codes,
    code_features,
    patch_codes,
    signature_features,
)
from mpic_lab.train.vision_summaries import draw_learnable

COVERED = 0.25  # share of a patch that an object must cover for the patch to show it


WHOLE = 0.7  # share of the stage with quadrants; whole images follow
_CHOICE = 0.2
IMAGE_SCALE = 0.5
"""Makes an image token, which sums four words and two codes, as long as a word: what attention adds to it counts."""


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
            cell[..., 2:] = [self.encoder.word(w) for w in POSITIONS[quadrant].split()]
            cell[..., :2] = self.encoder.word("nothing")
            if quadrant in held:
                cell[share[rows, columns] > COVERED, :2] = [self.encoder.word(w) for w in held[quadrant]]
        return out.reshape(-1, 4)


def draw_batch(
    targets: Targets, rng: random.Random, size: int, split: Split, progress: float = 1.0
) -> tuple[torch.Tensor, ...]:
    """Returns pixels and word ids of `size` scenes, which patches show an object, the patches that there are and the
    backgrounds.

    In the first part of the stage they are not of whole images but of twice as many quadrants with an object, which are
    a quarter of the work.
    """
    tiles = progress < WHOLE
    pixels, words, patches, backgrounds = [], [], [], []
    places = np.arange(targets.side**2).reshape(targets.side, targets.side)
    while len(pixels) < (2 * size if tiles else size):
        scene = replace(draw_learnable(rng, split), background=rng.randrange(len(BACKGROUNDS)))
        backgrounds.append(scene.background)
        drawn, cover = render_large(scene, rng, split)
        ids = targets(scene, cover)
        if not tiles:
            pixels.append(drawn)
            words.append(ids)
            patches.append(places.reshape(-1))
            continue
        quadrant = rng.choice(scene.objects)[0]
        y, x = (place * (LARGE // 2) for place in divmod(quadrant, 2))
        row, column = (place * (targets.side // 2) for place in divmod(quadrant, 2))
        own = places[row : row + targets.side // 2, column : column + targets.side // 2].reshape(-1)
        pixels.append(drawn[y : y + LARGE // 2, x : x + LARGE // 2])
        words.append(ids[own])
        patches.append(own)
    stacked = np.stack(words)
    shown = stacked[..., 0] != targets.encoder.word("nothing")
    arrays = (np.stack(pixels), stacked, shown, np.stack(patches), np.array(backgrounds))
    return tuple(map(torch.from_numpy, arrays))


def wanted(
    model: LlavaForConditionalGeneration,
    words: torch.Tensor,
    shown: torch.Tensor,
    patches: torch.Tensor,
    backgrounds: torch.Tensor,
) -> torch.Tensor:
    """Returns sums of word embeddings, with the constant feature of image tokens, their flags and the codes of patch
    and background."""
    summed = model.model.language_model.embed_tokens.weight.detach()[words].sum(2)
    summed[..., :RESERVED] = 0
    summed[..., 0] = IMAGE_CONSTANT
    summed[..., IMAGE], summed[..., VALUE] = FLAG_SIZE, FLAG_SIZE * shown
    summed[..., list(code_features(model))] = patch_codes(model).to(summed.device)[patches]
    codes = background_codes().to(summed.device)[backgrounds]
    summed[..., list(signature_features(model))] = codes[:, None].expand(*words.shape[:2], -1)
    return IMAGE_SCALE * summed


def features_of(
    model: LlavaForConditionalGeneration, pixels: torch.Tensor, patches: torch.Tensor
) -> torch.Tensor:
    """Returns [images, patches, hidden] of whole images, or of a part of each as if the image were no more than it."""
    tower = model.model.vision_tower
    places = tower.embeddings.position_embedding.weight
    if patches.shape[1] + 1 == len(places):
        return image_features(model, pixels)
    scaled = pixels.permute(0, 3, 1, 2).to(model.dtype) / 127.5 - 1
    shown = tower.embeddings.patch_embedding(scaled).flatten(2).transpose(1, 2) + places[patches + 1]
    first = (tower.embeddings.class_embedding + places[0]).expand(len(pixels), 1, -1)
    hidden = tower.pre_layrnorm(torch.cat([first, shown], 1))
    hidden = tower.encoder(inputs_embeds=hidden).last_hidden_state
    return model.model.multi_modal_projector(hidden[:, 1:])


def alignment_loss(
    model: LlavaForConditionalGeneration,
    pixels: torch.Tensor,
    words: torch.Tensor,
    shown: torch.Tensor,
    patches: torch.Tensor,
    backgrounds: torch.Tensor,
) -> torch.Tensor:
    """Returns the mean squared distance to the targets, the patches of objects and all others alike, and which shape
    and which background it is.

    Shapes are the slowest to be learned, for a patch has to look at its neighbours for them, and a background is a
    small part of a token: they also count as choices, among the shapes of the batch and among all backgrounds.
    """
    found = features_of(model, pixels, patches).float()
    error = (found - wanted(model, words, shown, patches, backgrounds)).square().mean(-1)
    known, scores = _choices(model, found[shown], words[shown][:, 1])
    choice = torch.nn.functional.cross_entropy(0.1 * scores, torch.searchsorted(known, words[shown][:, 1]))
    signatures = found[..., list(signature_features(model))] @ background_codes().to(found.device).T
    seen = backgrounds[:, None].expand(signatures.shape[:2])
    background = torch.nn.functional.cross_entropy(0.1 * signatures.flatten(0, 1), seen.flatten())
    return 0.5 * (error[shown].mean() + error[~shown].mean()) + _CHOICE * (choice + background)


def _choices(
    model: LlavaForConditionalGeneration, found: torch.Tensor, words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the words of the batch, and how much each token [tokens, hidden] agrees with each of them."""
    features = range(RESERVED, code_features(model)[0])
    known = words.unique()
    embeddings = model.model.language_model.embed_tokens.weight.detach()[known]
    return known, found[:, features] @ embeddings[:, features].T


@torch.no_grad()
def alignment_accuracy(
    model: LlavaForConditionalGeneration,
    pixels: torch.Tensor,
    words: torch.Tensor,
    shown: torch.Tensor,
    patches: torch.Tensor,
    backgrounds: torch.Tensor,
) -> float:
    """Returns the share of objects' patches nearer to the right colour, shape and background than to any other."""
    features = features_of(model, pixels, patches).float()
    signatures = features[..., list(signature_features(model))] @ background_codes().to(features.device).T
    right = (signatures.argmax(-1) == backgrounds[:, None])[shown]
    found = features[shown]
    for ids in (words[shown][:, 0], words[shown][:, 1]):
        known, scores = _choices(model, found, ids)
        right = right & (known[scores.argmax(-1)] == ids)
    return float(right.float().mean())
