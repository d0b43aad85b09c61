"""The words in which questions are asked: lists of wordings by kind of question, a file each, with its source.

In a wording {L} and {M} are labels such as "image two", {A} and {B} images that stand inside the sentence, {x} and {y}
the subjects of the question. `questions.py` and `tasks.py` define what each kind asks.
"""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Literal, get_args

Asking = Literal["train", "eval", "fresh", "free"]

WORDINGS: dict[Asking, dict[str, list[str]]] = {
    name: tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))
    for name in get_args(Asking)
}
"""The wordings of each list, by kind of question. Models are trained with `train`; the others are held out."""

_AROUND = (
    *(
        "A question: {q}",
        "Please answer: {q}",
        "Now: {q}",
        "Then: {q}",
        "So: {q}",
        "And {q}",
        "One more: {q}",
    ),
    *("Hello. {q}", "Hi! {q}", "Look again. {q}", "I want to know: {q}", "Another one. {q}", "Ok. {q}"),
    *(
        "{q} Please answer.",
        "{q} Thank you.",
        "{q} Thanks!",
        "{q} Please look.",
        "{q} Answer in a few words.",
    ),
)


def draw(rng: random.Random, asking: Asking, kind: str) -> str:
    """Draw a wording with empty slots. Training wordings sometimes contain typing errors or an extra word in front."""
    wording = rng.choice(WORDINGS[asking][kind])
    if asking != "train":
        return wording
    if rng.random() < 0.15 and not wording.startswith("{"):
        wording = wording[0].lower() + wording[1:]
    if rng.random() < 0.15:
        return wording.rstrip(".?")
    return rng.choice(_AROUND).replace("{q}", wording) if rng.random() < 0.15 else wording
