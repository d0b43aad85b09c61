"""The recipes of both generations of the demo model: sizes, initial weights, stages, data, what is watched."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic_lab.generator import Generator, worlds
from mpic_lab.generator.worlds import World
from mpic_lab.train import curriculum, model, vision_patches, vision_summaries
from mpic_lab.train.batch import Encoder
from mpic_lab.train.held import Entries
from mpic_lab.train.initial_weights import structured_init
from mpic_lab.train.model import Design
from mpic_lab.train.scoring import PATCH_LINKS, SUMMARY_LINKS, LinkVariant
from mpic_lab.train.sink_weights import SinkWeights, held_circuits


@dataclass(frozen=True)
class Stage:
    """A stage: its share of the budget and its learning rates (linear decay over the last `decay`)."""

    name: str
    share: float
    muon_lr: float
    adam_lr: float
    decay: float
    pic_share: float = 0.0


@dataclass(frozen=True)
class Generation:
    """A generation of the demo model.

    Attributes:
        init: writes the initial weights of the language model.
        held: the entries of them that training leaves as they are, if they are written at all.
        continued: the stages of a run that goes on from a finished model.
        continued_from: where in the base stage's curriculum it goes on.
        images: in a step of the vision stage, of each worker.
        vision: the module of the vision stage (`vision_summaries`, `vision_patches`).
        steps: the steps of the base stage's curriculum.
        fits: True if a conversation must fit the tokens of a training step.
        pic_heads: the head lengths of the PIC-aware phase; 0 is left out, so that full reuse stays lossy.
        watched: (task, chunks, side of the grid that is shown of an image; None: all of it).
        scored: the links that `mpic train score` compares, over its `cells`: task -> chunk counts.
        links: the links of the watched cells of full size.
        watch_every: seconds between two quick evaluations, at least.
    """

    design: Design
    world: World
    init: Callable[[LlavaForConditionalGeneration, PreTrainedTokenizerFast, int], None]
    stages: tuple[Stage, ...]
    continued: tuple[Stage, ...]
    images: int
    vision: Any
    steps: tuple[curriculum.CurriculumStep, ...]
    fits: bool
    pic_heads: tuple[int, ...]
    watched: tuple[tuple[str, int, int | None], ...]
    scored: tuple[LinkVariant, ...]
    cells: dict[str, tuple[int, ...]]
    links: tuple[LinkVariant, ...] = (SUMMARY_LINKS[0],)
    watch_every: float = 0.0
    continued_from: float = 1.0
    held: Callable[[LlavaForConditionalGeneration], list[Entries]] = lambda model: []

    def encoder(self, tokenizer: PreTrainedTokenizerFast) -> Encoder:
        """Returns an encoder for images of this generation."""
        return Encoder(tokenizer, self.design.image_tokens, self.world.labels)

    def scenes(
        self, encoder: Encoder, seed: int, progress: Callable[[], float]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields batches of the vision stage, whose progress is asked for anew each time."""
        rng, targets = random.Random(seed), self.vision.Targets(encoder)
        while True:
            yield self.vision.draw_batch(targets, rng, self.images, "train", progress())

    def batches(
        self, encoder: Encoder, seed: int, common_seed: int, tokens: int, pic_share: float
    ) -> curriculum.Batches:
        """Returns the batches of the other stages; workers have a seed each and `common_seed` in common."""
        generator = Generator(seed, world=self.world)
        limit = tokens if self.fits else None

        def draw(progress: float) -> curriculum.Group:
            return curriculum.draw_group(generator, encoder, progress, self.steps, limit)

        return curriculum.Batches(generator, draw, tokens, common_seed, pic_share, self.pic_heads)

    def small(self, side: int | None) -> World:
        """Returns the world with documents as short as suits images of which a grid of this side is shown."""
        return self.world if side is None else replace(self.world, words=curriculum.WORDS[side])


_CELLS: dict[str, tuple[int, ...]] = {
    "image": (1, 2, 4, 8), "image named": (1, 2, 4, 8), "caption": (1, 2, 4, 8), "compare": (2, 4, 8),
    "word level": (2,), "few-shot": (2, 4, 8), "card": (1, 2, 4, 8), "card named": (1, 2, 4, 8),
    "needle": (1, 2, 4, 8), "biography": (1, 2, 4, 8), "two-hop": (2, 4, 8), "last person": (1, 2, 4, 8),
    "mixed": (2, 4, 8), "search person": (0, 1, 2, 4, 8), "search thing": (0, 1, 2, 4, 8),
    "search picture": (0, 1, 2, 4, 8),
}  # fmt: skip


