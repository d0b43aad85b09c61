"""Questions about chunks. Every kind has several wordings; the last ones are kept for evaluation."""

from __future__ import annotations

import random
from typing import NamedTuple

from mpic.data.generator.documents import Fact
from mpic.data.generator.images import Scene
from mpic.data.generator.words import DIGITS, POSITIONS, Split

# kind -> (training wordings, evaluation wordings); {L} and {M} are labels such as "image two"
WORDINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "colour": (
        (
            "In {L}, what colour is the {x}?",
            "What colour is the {x} in {L}?",
            "In {L}, the colour of the {x}?",
            "Which colour is the {x} in {L}?",
            "In {L}, which colour has the {x}?",
            "What colour has the {x} in {L}?",
            "Please say the colour of the {x} in {L}.",
        ),
        ("In {L}, what is the colour of the {x}?", "What is the colour of the {x} in {L}?"),
    ),
    "shape": (
        (
            "In {L}, what is {x}?",
            "What is {x} in {L}?",
            "In {L}, which shape is {x}?",
            "What is the {x} shape in {L}?",
            "In {L}, what is the {x} shape?",
            "Please say what is {x} in {L}.",
        ),
        ("In {L}, what shape is {x}?", "Which shape is {x} in {L}?"),
    ),
    "position": (
        (
            "In {L}, what is at the {x}?",
            "What is at the {x} of {L}?",
            "In {L}, what do you see {x}?",
            "What is there at the {x} of {L}?",
            "At the {x} of {L}, what is there?",
            "In {L}, what do you see at the {x}?",
        ),
        ("In {L}, what is {x}?", "What do you see at the {x} of {L}?"),
    ),
    "where": (
        (
            "In {L}, where is the {x}?",
            "Where is the {x} in {L}?",
            "Where do you see the {x} in {L}?",
            "The {x} in {L} is where?",
            "Please say where the {x} is in {L}.",
        ),
        ("Where in {L} is the {x}?", "In {L}, where do you see the {x}?"),
    ),
    "count": (
        (
            "In {L}, how many shapes are there?",
            "How many shapes are in {L}?",
            "How many shapes does {L} show?",
            "Please say how many shapes are in {L}.",
            "How many shapes has {L}?",
        ),
        ("How many shapes do you see in {L}?", "In {L}, how many shapes do you see?"),
    ),
    "digit": (
        (
            "In {L}, which digit is there?",
            "Which digit is in {L}?",
            "Which digit does {L} show?",
            "What is the digit in {L}?",
            "In {L}, what is the digit?",
        ),
        ("In {L}, which digit do you see?", "What digit is in {L}?"),
    ),
    "caption": (
        (
            "Describe {L}.",
            "What does {L} show?",
            "What is in {L}?",
            "In {L}, what do you see?",
            "What is there in {L}?",
            "Please say what {L} shows.",
            "Describe all of {L}.",
            "Please describe all of {L}.",
            "Describe what you see in {L}.",
            "What do you see there in {L}?",
        ),
        ("Please describe {L}.", "What do you see in {L}?"),
    ),
    "card": (
        (
            "In {L}, what is the {x}?",
            "What is the {x} in {L}?",
            "What {x} does {L} say?",
            "In {L}, the {x}?",
            "Which {x} is in {L}?",
            "What is the {x} of {L}?",
            "Please say the {x} in {L}.",
            "{L} says which {x}?",
            "Which {x} has {L}?",
            "{L} has which {x}?",
            "In {L}, {x} is what?",
            "Is there a {x} in {L}, and which?",
            "What is there as the {x} in {L}?",
        ),
        ("In {L}, which {x} is there?", "Which {x} does {L} say?"),
    ),
    "needle": (
        (
            "What is the code of the {x}?",
            "Which code has the {x}?",
            "Which is the code of the {x}?",
            "Please say the code of the {x}.",
            "The code of the {x} is what?",
            "For the {x}, what is the code?",
            "What code has the {x}?",
            "The {x}: which code?",
            "The {x} has which code?",
            "What is it that is the code of the {x}?",
            "Which code does the {x} have?",
            "The {x} has what code?",
        ),
        ("The {x}: what is the code?", "What code does the {x} have?"),
    ),
    "city": (
        (
            "Where does {x} live?",
            "In which city does {x} live?",
            "Please say where {x} lives.",
            "{x} lives in which city?",
            "What is the city of {x}?",
            "Is it said where {x} lives?",
            "{x}: where does this person live?",
            "{x} lives in what city?",
            "Where is it that {x} lives?",
            "For {x}, what is the city?",
            "Which city does {x} live in?",
            "{x} is a person who lives where?",
            "Where then does {x} live?",
            "In which city is it that {x} lives?",
            "Which is the city of {x}?",
            "{x} has a city to live in: which?",
            "The city of {x} is what?",
        ),
        ("What city does {x} live in?", "{x} lives where?"),
    ),
    "job": (
        (
            "What is the job of {x}?",
            "What does {x} do?",
            "{x} has what job?",
            "As what does {x} work?",
            "What job has {x}?",
            "{x} works as a what?",
            "For {x}, what is the job?",
            "Please say the job of {x}.",
            "What does {x} work as?",
            "{x} is a person who works as what?",
            "Which job has {x}?",
            "Which is the job of {x}?",
            "{x} has which job?",
            "What job does {x} have?",
            "The job of {x} is what?",
        ),
        ("Which job does {x} have?", "{x} works as what?"),
    ),
    "pet": (
        (
            "What pet does {x} have?",
            "Which pet has {x}?",
            "{x} has what pet?",
            "What pet has {x}?",
            "For {x}, what is the pet?",
            "Please say the pet of {x}.",
            "Which pet does {x} have?",
            "{x} is a person who has which pet?",
            "Which is the pet of {x}?",
            "{x} has a pet: which?",
            "Which pet is it that {x} has?",
            "The pet of {x} is what?",
        ),
        ("What is the pet of {x}?", "{x} has which pet?"),
    ),
    "friend": (
        (
            "Who is the friend of {x}?",
            "Who is a friend of {x}?",
            "{x} has which friend?",
            "What friend has {x}?",
            "Please say the friend of {x}.",
            "For {x}, who is the friend?",
            "What friend does {x} have?",
            "{x} is a person who has which friend?",
            "Which friend has {x}?",
            "Who then is the friend of {x}?",
            "The friend of {x} is which person?",
            "{x} has a friend: who is it?",
            "Which person is the friend of {x}?",
        ),
        ("Which friend does {x} have?", "The friend of {x} is who?"),
    ),
    "friend city": (
        (
            "Where does the friend of {x} live?",
            "In which city does the friend of {x} live?",
            "What is the city of the friend of {x}?",
            "The friend of {x} lives in what city?",
            "Where is it that the friend of {x} lives?",
            "{x} has a friend: where does this person live?",
            "The friend of {x} lives in which city?",
            "Please say where the friend of {x} lives.",
            "Which city does the friend of {x} live in?",
            "{x} has a friend who lives where?",
            "Where then does the friend of {x} live?",
            "Which is the city of the friend of {x}?",
            "The city of the friend of {x} is what?",
            "In which city is it that the friend of {x} lives?",
        ),
        ("What city does the friend of {x} live in?", "The friend of {x} lives where?"),
    ),
    "friend job": (
        (
            "What is the job of the friend of {x}?",
            "What does the friend of {x} do?",
            "The friend of {x} has what job?",
            "Which job has the friend of {x}?",
            "The friend of {x} works as a what?",
            "{x} has a friend: what is the job of this person?",
            "What does the friend of {x} work as?",
            "Please say the job of the friend of {x}.",
            "As what does the friend of {x} work?",
            "{x} has a friend who works as what?",
            "What job does the friend of {x} have?",
            "Which is the job of the friend of {x}?",
            "The friend of {x} has which job?",
            "What job has the friend of {x}?",
            "The job of the friend of {x} is what?",
        ),
        ("Which job does the friend of {x} have?", "The friend of {x} works as what?"),
    ),
    "more": (
        (
            "Which has more shapes, {L} or {M}?",
            "Are there more shapes in {L} or in {M}?",
            "Has {L} or {M} more shapes?",
            "In which are there more shapes, {L} or {M}?",
            "Which of {L} and {M} has more shapes?",
            "Does {L} have more shapes or does {M}?",
            "More shapes: {L} or {M}?",
            "In which do you see more shapes, {L} or {M}?",
            "Which of {L} and {M} shows more shapes?",
        ),
        ("Does {L} or {M} have more shapes?", "Which shows more shapes, {L} or {M}?"),
    ),
    "same": (
        (
            "Is the {x} in {L} the same colour as the {x} in {M}?",
            "Has the {x} in {L} the same colour as the {x} in {M}?",
            "Are the {x} in {L} and the {x} in {M} of the same colour?",
            "The {x} in {L} and the {x} in {M}: is it the same colour?",
            "Do the {x} in {L} and in {M} have one colour?",
            "Is the colour of the {x} in {L} the same as in {M}?",
            "Are the {x} in {L} and in {M} the same colour?",
            "Does the {x} in {L} have the same colour as the {x} in {M}?",
        ),
        ("Do the {x} in {L} and the {x} in {M} have the same colour?",),
    ),
    "last city": (
        (
            "Where does the last person live?",
            "In which city does the last person live?",
            "The last person lives in which city?",
            "In what city does the last person live?",
            "What is the city of the last person?",
            "Please say where the last person lives.",
            "The last person lives where?",
            "Which city does the last person live in?",
            "Which is the city of the last person?",
            "The last person is one who lives where?",
        ),
        ("What city does the last person live in?",),
    ),
    "last job": (
        (
            "What is the job of the last person?",
            "What does the last person do?",
            "The last person has what job?",
            "Which job has the last person?",
            "What job has the last person?",
            "What does the last person work as?",
            "Please say the job of the last person.",
            "The last person works as what?",
            "What job does the last person have?",
            "Which is the job of the last person?",
            "The last person has which job?",
        ),
        ("Which job does the last person have?",),
    ),
    "library": (
        (
            "In the library picture with a {x}, how many shapes are there?",
            "How many shapes are in the library picture with a {x}?",
            "How many shapes does the library picture with a {x} show?",
            "Look in the library for a picture with a {x}: how many shapes are there?",
            "Please say how many shapes the library picture with a {x} shows.",
            "In the library picture with a {x}: how many shapes?",
            "How many shapes has the library picture with a {x}?",
        ),
        ("In the library picture with a {x}, how many shapes do you see?",),
    ),
    "library colour": (
        (
            "In the library picture with a {x}, what colour is the {y}?",
            "What colour is the {y} in the library picture with a {x}?",
            "In the library picture with a {x}, which colour has the {y}?",
            "The library picture with a {x}: what colour is the {y}?",
            "Please say the colour of the {y} in the library picture with a {x}.",
            "In the library picture with a {x}, the colour of the {y} is what?",
        ),
        ("In the library picture with a {x}, what is the colour of the {y}?",),
    ),
}
ATTRIBUTES = ("city", "job", "pet")


