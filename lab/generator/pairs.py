"""Pairs for contrastive training and for retrieval: images and texts on one side, what one asks for them on the other.

An *entry* is what a library holds: an image, or a text (a one-sentence fact, a biography, a description of a
picture). A *query* is what finds it: a caption, a search call of the demo model, a question, a paraphrase.
`split="eval"` uses sprites, names and wordings that training never sees, except for the search calls themselves,
whose spelling is fixed by the demo model ("city of Ana Lake", "picture with a red circle").
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpic_lab.generator import documents, questions
from mpic_lab.generator.conversation import number_word
from mpic_lab.generator.images import Scene, draw_scene
from mpic_lab.generator.words import OBJECTS, POSITIONS, Split, draw_people
from mpic_lab.generator.worlds import FIRST, World

ATTRIBUTES = ("city", "job", "pet", "friend")
CAPTIONS, SEARCHES = 0.45, 0.43  # shares of the queries for pictures; the rest are questions
TWINS = 0.6  # share of the pictures that come with another of the same colours and shapes

# (training wordings, evaluation wordings)
FRAMES: tuple[tuple[str, ...], tuple[str, ...]] = (
    (
        "{c}",
        "{c}.",
        "A picture of {c}.",
        "This image shows {c}.",
        "Picture with {n}: {c}",
        "an image that has {c}",
        "{n}, {c}",
        "you see {c} in this picture",
        "you see a picture with {n}, an image of {c}",
        "This image shows a picture that has {n}: {c}.",
        "{c}: you see {n} in this picture",
    ),
    ("A picture that shows {c}.", "image of {c}", "This is a picture with {n}: {c}.", "in this image: {c}"),
)
PLACES: tuple[tuple[str, ...], tuple[str, ...]] = (
    ("{o} {p}", "{o} {p}", "{o} at the {p}", "{p} {o}", "{p}: {o}", "{o} on the {p}"),
    ("{o} in the {p}", "at the {p} {o}"),
)
PARTIAL: tuple[tuple[str, ...], tuple[str, ...]] = (
    (
        "picture with {c}",
        "picture with {c}",
        "the library picture with {c}",
        "an image of {c}",
        "where is {c}?",
    ),
    ("picture with {c}", "which picture shows {c}?", "find the image that has {c}"),
)
FACTS = {
    "city": ("{x} lives in {v}.", "The city of {x} is {v}.", "{x}: city {v}."),
    "job": ("{x} works as a {v}.", "The job of {x} is {v}.", "{x}: job {v}."),
    "pet": ("{x} has a {v}.", "The pet of {x} is a {v}.", "{x}: pet {v}."),
    "friend": ("The friend of {x} is {v}.", "{x} has a friend, {v}.", "{x}: friend {v}."),
    "code": ("The code of the {x} is {v}.", "{x}: code {v}.", "Code {v} is for the {x}."),
}
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]

Entry = str | np.ndarray


NONE: frozenset[str] = frozenset()


class Pair(NamedTuple):
    """A query and the entry it should find; `claims` are what the entry answers, and no two of a batch share one.

    A query that names few objects has `wants`: every entry that `shows` them all answers it as well as its own does.
    """

    query: str
    entry: Entry
    claims: frozenset[str]
    wants: frozenset[str] = NONE
    shows: frozenset[str] = NONE

    def answered_by(self, other: Pair) -> bool:
        """Returns whether another pair's entry answers this query too."""
        return bool(self.wants) and self.wants <= other.shows


def shown(scene: Scene) -> frozenset[str]:
    """Returns what a query may want of a scene: its shapes, with and without their colours."""
    return frozenset(word for _, c, s in scene.objects for word in (s, f"{c} {s}"))


def _choose(rng: random.Random, wordings: tuple[tuple[str, ...], tuple[str, ...]], split: Split) -> str:
    return rng.choice(wordings[0 if split == "train" else 1])


