"""Turns tokens into text as they are generated; calls for a search are found in it and kept out of the answer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from mpic.engine.base import GenerationRequest, TokenLogprob
from mpic.errors import UnsupportedParameter

FIRST_TOKENS = 4
"""Tokens at the start of an answer whose probability tells how sure the model is."""
_LONGEST_LINE = 400
"""Characters after which a line that asks for a search is taken for complete."""
_LONGEST_CHARACTER = 8
"""Most tokens of one character; text that cannot be decoded after as many is given out as it is."""


class Detokenizer:
    """Incremental text of a growing list of tokens, with stop strings.

    Text is held back while it ends in an incomplete character or could still become a stop string, so that nothing that
    was given out is ever taken back.

    Attributes:
        stop: the stop string that was found, the first in the text if several were.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._watches = [_StopSearch(s) for s in stop if s]
        self._ids: list[int] = []
        # the window of tokens that is decoded again begins at ``_start``; the new ones in it begin at ``_read``
        self._start = self._read = 0
        self._held = ""
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def push(self, token: int) -> str:
        """Return the text that is final with this token. Set ``stop`` when a stop string is complete."""
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
        """Return the text that was held back, at the end of generation."""
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
        begun = len(text) - len(new)
        found = [(begun + end - len(watch.stop), watch.stop) for watch, end in ends if end is not None]
        if found:
            at, self.stop = min(found)
            self._held = ""
            return text[:at]
        keep = max((watch.seen for watch in self._watches), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _restart(self) -> None:
        """Forget the text so far; the text that follows is decoded independently of it."""
        self._ids, self._start, self._read, self._held = [], 0, 0, ""
        self._watches = [_StopSearch(watch.stop) for watch in self._watches]
        self.stop = None


class _StopSearch:
    """Looks for a stop string in a text that grows, by the algorithm of Knuth, Morris and Pratt: the time that a token
    takes must not grow with the length of the string, because all answers wait for it.

    Attributes:
        seen: characters of the stop string, from its start, that the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.seen = 0
        # the failure function of the algorithm, computed as far as it is needed
        self._shorter = [0, 0]

    def push(self, text: str) -> int | None:
        """Take in more text. Return how much of it precedes the end of the stop string, if that is complete."""
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


class CallDetokenizer(Detokenizer):
    """A ``Detokenizer`` that hides calls (``opens`` ... ``closes``) and reports them.

    Markers are looked for in the text with control tokens spelt out, so it does not matter whether they are control
    tokens, added tokens or plain text. After the push that closes a call, ``call`` is the text between them.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], opens: str, closes: str) -> None:
        super().__init__(tokenizer, (*stop, opens))
        self._opens, self._closes = opens, closes
        self._raw = _Raw(tokenizer)
        self._recent = ""
        self._open_call: str | None = None  # text of the call so far
        self.call: str | None = None

    def push(self, token: int) -> str:
        self.call = None
        new = self._raw.push(token)
        if self._open_call is not None:
            self._open_call += new
            self._close()
            return ""
        text = super().push(token)
        self._recent += new
        at = self._recent.find(self._opens)
        if at < 0:
            self._recent = self._recent[-len(self._opens) :]
            return text
        text += self._held
        self._open_call = self._recent[at + len(self._opens) :]
        self._restart()
        self._recent = ""
        self._close()
        return text

    def finish(self) -> str:
        """Return the text that was held back. A call that was never closed is not shown either."""
        return "" if self._open_call is not None else super().finish()

    def _close(self) -> None:
        assert self._open_call is not None
        at = self._open_call.find(self._closes)
        if at >= 0:
            self.call, self._open_call = self._open_call[:at], None
            self._raw = _Raw(self._tokenizer)