class Question(NamedTuple):
    """A question; two wordings of the same question share a `key`."""

    kind: str
    text: str
    answer: str
    key: str


def ask(rng: random.Random, split: Split, kind: str, **slots: str) -> str:
    """A wording of the split, filled in."""
    train, held_out = WORDINGS[kind]
    return rng.choice(train if split == "train" else held_out).format(**slots)


_IMAGE_KINDS = (
    ("colour",) * 4 + ("shape",) * 3 + ("position",) * 3 + ("where",) * 2 + ("count",) * 2 + ("digit",) * 2
)


def about_image(
    rng: random.Random, split: Split, scene: Scene, label: str, kind: str | None = None
) -> Question:
    """A question about one image."""
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
    return Question(kind, ask(rng, split, kind, L=label, x=slot), answer, f"{kind} {label} {slot}")


def about_document(rng: random.Random, split: Split, fact: Fact, label: str) -> Question:
    """A question about one document."""
    key = rng.choice(list(fact.facts))
    if fact.kind == "card":
        return Question("card", ask(rng, split, "card", L=label, x=key), fact.facts[key], f"{label} {key}")
    if fact.kind == "needle":
        return Question("needle", ask(rng, split, "needle", x=key), fact.facts[key], key)
    return Question(key, ask(rng, split, key, x=fact.subject), fact.facts[key], f"{key} {fact.subject}")


