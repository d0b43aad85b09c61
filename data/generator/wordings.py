"""In which words questions are asked: `wordings.toml`, which says what its three lists are."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Literal

Asking = Literal["train", "eval", "fresh"]

WORDINGS: dict[str, dict[Asking, list[str]]] = tomllib.loads(
    (Path(__file__).parent / "wordings.toml").read_text(encoding="utf-8")
)


def draw(rng: random.Random, asking: Asking, kind: str) -> str:
    """A wording, its slots empty."""
    return rng.choice(WORDINGS[kind][asking])
