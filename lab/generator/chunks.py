"""Draws the chunks of a conversation, with their labels and facts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from mpic_lab.generator import documents
from mpic_lab.generator.conversation import Document, Image, number_word
from mpic_lab.generator.documents import Fact
from mpic_lab.generator.images import BACKGROUNDS, Scene, draw_scene, render, render_large
from mpic_lab.generator.wordings import Asking
from mpic_lab.generator.words import NUMBERS, OBJECTS, Split, draw_handles, draw_people
from mpic_lab.generator.worlds import FIRST, World

KINDS = ("image", "image", "card", "biography", "biography", "needle")
NAMED = 0.35
"""Share of the conversations whose chunks have handles."""
_THINGS = 12  # maximum objects whose codes are in a prompt, so that some are left to search for
_COUNTED = 10  # maximum chunks in a prompt: training counts up to here


@dataclass(frozen=True)
class Labelled:
    """A chunk of a conversation with its facts."""

    label: str
    part: Image | Document
    about: Scene | Fact


class ChunkGenerator:
    """Draws chunks from a seed. The same seed, split and world give the same chunks.

    Attributes:
        world: sizes of the chunks, and the place of their labels.
        split: the names, handles and shapes that may be drawn.
        asking: the wordings in which questions are asked about them.
    """

    def __init__(
        self, seed: int, split: Split = "train", asking: Asking | None = None, world: World = FIRST
    ) -> None:
        self.world = world
        self.rng = random.Random(f"{split}-{seed}")
        self.split: Split = split
        self.asking: Asking = asking or split
        self._backgrounds: list[int] = []  # backgrounds left for the large images of a conversation

    def image(self, scene: Scene, name: str | None = None) -> Image:
        """Return the scene as an image chunk."""
        if self.world.scattered:
            if not self._backgrounds:
                self._backgrounds = self.rng.sample(range(len(BACKGROUNDS)), len(BACKGROUNDS))
            scene = replace(scene, background=self._backgrounds.pop())
            return Image(render_large(scene, self.rng, self.split)[0], name)
        return Image(render(scene, self.rng, self.split), name)

    def context(self, count: int) -> list[Labelled]:
        """Return `count` labelled chunks, of all kinds in order."""
        kinds = [self.rng.choice(KINDS) for _ in range(count)]
        return self.context_of(kinds, named=self.rng.random() < NAMED)

    def context_of(self, kinds: list[str], named: bool) -> list[Labelled]:
        """Return labelled chunks of exactly these kinds; half of the people have a friend among the others."""
        rng, split, items = self.rng, self.split, list[Labelled]()
        handles = self._handles(len(kinds), named)
        self._backgrounds = []
        people = draw_people(rng, kinds.count("biography"), split)
        needles = kinds.count("needle")
        each = rng.randint(1, max(1, min(3, _THINGS // max(1, needles)))) if self.world.scattered else 1
        things = rng.sample(OBJECTS, needles * each)
        subjects, counts = iter(people), {"image": 0, "document": 0}
        words, scattered = self.world.words, self.world.scattered
        for kind, handle in zip(kinds, handles, strict=True):
            noun = "image" if kind == "image" else "document"
            counts[noun] += 1
            label = f"{noun} {handle or number_word(counts[noun])}"
            about: Scene | Fact
            if kind == "image":
                about = draw_scene(rng)
                items.append(Labelled(label, self.image(about, handle), about))
                continue
            if kind == "card":
                title = (handle if named else draw_handles(rng, 1, split)[0]) if scattered else ""
                about = documents.card(rng, split, words, title)
            elif kind == "needle":
                about = documents.needle(rng, split, [things.pop() for _ in range(each)], words)
            else:
                name = next(subjects)
                others = [p for p in people if p != name]
                friend = rng.choice(others) if others and rng.random() < 0.7 else None
                about = documents.biography(rng, split, name, friend, words, scattered)
            items.append(Labelled(label, Document(about.text, handle), about))
        return items

    def _handles(self, count: int, named: bool) -> list[str] | list[None]:
        """Return the names of chunks; without names, chunks are numbered.

        Training of the second generation numbers chunks in any order. If `two` always followed `one`, the model could
        recognise a chunk by the label before it and need not read the chunk's own label.
        """
        if named:
            return draw_handles(self.rng, count, self.split)
        if self.split == "train" and self.world.labels == "before":
            return self.rng.sample(NUMBERS[: max(count, _COUNTED)], count)
        return [None] * count
