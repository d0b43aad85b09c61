"""Placeholders that a chat template gets instead of client text and chunks, and how its output is read back.

A template is a program that concatenates strings, so the only way to know the author of each part of its output is to
give it stand-ins. A placeholder is a private-use character, a nonce of this call, a quote, a number and another
private-use character. The nonce rules out collisions, so no client text has to be refused or searched. White space
around a text stays outside its placeholder, where templates can trim it. The quote shows whether the template printed
the placeholder as it is or inside JSON (``tojson``); the text is then escaped in the same way.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any

from mpic.cancel import checkpoint
from mpic.prompt.messages import Ref

OPEN, CLOSE = "\uf8f0", "\uf8f1"
_PATTERN = re.compile(f'{OPEN}([0-9a-f]{{32}})(\\\\*)"(\\d+){CLOSE}')
"""A placeholder of any rendering: its nonce, backslashes and number. A pattern per nonce would have to be compiled for
each request."""


class Placeholders:
    """The placeholders of one rendering."""

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(16)
        self.values: list[str | Ref] = []
        self._named: dict[str, str] = {}

    def _new(self, value: str | Ref) -> str:
        self.values.append(value)
        return f'{OPEN}{self.nonce}"{len(self.values) - 1}{CLOSE}'

    def text(self, text: str) -> str:
        """Return a placeholder for a text, with the white space around the text outside."""
        core = text.strip()
        if not core:
            return text
        at = text.index(core)
        return text[:at] + self._new(core) + text[at + len(core) :]

    def chunk(self, ref: Ref) -> str:
        """Return a placeholder for a chunk."""
        return self._new(ref)

    def tree(self, value: Any, is_plain: Callable[[str], bool]) -> Any:
        """Return a JSON-like value (tools, tool calls) with placeholders for its strings and keys, except plain
        words, which templates may compare with names such as ``string`` or ``required``. Equal strings get equal
        placeholders, because templates look for the names of properties among those that are required."""
        if isinstance(value, str):
            if is_plain(value):
                return value
            if value not in self._named:
                self._named[value] = self.text(value)
            return self._named[value]
        if isinstance(value, dict | list | tuple):
            checkpoint()
        if isinstance(value, dict):
            return {self.tree(k, is_plain): self.tree(v, is_plain) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(v, is_plain) for v in value]
        return value

    def reveal(self, text: str) -> str:
        """Replace the placeholders in a text by their values, for people to read."""

        def value(match: re.Match[str]) -> str:
            if match[1] != self.nonce:
                return match[0]
            return found if isinstance(found := self.values[int(match[3])], str) else "..."

        return _PATTERN.sub(value, text)

    def cut(self, rendered: str) -> list[tuple[int | None, str]] | None:
        """Cut the output of a template at the placeholders.

        Returns:
            Pairs, in order, of a placeholder's number (None for the template's own text) and its text as it was printed
            (empty for a chunk); None if the template has cut a placeholder.
        """
        pieces: list[tuple[int | None, str]] = []
        at = 0
        for match in _PATTERN.finditer(rendered):
            if match[1] != self.nonce:
                continue
            pieces.append((None, rendered[at : match.start()]))
            value = self.values[int(match[3])]
            text = "" if isinstance(value, Ref) else value
            for _ in range((len(match[2]) + 1).bit_length() - 1):
                text = json.dumps(text, ensure_ascii=False)[1:-1]
            pieces.append((int(match[3]), text))
            at = match.end()
        pieces.append((None, rendered[at:]))
        ends = (OPEN + self.nonce[:8], self.nonce[-8:])
        if any(number is None and any(end in text for end in ends) for number, text in pieces):
            return None
        return [(number, text) for number, text in pieces if number is not None or text]
