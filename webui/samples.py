"""Sample questions for the demo model, about files that ship with the program. Each file is uploaded under a name that
describes its content."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpic.data.bundled import SAMPLES, samples_folder

PARAMETERS = {"demo": 6.6, "demo-plain": 6.6, "large": 13.7, "large-plain": 13.7}
"""Millions of parameters of each demo model."""
NAMES = {
    "SHAPES2": "eiffel2025.png",
    "SHAPES3": "garden.png",
    "SHAPES4": "beach.png",
    "RING_STAR": "map7.png",
    "CIRCLE_TRIANGLE": "cat9.png",
    "CROSS": "home.png",
    "DIGIT3": "party.png",
    "DIGIT7": "tower.png",
    "GRACE": "vera.txt",
    "HUGO": "nico.txt",
    "EMMA": "karo.txt",
    "PIANO": "plan5.txt",
    "PET_CITY": "menu6.txt",
    "PET_JOB": "office.txt",
}
"""For each demo model: handle -> sample file."""


@dataclass(frozen=True)
class PageQuestion:
    """A question; ``files`` are the handles in it with the names of their files."""

    id: str
    title: str
    text: str
    files: dict[str, str]


QUESTIONS = (
    ("one", "One drawing", "IMAGE#SHAPES2 What is the colour of the circle in image SHAPES2?"),
    ("two", "Two drawings", "IMAGE#SHAPES4 IMAGE#SHAPES3 In image SHAPES3, what is top left?"),
    (
        "three",
        "Three drawings",
        "IMAGE#RING_STAR IMAGE#CIRCLE_TRIANGLE IMAGE#SHAPES4 In image SHAPES4, what is bottom left?",
    ),
    (
        "three-reversed",
        "The same three, another order",
        "IMAGE#SHAPES4 IMAGE#CIRCLE_TRIANGLE IMAGE#RING_STAR In image SHAPES4, what is bottom left?",
    ),
    (
        "two-hop",
        "Two people, two steps",
        "FILE#GRACE FILE#EMMA What city does the friend of Emma Page live in?",
    ),
    (
        "eight-images",
        "Eight drawings at once",
        "IMAGE#CROSS IMAGE#SHAPES3 IMAGE#DIGIT3 IMAGE#SHAPES4 IMAGE#RING_STAR IMAGE#CIRCLE_TRIANGLE IMAGE#SHAPES2 "
        "IMAGE#DIGIT7 In image SHAPES3, what colour is the circle?",
    ),
    (
        "eight",
        "Eight pieces",
        "IMAGE#CROSS FILE#PET_JOB IMAGE#DIGIT3 FILE#EMMA FILE#PIANO IMAGE#CIRCLE_TRIANGLE IMAGE#SHAPES2 "
        "FILE#PET_CITY What code does the piano have?",
    ),
)
"""Id, title and text."""


@cache
def sample_files(model: str) -> dict[str, Path]:
    """Return the sample files that a model knows, by handle: an empty dictionary for a model that is not
    bundled, or where the samples are not installed."""
    folder = samples_folder(model)
    if model not in SAMPLES:
        return {}
    return {handle: folder / name for handle, name in NAMES.items() if (folder / name).is_file()}


@cache
def samples(model: str) -> tuple[PageQuestion, ...]:
    """Return the sample questions for a model whose files are there."""
    found = []
    for id, title, text in QUESTIONS:
        used: dict[str, str] = {
            word.partition("#")[2]: NAMES[word.partition("#")[2]]
            for word in text.replace("?", " ").split()
            if "#" in word
        }
        if used.keys() <= sample_files(model).keys():
            found.append(PageQuestion(id, title, text, used))
    return tuple(found)