def thing(colour: str, shape: str) -> str:
    """Returns `a red circle`."""
    return f"{'an' if colour == 'orange' else 'a'} {colour} {shape}"


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def caption(rng: random.Random, split: Split, scene: Scene) -> str:
    """Returns all objects of a scene with their places, in one of many wordings and orders."""
    objects = list(scene.objects)
    if rng.random() < 0.5:
        rng.shuffle(objects)
    place = _choose(rng, PLACES, split)
    parts = [place.format(o=thing(c, s), p=POSITIONS[q]) for q, c, s in objects]
    text = ", ".join(parts) if rng.random() < 0.6 else _join(parts)
    count = len(objects) if rng.random() < 0.5 else number_word(len(objects))
    shapes = f"{count} shape{'s' * (len(objects) > 1)}"
    return _choose(rng, FRAMES, split).format(c=text, n=shapes)


def twin(rng: random.Random, scene: Scene) -> Scene:
    """Returns a scene of the same colours and shapes with two colours swapped or the objects in other places."""
    places, colours, shapes = (list(part) for part in zip(*scene.objects, strict=True))
    if len(places) > 1 and rng.random() < 0.5:
        i, j = rng.sample(range(len(places)), 2)
        colours[i], colours[j] = colours[j], colours[i]
    else:
        while places == [place for place, _, _ in scene.objects]:
            places = rng.sample(range(4), len(places))
    return Scene(tuple(sorted(zip(places, colours, shapes, strict=True))))


Asked = tuple[str, frozenset[str]]  # a query and what it wants (nothing: only its own entry answers it)


def partial(rng: random.Random, split: Split, scene: Scene, count: int = 1) -> Asked:
    """Returns a query that names one object (or `count`) of a scene and no place: the demo model's search for
    pictures."""
    objects = [(c, s) for _, c, s in rng.sample(scene.objects, min(count, len(scene.objects)))]
    query = _choose(rng, PARTIAL, split).format(c=_join([thing(c, s) for c, s in objects]))
    return query, frozenset(f"{c} {s}" for c, s in objects)


def _library(rng: random.Random, split: Split, scene: Scene) -> Asked:
    """Returns a question about a picture in the library that names one of its objects, and perhaps the shape of
    another."""
    (_, colour, shape), *others = rng.sample(scene.objects, min(2, len(scene.objects)))
    key = f"{colour} {shape}"
    if others and rng.random() < 0.5:
        other = others[0][2]
        return questions.ask(rng, split, "library colour", x=key, y=other), frozenset({key, other})
    return questions.ask(rng, split, "library", x=key), frozenset({key})


def picture_query(rng: random.Random, split: Split, scene: Scene) -> Asked:
    """Returns a query for a picture: a full caption, one object (now and then two), or a question."""
    roll = rng.random()
    if roll < CAPTIONS:
        return caption(rng, split, scene), NONE
    if roll < CAPTIONS + SEARCHES:
        return partial(rng, split, scene, rng.choice((1, 1, 1, 2)))
    return _library(rng, split, scene)


def person(rng: random.Random, split: Split) -> str:
    """Returns a full name; in training now and then an invented one, so that unknown names are told apart by their
    letters."""
    if split == "train" and rng.random() < 0.25:
        return " ".join(_word(rng).capitalize() for _ in range(2))
    return draw_people(rng, 1, split)[0]


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3)))


def fact_query(rng: random.Random, split: Split, attribute: str, subject: str) -> str:
    """Returns a query for a fact: the demo model's search call, or a question."""
    if rng.random() < 0.45:
        return f"{attribute} of {subject}"
    return questions.ask(rng, split, "needle" if attribute == "code" else attribute, x=subject)


def draw_fact(rng: random.Random, split: Split) -> tuple[str, str, str]:
    """Returns a random fact: attribute, subject, value."""
    if rng.random() < 0.2:
        invented = split == "train" and rng.random() < 0.6
        return "code", _word(rng) if invented else rng.choice(OBJECTS), documents.draw_value(rng, "code")
    attribute = rng.choice(ATTRIBUTES)
    return attribute, person(rng, split), draw_value(rng, split, attribute)


def draw_value(rng: random.Random, split: Split, attribute: str) -> str:
    """Returns a value of an attribute; the friend of someone is a person."""
    return person(rng, split) if attribute == "friend" else documents.draw_value(rng, attribute)


