"""The two generations of the generated world: how large chunks are, where they hold facts and where labels stand."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from mpic_lab.generator.conversation import Labels
from mpic_lab.generator.images import LARGE, SIZE, Scene, render, render_large
from mpic_lab.generator.words import Split


@dataclass(frozen=True)
class World:
    """Sizes of one generation.

    Attributes:
        size: side of an image, pixels.
        words: fewest and most words of a document; a word or mark is about one token, three-digit codes are three.
        scattered: facts stand anywhere in a document, in any order, with filler between, and a card names its subject
            in each; else a card begins with them and a biography with its name.
        labels: place of the label of a chunk.
    """

    size: int
    words: tuple[int, int]
    scattered: bool
    labels: Labels = "around"

    def render(self, scene: Scene, rng: random.Random, split: Split) -> np.ndarray:
        """Return a picture of a scene, uint8 `[size, size, 3]`."""
        return render(scene, rng, split) if self.size == SIZE else render_large(scene, rng, split)[0]


FIRST = World(SIZE, (44, 100), scattered=False)
SECOND = World(LARGE, (290, 960), scattered=True, labels="before")
"""Documents of 300 to 1,000 tokens, images of 576."""

WORLDS = {1: FIRST, 2: SECOND}
"""Generation -> the world that its demo models know."""
