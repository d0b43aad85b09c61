"""KVSplit (EPIC v1, section 5): splitting a long text into the chunks as which it is cached.

=============  =====================================================================================
``none``       one piece
``fixed``      pieces of ``tokens`` tokens of the model's tokenizer, cut between tokens
``sentence``   as many whole sentences as fit into ``tokens``
``paragraph``  as many whole paragraphs as fit; one that is too long is cut at sentences
``section``    the same with sections of Markdown (headings, blocks, then sentences)
=============  =====================================================================================

Pieces cover the text from start to end: without overlap, joining them gives the text back exactly; with it, each piece
begins up to ``overlap`` tokens before the end of the previous one. No piece is blank. Sentence and word boundaries are
Unicode's (UAX 29), found by ``semantic-text-splitter``.

Splitting a book takes seconds, most of them for counting the tokens of candidates. Counting stops as soon as a
candidate is known to be too long. ``mpic.prompt.split_process`` does it in a process of its own.

A text is read in windows, each from where the last complete piece ends, so that memory does not grow with the number of
its paragraphs, and splitting stops at the first piece too many.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, get_args

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from mpic.cancel import checkpoint
from mpic.errors import BadRequest, cut

Mode = Literal["none", "fixed", "sentence", "paragraph", "section"]
MODES: tuple[Mode, ...] = get_args(Mode)
TokenSpans = Callable[[str], Iterable[tuple[int, int]]]
"""Text -> for each of its tokens the characters ``[start, end)`` that it stands for."""
Count = Callable[[str, int], int]
"""Text, a number -> the number of its tokens, or anything above the number if there are more."""
WORD, SPACE = re.compile(r"\S"), re.compile(r"\s")
SLICE = 1 << 16
"""Characters that are processed before other threads may run."""
LEAST_WINDOW, WINDOW, WINDOW_TOKENS = 1 << 14, 1 << 17, 64
"""Characters that are split at a time: so many for each token of a piece, within these bounds; more if one piece holds
more. The splitter takes up to a hundred bytes for each."""
CHARACTER = 256
"""No character has more tokens."""


@dataclass(frozen=True)
class Split:
    """Settings of a split.

    Args:
        tokens: maximum number of tokens of a piece.
        overlap: maximum number of tokens that two neighbours share; at most half of ``tokens``, or there would be too
            many pieces.

    Raises:
        BadRequest: the mode is unknown, or the numbers are not valid.
    """

    mode: Mode = "none"
    tokens: int = 512
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise BadRequest(
                f"split.mode must be one of {', '.join(MODES)}, not {cut(self.mode)!r}", param="split.mode"
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


class SplitPiece(NamedTuple):
    """Characters ``[start, end)`` of the text."""

    start: int
    end: int


class TooManyPieces(ValueError):
    """A text would be split into more pieces than are allowed."""


def split_text(
    text: str, split: Split, token_spans: TokenSpans, count: Count | None = None, most: int | None = None
) -> list[SplitPiece]:
    """Split a text into pieces, in order. A blank text is one piece.

    Args:
        count: counts the tokens of a text; by default, those of ``token_spans``.
        most: maximum number of pieces. Splitting ends with the first piece too many.

    Raises:
        TooManyPieces: there are more.
    """
    if split.mode == "none" or not WORD.search(text):
        return [SplitPiece(0, len(text))]
    if split.mode == "fixed":
        pieces = _tidy(text, _fixed(text, split, token_spans))
    else:
        count = count or (lambda piece, most: sum(1 for _ in token_spans(piece)))
        pieces = _tidy(text, _semantic(text, split, count))
    kept = list(pieces if most is None else islice(pieces, most + 1))
    if most is not None and len(kept) > most:
        raise TooManyPieces(f"more than {most} pieces")
    return kept


def _fixed(text: str, split: Split, token_spans: TokenSpans) -> Iterator[SplitPiece]:
    """Yield pieces of a fixed number of tokens. A token may be part of a character (bytes) or share it with the next,
    so cuts go between characters."""
    starts = array("Q")  # where the tokens from ``known`` on begin
    known = 0
    spans = iter(token_spans(text))
    first = at = 0  # the token a piece begins with, and its first character
    while at < len(text):
        checkpoint()
        following = first + split.tokens
        starts.extend(start for start, _ in islice(spans, max(0, following + 1 - known - len(starts))))
        more = following < known + len(starts)
        end = max(starts[following - known], at + 1) if more else len(text)
        yield SplitPiece(at, end)
        if end == len(text):
            return
        first = following - split.overlap
        at = max(starts[first - known], at + 1) if split.overlap else end
        del starts[: first - known]
        known = first


def _semantic(text: str, split: Split, count: Count) -> Iterator[SplitPiece]:
    # the splitter compares the tokens of a character that is too much by itself
    most = max(split.tokens, CHARACTER)

    def counted(piece: str) -> int:
        checkpoint()
        return count(piece, most)

    kind = MarkdownSplitter if split.mode == "section" else TextSplitter
    splitter = kind.from_callback(counted, split.tokens, overlap=split.overlap, trim=False)
    at, size = 0, min(max(LEAST_WINDOW, WINDOW_TOKENS * split.tokens), WINDOW)
    while at < len(text):
        window = text[at : at + size]
        if split.mode == "sentence":  # line breaks would count for more than ends of sentences
            window = _on_one_line(window)
        pieces = [
            SplitPiece(at + start, at + start + len(piece)) for start, piece in splitter.chunk_indices(window)
        ]
        if at + size >= len(text):
            yield from pieces
            return
        if len(pieces) < 2:  # it might go on beyond the window
            size *= 2
            continue
        yield from pieces[:-1]
        at = pieces[-1].start


def _on_one_line(text: str) -> str:
    """Replace every white space by a space, in slices."""
    parts = []
    for at in range(0, len(text), SLICE):
        checkpoint()
        parts.append(SPACE.sub(" ", text[at : at + SLICE]))
    return "".join(parts)


def _tidy(text: str, pieces: Iterable[SplitPiece]) -> Iterator[SplitPiece]:
    """Join blank pieces to the piece before them, or, at the start, after them. Drop a piece that lies within the
    previous one (where a token is less than a character)."""
    last: SplitPiece | None = None
    blank_before = False  # is the last one blank? Looking again would cost its length each time
    for piece in pieces:
        if last is not None and piece.end <= last.end:
            continue
        blank = WORD.search(text, piece.start, piece.end) is None
        if last is not None and (blank_before or blank):
            last = SplitPiece(last.start, piece.end)
            blank_before = blank_before and blank
        else:
            if last is not None:
                yield last
            last, blank_before = piece, blank
    if last is not None:
        yield last
