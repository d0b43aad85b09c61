"""The sizes of the bench, the questions that all peers are asked, and the contract of a peer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mpic.kv.chunk import Chunk
from mpic.prompt.segments import Prompt, TextSegment
from mpic_lab.bench.workload import (
    BENCH_DECODER,
    BENCH_TOWER,
    DecoderShape,
    Ids,
    TowerShape,
    image_chunk,
    prompt_of,
    random_image,
)

DECODER = DecoderShape(**{**vars(BENCH_DECODER), "context": 8192})
LARGE = DecoderShape(layers=28, hidden=1536, heads=12, intermediate=8960, kv_heads=2, context=8192)
"""The shape of Qwen2-VL-2B's decoder with a smaller vocabulary."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``peers`` bench.

    Args:
        tower: vision tower of the model that is asked about images.
        documents, document_tokens: number of documents, or of images, in a long prompt, and the tokens of a document.
        system, question: tokens of the text before and behind them.
        short: tokens of the short fresh prompt.
        answers: numbers of answers that are generated at once.
        tokens: tokens of each of these answers.
        probes, probe_tokens: number and length in tokens of the prompts that check that all peers compute the same
            model.
        together: True if all peers are in memory at once and take turns; False if one is started at a time, for every
            turn anew.
        only: the cases that are measured, by their short names; none: all.
    """

    decoder: DecoderShape = DECODER
    tower: TowerShape = BENCH_TOWER
    documents: int = 8
    document_tokens: int = 576
    system: int = 64
    question: int = 136
    short: int = 512
    answers: tuple[int, ...] = (1, 8)
    tokens: int = 32
    probes: int = 8
    probe_tokens: int = 48
    repeats: int = 3
    seed: int = 0
    together: bool = True
    only: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Number of tokens of a long prompt of documents."""
        return self.documents * self.document_tokens + self.system + self.question

    @property
    def image_length(self) -> int:
        """Number of tokens of a long prompt of images."""
        return self.documents * self.tower.tokens + self.system + self.question

    @property
    def kept_tokens(self) -> int:
        """Number of tokens that a cache must hold so that nothing needed by a later question of the turn is evicted:
        three long prompts, and the answers after one of them."""
        answers = max(self.answers) * (self.question + self.tokens + 64)
        return 3 * max(self.length, self.image_length) + answers + self.short


SIZES = {"110m": {}, "2b": {"decoder": LARGE, "together": False, "repeats": 2}}
"""The settings that each ``--size`` changes. Peers of the large model do not run together, because two copies of it do
not fit into the memory of a small machine."""


class First(NamedTuple):
    """The first token of an answer.

    Args:
        ms: milliseconds until it has arrived.
        found: tokens at the beginning of the prompt that were found in a cache; None if the peer does not say.
        linked: tokens after the first difference that were reused nevertheless.
    """

    ms: float
    found: int | None = None
    linked: int = 0


class Peer(Protocol):
    """A way to serve the model.

    Attributes:
        name: its column.
        detail: its version, what it computes in, and the options that matter.
    """

    name: str
    detail: str

    def next_token(self, prompt: Prompt) -> int:
        """Return the most probable token after a prompt."""

    def first(self, prompt: Prompt) -> First:
        """Measure the time to the first token of an answer; greedy, nothing else running."""

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        """Return the tokens a second of answers to all prompts together, while all of them are being generated. The
        prompts may have been prefilled before the clock starts."""

    def reset(self) -> None:
        """Empty its caches of earlier prompts."""

    def close(self) -> None:
        """End it."""


class Questions:
    """Prompts over the same documents or images, and fresh ones that no cache has seen.

    Args:
        images: ask about images instead of documents.
    """

    def __init__(self, settings: Settings, images: bool = False) -> None:
        self._settings, self.images = settings, images
        self._ids = Ids(settings.decoder.vocabulary, settings.seed)
        self._seeds: Iterator[int] = itertools.count(settings.seed)
        self.system = self._ids.fresh(settings.system)
        self.documents = self._documents()

    def _documents(self) -> list[Chunk]:
        settings = self._settings
        if not self.images:
            return self._ids.chunks(settings.documents, settings.document_tokens)
        side = settings.tower.size
        return [image_chunk(random_image(next(self._seeds), side)) for _ in range(settings.documents)]

    def opening(self) -> Prompt:
        """Return a short prompt that begins as the long ones do, so that a prefix cache holds the system prompt."""
        return prompt_of((*self.system, *self._ids.fresh(self._settings.question)))

    def shuffled(self, turn: int) -> Prompt:
        """Return the documents in an order that begins with another document every turn. The question is fresh."""
        first = (turn + 1) % len(self.documents)
        order = [*self.documents[first:], *self.documents[:first]]
        return prompt_of(self.system, *order, self._ids.fresh(self._settings.question))

    def ordered(self) -> Prompt:
        """Return the documents in their own order with a fresh question, so that a prefix cache finds all documents
        from the second time on."""
        return prompt_of(self.system, *self.documents, self._ids.fresh(self._settings.question))

    def unseen(self) -> Prompt:
        """Return new documents or images between the same system prompt and a fresh question."""
        return prompt_of(self.system, *self._documents(), self._ids.fresh(self._settings.question))

    def fresh(self, tokens: int) -> Prompt:
        """Return a text of random tokens."""
        return prompt_of(self._ids.fresh(tokens))

    def probe(self) -> Prompt:
        """Return a short prompt; with an image in it if the questions are about images."""
        half = self._settings.probe_tokens // 2
        image = self._documents()[:1] if self.images else []
        return prompt_of(self._ids.fresh(half), *image, self._ids.fresh(self._settings.probe_tokens - half))


def parts(prompt: Prompt) -> list[Sequence[int] | Chunk]:
    """Return the texts and chunks of a prompt in order."""
    return [
        segment.token_ids if isinstance(segment, TextSegment) else segment.chunk
        for segment in prompt.segments
    ]


def flat(prompt: Prompt) -> list[int]:
    """Return all tokens of a prompt, those of its documents included; those of images are not known here."""
    ids: list[int] = []
    for part in parts(prompt):
        ids += (part.token_ids or ()) if isinstance(part, Chunk) else part
    return ids
