"""Calls in what a model says: found as it speaks, and kept out of the answer."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpic.engine.base import GenerationRequest
from mpic.engine.detokenize import Detokenizer
from mpic.errors import UnsupportedParameter


class CallReader(Detokenizer):
    """A ``Detokenizer`` that hides calls (``opens`` ... ``closes``) and says when one has been made.

    Markers are looked for in the text with control tokens spelt out, so it does not matter whether they are control
    tokens, added tokens or plain text. ``call`` is what stood between them, after the push that closed it.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], opens: str, closes: str) -> None:
        super().__init__(tokenizer, (*stop, opens))
        self._opens, self._closes = opens, closes
        self._raw = _Raw(tokenizer)
        self._recent = ""
        self._said: str | None = None  # of an open call
        self.call: str | None = None

    def push(self, token: int) -> str:
        self.call = None
        new = self._raw.push(token)
        if self._said is not None:
            self._said += new
            self._close()
            return ""
        text = super().push(token)
        self._recent += new
        at = self._recent.find(self._opens)
        if at < 0:
            self._recent = self._recent[-len(self._opens) :]
            return text
        text += self._held
        self._said = self._recent[at + len(self._opens) :]
        self._restart()
        self._recent = ""
        self._close()
        return text

    def finish(self) -> str:
        """A call that was never closed is not shown either."""
        return "" if self._said is not None else super().finish()

    def _close(self) -> None:
        at = self._said.find(self._closes)
        if at >= 0:
            self.call, self._said = self._said[:at], None
            self._raw = _Raw(self._tokenizer)


class _Raw(Detokenizer):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, ())

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def reader(tokenizer: Any, request: GenerationRequest) -> Detokenizer:
    """What reads a request's answer.

    Raises:
        UnsupportedParameter: it wants retrieval, and calls cannot be found.
    """
    if request.retrieval is None:
        return Detokenizer(tokenizer, request.sampling.stop)
    opens, closes = request.retrieval.opens, request.retrieval.closes
    if tokenizer is None or not opens or not closes:
        raise UnsupportedParameter("calls are found in text", param="mpic.retrieval")
    return CallReader(tokenizer, request.sampling.stop, opens, closes)


class Heard(NamedTuple):
    """What a token has made certain: text of the answer, a call that it has closed, whether the answer is over."""

    text: str
    call: str | None
    over: bool


def hear(reader: Detokenizer, token: int, ends: bool) -> Heard:
    """Read the next token of an answer.

    Args:
        ends: whether it is one that ends answers. It may close a call first, and is no text.
    """
    calls = isinstance(reader, CallReader)
    text = reader.push(token) if calls or not ends else ""
    call = reader.call if calls else None
    return Heard("" if ends else text, call, (ends and call is None) or reader.stopped)
