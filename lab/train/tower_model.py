"""A vision tower for a language model that stays as it is, in the layout of `LlavaForConditionalGeneration`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import SiglipVisionConfig, SiglipVisionModel

from mpic_lab.generator.scenes import (
    GRID,
    GROUNDS,
    NUMBERS,
    PATCH,
    SHAPES,
    SIDE,
    SPOKEN,
    WORDS,
    Picture,
    covered,
    words,
)
from mpic_lab.train.tower_prompts import TOKENS

COLORS, KINDS, SIZES = tuple(GROUNDS), (*SHAPES, *NUMBERS), ("small", "large")
_NUMBER = {word: i for i, word in enumerate(WORDS)}
_CODE = 64
"""Channels in which a patch's place is written at the start: a head's width."""
_OFFSETS = (
    ((-1, 0), (1, 0), (0, -1), (0, 1)),
    ((-1, -1), (1, 1), (1, -1), (-1, 1)),
    ((-2, 0), (2, 0), (0, -2), (0, 2)),
)
"""Layer -> the neighbour, in columns and rows, that each head looks at when training begins."""


def vision_config(width: int = 256, layers: int = 7, heads: int = 4) -> SiglipVisionConfig:
    """Return the layout of a tower: 196 tokens a picture of 224 x 224 pixels."""
    return SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
        attn_implementation="eager",  # of 196 tokens faster on a CPU than a fused kernel, backwards above all
    )


class Projector(nn.Module):
    """The projector of LLaVA: two layers with a GELU between them, under its names."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(width, to), nn.Linear(to, to)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return vectors for the language model."""
        return self.linear_2(F.gelu(self.linear_1(x)))


class Tower(nn.Module):
    """Vision tower, projector, and the heads that train the tower before it meets the language model.

    Args:
        to: width of the language model.
        local: layer whose patches must know the object that covers them.
    """

    def __init__(self, config: SiglipVisionConfig, to: int, local: int = 4) -> None:
        super().__init__()
        self.vision, self.projector = SiglipVisionModel(config), Projector(config.hidden_size, to)
        self.local = min(local, config.num_hidden_layers)
        self.covering = nn.Linear(config.hidden_size, len(COLORS) + len(KINDS) + len(SIZES) + 3)
        self.saying = nn.Linear(config.hidden_size, len(WORDS))
        begin_local(self.vision)

    def states(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states `[n, 196, width]` of the layer `local` and of the last one."""
        found = self.vision(pixels, output_hidden_states=True).hidden_states
        return found[self.local], found[-1]

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the image tokens of pictures, `[n, 196, to]`."""
        return self.projector(self.states(pixels)[1])


@torch.no_grad()
def begin_local(vision: SiglipVisionModel) -> None:
    """Let a tower begin as a convolution would: patches as the lowest frequencies of their pixels, heads of the first
    layers that look at neighbours. Training may change all of it. Heads of another width than 64 begin at random."""
    config, state = vision.config, dict(vision.named_parameters())
    width, heads = config.hidden_size, config.num_attention_heads
    weight = next(w for name, w in state.items() if name.endswith("patch_embedding.weight"))
    place = next(w for name, w in state.items() if name.endswith("position_embedding.weight"))
    if width // heads != _CODE or width <= _CODE:
        return
    weight.zero_()
    next(w for name, w in state.items() if name.endswith("patch_embedding.bias")).zero_()
    weight[_CODE:] = _frequencies(width - _CODE)
    place.normal_(0, 0.02)
    place[:, :_CODE] = _places()
    layers = [module for module in vision.modules() if hasattr(module, "self_attn")]
    for layer, offsets in zip(layers, _OFFSETS):
        query, key = layer.self_attn.q_proj, layer.self_attn.k_proj
        for linear in (query, key):
            linear.bias.zero_()
            linear.weight.mul_(0.1)
        for head, offset in enumerate(offsets[:heads]):
            rows = slice(head * _CODE, (head + 1) * _CODE)
            query.weight[rows, :_CODE] += 2.0 * _turn(*offset)
            key.weight[rows, :_CODE] += 2.0 * torch.eye(_CODE)
        layer.self_attn.out_proj.weight[:_CODE] *= 0.1
        layer.mlp.fc2.weight[:_CODE] *= 0.1


def _frequencies(count: int) -> torch.Tensor:
    """Return the cosine waves of lowest frequency over a patch, of each colour, `[count, 3, 16, 16]`."""
    at = (np.arange(PATCH) + 0.5) * math.pi / PATCH
    waves = np.cos(np.arange(PATCH)[:, None] * at)
    pairs = sorted(((u, v) for u in range(PATCH) for v in range(PATCH)), key=lambda uv: (sum(uv), uv))
    found = torch.zeros(count, 3, PATCH, PATCH)
    for i in range(count):
        u, v = pairs[i // 3]
        wave = np.outer(waves[u], waves[v])
        # natural pictures have little of the higher frequencies, so amplify those
        found[i, i % 3] = torch.from_numpy(wave / np.linalg.norm(wave) * 0.08 * (1 + u + v)).float()
    return found


def _angles() -> torch.Tensor:
    return torch.exp(torch.linspace(math.log(2 * math.pi / 3), math.log(2 * math.pi / 28), _CODE // 4))


def _places() -> torch.Tensor:
    """Return sines and cosines of column and row, `[196, 64]`."""
    row, column = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    waves = [at.flatten()[:, None] * _angles() for at in (column, row)]
    return torch.cat([f(w) for w in waves for f in (torch.sin, torch.cos)], 1)


def _turn(columns: int, rows: int) -> torch.Tensor:
    """Return the matrix `[64, 64]` that makes the code of a place that of a neighbour."""
    parts = []
    for offset in (columns, rows):
        sin, cos = (torch.diag(f(offset * _angles())) for f in (torch.sin, torch.cos))
        parts.append(torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)]))
    return torch.block_diag(*parts)


class Caption(nn.Module):
    """The words of patches as vectors that the language model reads: its own embeddings, moved by training.

    Args:
        table: embeddings of `WORDS`, `[words, to]`.
    """

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.clone().float())
        self.place = nn.Parameter(torch.zeros(TOKENS, table.shape[1]))
        self.mix = nn.Linear(table.shape[1], table.shape[1])
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)

    def forward(self, said: torch.Tensor) -> torch.Tensor:
        """Return vectors `[n, 196, to]` of words `[n, 196]`; each knows the words beside it."""
        vectors = self.table[said]
        around = F.avg_pool1d(vectors.transpose(1, 2), 5, 1, 2).transpose(1, 2)
        return vectors + self.place + self.mix(around)


