"""The tokens of a prompt that a model lets attend to each other in both directions: those of an image, or all.

Models receive the type of every token together with its embedding. The meaning of a type is found from the masks that a
model makes for prompts of chosen types; no family is treated specially. By transformers' convention text has type 0 and
an image's tokens type 1 (``create_mm_token_type_ids``); a model whose tokens of type 0 already see what comes after
them is a prefix language model, in which a prompt has type 0 and generated tokens have type 1 (PaliGemma, arXiv
2407.07726, section 3.1).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch
from torch import nn

from mpic.errors import ModelRefused
from mpic.kernels.patterns import Blocks
from mpic.kernels.windows import Window

_NAMES = ("token_type_ids", "mm_token_type_ids")
Mask = Callable[[int, int], bool]
"""Whether a row sees a key, by their places in the prompt."""


class Scope(Enum):
    """The tokens of a prompt that attend to each other in both directions."""

    IMAGE = "image"
    PROMPT = "prompt"


def types_name(model: nn.Module) -> str | None:
    """Return the name under which a model takes the types of tokens, or None."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in _NAMES if name in taken), None)


def token_types(scope: Scope | None, is_image: torch.Tensor) -> torch.Tensor:
    """Return the types that a model's processor gives to the tokens of a prompt, ``[tokens]`` int64."""
    return torch.zeros_like(is_image, dtype=torch.int64) if scope is Scope.PROMPT else is_image.long()


def find_blocks(
    windows: Sequence[Window | None], masks: Callable[[torch.Tensor], Sequence[Mask]]
) -> tuple[Scope | None, list[Blocks | None]]:
    """Find the tokens that see later ones, and the layers in which they do.

    Args:
        windows: windows of the layers, for text alone.
        masks: returns the layers' masks for the types ``[tokens]`` of a prompt.

    Raises:
        ModelRefused: types change the masks in a way that blocks do not describe.
    """
    sizes = {window.size for window in windows if window is not None}
    block = max(sizes, default=8) + 9  # longer than any window
    text = torch.zeros(4 * block, dtype=torch.int64)
    if any(sees(2, 5) for sees in masks(text)):
        types = text.clone()
        types[2 * block :] = 1
        scope, ranges = Scope.PROMPT, [(0, 2 * block)]
    else:
        ranges = [(5, 5 + block), (block + 9, 3 * block)]
        types = text.clone()
        for lo, hi in ranges:
            types[lo:hi] = 1
        scope = Scope.IMAGE
    found = [
        _blocks(window, sees, ranges, len(types)) for window, sees in zip(windows, masks(types), strict=True)
    ]
    if not any(found):
        return None, found
    cut = [window for window, blocks in zip(windows, found, strict=True) if blocks is Blocks.WHOLE]
    if scope is Scope.IMAGE and any(cut):
        raise ModelRefused("its windows leave out parts of the text and no part of an image")
    return scope, found


def _blocks(window: Window | None, sees: Mask, ranges: list[tuple[int, int]], length: int) -> Blocks | None:
    """Return the member of ``Blocks`` that describes a layer's mask of the blocks at ``ranges``, or None if its rows
    do not see later ones. Raise ModelRefused if neither describes the mask."""
    lo, hi = ranges[0]
    if not sees(lo, hi - 1):
        blocks = None
    else:
        blocks = Blocks.WHOLE if window is None or sees(hi - 1, lo) else Blocks.WINDOWED
    generator = np.random.default_rng(0)
    edges = sorted({place for lo, hi in ranges for place in (lo - 1, lo, hi - 1, hi)} - {-1})
    for row in (*edges, *generator.integers(0, length, 32).tolist()):
        floor = 0 if window is None else int(window.floor(np.array([row]))[0])
        block = next(((lo, hi) for lo, hi in ranges if lo <= row < hi), (row, row))
        for key in {*edges, *generator.integers(0, length, 8).tolist(), max(floor - 1, 0), floor}:
            expected = floor <= key <= row
            if blocks is not None and block[0] <= key < block[1]:
                expected = blocks is Blocks.WHOLE or key >= floor
            if sees(row, key) != expected:
                raise ModelRefused("the types of tokens change its masks by more than blocks")
    return blocks
