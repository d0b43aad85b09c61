"""Documents: cards, biographies, and needles, filled up with sentences without facts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mpic_lab.generator.words import CITIES, JOBS, PETS, Split, draw_code, fillers

WORDS = (44, 100)  # a word or mark is about one token; three-digit codes are three


@dataclass(frozen=True)
class Fact:
    """A text document with the facts that it states: the value of each attribute (or object)."""

    kind: str  # "card", "biography", "needle"
    text: str
    facts: dict[str, str]
    subject: str = ""  # the person of a biography
    title: str = ""  # the subject of a card that names it


def length_of(text: str) -> int:
    """Return the number of words and punctuation marks."""
    return len(text.split()) + text.count(".") + text.count(",")


def _pad(sentences: list[str], rng: random.Random, split: Split, words: tuple[int, int]) -> list[str]:
    """Return filler sentences to put between (or after) the given ones."""
    target, out = rng.randint(*words), []
    size = sum(length_of(s) for s in sentences)
    while size < target - 6:
        out.append(rng.choice(fillers(split)))
        size += length_of(out[-1])
    return out


def _interleave(rng: random.Random, first: list[str], rest: list[str], filler: list[str]) -> str:
    slots: list[list[str]] = [[] for _ in range(len(rest) + 1)]
    for sentence in filler:
        rng.choice(slots).append(sentence)
    out = list(first) + slots[0]
    for sentence, slot in zip(rest, slots[1:], strict=True):
        out += [sentence, *slot]
    return " ".join(out)


def draw_value(rng: random.Random, attribute: str) -> str:
    """Return a random value of an attribute."""
    if attribute == "code":
        return draw_code(rng)
    return rng.choice({"city": CITIES, "job": JOBS, "pet": PETS}[attribute])


def card(rng: random.Random, split: Split, words: tuple[int, int] = WORDS, title: str = "") -> Fact:
    """Return a card with its facts in the first dozen tokens; only the label outside tells which card it is.

    With a `title` the facts are sentences between filler, and each says that it is about the title.
    """
    attributes = rng.sample(["code", "city", "job", "pet"], rng.randint(3, 4) if title else rng.randint(2, 3))
    facts = {a: draw_value(rng, a) for a in attributes}
    if title:
        rest = [f"The {a} of {title} is {v}." for a, v in facts.items()]
        text = _interleave(rng, [], rest, _pad(rest, rng, split, words))
        return Fact("card", text, facts, title=title)
    head = "Card: " + ", ".join(f"{a} {v}" for a, v in facts.items()) + "."
    return Fact("card", " ".join([head, *_pad([head], rng, split, words)]), facts)


SENTENCE = {
    "city": "{name} lives in {value}.",
    "job": "{name} works as a {value}.",
    "pet": "{name} has a {value}.",
    "friend": "The friend of {name} is {value}.",
}


def biography(
    rng: random.Random,
    split: Split,
    name: str,
    friend: str | None,
    words: tuple[int, int] = WORDS,
    scattered: bool = False,
) -> Fact:
    """Return city, job, pet and perhaps friend of a person between filler sentences; with `scattered`, the headline
    too."""
    facts = {a: draw_value(rng, a) for a in ("city", "job", "pet")}
    if friend:
        facts["friend"] = friend
    first = [f"About {name}."]
    rest = [SENTENCE[a].format(name=name, value=v) for a, v in facts.items()]
    if scattered:
        first, rest = [], first + rest
    rng.shuffle(rest)
    text = _interleave(rng, first, rest, _pad([*first, *rest], rng, split, words))
    return Fact("biography", text, facts, name)


def needle(rng: random.Random, split: Split, things: str | list[str], words: tuple[int, int] = WORDS) -> Fact:
    """Return the codes of one or several objects, a sentence each, hidden in filler."""
    facts = {thing: draw_code(rng) for thing in ([things] if isinstance(things, str) else things)}
    rest = [reference_fact("code", thing, code) for thing, code in facts.items()]
    return Fact("needle", _interleave(rng, [], rest, _pad(rest, rng, split, words)), facts)


def reference_fact(attribute: str, subject: str, value: str) -> str:
    """Return a one-sentence library entry; `attribute` "code" is about a thing, the others about a person."""
    if attribute == "code":
        return f"The code of the {subject} is {value}."
    return SENTENCE[attribute].format(name=subject, value=value)
