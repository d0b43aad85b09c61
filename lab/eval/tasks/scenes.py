"""Questions in ordinary English about drawn pictures, a task for each kind: what `mpic train tower` teaches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from mpic_lab.eval.tasks.base import Options, Sample, task
from mpic_lab.eval.tasks.documents import ask
from mpic_lab.generator.client import content_part
from mpic_lab.generator.conversation import Image
from mpic_lab.generator.scenes import PictureQuestion, draw_picture, questions, render

_SUMMARIES = {
    "color": "the color of a shape in one of several pictures",
    "size": "the size of a shape",
    "where": "the place of an object",
    "shape": "the shape of a color",
    "color_at": "the color at a place",
    "shape_at": "the shape at a place",
    "digit": "the digit at a place",
    "count": "the number of objects",
    "background": "the color of the background",
    "exists": "whether a shape is there",
}


def _loader(kind: str) -> Callable[[Options], Iterator[Sample]]:
    def load(options: Options) -> Iterator[Sample]:
        for number in range(options.questions):
            yield _sample(
                random.Random(f"{options.seed} {kind} {options.chunks} {number}"), kind, options, number
            )

    return load


def _sample(rng: random.Random, kind: str, options: Options, number: int) -> Sample:
    """Return pictures and a question about one of them that has one of the kind."""
    asked = rng.randrange(options.chunks)
    pictures = [draw_picture(rng) for _ in range(options.chunks)]
    found: list[PictureQuestion] = []
    while not found:
        pictures[asked] = draw_picture(rng)
        found = [question for question in questions(pictures[asked], rng) if question.kind == kind]
    question = rng.choice(found)
    text = question.text
    if options.chunks > 1:
        text = f"In image {asked + 1}, {text[0].lower()}{text[1:]}"
    parts = [content_part(Image(render(picture, rng))) for picture in pictures]
    return Sample(str(number), ask(parts, "", text), (question.answer,), max_tokens=32)


for _kind, _summary in _SUMMARIES.items():
    task(f"scene-{_kind.replace('_', '-')}", _summary, "em", counts_chunks=True)(_loader(_kind))