def two_hop(rng: random.Random, split: Split, person: Fact, friend: Fact) -> Question:
    """Where the friend of someone lives (or works): the answer names the friend first."""
    key = rng.choice(("city", "job"))
    verb = {"city": "lives in", "job": "works as a"}[key]
    text = ask(rng, split, f"friend {key}", x=person.subject)
    answer = f"{friend.subject} {verb} {friend.facts[key]}"
    return Question(f"friend {key}", text, answer, f"friend {key} {person.subject}")


def compare(
    rng: random.Random, split: Split, a: tuple[str, Scene], b: tuple[str, Scene], kind: str | None = None
) -> Question | None:
    """Two images: which has more shapes, or is a shape they share of one colour. The answer shows its reasons."""
    (label_a, scene_a), (label_b, scene_b) = a, b
    colours_a, colours_b = ({s: c for _, c, s in scene.objects} for scene in (scene_a, scene_b))
    shared = sorted(set(colours_a) & set(colours_b))
    kind = kind or rng.choice(("more", "same"))
    if kind == "same" and shared:
        shape = rng.choice(shared)
        first, second = colours_a[shape], colours_b[shape]
        if first != second and rng.random() < 0.8:
            return None  # chance makes few pairs of one colour; about half of those asked about should be
        verdict = "yes" if first == second else "no"
        text = ask(rng, split, "same", L=label_a, M=label_b, x=shape)
        return Question("same", text, f"{first} and {second}, so {verdict}", f"{shape} {label_a} {label_b}")
    first, second = str(len(scene_a.objects)), str(len(scene_b.objects))
    if kind == "more" and first != second:
        verdict = "first" if first > second else "second"
        text = ask(rng, split, "more", L=label_a, M=label_b)
        return Question("more", text, f"{first} and {second}, so the {verdict}", f"more {label_a} {label_b}")
    return None
