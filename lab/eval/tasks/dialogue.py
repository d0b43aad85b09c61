"""Dialogues over several images: MMDU at sentence level, SparklesEval at word level (the tasks of MPIC, section 6.1).

Every answer of the file is one sample; earlier turns are given with the reference answers, so that policies are
compared on the same context. Answers are grouped by the number of images in the prompt (MPIC, figure 10), and have room
for ``ANSWER_TOKENS``: MMDU's reference answers have about 400 tokens, so a lower limit would cut the graded text.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpic_lab.eval.tasks.base import Options, Sample, TaskError, task
from mpic_lab.eval.tasks.documents import data_file, field_of, whole_json

_LABEL = re.compile(r"\bIMAGE#(\w+)")
ANSWER_TOKENS = 1024
_HERE = re.compile(r"(?:<Img>)?<ImageHere>(?:</Img>)?")


@task("mmdu", "MMDU (benchmark.json, images beside it or in `images`)", "rouge-l", reads_file=True)
def mmdu(options: Options) -> Iterator[Sample]:
    """Read entries ``{"id", "image": [paths], "conversations": [{"from", "value"}, ...]}``, a list or keyed by
    number."""
    path = data_file(options, (".json",))
    entries = whole_json(path)
    folder = options.images or path.parent
    for entry in entries.values() if isinstance(entries, dict) else entries:
        id = str(field_of(entry, "id", path.name))
        pictures = iter(field_of(entry, "image", id))
        turns = [(turn["from"] == "user", turn["value"]) for turn in field_of(entry, "conversations", id)]
        yield from _samples(id, turns, pictures, folder)


@task("sparkles", "SparklesEval (its annotations, images in `images`)", "rouge-l", reads_file=True)
def sparkles(options: Options) -> Iterator[Sample]:
    """Read entries ``{"evaluation_id", "dialogue": [{"role", "content", "images": [{"image_id", "caption"}]}, ...]}``;
    the images stand inside the sentence, where ``IMAGE#id<Img><ImageHere></Img>`` is.

    ``IMAGE#id`` itself would name an upload here, so it reads ``image id``, which is how the server writes a handle
    whose image stands in the prompt already (and the same words to ROUGE).
    """
    path = data_file(options, (".json",))
    folder = options.images or path.parent.parent / "images"
    for entry in whole_json(path):
        id = str(field_of(entry, "evaluation_id", path.name))
        dialogue = field_of(entry, "dialogue", id)
        shown = [image for turn in dialogue for image in turn.get("images", ())]
        names = [f"{image['image_id']}.jpg" for image in shown]
        captions = [f"{image['image_id']}: {image['caption']}" for image in shown if "caption" in image]
        texts = [_LABEL.sub(r"image \1", turn["content"]) for turn in dialogue]
        turns = [(number % 2 == 0, text) for number, text in enumerate(texts)]
        for sample in _samples(id, turns, iter(names), folder):
            yield replace(sample, captions=tuple(captions[: sample.chunks]))


def _samples(
    id: str, turns: list[tuple[bool, str]], pictures: Iterator[str], folder: Path
) -> Iterator[Sample]:
    history: list[dict[str, Any]] = []
    for number, (asks, text) in enumerate(turns):
        if asks:
            history = [*history, {"role": "user", "content": _parts(text, pictures, folder, id)}]
            continue
        images = sum(part["type"] == "image" for message in history for part in _content(message))
        yield Sample(f"{id}#{number // 2}", history, (text,), ANSWER_TOKENS, chunks=images)
        history = [*history, {"role": "assistant", "content": text}]


def _parts(text: str, pictures: Iterator[str], folder: Path, id: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(_HERE.split(text)):
        if number:
            name = next(pictures, None)
            if name is None:
                raise TaskError(f"{id}: more places for images than images")
            parts.append({"type": "image", "image": _data_url(folder / name)})
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip()})
    return parts


def _content(message: dict[str, Any]) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else []


def _data_url(path: Path) -> str:
    if not path.is_file():
        raise TaskError(f"no such image: {path}")
    kind = mimetypes.guess_type(path.name)[0] or "image/jpeg"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
