"""Turning tokens into text as they come."""

from __future__ import annotations

from typing import Any

_LONGEST_CHARACTER = 8
"""Tokens that one character can take; text that is still undecodable after as many is given out as it is."""


class Detokenizer:
    """Incremental text of a growing list of tokens, with stop strings.

    Text is held back while it ends in an incomplete character or could still become a stop string, so what was
    given out is never taken back.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in stop if s)
        self._ids: list[int] = []
        self._start = self._read = 0  # window of tokens that is decoded again, and where new ones begin in it
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became certain with this token. Sets ``stopped`` when a stop string appeared."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        incomplete = after.endswith("\ufffd") and len(self._ids) - self._read < _LONGEST_CHARACTER
        if incomplete or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """Whatever was held back, at the end of generation."""
        if self._tokenizer is None or self.stopped:
            return ""
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        text = self._release(after[len(before) :])
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [at for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(
            (n for s in self._stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
