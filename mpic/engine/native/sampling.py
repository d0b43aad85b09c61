"""Choosing tokens and turning them into text, one request at a time so that no batch can change a result."""

from __future__ import annotations

import secrets
from typing import Any

import torch

from mpic.engine.base import Sampling, TokenLogprob

_LONGEST_CHARACTER = 8
"""Tokens that one character can take; text that is still undecodable after as many is given out as it is."""


class Sampler:
    """Draws one request's tokens. The generator is its own and advances once a token, so results depend on the seed
    alone; a preempted request keeps it."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> tuple[int, TokenLogprob | None]:
        """``logits [vocabulary]`` fp32 on the CPU -> the token and, if asked for, its log-probability (of the model's
        own distribution, before temperature and truncation)."""
        s = self.sampling
        token = int(logits.argmax()) if s.temperature == 0 else self._draw(logits)
        if s.logprobs is None:
            return token, None
        logprobs = torch.log_softmax(logits, -1)
        top = torch.topk(logprobs, min(s.logprobs, len(logprobs))) if s.logprobs else None
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else ()
        return token, TokenLogprob(token, float(logprobs[token]), pairs)

    def _draw(self, logits: torch.Tensor) -> int:
        s = self.sampling
        if 0 < s.top_k < len(logits):
            kept = torch.topk(logits, s.top_k).indices
            logits = torch.full_like(logits, float("-inf")).index_copy_(0, kept, logits[kept])
        # relative to the maximum and in double precision, so that no temperature above 0 overflows
        probabilities = torch.softmax((logits.double() - float(logits.max())) / s.temperature, -1)
        if s.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            outside = ordered.cumsum(0) - ordered >= s.top_p  # the token that crosses top_p stays
            ordered[outside] = 0
            probabilities = torch.zeros_like(probabilities).index_copy_(0, order, ordered)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


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
