"""KVSplit (EPIC, section 4.1): cutting a long text into the chunks it is cached as.

=============  =====================================================================================
``none``       one piece
``fixed``      pieces of ``tokens`` tokens of the model's tokenizer, cut between tokens
``sentence``   as many whole sentences as fit into ``tokens``
``paragraph``  as many whole paragraphs as fit; one that is too long is cut at sentences
``section``    the same with sections of Markdown (headings, blocks, then sentences)
=============  =====================================================================================

Pieces cover the text from start to end: without overlap, joining them gives the text back exactly; with it, each piece
begins up to ``overlap`` tokens before the end of the one before. No piece is blank. Sentence and word boundaries are
Unicode's (UAX 29), found by ``semantic-text-splitter``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from mpic.errors import BadRequest

Mode = Literal["none", "fixed", "sentence", "paragraph", "section"]
MODES: tuple[Mode, ...] = get_args(Mode)
TokenSpans = Callable[[str], Sequence[tuple[int, int]]]
"""Text -> for each of its tokens the characters ``[start, end)`` it stands for."""
WORD = re.compile(r"\S")


@dataclass(frozen=True)
class Split:
    """How to cut.

    Args:
        tokens: most tokens of a piece.
        overlap: most tokens that two neighbours share; at most half of ``tokens``, or the pieces would be too many.

    Raises:
        BadRequest: an unknown mode, or numbers that mean nothing.
    """

    mode: Mode = "none"
    tokens: int = 512
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise BadRequest(
                f"split.mode is one of {', '.join(MODES)}, not {self.mode!r}", param="split.mode"
            )
        if self.tokens < 1:
            raise BadRequest(f"split.tokens must be at least 1, not {self.tokens}", param="split.tokens")
        if not 0 <= self.overlap <= self.tokens // 2:
            raise BadRequest(
                f"split.overlap must be at least 0 and at most half of split.tokens, not {self.overlap}",
                param="split.overlap",
            )
        if self.mode == "none" and self.overlap:
            raise BadRequest("split.overlap needs a split.mode other than none", param="split.overlap")


class Piece(NamedTuple):
    """Characters ``[start, end)`` of the text."""

    start: int
    end: int


def split_text(text: str, split: Split, token_spans: TokenSpans) -> list[Piece]:
    """The pieces of a text, in order. A blank text is one piece."""
    if split.mode == "none" or not text.strip():
        return [Piece(0, len(text))]
    pieces = (
        _fixed(text, split, token_spans) if split.mode == "fixed" else _semantic(text, split, token_spans)
    )
    return _tidy(text, pieces)


def _fixed(text: str, split: Split, token_spans: TokenSpans) -> list[Piece]:
    """A token may be part of a character (bytes) or share it with the next: cuts go between characters."""
    starts = [start for start, _ in token_spans(text)]
    pieces = []
    first = at = 0  # the token a piece begins with, and its first character
    while at < len(text):
        following = first + split.tokens
        end = max(starts[following], at + 1) if following < len(starts) else len(text)
        pieces.append(Piece(at, end))
        if end == len(text):
            break
        first = following - split.overlap
        at = max(starts[first], at + 1) if split.overlap else end
    return pieces


def _semantic(text: str, split: Split, token_spans: TokenSpans) -> list[Piece]:
    def count(piece: str) -> int:
        return len(token_spans(piece))

    kind = MarkdownSplitter if split.mode == "section" else TextSplitter
    splitter = kind.from_callback(count, split.tokens, overlap=split.overlap, trim=False)
    if split.mode == "sentence":  # line breaks would count for more than ends of sentences
        text = re.sub(r"\s", " ", text)
    return [Piece(start, start + len(piece)) for start, piece in splitter.chunk_indices(text)]


def _tidy(text: str, pieces: list[Piece]) -> list[Piece]:
    """White space alone joins the piece before it, or the one after it at the start. A piece within the one before it
    (where a token is less than a character) goes."""
    kept: list[Piece] = []
    blank_before = False  # is kept[-1] blank? Looking again would cost its length each time
    for piece in pieces:
        if kept and piece.end <= kept[-1].end:
            continue
        blank = WORD.search(text, piece.start, piece.end) is None
        if kept and (blank_before or blank):
            kept[-1] = Piece(kept[-1].start, piece.end)
            blank_before = blank_before and blank
        else:
            kept.append(piece)
            blank_before = blank
    return kept