FIRST = Generation(
    design=model.FIRST,
    world=worlds.FIRST,
    init=structured_init,
    stages=(
        Stage("vision", 0.055, 0.01, 1e-3, 0.5),
        Stage("base", 0.72, 0.01, 2e-3, 0.5),
        Stage("pic", 0.225, 0.006, 1.2e-3, 0.8, pic_share=0.5),
    ),
    continued=(
        Stage("vision", 0.05, 0.01, 1e-3, 0.5),
        Stage("base", 0.70, 0.007, 1.4e-3, 0.7),
        Stage("pic", 0.25, 0.005, 1e-3, 0.8, pic_share=0.5),
    ),
    images=48,
    vision=vision_summaries,
    steps=curriculum.SUMMARY_STEPS,
    fits=True,
    pic_heads=(4, 6, 8, 12, 16, 16, 24, 32),
    watched=tuple((task, count, None) for task, count in (
        ("image", 1), ("image", 2), ("image", 4), ("image", 8), ("image named", 4), ("card", 4), ("card", 8),
        ("biography", 4), ("needle", 4), ("two-hop", 4), ("compare", 2), ("caption", 2), ("few-shot", 4),
        ("last person", 4), ("search person", 2), ("search thing", 2), ("search picture", 2),
    )),
    scored=SUMMARY_LINKS,
    cells=_CELLS,
)  # fmt: skip
"""64 tokens an image, its first 16 taught to hold everything; documents of 40 to 120 tokens; 2,048 of context."""

SECOND = Generation(
    design=model.SECOND,
    world=worlds.SECOND,
    init=partial(structured_init, kind=SinkWeights),
    stages=(
        Stage("vision", 0.10, 0.02, 2e-3, 0.5),
        Stage("base", 0.76, 0.01, 2e-3, 0.4),
        Stage("pic", 0.14, 0.005, 1e-3, 0.8, pic_share=0.5),
    ),
    continued=(  # not vision: twenty steps of it, warm-up included, took the tower from 94 to 81 % of patches
        Stage("base", 0.80, 0.007, 1.4e-3, 0.7),
        Stage("pic", 0.20, 0.005, 1e-3, 0.8, pic_share=0.5),
    ),
    images=12,
    vision=vision_patches,
    steps=curriculum.PATCH_STEPS,
    fits=False,
    pic_heads=(8, 16, 32, 32, 64),
    watched=(
        *((task, count, 8) for task, count in (
            ("image", 1), ("image", 4), ("image named", 4), ("card", 4), ("biography", 4), ("needle", 4),
            ("compare", 2), ("caption", 2), ("few-shot", 4), ("search person", 2), ("search picture", 2),
        )),
        *((task, count, None) for task, count in (
            ("image", 1), ("image", 4), ("image", 8), ("card", 1), ("card", 4), ("needle", 1), ("needle", 4),
            ("needle", 8), ("biography", 4),
        )),
    ),
    scored=PATCH_LINKS,
    cells={**_CELLS, "both people": (2, 4, 8)},
    links=PATCH_LINKS[:3] + PATCH_LINKS[5:6],
    watch_every=1500.0,
    held=held_circuits,
    continued_from=0.7,  # with conversations of more than the smallest size, which are what a finished model lacks
)  # fmt: skip
"""576 tokens an image, each of its own patch; documents of 300 to 1,000 tokens; 8,192 of context; attention sinks."""

GENERATIONS = {1: FIRST, 2: SECOND}


def generation_of(model: LlavaForConditionalGeneration) -> Generation:
    """Returns the generation of a model, which the tokens of its images tell."""
    return next(r for r in GENERATIONS.values() if r.design.image_tokens == model.config.image_seq_length)


def generation_at(folder: Path) -> Generation:
    """Returns the generation of a saved model."""
    tokens = json.loads((folder / "config.json").read_text())["image_seq_length"]
    return next(r for r in GENERATIONS.values() if r.design.image_tokens == tokens)
