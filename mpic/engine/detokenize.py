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
        self._watches = [_Watch(s) for s in stop if s]
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
        ends = [(watch, watch.push(new)) for watch in self._watches]
        found = [len(text) - len(new) + end - len(watch.stop) for watch, end in ends if end is not None]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((watch.seen for watch in self._watches), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _restart(self) -> None:
        """Forget what was said: what comes is a text of its own."""
        self._ids, self._start, self._read, self._held = [], 0, 0, ""
        self._watches = [_Watch(watch.stop) for watch in self._watches]
        self.stopped = False


class _Watch:
    """Looks for a stop string in a text that grows, by the algorithm of Knuth, Morris and Pratt: the time that a token
    takes must not grow with the length of the string, because all answers wait for it.

    Attributes:
        seen: characters of the stop string, from its start, that the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.seen = 0
        self._shorter = [
            0,
            0,
        ]  # for a number of seen characters the next smaller one that fits too, as far as needed

    def push(self, text: str) -> int | None:
        """Take in more text; how much of it there is up to the end of the stop string, if that is complete."""
        for at, letter in enumerate(text, 1):
            self.seen = self._next(self.seen, letter)
            if self.seen == len(self.stop):
                return at
            if self.seen == len(self._shorter):
                self._shorter.append(self._next(self._shorter[-1], letter))
        return None

    def _next(self, seen: int, letter: str) -> int:
        while seen and self.stop[seen] != letter:
            seen = self._shorter[seen]
        return seen + (self.stop[seen] == letter)
