"""The mix of a training conversation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mix:
    """The ingredients of a conversation: weights of chunk kinds, how chunks are labelled, kinds of questions."""

    kinds: tuple[str, ...] = ("image", "image", "card", "biography", "biography", "needle")
    named: float = 0.35  # share of conversations whose chunks have handles
    search: float = 0.12  # share of questions that need the library
    compare: float = 0.15
    hop: float = 0.35
    order: float = 0.3
    words: tuple[int, int] | None = None  # words of a document; None: the world's default
    both: float = 0.0  # questions that compare a fact of two people
    digits: bool = True
    alike: float = 0.0  # share of conversations whose chunks are all of one kind
    apart: float = (
        0.0  # share of conversations whose questions are asked one by one, each over the chunks alone
    )
