"""Cutting a long text into slices whose tokens, one slice after another, are exactly the tokens of the whole text.

A tokenizer processes a whole text at once, for seconds if it is long, and cannot be stopped. Between slices it can be
stopped: when there are too many tokens already, or when the result is no longer needed. A text is cut only at a space
between two letters, and only if all of this holds for the tokenizer when the model is loaded:

- The model is BPE, and no token of its vocabulary holds a letter followed by a space. It can then merge nothing across
  a cut, wherever its words end.
- The steps before the model work from left to right and on one place at a time: normalizers of single characters, and
  regular expressions that neither look back nor refer to the ends of the text. A cut then changes nothing beyond its
  neighbours.
- Texts with all kinds of neighbours give the same tokens, at the same characters, whole and cut
  (``_gives_same_tokens``).

Some tokenizers put a space in front of every text. For them the space at a cut belongs to neither slice.

No slice has more than ``MOST`` characters, because a tokenizer takes some 400 bytes of memory for each. Where no such
space comes in time (one word a line, Chinese, base64), and for tokenizers that do not qualify, a text is cut where its
neighbourhood gives the same tokens whole and cut, and only if there is no such place wherever the slice is full.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders

from mpic.prompt.bounds import is_byte_level, parts_of

LEFT = (
    *("a", "The quick", "x\n\nab", "1 23ab", "it's don't", "!!! no", "a  b", "tab\tef", "<|im", "ASSISTANT"),
    *("USER", "I'LL", "élan vital", "Привет", "中文", "한국어", "مرحبا", "ﬁ", "\u212a", "e\u0301a"),
    *("🙂x", "x_y", "a.b"),
)
RIGHT = (
    *("b", "brown fox", "USER: x", "s' t", "don't 12", "a\n\nend", "a   y", "ASSISTANT:", "é!!", "ing ..."),
    *("i <image>", "мир", "文字", "한국", "عالم", "ﬁn", "\u212a", "a\u0301", "b🙂", "S1", "d.e"),
    *("x" * 40, "ll", "re"),
)
"""Texts before and after a cut with which a tokenizer is tried."""

NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace", "ByteLevel"}
PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"}
CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
ANCHOR = re.compile(r"\(\?<|\\[bBAGzZ]|(?:^|[|(])\^|\$")
MOST = 1 << 15
"""Characters of a slice at most."""
NEAR, SEARCHED, TRIES = 256, 4096, 16
"""Characters on each side of a cut that are tokenized to try it, characters in which places are looked for, and places
of each kind that are tried."""
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


class Slicer:
    """Cuts texts for one tokenizer.

    Args:
        tokenizer: adds nothing to a text and truncates nothing.
        cuts: texts may be cut at any space between letters.
        drops_space: True if the space at a cut belongs to neither slice.
    """

    def __init__(self, tokenizer: Tokenizer, cuts: bool, drops_space: bool = False) -> None:
        self._tokenizer, self.cuts, self.drops_space = tokenizer, cuts, drops_space

    @classmethod
    def of(cls, tokenizer: Tokenizer, state: Mapping[str, Any], control: Collection[str]) -> Slicer:
        """Return the slicer of a tokenizer.

        Args:
            tokenizer: adds nothing to a text and truncates nothing.
            state: the content of its tokenizer.json.
            control: the added tokens that no text of a client can produce.
        """
        if not _qualifies(state, control):
            return cls(tokenizer, False)
        if _gives_same_tokens(tokenizer, False):
            return cls(tokenizer, True)
        drops = _gives_same_tokens(tokenizer, True)
        return cls(tokenizer, drops, drops)

    def slices(self, text: str, size: int) -> Iterator[Slice]:
        """Yield the slices of a text, each of about ``size`` characters; longer where the text cannot be cut."""
        start, dropped = 0, False
        while (cut := self._cut(text, start, size)) is not None:
            yield Slice(start, text[start : cut[0]], dropped)
            start, dropped = cut[0] + cut[1], cut[1]
        yield Slice(start, text[start:], dropped)

    def joined(self, pieces: Iterable[tuple[str, bool]], size: int) -> Iterator[str]:
        """Yield the slices of texts that are tokenized as one.

        Args:
            pieces: texts, and for each whether it may be cut.
        """
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
        cut = find_cut(text, start + size, end) if self.cuts else None
        if cut is not None:
            return cut, self.drops_space
        return None if len(text) <= end else self._tried(text, start, end)

    def _tried(self, text: str, start: int, end: int) -> tuple[int, bool]:
        """Return the last place before ``end`` where a cut changes no token nearby, or ``end``."""
        for pattern in PLACES:
            found = pattern.finditer(text, max(start + 1, end - SEARCHED), end)
            for at in reversed([match.start() for match in found][-TRIES:]):
                drops = self.drops_space and text[at] == " "
                left, right = text[max(start, at - NEAR) : at], text[at + drops : at + NEAR]
                if _same(self._tokenizer, left, right, drops):
                    return at, drops
        return end, False


def find_cut(text: str, at: int, end: int | None = None) -> int | None:
    """Return the first place from ``at`` on, before ``end``, where a text may be cut: a space between two letters."""
    at = max(at, 1)
    while 0 <= (at := text.find(" ", at, end)) < len(text) - 1:
        if text[at - 1].isalpha() and text[at + 1].isalpha():
            return at
        at += 1
    return None


def _qualifies(state: Mapping[str, Any], control: Collection[str]) -> bool:
    """Check the conditions that a tokenizer.json shows; see the module."""
    model = state["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        return False
    normalizers = parts_of(state["normalizer"], "normalizers")
    words = parts_of(state["pre_tokenizer"], "pretokenizers")
    if not NORMALIZERS.issuperset(part["type"] for part in normalizers):
        return False
    if not PRE_TOKENIZERS.issuperset(part["type"] for part in words):
        return False
    patterns = [part["pattern"].get("Regex", "") for part in (*normalizers, *words) if "pattern" in part]
    if any(ANCHOR.search(CLASS.sub("x", pattern)) for pattern in patterns):
        return False
    added = [token for token in state["added_tokens"] if token["content"] not in control]
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added):
        return False
    if is_byte_level(state):
        spell = decoders.ByteLevel().decode
        texts = [spell([piece]) for piece in model["vocab"]]
    else:
        texts = [piece.replace("\u2581", " ") for piece in model["vocab"]]
    return not any(JOINED.search(text) for text in (*texts, *(token["content"] for token in added)))


def _gives_same_tokens(tokenizer: Tokenizer, drops_space: bool) -> bool:
    """Return whether texts give the same tokens, whole and cut."""
    return all(
        _same(tokenizer, left, right if drops_space else f" {right}", drops_space)
        for left in LEFT
        for right in RIGHT
    )


def _same(tokenizer: Tokenizer, left: str, right: str, drops_space: bool) -> bool:
    """Return whether two texts give the same tokens, at the same characters, as both in one, with a space between
    them if that is dropped at the cut."""
    whole, first, second = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in (f"{left} {right}" if drops_space else left + right, left, right)
    )
    start = len(left) + drops_space
    return whole.ids == first.ids + second.ids and whole.offsets == first.offsets + shifted(
        second.offsets, start, drops_space
    )


def shifted(spans: Sequence[tuple[int, int]], start: int, drops_space: bool) -> list[tuple[int, int]]:
    """Convert the characters of a slice's tokens to characters of the whole text.

    Args:
        start: start of the slice in the text.
        drops_space: the space before the slice was left out. It belongs to the first token, and is all of it when the
            second begins at the same character.
    """
    moved = [(first + start, end + start) for first, end in spans]
    if drops_space and moved:
        alone = len(moved) > 1 and moved[0][0] == moved[1][0]
        moved[0] = (start - 1, start if alone else max(moved[0][1], start))
    return moved
