"""Pictures of up to nine coloured objects on a coloured ground, and questions about them in ordinary English.

A picture is a grid of three by three *places*. Each question has a kind, by which scores are kept, and its answer is a
sentence in which one word decides. A scene also has a description as a grid of 14 x 14 words, one per patch (`words`),
which a vision tower learns to say. These words repeat each object in every row of patches of its place, because a
language model easily overlooks a word that it reads only once.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw

from mpic_lab.generator.images import outline
from mpic_lab.generator.words import COLOURS, DIGITS, SHAPES

SIDE, PATCH = 224, 16
GRID = SIDE // PATCH
GROUNDS = COLOURS | {"black": (20, 20, 20), "pink": (250, 150, 195)}
SIZES = {"small": (13, 17), "large": (25, 30)}
"""Size -> smallest and largest radius, pixels."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_BOUNDS = ((0, 5, 9, 14), (0, 5, 9, 13))
"""First patches of the three columns and rows of places; the last row of patches is below all of them."""
_CENTRES = tuple([(a + b) * PATCH // 2 for a, b in pairwise(bounds)] for bounds in _BOUNDS)
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")
PLACES = tuple("center" if r == c == 1 else f"{ROWS[r]} {COLUMNS[c]}" for r in range(3) for c in range(3))
_JITTER = 12
_ROOM = 31
"""Farthest an object reaches from the centre of its place, pixels."""
_LAST = "There are {} objects . The color of the background is {} . \n"
_WORDINGS = {
    "color": ("What color is the {x}?", "Which color does the {x} have?", "What is the color of the {x}?"),
    "size": ("Is the {x} small or large?", "How big is the {x}, small or large?"),
    "where": ("Where is the {x}?", "Where in the picture is the {x}?", "What is the position of the {x}?"),
    "where is a color": ("Where is the {x} object?", "Where is the {x} thing?"),
    "shape": ("What shape is the {x} object?", "Which shape is {x}?"),
    "color_at": ("What color is the object in the {x}?", "Which color is the thing in the {x}?"),
    "shape_at": ("What shape is in the {x}?", "Which shape do you see in the {x}?"),
    "digit": ("Which digit is in the {x}?", "What number do you see in the {x}?"),
    "count": ("How many objects are there?", "How many objects are in the picture?", "Count the objects."),
    "background": ("What color is the background?", "Which color is the background?"),
    "exists": ("Is there a {x}?", "Is there a {x} in the picture?", "Can you see a {x}?"),
}
WORDS = tuple(
    sorted(
        {*GROUNDS, *SHAPES, *SIZES, *NUMBERS, *ROWS, *COLUMNS, "empty", *_LAST.replace("{} ", "").split(" ")}
    )
)
"""Every word that stands for a patch; each is one token of common tokenizers, with a space before it."""


@dataclass(frozen=True)
class Thing:
    """An object; its place is a number, 0 top left .. 8 bottom right, its centre and radius are in pixels."""

    place: int
    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float

    @property
    def kind(self) -> str:
        """Return the shape in one word; for a digit the number's name."""
        return NUMBERS[int(self.shape)] if self.shape in DIGITS else self.shape

    @property
    def name(self) -> str:
        """Return what the object is called in a sentence."""
        return f"digit {self.kind}" if self.shape in DIGITS else self.kind


@dataclass(frozen=True)
class Picture:
    """A drawn picture: its background and the objects on it."""

    ground: str
    things: tuple[Thing, ...]


class PictureQuestion(NamedTuple):
    """A question of a kind. The answer is `before`, `key` and `after` put together; `key` decides."""

    kind: str
    text: str
    before: str
    key: str
    after: str

    @property
    def answer(self) -> str:
        """Return the whole answer."""
        return self.before + self.key + self.after


def draw_picture(rng: random.Random, most: int = 4) -> Picture:
    """Return a picture of 1 to `most` objects."""
    ground = rng.choice(list(GROUNDS))
    colors = [color for color in GROUNDS if color != ground]
    things: list[Thing] = []
    for place in sorted(rng.sample(range(9), rng.randint(1, most))):
        shape = rng.choice(DIGITS) if rng.random() < 0.15 else rng.choice(SHAPES)
        if things and rng.random() < 0.15:
            shape = rng.choice(things).shape
        size = rng.choice(list(SIZES))
        radius = rng.uniform(*SIZES[size])
        free = min(_JITTER, _ROOM - radius)
        x, y = (
            centres[at] + rng.uniform(-free, free) for centres, at in zip(_CENTRES, (place % 3, place // 3))
        )
        things.append(Thing(place, shape, rng.choice(colors), size, x, y, radius))
    return Picture(ground, tuple(things))


def render(picture: Picture, rng: random.Random) -> np.ndarray:
    """Return a picture as uint8 `[224, 224, 3]`; the shade of each colour varies."""

    def shade(color: str) -> tuple[int, ...]:
        return tuple(max(0, min(255, value + rng.randint(-12, 12))) for value in GROUNDS[color])

    canvas = PILImage.new("RGB", (SIDE, SIDE), shade(picture.ground))
    for thing in picture.things:
        side = 72  # an object is drawn alone, twice as large, for smooth edges
        mask = PILImage.new("L", (2 * side, 2 * side), 0)
        outline(
            thing.shape,
            ImageDraw.Draw(mask),
            side + thing.x % 1 * 2,
            side + thing.y % 1 * 2,
            2 * thing.radius,
            255,
        )
        mask = mask.resize((side, side), PILImage.Resampling.BOX)
        canvas.paste(shade(thing.color), (int(thing.x) - side // 2, int(thing.y) - side // 2), mask)
    return np.asarray(canvas)


def questions(picture: Picture, rng: random.Random) -> list[PictureQuestion]:
    """Return a question of every sort that the picture answers, with wordings drawn at random."""
    things, found = picture.things, []
    shapes, colors = Counter(t.shape for t in things), Counter(t.color for t in things)

    def ask(kind: str, x: str, before: str, key: str, after: str = ".", wordings: str = "") -> None:
        text = rng.choice(_WORDINGS[wordings or kind]).format(x=x)
        found.append(PictureQuestion(kind, text, before, key, after))

    for t in things:
        place = PLACES[t.place]
        if shapes[t.shape] == 1:
            ask("color", t.name, f"The {t.name} is", f" {t.color}")
            ask("size", t.name, f"The {t.name} is", f" {t.size}")
            ask("where", t.name, f"The {t.name} is in the", f" {place}")
        if colors[t.color] == 1:
            ask("where", t.color, f"The {t.color} object is in the", f" {place}", wordings="where is a color")
            if t.shape not in DIGITS:
                ask("shape", t.color, f"The {t.color} object is a", f" {t.name}")
        ask("color_at", place, f"The object in the {place} is", f" {t.color}")
        if t.shape in DIGITS:
            ask("digit", place, f"The digit in the {place} is", f" {t.kind}")
        else:
            ask("shape_at", place, f"The shape in the {place} is a", f" {t.name}")
    ask("count", "", "The number of objects is", f" {NUMBERS[len(things)]}")
    ask("background", "", "The background is", f" {picture.ground}")
    shape = rng.choice(SHAPES) if rng.random() < 0.5 else rng.choice(things).shape
    name = f"digit {NUMBERS[int(shape)]}" if shape in DIGITS else shape
    there = ("Yes", f", there is a {name}.") if shapes[shape] else ("No", f", there is no {name}.")
    ask("exists", name, "", *there)
    return found


def describe(picture: Picture, rng: random.Random) -> PictureQuestion:
    """Return the question for everything in a picture; its answer has no single word that decides."""
    parts = [f"a {t.size} {t.color} {t.name} in the {PLACES[t.place]}" for t in picture.things]
    text = rng.choice(["Describe the picture.", "What is in the picture?", "What do you see?"])
    listed = ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1]
    return PictureQuestion("describe", text, "There is ", listed, f" on a {picture.ground} background.")


def pick(picture: Picture, rng: random.Random, count: int) -> list[PictureQuestion]:
    """Return up to `count` questions, each asked once, with the kinds as even as the picture allows."""
    by_kind: dict[str, list[PictureQuestion]] = {}
    for question in questions(picture, rng):
        by_kind.setdefault(question.kind, []).append(question)
    piles = list(by_kind.values())
    rng.shuffle(piles)
    for pile in piles:
        rng.shuffle(pile)
    deepest = max(map(len, piles))
    return [pile[depth] for depth in range(deepest) for pile in piles if depth < len(pile)][:count]


def _spelled(thing: Thing | None, place: int, width: int, reverse: bool) -> list[str]:
    """Return the words of a row of patches in a place, from the object to its place or the other way round."""
    what = ["empty"] * 3 if thing is None else [thing.size, thing.color, thing.kind]
    where = [ROWS[place // 3], COLUMNS[place % 3]] if width == 5 else [PLACES[place].split()[0]]
    return where + what if reverse else what + where


def words(picture: Picture) -> list[str]:
    """Return a word for each of the 196 patches, in reading order.

    A row of a place says `small red circle top left`, the next one `top left small red circle`, and so on. The last row
    of patches says how many objects there are and what they lie on.
    """
    at = {thing.place: thing for thing in picture.things}
    columns, rows = _BOUNDS
    said = []
    for row in range(3):
        for patch in range(rows[row], rows[row + 1]):
            for column in range(3):
                place = 3 * row + column
                width = columns[column + 1] - columns[column]
                said += _spelled(at.get(place), place, width, (patch - rows[row]) % 2 == 1)
    return said + _LAST.format(NUMBERS[len(picture.things)], picture.ground).split(" ")


SPOKEN = tuple(
    i
    for i, (one, other) in enumerate(
        zip(
            words(Picture("red", tuple(Thing(p, "star", "red", "small", 0, 0, 0) for p in range(9)))),
            words(Picture("blue", ())),
        )
    )
    if one != other
)
"""Patches whose word depends on the picture; those of the others are always the same."""


def covered(picture: Picture) -> np.ndarray:
    """Return which object, by its number + 1, reaches into each patch, `[14, 14]`; 0 for none."""
    centres = (np.arange(GRID) + 0.5) * PATCH
    found = np.zeros((GRID, GRID), np.int64)
    for number, thing in enumerate(picture.things):
        inside = np.maximum(abs(centres[None] - thing.x), abs(centres[:, None] - thing.y)) < thing.radius + 4
        found[inside] = number + 1
    return found
