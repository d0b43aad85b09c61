"""Finds tool calls in an answer's text, in the form of Hermes and Qwen: ``<tool_call>`` around JSON of a name and its
arguments, for which some models write ``parameters``.

Text that may still become a call is held back. Text that turns out to be none is given out as it was written.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ParsedToolCall(NamedTuple):
    """A tool call; ``arguments`` is JSON of an object."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """Return the call as OpenAI shows it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallParser:
    """Parses one answer, piece by piece.

    Attributes:
        calls: the calls found so far.
    """

    def __init__(self) -> None:
        self.calls: list[ParsedToolCall] = []
        self._held = ""
        self._inside = False

    def push(self, text: str) -> list[str | ParsedToolCall]:
        """Read the next piece and return the words and call that are certain now, in order."""
        self._held += text
        out: list[str | ParsedToolCall] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held = after
            self._append(out, self._call(before, CLOSE) if self._inside else before)
            self._inside = not self._inside
        if not self._inside:
            keep = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
            certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            self._append(out, certain)
        return out

    def finish(self) -> list[str | ParsedToolCall]:
        """Return the rest at the end of the answer, where the mark that closes a last call may be missing."""
        out: list[str | ParsedToolCall] = []
        self._append(out, self._call(self._held, "") if self._inside else self._held)
        self._held, self._inside = "", False
        return out

    def _append(self, out: list[str | ParsedToolCall], item: str | ParsedToolCall) -> None:
        if isinstance(item, ParsedToolCall):
            self.calls.append(item)
        elif self.calls:
            item = item if item.strip() else ""  # drops line breaks between calls
        if item:
            out.append(item)

    def _call(self, body: str, close: str) -> ParsedToolCall | str:
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", call.get("parameters"))
            if isinstance(arguments, str):
                arguments = json.loads(arguments.strip() or "null")
            written = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
            (name + written).encode()  # an escape can spell half of a surrogate pair
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return OPEN + body + close
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            return OPEN + body + close
        return ParsedToolCall(f"call_{secrets.token_hex(12)}", name, written)
