"""Parses JSON from untrusted clients: it is checked against bounds before it is parsed, and does not block other
threads.

``json.loads`` lets no other thread run until it is done, and 60 MB of JSON can become a hundred million objects.
Therefore a text is scanned first, in slices and by numpy, which lets other threads run: the scan counts its values,
their depth, and the length of its strings. A text within the bounds is parsed by ``json.loads`` without its long
strings, which are decoded one by one, in slices, and then put back. A text of one slice whose bytes alone show that it
is within the bounds is not scanned. The result is that of ``json.loads``, except that halves of surrogate pairs are
refused: no tokenizer takes them, and no response can hold them.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpic.cancel import checkpoint

SLICE = 1 << 18
"""Bytes that are processed before other threads may run."""
LONG = 1 << 8
"""Strings of at least so many bytes are decoded one by one."""
LOOSE = 1 << 22
"""Most bytes outside of strings: white space, numbers, punctuation."""

QUOTE = 34
COMMA, OPENS, CLOSES = 1, 2, 3
KINDS = np.zeros(256, np.uint8)
KINDS[[ord(c) for c in ",[{]}"]] = (COMMA, OPENS, OPENS, CLOSES, CLOSES)
DEPTH = np.array((0, 0, 1, -1), np.int8)
DATA_URL = b"data:"
HIGH_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")


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
    depth: int = 500


class Long(NamedTuple):
    """A long string: the bytes ``[start, end)`` between its quotes."""

    start: int
    end: int


def read(body: bytes | bytearray, bounds: Bounds) -> Any:
    """Parse a JSON text.

    Raises:
        TooMuch: it exceeds a bound.
        HalfPair: a string in it contains half of a surrogate pair.
        UnicodeDecodeError: it is not UTF-8 (nor UTF-16 or UTF-32).
        ValueError: it is not JSON; mostly the subclass json.JSONDecodeError.
    """
    encoding = json.detect_encoding(bytes(body[:4]))
    if not encoding.startswith("utf-8"):
        body = _in_utf8(body, encoding)
    if len(body) <= SLICE and _is_surely_within(body, bounds):
        text, strings, escapes = _decode(body, 0, len(body)).removeprefix("\ufeff"), {}, b"\\u" in body
    else:
        scan = _Scan(body, bounds)
        scan.run()
        text, strings = _without_long_strings(body, scan.long)
        escapes = scan.escapes
    value = json.loads(text)
    return _put_back(value, strings, escapes) if strings or escapes else value


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
    """Scans a text, slice by slice.

    Attributes:
        long: the long strings, in order.
        escapes: True if there may be an escaped character (``\\u``).
    """

    def __init__(self, body: bytes | bytearray, bounds: Bounds) -> None:
        self.body, self.bounds = body, bounds
        self.long: list[Long] = []
        self.escapes = False
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
            self.escapes = self.escapes or b"\\u" in piece
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
            long = Long(int(starts[i]), int(ends[i]))
            self.long.append(long)
            if self._is_data(long.start):
                self._text -= long.end - long.start

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


def _without_long_strings(body: bytes | bytearray, long: list[Long]) -> tuple[str, dict[str, str]]:
    """Return the text with names in place of its long strings, and the strings by name."""
    nonce = secrets.token_hex(16)
    parts: list[str] = []
    strings: dict[str, str] = {}
    at = 0
    for i, (start, end) in enumerate(long):
        name = f"{nonce}{i}"
        parts += (_decode(body, at, start), name)
        strings[name] = _string(body, start, end)
        at = end
    parts.append(_decode(body, at, len(body)))
    return "".join(parts).removeprefix("\ufeff"), strings


def _string(body: bytes | bytearray, start: int, end: int) -> str:
    """Decode the string between two quotes."""
    pieces = []
    while start < end:
        checkpoint()
        cut = _cut(body, start, end)
        piece = json.loads(f'"{_decode(body, start, cut)}"')
        _check_text(piece)
        pieces.append(piece)
        start = cut
    return "".join(pieces)


def _cut(body: bytes | bytearray, start: int, end: int) -> int:
    """Return a place about ``SLICE`` after ``start`` that cuts no character, escape or pair of escapes."""
    at = start + SLICE
    if at >= end:
        return end
    while at > start and 0x80 <= body[at] < 0xC0:
        at -= 1
    escape = body.rfind(b"\\", max(start, at - 5), at)
    if escape >= 0 and _escapes(body, start, escape):
        at = escape
    half = at - 6
    if half >= start and HIGH_HALF.fullmatch(bytes(body[half:at])) and _escapes(body, start, half):
        at = half
    return at if at > start else end


def _escapes(body: bytes | bytearray, start: int, at: int) -> bool:
    """Return whether a backslash begins an escape; one that is itself escaped does not."""
    before = bytes(body[start : at + 1])
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _decode(body: bytes | bytearray, start: int, end: int) -> str:
    try:
        return str(memoryview(body)[start:end], "utf-8")
    except UnicodeDecodeError as error:
        error.start, error.end = error.start + start, error.end + start
        raise


def _in_utf8(body: bytes | bytearray, encoding: str) -> bytearray:
    decoder = codecs.getincrementaldecoder(encoding)()
    out = bytearray()
    for at in range(0, len(body), SLICE):
        checkpoint()
        out += decoder.decode(bytes(body[at : at + SLICE]), at + SLICE >= len(body)).encode()
    return out


def _put_back(value: Any, strings: Mapping[str, str], check: bool) -> Any:
    """Put strings back in place of their names, also in keys of objects; ``check`` refuses half pairs in all
    strings."""
    holder = [value]
    waiting: list[Any] = [holder]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if check:
                for name in node:
                    _check_text(name)
            if not strings.keys().isdisjoint(node):
                items = [(strings.get(name, name), item) for name, item in node.items()]
                node.clear()
                node.update(items)
        for place, item in list(node.items()) if isinstance(node, dict) else enumerate(node):
            if isinstance(item, str):
                if item in strings:
                    node[place] = strings[item]
                elif check:
                    _check_text(item)
            elif isinstance(item, dict | list):
                waiting.append(item)
    return holder[0]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HalfPair("a string contains half of a surrogate pair") from error
