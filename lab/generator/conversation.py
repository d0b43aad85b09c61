"""Conversations and how they are spelled: the prompt conventions of the demo models.

    <s> [system] USER: PARTS ASSISTANT: answer</s> USER: ...

With labels *around* a chunk (first generation) an image is `image LABEL:<image> end of image LABEL.`, a document
`document LABEL:TEXT end of document LABEL.`; with labels *before* it (second generation) they are `image LABEL:<image>`
and `document LABEL:TEXT`. LABEL is the chunk's name or, without one, its number in words, counted per kind over the
conversation. A search is
`ASSISTANT:<search> query</search> reference one:CHUNK end of reference one. answer</s>`. The chat templates
state the same for `apply_chat_template`; a test holds them together.
Chunks (`ConversationSegment.kind` image or document) are tokenized alone, and so is each piece of text between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mpic_lab.generator.words import NUMBERS

Labels = Literal["around", "before"]
"""Where a chunk's label stands."""
_FOLDER = Path(__file__).parent
CHAT_TEMPLATES: dict[Labels, str] = {
    "around": (_FOLDER / "chat_template.jinja").read_text().rstrip("\n"),
    "before": (_FOLDER / "chat_template_before.jinja").read_text().rstrip("\n"),
}
SPECIAL = {
    "pad": "<pad>",
    "bos": "<s>",
    "eos": "</s>",
    "image": "<image>",
    "search": "<search>",
    "end": "</search>",
}


@dataclass(frozen=True, eq=False)
class Image:
    """An image chunk; `name` is its handle, if it has one."""

    pixels: np.ndarray
    name: str | None = None


@dataclass(frozen=True)
class Document:
    """A text chunk; `name` is its handle, if it has one."""

    text: str
    name: str | None = None


Part = str | Image | Document


@dataclass
class Turn:
    """A question and its answer. With `query`, the answer needs one of these references of the library, best first."""

    user: list[Part]
    answer: str
    query: str | None = None
    references: list[Image | Document] = field(default_factory=list)
    kind: str = ""


@dataclass
class Conversation:
    """A conversation that the model is trained on or tested with."""

    turns: list[Turn]
    system: str | None = None
    task: str = ""


class ConversationSegment(NamedTuple):
    """A piece that is tokenized alone: text, an image's pixels, or a document's text."""

    kind: str  # "text", "image" or "document"
    content: Any
    target: bool = False  # True if the model is trained to generate it


def number_word(index: int) -> str:
    """Return a number in words (1 as "one"), or in digits beyond twenty."""
    return NUMBERS[index - 1] if index <= len(NUMBERS) else str(index)


class _Labels:
    """Counts chunks per kind and names them."""

    def __init__(self) -> None:
        self.count = {"image": 0, "document": 0, "reference": 0}

    def next(self, kind: str, name: str | None) -> str:
        self.count[kind] += 1
        return f"{kind} {name or number_word(self.count[kind])}"


def _chunk(part: Image | Document, label: str, place: Labels = "around") -> Iterator[ConversationSegment]:
    yield ConversationSegment("text", f" {label}:")
    yield (
        ConversationSegment("image", part.pixels)
        if isinstance(part, Image)
        else ConversationSegment("document", part.text)
    )
    if place == "around":
        yield ConversationSegment("text", f" end of {label}.")


def _pieces(conversation: Conversation, place: Labels) -> Iterator[ConversationSegment]:
    labels = _Labels()
    yield ConversationSegment(
        "text", SPECIAL["bos"] + (f" {conversation.system}" if conversation.system else "")
    )
    for turn in conversation.turns:
        yield ConversationSegment("text", " USER:")
        for part in turn.user:
            if isinstance(part, str):
                yield ConversationSegment("text", f" {part}")
            else:
                kind = "image" if isinstance(part, Image) else "document"
                yield from _chunk(part, labels.next(kind, part.name), place)
        yield ConversationSegment("text", " ASSISTANT:")
        if turn.query is not None:
            yield ConversationSegment("text", f"{SPECIAL['search']} {turn.query}{SPECIAL['end']}", True)
            for reference in turn.references:
                yield from _chunk(reference, labels.next("reference", None))
        if turn.query is None or turn.references:
            yield ConversationSegment("text", f" {turn.answer}{SPECIAL['eos']}", True)


def segments(conversation: Conversation, place: Labels = "around") -> list[ConversationSegment]:
    """Return the conversation cut where chunks and answers begin and end, neighbouring texts joined.

    Args:
        place: place of the labels of images and documents; labels of references stand around them.
    """
    out: list[ConversationSegment] = []
    for piece in _pieces(conversation, place):
        last = out[-1] if out else None
        if last and last.kind == "text" == piece.kind and last.target == piece.target:
            out[-1] = ConversationSegment("text", last.content + piece.content, last.target)
        else:
            out.append(piece)
    return out


def _content(parts: list[Part]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            out.append({"type": "text", "text": part})
            continue
        item: dict[str, Any] = (
            {"type": "image"} if isinstance(part, Image) else {"type": "document", "text": part.text}
        )
        if part.name:
            item["name"] = part.name
        out.append(item)
    return out


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the conversation as chat messages for `apply_chat_template` (images in order, pixels left out)."""
    out: list[dict[str, Any]] = []
    if conversation.system:
        out.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        out.append({"role": "user", "content": _content(turn.user)})
        answer: list[dict[str, Any]] = []
        if turn.query is not None:
            answer.append({"type": "search", "text": turn.query})
        answer += _content([*turn.references])
        out.append({"role": "assistant", "content": [*answer, {"type": "text", "text": turn.answer}]})
    return out


def fill_in(wording: str, slots: dict[str, Part]) -> list[Part]:
    """Return the parts of a turn: the wording with its words filled in, cut where its chunks stand."""
    pieces: list[Part] = []
    for piece in re.split(r"\{(\w)\}", wording):
        part = slots.get(piece, piece)
        if isinstance(part, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += part
        else:
            pieces.append(part)
    return [p.strip() if isinstance(p, str) else p for p in pieces]