def numbers(pictures: Sequence[Picture]) -> torch.Tensor:
    """Return the indices of the pictures' words, `[n, 196]`."""
    return torch.tensor([[_NUMBER[word] for word in words(picture)] for picture in pictures])


def labels(pictures: Sequence[Picture]) -> torch.Tensor:
    """Return what covers each patch, `[n, 196, 3]`: number of colour, kind and size, the last number for nothing."""
    found = np.empty((len(pictures), TOKENS, 3), np.int64)
    nothing = (len(COLORS), len(KINDS), len(SIZES))
    for picture, out in zip(pictures, found):
        known = [(COLORS.index(t.color), KINDS.index(t.kind), SIZES.index(t.size)) for t in picture.things]
        out[:] = np.array([nothing, *known])[covered(picture).ravel()]
    return torch.from_numpy(found)


def to_pixels(pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """Return pictures uint8 `[224, 224, 3]` as the tower takes them, `[n, 3, 224, 224]` in -1 to 1."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def sight_loss(
    tower: Tower, pixels: torch.Tensor, pictures: Sequence[Picture]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of what the patches show and say, and their last states `[n, 196, width]`.

    Patches without an object, and words for empty places, are many and easy; they count a tenth.
    """
    local, last = tower.states(pixels)
    shown = labels(pictures)
    heads = tower.covering(local).float().split([len(COLORS) + 1, len(KINDS) + 1, len(SIZES) + 1], -1)
    rare = torch.where(shown[..., 0] < len(COLORS), 1.0, 0.1)
    total = sum(_weighted(head, label, rare) for head, label in zip(heads, shown.unbind(-1)))
    said = numbers(pictures)[:, SPOKEN]
    rare = torch.where(said == _NUMBER["empty"], 0.1, 1.0)
    rare[:, -2:] = 4.0  # number of objects and background: one patch each
    return total + 3 * _weighted(tower.saying(last[:, SPOKEN]).float(), said, rare), last


def _weighted(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def sight_scores(tower: Tower, pixels: torch.Tensor, pictures: Sequence[Picture]) -> dict[str, float]:
    """Return the share of words said right by what they are about; of objects, one row of patches each."""
    said, right = numbers(pictures)[:, SPOKEN], tower.saying(tower.states(pixels)[1][:, SPOKEN]).argmax(-1)
    hit = right == said
    groups = {"color": COLORS, "shape": SHAPES, "digit": NUMBERS, "size": SIZES, "empty": ("empty",)}
    found = {"background": hit[:, -1].float().mean().item(), "count": hit[:, -2].float().mean().item()}
    for name, group in groups.items():
        about = torch.isin(said, torch.tensor([_NUMBER[word] for word in group]))
        about[:, -2:] = False
        found[name] = hit[about].float().mean().item() if about.any() else math.nan
    return found
