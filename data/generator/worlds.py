"""The two generations of the generated world: how large images and documents are, and where documents hold facts."""

from __future__ import annotations

from dataclasses import dataclass

from mpic.data.generator.images import LARGE, SIZE


@dataclass(frozen=True)
class World:
    """Sizes of one generation.

    Attributes:
        size: side of an image, pixels.
        words: fewest and most words of a document; a word or mark is about one token, three-digit codes are three.
        scattered: facts stand anywhere in a document, in any order, with filler between; else a card begins with them
            and a biography with its name.
    """

    size: int
    words: tuple[int, int]
    scattered: bool


FIRST = World(SIZE, (44, 100), scattered=False)
SECOND = World(LARGE, (290, 960), scattered=True)
"""Documents of 300 to 1,000 tokens, images of 576."""
