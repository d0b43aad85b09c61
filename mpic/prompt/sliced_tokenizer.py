"""Tokenizing long texts slice by slice, so that the tokens of the slices, one after another, are exactly those of the
whole text.

A tokenizer processes a whole text at once, for seconds if it is long, takes some 400 bytes of memory for each
character, and cannot be stopped. Between slices it can be: when there are too many tokens already, or when the result
is no longer needed (``mpic.cancel``).

A text is cut at a space between two letters. No token of the vocabulary may hold a letter followed by a space, so that
nothing can be merged across a cut, and the text around the cut has to give the same tokens, at the same characters,
whole and cut. Some tokenizers put a space in front of every text; for them the space at a cut belongs to neither slice.
Where no such space comes in time (one word a line, Chinese, base64), and for other vocabularies, a text is cut at
another place around which the tokens are the same, and only if there is none wherever the slice is full.

``encode`` of the tokenizers library lets no other thread run until it is done; ``encode_batch`` does, and so does
``encode_batch_fast``, which leaves out the offsets of tokens and takes a third of the time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer, decoders

from mpic import memory
from mpic.cancel import checkpoint
from mpic.prompt.bounds import is_byte_level, least_tokens, longest_token

SLICE, MOST = 1 << 14, 1 << 15
"""Characters of a slice that is tokenized at a time, and of one that has to be cut somewhere."""
BYTES_PER_BYTE = 450
"""Bytes of memory that the tokenizers library takes for each byte of a text: 150 to 410 were measured."""
COUNTED, REMEMBERED = 4096, 1024
"""Characters of a slice whose number of tokens is remembered, and the number of slices that are remembered."""
NEAR, SEARCHED, TRIES = 128, 4096, 16
"""Characters on each side of a cut that are tokenized to try it, characters in which places are looked for, and places
of each kind that are tried."""
SPACE = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
PLACES = tuple(
    map(re.compile, (r"(?<=\n)(?=\S)", r"(?<=\S)(?= \S)", r"(?<=[^\w\s])(?=\w)|(?<=\w)(?=[^\w\s])"))
)
"""Places where a cut is tried when there is no space between letters, best first: lines, other words, punctuation."""
JOINED = re.compile(r"[^\W\d_] |\ufffd ")
"""A letter, or a part of one, followed by a space."""


class Slice(NamedTuple):
    """Part of a text; ``start`` is the place of its first character in the whole, and ``dropped`` tells that the space
    before it was left out."""

    start: int
    text: str
    dropped: bool


class SlicedTokenizer:
    """Tokenizes texts in slices.

    Args:
        source: the tokenizer.json of a tokenizer that gives the same ids, for another process.
        longest: most bytes of a text that one token can stand for; None: any number.
        joins: a token may join words, so that texts are cut only where they have to be.
        tokenizer: adds nothing to a text and truncates nothing; None: that of ``source``.
    """

    def __init__(
        self, source: str, longest: int | None, joins: bool, tokenizer: Tokenizer | None = None
    ) -> None:
        self.source, self.longest, self.joins = source, longest, joins
        self.tokenizer = tokenizer or Tokenizer.from_str(source)
        self._try = self.tokenizer.encode_batch

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, source: str, state: Mapping[str, Any], control: Collection[str]
    ) -> SlicedTokenizer:
        """Return the one for a tokenizer.

        Args:
            tokenizer, source: see above.
            state: the content of ``source``.
            control: the added tokens that no text of a client can produce.
        """
        return cls(source, longest_token(state, control), _joins(state, control), tokenizer)

    def ids(self, pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, list[int]]]:
        """Yield the slices of texts that are tokenized as one, with their ids.

        Args:
            pieces: texts, and for each whether it may be cut.
        """
        for text in self._joined(pieces, SLICE):
            yield text, self._fast(text).ids

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the characters ``[start, end)`` of each id of a text."""
        for part in self._slices(text, SLICE):
            encoding = _encoded(self.tokenizer.encode_batch, part.text)
            yield from _shifted(_offsets(encoding), part.start, part.dropped)

    def counter(self) -> Callable[[str, int], int]:
        """Return a function that counts the ids of a text; above a given number, the count may be inexact. It
        remembers parts of texts, because a splitter counts many texts with the same beginning."""
        known: dict[bytes, int] = {}  # by digest: keeping the parts would take many times as much memory

        def remembered(part: str) -> int:
            key = hashlib.blake2b(part.encode(errors="surrogatepass"), digest_size=16).digest()
            if key not in known:
                if len(known) >= REMEMBERED:
                    del known[next(iter(known))]
                known[key] = len(self._fast(part))
            return known[key]

        def count(text: str, most: int) -> int:
            found = least_tokens([text], self.longest, most)
            if found > most:
                return found
            found = 0
            for part in self._slices(text, COUNTED):
                found += remembered(part.text)
                if found > most:
                    break
            return found

        return count

    def _fast(self, text: str) -> Encoding:
        return _encoded(self.tokenizer.encode_batch_fast, text)

    def _slices(self, text: str, size: int) -> Iterator[Slice]:
        """Yield the slices of a text, each of about ``size`` characters; longer where the text cannot be cut."""
        start, dropped = 0, False
        while (cut := self._cut(text, start, size)) is not None:
            yield Slice(start, text[start : cut[0]], dropped)
            start, dropped = cut[0] + cut[1], cut[1]
        yield Slice(start, text[start:], dropped)

    def _joined(self, pieces: Iterable[tuple[str, bool]], size: int) -> Iterator[str]:
        """Yield the slices of texts that are tokenized as one."""
        waiting: list[str] = []
        length = 0
        for text, may_cut in pieces:
            start = 0
            while may_cut and (cut := self._cut(text, start, max(1, size - length))) is not None:
                yield "".join((*waiting, text[start : cut[0]]))
                waiting, length, start = [], 0, cut[0] + cut[1]
            waiting.append(text[start:])
            length += len(waiting[-1])
        yield "".join(waiting)

    def _cut(self, text: str, start: int, size: int) -> tuple[int, bool] | None:
        """Return where the slice that begins at ``start`` ends, and whether the space there is dropped; None: it holds
        the rest of the text."""
        if len(text) - start <= size:
            return None
        end = start + max(2 * size, MOST)
        if not self.joins:
            spaces = SPACE.finditer(text, start + size, end)
            for at in islice((match.start() for match in spaces), TRIES):
                for dropped in (False, True):
                    if self._is_same(text, start, at, dropped):
                        return at, dropped
        if len(text) <= end:
            return None
        for pattern in PLACES:
            found = pattern.finditer(text, max(start + 1, end - SEARCHED), end)
            for at in reversed([match.start() for match in found][-TRIES:]):
                for dropped in (False, True)[: 1 + (text[at] == " ")]:
                    if self._is_same(text, start, at, dropped):
                        return at, dropped
        return end, False

    def _is_same(self, text: str, start: int, at: int, dropped: bool) -> bool:
        """Return whether the text around a cut gives the same tokens, at the same characters, whole and cut."""
        lo = max(start, at - NEAR)
        left, right = text[lo:at], text[at + dropped : at + NEAR]
        whole, first, second = self._try([text[lo : at + NEAR], left, right], add_special_tokens=False)
        moved = _shifted(second.offsets, at + dropped - lo, dropped)
        return whole.ids == first.ids + second.ids and whole.offsets == first.offsets + moved


