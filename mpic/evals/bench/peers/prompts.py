"""The questions that all peers are asked, and the contract of a peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mpic.evals.bench.workload import BENCH_DECODER, DecoderShape, Ids, prompt_of
from mpic.prompt.segments import Prompt, TextSegment

DECODER = DecoderShape(**{**vars(BENCH_DECODER), "context": 8192})


@dataclass(frozen=True)
class Settings:
    """Sizes of the ``peers`` bench.

    Args:
        documents, document_tokens: number of documents in a long prompt, and the tokens of each.
        system, question: tokens of the text before and behind them.
        short: tokens of the short fresh prompt.
        answers: numbers of answers that are generated at once.
        tokens: tokens of each of these answers.
        probes, probe_tokens: number and length of the prompts with which the bench checks that all peers compute the
            same model.
    """

    decoder: DecoderShape = DECODER
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

    @property
    def length(self) -> int:
        """Number of tokens of a long prompt."""
        return self.documents * self.document_tokens + self.system + self.question


class Peer(Protocol):
    """A way to serve the model.

    Attributes:
        name: its column.
        detail: its version and the options that matter.
    """

    name: str
    detail: str

    def next_token(self, ids: Sequence[int]) -> int:
        """Returns the most probable token after a prompt."""

    def first_ms(self, prompt: Prompt) -> float:
        """Returns the milliseconds until the first token of an answer has arrived; greedy, nothing else running."""

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        """Returns the tokens a second of answers to all prompts together, while all of them are being generated. The
        prompts may have been prefilled before the clock starts."""

    def close(self) -> None:
        """Ends it."""


class Questions:
    """Prompts over the same documents, and fresh ones that no cache has seen."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ids = Ids(settings.decoder.vocabulary, settings.seed)
        self.system = self._ids.fresh(settings.system)
        self.documents = self._ids.chunks(settings.documents, settings.document_tokens)

    def shuffled(self, turn: int) -> Prompt:
        """Returns the documents in an order that begins with another document every turn, so that a prefix cache finds
        the system prompt alone. The question is fresh."""
        first = (turn + 1) % len(self.documents)
        order = [*self.documents[first:], *self.documents[:first]]
        return prompt_of(self.system, *order, self._ids.fresh(self._settings.question))

    def ordered(self) -> Prompt:
        """Returns the documents in their own order with a fresh question, so that a prefix cache finds all documents
        from the second time on."""
        return prompt_of(self.system, *self.documents, self._ids.fresh(self._settings.question))

    def fresh(self, tokens: int) -> Prompt:
        return prompt_of(self._ids.fresh(tokens))

    def probe(self) -> tuple[int, ...]:
        return self._ids.fresh(self._settings.probe_tokens)


def flat(prompt: Prompt) -> list[int]:
    """Returns all tokens of a prompt, those of its documents included."""
    ids: list[int] = []
    for segment in prompt.segments:
        if isinstance(segment, TextSegment):
            ids += segment.token_ids
        else:
            ids += segment.chunk.token_ids or ()
    return ids
