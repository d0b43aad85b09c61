"""Cutting a long text into slices whose tokens, one slice after another, are exactly the tokens of the whole text.

A tokenizer processes a whole text at once, for seconds if it is long, and cannot be stopped. Between slices it can:
when there are too many tokens already, or when the result is no longer needed. A text is cut only at a space between
two letters, and only if all of this holds for the tokenizer when the model is loaded:

- The model is BPE, and no token of its vocabulary holds a letter followed by a space. It can then merge nothing across
  a cut, wherever its words end.
- The steps before the model work from left to right and on one place at a time: normalizers of single characters, and
  regular expressions that neither look back nor refer to the ends of the text. A cut then changes nothing beyond its
  neighbours.
- Texts with all kinds of neighbours give the same tokens, at the same characters, whole and cut
  (``_gives_same_tokens``).

Some tokenizers put a space in front of every text. For them the space at a cut belongs to neither slice. Tokenizers
that do not qualify get their texts whole.
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
JOINED = re.compile(r"[^\W\d_] |\ufffd ")
"""A letter, or a part of one, followed by a space."""


class Slice(NamedTuple):
    """Part of a text; ``start`` is the place of its first character in the whole."""

    start: int
    text: str


class Slicer:
    """Cuts texts for one tokenizer.

    Args:
        cuts: False if every text is one slice.
        drops_space: True if the space at a cut belongs to neither slice.
    """

    def __init__(self, cuts: bool, drops_space: bool = False) -> None:
        self.cuts, self.drops_space = cuts, drops_space

    @classmethod
    def of(cls, tokenizer: Tokenizer, state: Mapping[str, Any], control: Collection[str]) -> Slicer:
        """Returns the slicer of a tokenizer.

        Args:
            tokenizer: adds nothing to a text and truncates nothing.
            state: the content of its tokenizer.json.
            control: the added tokens that no text of a client can produce.
        """
        if not _qualifies(state, control):
            return cls(False)
        if _gives_same_tokens(tokenizer, False):
            return cls(True)
        drops = _gives_same_tokens(tokenizer, True)
        return cls(drops, drops)

    def slices(self, text: str, size: int) -> Iterator[Slice]:
        """Yields the slices of a text, each of about ``size`` characters; longer where the text cannot be cut."""
        start = 0
        while self.cuts and len(text) - start > size:
            cut = find_cut(text, start + size)
            if cut is None:
                break
            yield Slice(start, text[start:cut])
            start = cut + self.drops_space
        yield Slice(start, text[start:])

    def joined(self, pieces: Iterable[tuple[str, bool]], size: int) -> Iterator[str]:
        """Yields the slices of texts that are tokenized as one.

        Args:
            pieces: texts, and for each whether it may be cut.
        """
        waiting: list[str] = []
        length = 0
        for text, may_cut in pieces:
            start = 0
            while self.cuts and may_cut and length + len(text) - start > size:
                cut = find_cut(text, start + max(1, size - length))
                if cut is None:
                    break
                yield "".join((*waiting, text[start:cut]))
                waiting, length, start = [], 0, cut + self.drops_space
            waiting.append(text[start:])
            length += len(waiting[-1])
        yield "".join(waiting)


def find_cut(text: str, at: int) -> int | None:
    """Returns the first place from ``at`` on where a text may be cut: a space between two letters."""
    at = max(at, 1)
    while 0 <= (at := text.find(" ", at)) < len(text) - 1:
        if text[at - 1].isalpha() and text[at + 1].isalpha():
            return at
        at += 1
    return None


def _qualifies(state: Mapping[str, Any], control: Collection[str]) -> bool:
    """Checks the conditions that a tokenizer.json shows; see the module."""
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
    """Returns whether texts give the same tokens, whole and cut."""
    for left in LEFT:
        for right in RIGHT:
            whole = tokenizer.encode(f"{left} {right}", add_special_tokens=False)
            first = tokenizer.encode(left, add_special_tokens=False)
            start = len(left) + drops_space
            second = tokenizer.encode(right if drops_space else f" {right}", add_special_tokens=False)
            if whole.ids != first.ids + second.ids:
                return False
            if whole.offsets != first.offsets + shifted(second.offsets, start, drops_space):
                return False
    return True


def shifted(spans: Sequence[tuple[int, int]], start: int, drops_space: bool) -> list[tuple[int, int]]:
    """Converts the characters of a slice's tokens to characters of the whole text.

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