def fact_text(rng: random.Random, split: Split, attribute: str, subject: str, value: str) -> str:
    """Returns the fact in one sentence; the evaluation uses the sentence that libraries use."""
    wordings = FACTS[attribute]
    return (rng.choice(wordings) if split == "train" else wordings[0]).format(x=subject, v=value)


class Pairs:
    """Draws pairs from a seed. The same seed, split and worlds give the same pairs.

    Args:
        worlds: what pictures may be drawn as, each as often as another.
    """

    def __init__(self, seed: int, split: Split = "train", worlds: Sequence[World] = (FIRST,)) -> None:
        self.rng = random.Random(f"pairs-{split}-{seed}")
        self.split: Split = split
        self.worlds = worlds

    def image(self) -> list[Pair]:
        """Returns a picture and a query for it, whole or partial; often a second one, of the same colours and
        shapes."""
        scenes = [draw_scene(self.rng)]
        if self.rng.random() < TWINS:
            scenes.append(twin(self.rng, scenes[0]))
        return [self._pictured(s, *picture_query(self.rng, self.split, s)) for s in scenes]

    def captioned(self) -> Pair:
        """Returns a picture and a caption that names everything in it."""
        scene = draw_scene(self.rng)
        return self._pictured(scene, caption(self.rng, self.split, scene), NONE)

    def _pictured(self, scene: Scene, query: str, wants: frozenset[str]) -> Pair:
        world = self.rng.choice(self.worlds) if len(self.worlds) > 1 else self.worlds[0]
        image = world.render(scene, self.rng, self.split)
        return Pair(query, image, frozenset({str(scene)}), wants, shown(scene))

    def paraphrase(self) -> Pair:
        """Returns two captions of one scene."""
        scene = draw_scene(self.rng)
        first, second = (caption(self.rng, self.split, scene) for _ in range(2))
        return Pair(first, second, frozenset({str(scene)}), shows=shown(scene))

    def fact(self) -> Pair:
        """Returns a one-sentence fact and a query for it."""
        return self._stated(*draw_fact(self.rng, self.split))

    def same_person(self) -> list[Pair]:
        """Returns facts about one person, which only the attribute tells apart."""
        rng, split, subject = self.rng, self.split, person(self.rng, self.split)
        chosen = rng.sample(ATTRIBUTES, rng.randint(2, 4))
        return [self._stated(a, subject, draw_value(rng, split, a)) for a in chosen]

    def _stated(self, attribute: str, subject: str, value: str) -> Pair:
        query = fact_query(self.rng, self.split, attribute, subject)
        text = fact_text(self.rng, self.split, attribute, subject, value)
        return Pair(query, text, frozenset({f"{attribute} of {subject}"}))

    def biography(self) -> Pair:
        """Returns a biography and a query for its person."""
        rng, split, name = self.rng, self.split, person(self.rng, self.split)
        text = documents.biography(rng, split, name, None, (20, 70)).text
        query = name if rng.random() < 0.3 else fact_query(rng, split, rng.choice(ATTRIBUTES[:3]), name)
        return Pair(query, text, frozenset(f"{a} of {name}" for a in ATTRIBUTES))

    def batch(self, images: int, texts: int) -> tuple[list[Pair], list[Pair]]:
        """Returns (image pairs, text pairs); no entry answers another pair's query, but where `Pair.answered_by` says
        so."""
        seen: set[str] = set()
        makers = [self.fact] * 3 + [self.same_person] * 2 + [self.biography] + [self.paraphrase] * 4
        return self.distinct([self.image], images, seen), self.distinct(makers, texts, seen)

    def distinct(
        self, makers: Sequence[Callable[[], Pair | list[Pair]]], count: int, seen: set[str]
    ) -> list[Pair]:
        """Returns `count` pairs whose claims are not in `seen` (which grows) and differ from each other's."""
        out: list[Pair] = []
        while len(out) < count:
            made = self.rng.choice(makers)()
            for pair in made if isinstance(made, list) else [made]:
                if seen.isdisjoint(pair.claims):
                    seen |= pair.claims
                    out.append(pair)
        return out[:count]