def _joins(state: Mapping[str, Any], control: Collection[str]) -> bool:
    """Return whether a token of a tokenizer.json may join a word to what follows it."""
    model = state["model"]
    if model.get("dropout"):
        return True
    vocabulary = [piece if isinstance(piece, str) else piece[0] for piece in model["vocab"]]
    if is_byte_level(state):
        spell = decoders.ByteLevel().decode
        texts = [spell([piece]) for piece in vocabulary]
    else:
        texts = [piece.replace("\u2581", " ") for piece in vocabulary]
    texts += [token["content"] for token in state["added_tokens"] if token["content"] not in control]
    return any(map(JOINED.search, texts))


def _encoded(encode: Callable[..., list[Encoding]], text: str) -> Encoding:
    """Tokenize one text with a method for batches.

    Raises:
        OutOfMemory: there may not be enough memory; without it the tokenizer would end the process.
    """
    checkpoint()
    size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    with memory.set_aside(BYTES_PER_BYTE * size, "tokenizing the text"):
        [encoding] = encode([text], add_special_tokens=False)
    return encoding


def _offsets(encoding: Encoding) -> list[tuple[int, int]]:
    """Return ``encoding.offsets``; those of many tokens one by one, because making all at once blocks other
    threads."""
    if len(encoding) <= SLICE:
        return encoding.offsets
    return [encoding.token_to_chars(i) for i in range(len(encoding))]  # ty: ignore[invalid-explicit-return] (None: special tokens, and there are none)


def _shifted(spans: Sequence[tuple[int, int]], start: int, dropped: bool) -> list[tuple[int, int]]:
    """Convert the characters of a slice's tokens to characters of the whole text.

    Args:
        start: start of the slice in the text.
        dropped: the space before the slice was left out. It belongs to the first token, and is all of it when the
            second begins at the same character.
    """
    moved = [(first + start, end + start) for first, end in spans]
    if dropped and moved:
        alone = len(moved) > 1 and moved[0][0] == moved[1][0]
        moved[0] = (start - 1, start if alone else max(moved[0][1], start))
    return moved
