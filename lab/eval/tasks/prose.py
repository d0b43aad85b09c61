"""Needles in real prose: what ``mpic calibrate`` asks a model about documents."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import cache

from mpic_lab.eval.tasks.base import Options, Sample, TaskError, task
from mpic_lab.eval.tasks.documents import ask

TOKENS = 270
"""Most tokens of a document, unless the options ask for fewer."""
_NAMES = (
    "Amber", "Birch", "Cedar", "Delta", "Ember", "Flint", "Grove", "Heron", "Ivory", "Jasper", "Kestrel", "Larch",
)  # fmt: skip
_NEEDLE = "The access code of project {name} is {code}."
_QUESTION = "What is the access code of project {name}? Answer with the code only."
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


@task("prose-codes", "a code in one of several documents of real prose", "contains", counts_chunks=True)
def codes(options: Options) -> Iterator[Sample]:
    """Hide a code of five digits in each of ``chunks`` documents, at most a dozen, and ask for one of them.

    A document has at most 270 tokens of the model (words, for a judge, who reads the question only), or ``tokens`` if
    that is less.
    """
    if options.chunks > len(_NAMES):
        raise TaskError(f"prose-codes: at most {len(_NAMES)} documents, not {options.chunks}")
    count = options.count or (lambda text: len(text.split()))
    for number in range(options.questions):
        rng = random.Random(f"{options.seed} {options.chunks} {number}")
        names = rng.sample(_NAMES, options.chunks)
        codes = [str(code) for code in rng.sample(range(10_000, 100_000), options.chunks)]
        documents = []
        for name, code in zip(names, codes):
            lines = _document(rng, _NEEDLE.format(name=name, code=code), min(TOKENS, options.tokens), count)
            documents.append({"type": "document", "text": f"{' '.join(lines)}\n"})
        asked = rng.randrange(options.chunks)
        messages = ask(documents, "", _QUESTION.format(name=names[asked]))
        yield Sample(str(number), messages, (codes[asked],), max_tokens=32)


def _document(rng: random.Random, needle: str, tokens: int, count: Callable[[str], int]) -> list[str]:
    """Return consecutive sentences with the needle between two of them."""
    prose, lines = sentences(), list[str]()
    at, room = rng.randrange(len(prose)), tokens - count(f" {needle}")
    while (size := count(f" {(line := prose[at % len(prose)])}")) <= room:
        lines.append(line)
        at, room = at + 1, room - size
    lines.insert(rng.randint(0, len(lines)), needle)
    return lines
