"""Questions about documents of real prose. ``mpic calibrate`` asks ``prose-codes``."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from mpic_lab.eval.tasks.base import Options, Sample, TaskError, task
from mpic_lab.eval.tasks.documents import ask

TOKENS = 270
"""Most tokens of a document, unless the options ask for fewer."""
_NAMES = (
    "Amber", "Birch", "Cedar", "Delta", "Ember", "Flint", "Grove", "Heron", "Ivory", "Jasper", "Kestrel", "Larch",
)  # fmt: skip
_NEEDLE = "The access code of project {name} is {code}."
_QUESTION = "What is the access code of project {name}? Answer with the code only."
_TWO = "What are the access codes of project {names}? Answer with the two codes only."
_COPY = "Copy the sentence that stands directly {where} the access code of project {name}, word for word."
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;'()-]{40,400}[.]")


@cache
def sentences() -> tuple[str, ...]:
    """Return the sentences of the language reference that Python ships with (``pydoc_data.topics``), in their order.

    Raises:
        TaskError: this Python has none.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TaskError(
            "prose-codes reads the language reference that Python ships with, and this Python has none"
        ) from None
    texts = (" ".join(topics[name].split()) for name in sorted(topics))
    return tuple(one for text in texts for one in _SENTENCE.split(text) if _PROSE.fullmatch(one))


class Codes(NamedTuple):
    """Documents of real prose, with the code of a project in each.

    Attributes:
        rng: draws what is asked.
        codes: the codes by project, in the order of the documents.
        lines: sentences of each document, of which one has the code.
    """

    number: int
    rng: random.Random
    codes: dict[str, str]
    lines: list[list[str]]

    @property
    def texts(self) -> list[str]:
        return [f"{' '.join(lines)}\n" for lines in self.lines]

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [{"type": "document", "text": text} for text in self.texts]


def draw_codes(options: Options) -> Iterator[Codes]:
    """Yield the documents that questions are asked about. A document has at most 270 tokens of the model (words, for a
    judge, who reads the question only), or ``tokens`` if that is less."""
    if options.chunks > len(_NAMES):
        raise TaskError(f"at most {len(_NAMES)} documents of prose, not {options.chunks}")
    count = options.count or (lambda text: len(text.split()))
    for number in range(options.questions):
        rng = random.Random(f"{options.seed} {options.chunks} {number}")
        names = rng.sample(_NAMES, options.chunks)
        codes = dict(zip(names, map(str, rng.sample(range(10_000, 100_000), options.chunks))))
        tokens = min(TOKENS, options.tokens)
        lines = [_document(rng, _NEEDLE.format(name=n, code=c), tokens, count) for n, c in codes.items()]
        yield Codes(number, rng, codes, lines)


@task("prose-codes", "a code in one of several documents of real prose", "contains", counts_chunks=True)
def codes(options: Options) -> Iterator[Sample]:
    """Hide a code of five digits in each of ``chunks`` documents, at most a dozen, and ask for one of them."""
    for one in draw_codes(options):
        name = one.rng.choice(list(one.codes))
        messages = ask(one.documents, "", _QUESTION.format(name=name))
        yield Sample(str(one.number), messages, (one.codes[name],))


@task("prose-two-codes", "two codes in two documents of real prose", "contains", counts_chunks=True)
def two_codes(options: Options) -> Iterator[Sample]:
    """As ``prose-codes``, but ask for the codes of two projects; each is half of the score."""
    if options.chunks < 2:
        raise TaskError(f"prose-two-codes needs at least 2 documents, not {options.chunks}")
    for one in draw_codes(options):
        names = one.rng.sample(list(one.codes), 2)
        question = _TWO.format(names=" and of project ".join(names))
        messages = ask(one.documents, "", question)
        yield Sample(str(one.number), messages, tuple(one.codes[name] for name in names), max_tokens=48)


@task(
    "prose-copy",
    "a sentence of one of several documents of real prose, copied",
    "rouge-l",
    counts_chunks=True,
)
def copy(options: Options) -> Iterator[Sample]:
    """Ask for the sentence of a document behind (or, at its end, before) the one with a project's code."""
    for one in draw_codes(options):
        places = [place for place, lines in enumerate(one.lines) if len(lines) > 1]
        if not places:
            raise TaskError(
                f"prose-copy needs documents of two sentences: {options.tokens} tokens are too few"
            )
        place = one.rng.choice(places)
        lines, name = one.lines[place], list(one.codes)[place]
        at = next(i for i, line in enumerate(lines) if f"project {name} is" in line)
        where, other = ("after", at + 1) if at + 1 < len(lines) else ("before", at - 1)
        messages = ask(one.documents, "", _COPY.format(where=where, name=name))
        yield Sample(str(one.number), messages, (lines[other],), max_tokens=96)


def _document(rng: random.Random, needle: str, tokens: int, count: Callable[[str], int]) -> list[str]:
    """Return consecutive sentences with the needle between two of them."""
    prose, lines = sentences(), list[str]()
    at, room = rng.randrange(len(prose)), tokens - count(f" {needle}")
    while (size := count(f" {(line := prose[at % len(prose)])}")) <= room:
        lines.append(line)
        at, room = at + 1, room - size
    lines.insert(rng.randint(0, len(lines)), needle)
    return lines
