"""Images: up to four coloured shapes or digits, one per quadrant.

Those of 64 x 64 px are put together from pre-rendered sprites; on large ones every shape has a place and a size of its
own within its quadrant.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from mpic_lab.generator.words import COLOURS, DIGITS, POSITIONS, SHAPES, Split

SIZE = 64
CELL = SIZE // 2
LARGE = 336
_SCALE = 4
_VARIANTS = {"train": 16, "eval": 8}
_MASKS = {"train": 48, "eval": 16}
_SPRITE_SEED = {"train": 0, "eval": 99}
_LEVELS = (4, 36, 68, 100)
BACKGROUND_LEVELS = tuple(
    (i, j, (i + j) % len(_LEVELS)) for i in range(len(_LEVELS)) for j in range(len(_LEVELS))
)
"""Levels of red, green and blue of every background of large images; two of them differ in two colours at least. Large
images in one prompt have different backgrounds, by which patches of one image can be distinguished from those of
others, as by light and grain in photographs."""
BACKGROUNDS = tuple(tuple(_LEVELS[level] for level in levels) for levels in BACKGROUND_LEVELS)
_JITTER = 6
PATCH = 14
"""Side of the patch of a large image that becomes an image token, pixels."""
_LINES = 3  # pixels at the top and left of each patch that show the background, like gaps between tiles


@dataclass(frozen=True)
class Scene:
    """The objects of an image: quadrant index (0 top left .. 3 bottom right) -> (colour, shape or digit).

    Attributes:
        background: index into `BACKGROUNDS` of a large image; none: any is drawn when it is rendered.
    """

    objects: tuple[tuple[int, str, str], ...]
    background: int | None = None

    def at(self, quadrant: int) -> str:
        """Return the object of a quadrant in words, or "nothing"."""
        return next((f"{c} {s}" for q, c, s in self.objects if q == quadrant), "nothing")

    def caption(self) -> str:
        """Return all objects with their places, in reading order."""
        return ", ".join(
            f"{'an' if c == 'orange' else 'a'} {c} {s} {POSITIONS[q]}" for q, c, s in self.objects
        )


def draw_scene(rng: random.Random, count: int | None = None, digits: bool = True) -> Scene:
    """Return a scene of 1-4 objects; colours and shapes are distinct within it."""
    count = count or rng.randint(1, 4)
    quadrants = sorted(rng.sample(range(4), count))
    colours, shapes = rng.sample(list(COLOURS), count), rng.sample(SHAPES, count)
    if digits and rng.random() < 0.25:
        shapes[rng.randrange(count)] = rng.choice(DIGITS)
    return Scene(tuple(zip(quadrants, colours, shapes, strict=True)))


def outline(
    shape: str, draw: ImageDraw.ImageDraw, cx: float, cy: float, r: float, fill: tuple[int, ...]
) -> None:
    """Draw a shape or digit of radius `r` around a point, pixels."""
    if shape == "circle":
        draw.ellipse([cx - r, cy - r, cx + r, cy + r], fill=fill)
    elif shape == "square":
        draw.rectangle([cx - r * 0.85, cy - r * 0.85, cx + r * 0.85, cy + r * 0.85], fill=fill)
    elif shape == "triangle":
        draw.polygon([(cx, cy - r), (cx - r, cy + r * 0.8), (cx + r, cy + r * 0.8)], fill=fill)
    elif shape == "ring":
        draw.ellipse([cx - r, cy - r, cx + r, cy + r], outline=fill, width=int(r * 0.36))
    elif shape == "cross":
        w = r * 0.32
        draw.rectangle([cx - w, cy - r, cx + w, cy + r], fill=fill)
        draw.rectangle([cx - r, cy - w, cx + r, cy + w], fill=fill)
    elif shape == "star":
        points = []
        for i in range(10):
            angle, radius = -math.pi / 2 + i * math.pi / 5, r if i % 2 == 0 else r * 0.45
            points.append((cx + radius * math.cos(angle), cy + radius * math.sin(angle)))
        draw.polygon(points, fill=fill)
    else:  # a digit
        draw.text((cx, cy), shape, fill=fill, font=ImageFont.load_default(r * 2.6), anchor="mm")


def _sprite(colour: str, shape: str, rng: random.Random) -> np.ndarray:
    side = CELL * _SCALE
    canvas = PILImage.new("RGBA", (side, side), (0, 0, 0, 0))
    radius = rng.uniform(0.31, 0.43) * side
    cx, cy = (side * (0.5 + rng.uniform(-0.06, 0.06)) for _ in range(2))
    fill = (*tuple(int(max(0, min(255, v + rng.uniform(-15, 15)))) for v in COLOURS[colour]), 255)
    outline(shape, ImageDraw.Draw(canvas), cx, cy, radius, fill)
    return np.asarray(canvas.resize((CELL, CELL), PILImage.Resampling.LANCZOS), dtype=np.float32)


@functools.cache
def sprites(split: Split) -> dict[tuple[str, str], list[np.ndarray]]:
    """Return RGBA sprites of every (colour, shape); the two splits share none."""
    rng = random.Random(_SPRITE_SEED[split])
    return {
        (c, s): [_sprite(c, s, rng) for _ in range(_VARIANTS[split])]
        for c in COLOURS
        for s in SHAPES + DIGITS
    }


def render(scene: Scene, rng: random.Random, split: Split) -> np.ndarray:
    """Return the scene as uint8 [64, 64, 3] on a dark background."""
    pixels = np.full((SIZE, SIZE, 3), rng.randint(0, 50), np.float32)
    for quadrant, colour, shape in scene.objects:
        sprite = rng.choice(sprites(split)[(colour, shape)])
        y, x = (quadrant // 2) * CELL, (quadrant % 2) * CELL
        alpha = sprite[..., 3:] / 255.0
        cell = pixels[y : y + CELL, x : x + CELL]
        pixels[y : y + CELL, x : x + CELL] = cell * (1 - alpha) + sprite[..., :3] * alpha
    return pixels.astype(np.uint8)


@functools.cache
def _masks(split: Split, shape: str) -> list[np.ndarray]:
    """Return masks of a quadrant of a large image, 0 to 255 where the shape covers it; the two splits share none."""
    rng, side = random.Random(f"{split}-{shape}-{_SPRITE_SEED[split]}"), LARGE // 2
    out = []
    for _ in range(_MASKS[split]):
        canvas = PILImage.new("L", (2 * side, 2 * side), 0)
        radius = rng.uniform(0.30, 0.43) * side
        cx, cy = (side * (0.5 + rng.uniform(-0.06, 0.06)) for _ in range(2))
        outline(shape, ImageDraw.Draw(canvas), 2 * cx, 2 * cy, 2 * radius, 255)
        out.append(np.asarray(canvas.resize((side, side), PILImage.Resampling.BOX)))
    return out


def render_large(scene: Scene, rng: random.Random, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return the scene as uint8 [336, 336, 3], and the share of every pixel that an object covers, [336, 336] in [0,
    1]."""
    background = rng.randrange(len(BACKGROUNDS)) if scene.background is None else scene.background
    shift = [level + rng.uniform(-_JITTER, _JITTER) for level in BACKGROUNDS[background]]
    shade = np.clip(np.array(shift, np.float32), 0, 255)
    pixels = np.zeros((LARGE, LARGE, 3), np.float32) + shade
    cover = np.zeros((LARGE, LARGE), np.float32)
    side = LARGE // 2
    for quadrant, colour, shape in scene.objects:
        alpha = rng.choice(_masks(split, shape)).astype(np.float32)[..., None] / 255
        fill = np.array([max(0, min(255, v + rng.uniform(-15, 15))) for v in COLOURS[colour]], np.float32)
        y, x = (quadrant // 2) * side, (quadrant % 2) * side
        cell = pixels[y : y + side, x : x + side]
        pixels[y : y + side, x : x + side] = cell * (1 - alpha) + fill * alpha
        cover[y : y + side, x : x + side] = alpha[..., 0]
    lines = np.arange(LARGE) % PATCH < _LINES
    pixels[lines, :], pixels[:, lines] = shade, shade
    return pixels.astype(np.uint8), cover
