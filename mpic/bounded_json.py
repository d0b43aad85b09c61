"""Parses JSON from untrusted clients: it is checked against bounds before it is parsed.

60 MB of JSON can become a hundred million objects. Therefore a text is scanned first, in slices and by numpy, which
lets other threads run: the scan counts its values, their depth, and the length of its strings. A text of one slice
whose bytes alone show that it is within the bounds is not scanned. Then pydantic's parser reads it at once; 60 MB of
data URLs take it some 40 ms, in which no other thread runs. The result is that of ``json.loads``, except that halves
of surrogate pairs are refused: no tokenizer takes them, and no response can hold them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpic.cancel import checkpoint

SLICE = 1 << 18
"""Bytes that are scanned before other threads may run."""
LOOSE = 1 << 22
"""Most bytes outside of strings: white space, numbers, punctuation."""

QUOTE = 34
COMMA, OPENS, CLOSES = 1, 2, 3
KINDS = np.zeros(256, np.uint8)
KINDS[[ord(c) for c in ",[{]}"]] = (COMMA, OPENS, OPENS, CLOSES, CLOSES)
DEPTH = np.array((0, 0, 1, -1), np.int8)
DATA_URL = b"data:"
LONG = 1 << 8
"""Strings of at least so many bytes may be data URLs; shorter ones count as text."""


class TooMuch(ValueError):
    """A text exceeds a bound. The message is phrased to follow the words "it has".

    Args:
        what: name of the bound in ``Bounds``, or ``loose``.
    """

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


class HalfPair(ValueError):
    """A string contains half of a surrogate pair."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of a JSON text.

    Args:
        values: maximum number of objects, lists, strings, numbers and so on. Names in objects do not count; an empty
            object or list counts twice.
        text: maximum number of bytes of all strings together, as they are written; data URLs do not count. None: no
            limit.
        depth: maximum depth of nested containers.
    """

    values: int = 1 << 18
    text: int | None = None
    depth: int = 200


def read(body: bytes | bytearray, bounds: Bounds) -> Any:
    """Parse a JSON text.

    Raises:
        TooMuch: it exceeds a bound.
        HalfPair: a string in it contains half of a surrogate pair.
        UnicodeDecodeError: it is not UTF-8 (nor UTF-16 or UTF-32).
        ValueError: it is not JSON.
    """
    from pydantic_core import (
        from_json,  # here, because a GPU is measured on machines without it (`make report-gpu`)
    )

    encoding = json.detect_encoding(bytes(body[:4]))
    if encoding != "utf-8":
        body = str(body, encoding).encode()
    if len(body) > SLICE or not _is_surely_within(body, bounds):
        _Scan(body, bounds).run()
    try:
        return from_json(body, cache_strings="keys")
    except ValueError as error:
        str(body, "utf-8")  # raises if that is why
        why = str(error)
        if "surrogate" in why or "unexpected end of hex" in why:
            raise HalfPair("a string contains half of a surrogate pair") from None
        raise


def count(value: Any) -> int:
    """Return the number of values of a parsed text, as ``Bounds.values`` counts them."""
    values, waiting = 1, [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            values += max(len(node), 1)
            waiting += node.values() if isinstance(node, dict) else node
    return values


def is_finite(value: Any) -> bool:
    """Return whether a parsed text holds none of the numbers that Python reads but JSON does not have: ``NaN``,
    ``Infinity``, and those that are too large."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, float) and not math.isfinite(node):
            return False
        if isinstance(node, dict | list):
            waiting += node.values() if isinstance(node, dict) else node
    return True


def _is_surely_within(body: bytes | bytearray, bounds: Bounds) -> bool:
    """Return whether a text is within the bounds even if all of its bytes count, whether in a string or not."""
    opens = body.count(b"[") + body.count(b"{")
    return (
        opens <= bounds.depth
        and 1 + opens + body.count(b",") <= bounds.values
        and len(body) <= (LOOSE if bounds.text is None else min(LOOSE, bounds.text))
    )


class _Scan:
    """Scans a text, slice by slice."""

    def __init__(self, body: bytes | bytearray, bounds: Bounds) -> None:
        self.body, self.bounds = body, bounds
        self._values, self._text, self._loose, self._depth = 1, 0, 0, 0
        self._open = -1  # the quote that began a string which has not ended yet

    def run(self) -> None:
        """Raise TooMuch."""
        at = 0
        while at < len(self.body):
            checkpoint()
            end = min(at + SLICE, len(self.body))
            piece = bytes(self.body[at:end])
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape must not be cut
                end += 1
                piece = bytes(self.body[at:end])
            self._slice(piece, at)
            self._check(at + len(piece))
            at = end

    def _slice(self, piece: bytes, at: int) -> None:
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        if self._open >= 0 and b'"' not in piece:
            return
        letters = np.frombuffer(piece, np.uint8)
        quotes = letters == QUOTE
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ (self._open >= 0)
        kinds = KINDS[letters] * (1 - inside)
        self._values += np.count_nonzero(kinds == COMMA) + np.count_nonzero(kinds == OPENS)
        depths = np.cumsum(DEPTH[kinds], dtype=np.int32) + self._depth
        if depths.max(initial=0) > self.bounds.depth:
            raise TooMuch("depth", "values nested too deeply")
        self._depth = int(depths[-1])
        self._loose += len(piece) - np.count_nonzero(inside)
        self._strings(np.flatnonzero(quotes) + at)

    def _strings(self, quotes: np.ndarray) -> None:
        """Count the strings that end at the next quotes."""
        if self._open >= 0:
            quotes = np.concatenate(([self._open], quotes))
        self._open = int(quotes[-1]) if len(quotes) % 2 else -1
        starts, ends = quotes[:-1:2] + 1, quotes[1::2]
        sizes = ends - starts
        self._text += int(sizes.sum())
        for i in np.flatnonzero(sizes >= LONG):
            if self._is_data(int(starts[i])):
                self._text -= int(sizes[i])

    def _is_data(self, start: int) -> bool:
        return self.body[start : start + len(DATA_URL)] == DATA_URL

    def _check(self, end: int) -> None:
        bounds = self.bounds
        if self._values > bounds.values:
            raise TooMuch("values", f"more than {bounds.values:,} values")
        if self._loose > LOOSE:
            raise TooMuch("loose", f"more than {LOOSE:,} bytes outside of its strings")
        if bounds.text is None:
            return
        begun = 0 if self._open < 0 or self._is_data(self._open + 1) else end - self._open - 1
        if self._text + begun > bounds.text:
            raise TooMuch("text", f"more than {bounds.text:,} bytes of text")
