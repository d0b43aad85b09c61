"""Questions about chunks, and their answers."""

from __future__ import annotations

import random
from typing import NamedTuple

from mpic_lab.generator.documents import Fact
from mpic_lab.generator.images import Scene
from mpic_lab.generator.wordings import Asking, draw
from mpic_lab.generator.words import DIGITS, POSITIONS

ATTRIBUTES = ("city", "job", "pet")


class Question(NamedTuple):
    """A question; two wordings of the same question share a `key`."""

    kind: str
    text: str
    answer: str
    key: str
    shape: str = ""  # whose colours are compared


def ask(rng: random.Random, asking: Asking, kind: str, **slots: str) -> str:
    """Draw a wording and fill it in."""
    return draw(rng, asking, kind).format(**slots)


_IMAGE_KINDS = (
    ("colour",) * 4 + ("shape",) * 3 + ("position",) * 3 + ("where",) * 2 + ("count",) * 2 + ("digit",) * 2
)


def about_image(
    rng: random.Random, asking: Asking, scene: Scene, label: str, kind: str | None = None
) -> Question:
    """Return a question about one image."""
    kind = kind or rng.choice(_IMAGE_KINDS)
    digit = next((s for _, _, s in scene.objects if s in DIGITS), None)
    if kind == "digit" and digit is None:
        kind = "colour"
    quadrant, colour, shape = rng.choice(scene.objects)
    if kind == "position" and rng.random() < 0.3:
        quadrant = rng.randrange(4)
    slot, answer = {
        "colour": (shape, colour),
        "shape": (colour, shape),
        "position": (POSITIONS[quadrant], scene.at(quadrant)),
        "where": (f"{colour} {shape}", POSITIONS[quadrant]),
        "count": ("", str(len(scene.objects))),
        "digit": ("", digit or ""),
        "caption": ("", scene.caption()),
    }[kind]
    return Question(kind, ask(rng, asking, kind, L=label, x=slot), answer, f"{kind} {label} {slot}")


def about_document(rng: random.Random, asking: Asking, fact: Fact, label: str) -> Question:
    """Return a question about one document."""
    key = rng.choice(list(fact.facts))
    if fact.kind == "card":
        label = fact.title or label
        return Question("card", ask(rng, asking, "card", L=label, x=key), fact.facts[key], f"{label} {key}")
    if fact.kind == "needle":
        return Question("needle", ask(rng, asking, "needle", x=key), fact.facts[key], key)
    return Question(key, ask(rng, asking, key, x=fact.subject), fact.facts[key], f"{key} {fact.subject}")


def two_hop(rng: random.Random, asking: Asking, person: Fact, friend: Fact) -> Question:
    """Ask where the friend of someone lives (or works); the answer names the friend first."""
    key = rng.choice(("city", "job"))
    verb = {"city": "lives in", "job": "works as a"}[key]
    text = ask(rng, asking, f"friend {key}", x=person.subject)
    answer = f"{friend.subject} {verb} {friend.facts[key]}"
    return Question(f"friend {key}", text, answer, f"friend {key} {person.subject}")


def both(rng: random.Random, asking: Asking, a: Fact, b: Fact) -> Question:
    """Ask whether two people live in one city or have one job. The answer shows its reasons."""
    key = rng.choice(("city", "job"))
    first, second = a.facts[key], b.facts[key]
    verdict = "yes" if first == second else "no"
    text = ask(rng, asking, f"both {key}", x=a.subject, y=b.subject)
    return Question(
        f"both {key}", text, f"{first} and {second}, so {verdict}", f"both {key} {a.subject} {b.subject}"
    )


def compare(
    rng: random.Random, asking: Asking, a: tuple[str, Scene], b: tuple[str, Scene], kind: str | None = None
) -> Question | None:
    """Ask which of two images has more shapes, or whether a shape they share has one colour. The answer shows its
    reasons."""
    (label_a, scene_a), (label_b, scene_b) = a, b
    colours_a, colours_b = ({s: c for _, c, s in scene.objects} for scene in (scene_a, scene_b))
    shared = sorted(set(colours_a) & set(colours_b))
    kind = kind or rng.choice(("more", "same"))
    if kind == "same" and shared:
        shape = rng.choice(shared)
        first, second = colours_a[shape], colours_b[shape]
        if first != second and rng.random() < 0.8:
            return None  # few random pairs share a colour, but about half of the pairs in questions should
        verdict = "yes" if first == second else "no"
        text = ask(rng, asking, "same", L=label_a, M=label_b, x=shape)
        return Question(
            "same", text, f"{first} and {second}, so {verdict}", f"{shape} {label_a} {label_b}", shape
        )
    first, second = str(len(scene_a.objects)), str(len(scene_b.objects))
    if kind == "more" and first != second:
        verdict = "first" if first > second else "second"
        text = ask(rng, asking, "more", L=label_a, M=label_b)
        return Question("more", text, f"{first} and {second}, so the {verdict}", f"more {label_a} {label_b}")
    return None