class _Raw(Detokenizer):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, ())

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class OpeningDetokenizer(Detokenizer, ABC):
    """A ``Detokenizer`` that holds back the beginning of an answer until it is known whether it is a call. A call is
    reported and not shown: ``call`` is its text, with that of the token that ends answers if it was such a one."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        super().__init__(tokenizer, stop)
        self.call: str | None = None
        self._begin()

    def _begin(self) -> None:
        self._plain = Detokenizer(self._tokenizer, ())
        self._seen, self._hidden = "", ""
        self._decided = False

    def read(self, token: int, ends: bool, logprob: TokenLogprob | None) -> str:
        """Return the text that is final with this token; set ``call`` if the token completes one."""
        self.call = None
        text = "" if ends else self.push(token)
        if self._decided:
            return text
        self._hidden += text
        self._seen += self._plain.finish() if ends else self._plain.push(token)
        asks = self._asks(ends or self.stopped, logprob)
        if asks is None:
            return ""
        if asks:
            self.call = self._seen + (_Raw(self._tokenizer)._decode([token]) if ends else "")
            self._restart()
            self._begin()
            self._decided = self._once
            return ""
        self._decided = True
        return "" if ends else self._give()

    def finish(self) -> str:
        """Return the text that was held back. A call that was not complete is not shown."""
        return "" if self._calling() else self._give() + super().finish()

    def _give(self) -> str:
        hidden, self._hidden = self._hidden, ""
        return hidden

    _once = False
    """True if an answer makes one call at most."""

    @abstractmethod
    def _asks(self, ended: bool, logprob: TokenLogprob | None) -> bool | None:
        """Return whether what was ``_seen`` is a call; None: not known yet."""

    def _calling(self) -> bool:
        """Return whether what was ``_seen`` is the beginning of a call."""
        return False


class LineDetokenizer(OpeningDetokenizer):
    """Reports a line at the start of an answer that begins with ``opens``, in any case."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], opens: str) -> None:
        super().__init__(tokenizer, stop)
        self._opens = opens.casefold()

    def _asks(self, ended: bool, logprob: TokenLogprob | None) -> bool | None:
        line = self._seen.lstrip()
        if self._calling():
            complete = ended or "\n" in line or len(line) > _LONGEST_LINE
            return True if complete else None
        may_be = self._opens.startswith(line[: len(self._opens)].casefold()) and not ended
        return None if may_be else False

    def _calling(self) -> bool:
        return not self._decided and self._seen.lstrip().casefold().startswith(self._opens)


class DoubtDetokenizer(OpeningDetokenizer):
    """Reports the beginning of an answer as a call where the geometric mean of the probabilities of its first
    ``FIRST_TOKENS`` tokens, or of all if there are fewer, is below ``least``."""

    _once = True

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], least: float) -> None:
        super().__init__(tokenizer, stop)
        self._least = math.log(least)
        self._logprobs: list[float] = []

    def _asks(self, ended: bool, logprob: TokenLogprob | None) -> bool | None:
        assert logprob is not None  # which ``detokenizer_for`` makes sure of
        self._logprobs.append(logprob.logprob)
        if len(self._logprobs) < FIRST_TOKENS and not ended:
            return None
        return sum(self._logprobs) / len(self._logprobs) < self._least


def detokenizer_for(tokenizer: Any, request: GenerationRequest) -> Detokenizer:
    """Return the detokenizer of a request's answer.

    Raises:
        UnsupportedParameter: the request wants retrieval, and calls cannot be found without text or markers.
    """
    if request.retrieval is None:
        return Detokenizer(tokenizer, request.sampling.stop)
    retrieval, stop = request.retrieval, request.sampling.stop
    opens, closes = retrieval.opens, retrieval.closes
    if tokenizer is None:
        raise UnsupportedParameter("calls are found in text", param="mpic.retrieval")
    if retrieval.trigger == "confidence":
        if request.sampling.logprobs is None or not retrieval.confidence > 0:
            raise UnsupportedParameter("it needs log-probabilities and a bound", param="mpic.retrieval")
        return DoubtDetokenizer(tokenizer, stop, retrieval.confidence)
    if not opens or (retrieval.trigger == "call" and not closes):
        raise UnsupportedParameter("calls are found in text", param="mpic.retrieval")
    if retrieval.trigger == "prompted":
        return LineDetokenizer(tokenizer, stop, opens)
    return CallDetokenizer(tokenizer, stop, opens, closes)


class Detokenized(NamedTuple):
    """The result of reading a token: answer text that is now final, the call that the token closes, and whether the
    answer has ended."""

    text: str
    call: str | None
    over: bool


def detokenize(
    detokenizer: Detokenizer, token: int, ends: bool, logprob: TokenLogprob | None = None
) -> Detokenized:
    """Read the next token of an answer.

    Args:
        ends: True for a token that ends answers. Such a token may close a call first, and adds no text.
        logprob: its log-probability, where a ``DoubtDetokenizer`` reads it.
    """
    if isinstance(detokenizer, OpeningDetokenizer):
        text, call = detokenizer.read(token, ends, logprob), detokenizer.call
        return Detokenized("" if ends else text, call, (ends and call is None) or detokenizer.stopped)
    calls = isinstance(detokenizer, CallDetokenizer)
    text = detokenizer.push(token) if calls or not ends else ""
    call = detokenizer.call if calls else None
    return Detokenized("" if ends else text, call, (ends and call is None) or detokenizer.stopped)
