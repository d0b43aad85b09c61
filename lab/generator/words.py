# ruff: noqa: SIM905  (a word list reads better as one string)
"""Word lists of the generated world, and which of them are held out for evaluation."""

from __future__ import annotations

import random
import zlib
from typing import Literal

Split = Literal["train", "eval"]

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 40, 40),
    "green": (50, 190, 60),
    "blue": (50, 90, 235),
    "yellow": (240, 220, 50),
    "purple": (150, 60, 200),
    "orange": (245, 140, 30),
    "white": (240, 240, 240),
    "cyan": (60, 215, 225),
}
SHAPES = ("circle", "square", "triangle", "ring", "cross", "star")
DIGITS = tuple("0123456789")
POSITIONS = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()

CITIES = "Rome Paris London Madrid Berlin Vienna Oslo Cairo Tokyo Lima Delhi Quito Dublin Prague Athens Seoul".split()
JOBS = "baker pilot doctor lawyer farmer painter teacher singer nurse sailor writer miner".split()
PETS = "cat dog horse rabbit parrot turtle goat snake duck sheep".split()
OBJECTS = "lamp door safe boat clock piano bicycle garden tower bridge camera engine mirror ladder wagon basket".split()
FIRST_NAMES = (
    "Ana Ben Clara David Emma Frank Grace Henry Ida Jack Kate Leo Mary Nina Oscar Paul Rosa Sam Tina Victor "
    "Wendy Yara Zoe Hugo"
).split()
LAST_NAMES = (
    "Moss Hart Stone Wood Lake Reed Field Marsh Brook Hill Frost Cole Ward Page Lane Cross West Young Price "
    "Baker Nash Quinn Vale Boyd"
).split()
QUESTION_WORDS = (
    "top bottom left right city job pet code friend live lives work works do colour shape shapes many digit where "
    "Where Describe describe"
).split()
HANDLE_WORDS = (
    "EIFFEL LOUVRE BEACH TOWER HOME OFFICE MENU MAP CAT DOG PLAN LOGO GARDEN CAR PARTY ALPS".split()
)
_CONSONANTS, _VOWELS = "BCDFGHJKLMNPRSTVWZ", "AEIOU"

_FILLER_TRAIN = """The summary of this report is on the next page.
Please read all of it and then answer.
More about this is in the last part of the report.
The figure on this page was made for the first part.
It says no more about that here.
Every part of the report has a list of its own.
Some of the text is the same in the second part.
See the next page for more of the story.
The weather was good on that day.
This page was written a long time ago.
Read the note and then look at the figure.
The report was read by many people.
A copy of the text is kept in the office.
The story goes on for a long time.
Nothing more was said about it.
The first part of the story is the same as before.
Many people read the report every day.
The list on the last page is not long.
Look at the next figure for a good summary.
The office was open every day of the week.
The note was kept for a week and then sent on.
Not every part of the text is about this.
The second figure is better than the first.
It was a good day to read a long story.""".split("\n")
_FILLER_EVAL = """The second part of the story is on the last page.
Many people said it was a good report.
The note was written on the same day.
Please look at the list before the summary.
The text was sent to the office a week ago.
A long list of people is kept here.
Read the first figure and then the second part.
The story was open to all people for a day.""".split("\n")


def _bucket(text: str) -> int:
    return zlib.crc32(text.encode()) % 4


def is_eval(text: str) -> bool:
    """Return whether a full name or a handle belongs to the evaluation split (one in four does)."""
    return _bucket(text) == 0


def fillers(split: Split) -> list[str]:
    """Return sentences without facts, to fill documents up."""
    return _FILLER_TRAIN if split == "train" else _FILLER_EVAL


def draw_people(rng: random.Random, n: int, split: Split) -> list[str]:
    """Return `n` full names of the split; no two share a first or a last name."""
    firsts, lasts, people = list(FIRST_NAMES), list(LAST_NAMES), []

    def fits(first: str, last: str) -> bool:
        return is_eval(f"{first} {last}") == (split == "eval")

    while len(people) < n:
        first, last = rng.choice(firsts), rng.choice(lasts)
        if fits(first, last):
            firsts.remove(first)
            lasts.remove(last)
            people.append(f"{first} {last}")
        elif not any(fits(a, b) for a in firsts for b in lasts):  # only names already used are left
            firsts, lasts, people = list(FIRST_NAMES), list(LAST_NAMES), []
    return people


def draw_handle(rng: random.Random, split: Split) -> str:
    """Return an upper-case handle such as EIFFEL2025, LUMA or TEROKA7."""
    while True:
        if rng.random() < 0.35:
            stem = rng.choice(HANDLE_WORDS)
        else:
            stem = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3)))
        roll = rng.random()
        digits = 0 if roll < 0.5 else 1 if roll < 0.8 else 4
        handle = stem + "".join(rng.choice(DIGITS) for _ in range(digits))
        if is_eval(handle) == (split == "eval"):
            return handle


def draw_handles(rng: random.Random, n: int, split: Split) -> list[str]:
    """Return `n` handles whose letters differ (a name that differs by its digits only is not drawn)."""
    handles: dict[str, str] = {}
    while len(handles) < n:
        handle = draw_handle(rng, split)
        handles.setdefault(handle.rstrip("0123456789"), handle)
    return list(handles.values())


def draw_code(rng: random.Random) -> str:
    """Return a three-digit code."""
    return "".join(rng.sample(DIGITS, 3))
