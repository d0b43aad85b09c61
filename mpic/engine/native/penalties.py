"""Changes logits by what a request asks for: a bias of tokens, penalties of those that it has read or written, and
``min_p``. The order is that of vLLM: bias, repetition, frequency and presence, then ``min_p`` of what is left.

Everything is sparse: a row is changed at the tokens that the request names or has seen, in one scatter for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from mpic.engine.base import Sampling
from mpic.kernels.upload import upload
from mpic.prompt.segments import Segment, TextSegment


class Seen:
    """The tokens that a request has seen: those of its answer with how often they came and, where repetition is
    penalized, those of its prompt."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._at: dict[int, int] = {}
        self._tokens, self._times = np.empty(0, np.int64), np.empty(0, np.int64)

    def read(self, segments: Iterable[Segment]) -> None:
        """Take in the tokens of a prompt, also ones that are known already. Images and clips have none."""
        if self._sampling.repetition_penalty == 1:
            return
        for segment in segments:
            for token in (segment if isinstance(segment, TextSegment) else segment.chunk).token_ids or ():
                self._index(token)

    def write(self, token: int) -> None:
        """Take in a token of the answer."""
        if self._sampling.penalizes:
            at = self._index(token)  # which may replace the arrays
            self._times[at] += 1

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, each once, and how often the answer has them, ``[tokens]`` int64 each."""
        return self._tokens[: len(self._at)], self._times[: len(self._at)]

    def _index(self, token: int) -> int:
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._tokens):  # twice as large each time, so that a token costs the same on average
            self._tokens = np.concatenate([self._tokens, np.zeros(max(at, 64), np.int64)])
            self._times = np.concatenate([self._times, np.zeros(max(at, 64), np.int64)])
        self._tokens[at] = token
        return at


@torch.inference_mode()
def adjusted(logits: torch.Tensor, options: Sequence[Sampling], seen: Sequence[Seen]) -> torch.Tensor:
    """Return the logits from which tokens are drawn. They are ``logits`` themselves where no request changes any, and a
    copy otherwise.

    Args:
        logits: ``[rows, vocabulary]`` fp32, on any device.
        options, seen: those of the rows' requests.
    """
    changing = [row for row, one in enumerate(options) if one.adjusts]
    if not changing:
        return logits
    logits = logits.clone()
    biased = [
        (row, *zip(*options[row].logit_bias, strict=True)) for row in changing if options[row].logit_bias
    ]
    _change(logits, biased, lambda old, bias: old + bias)
    penalized = []
    for row in changing:
        if options[row].penalizes:
            tokens, times = seen[row].table()
            less = options[row].frequency_penalty * times + options[row].presence_penalty * (times > 0)
            penalized.append((row, tokens, less, np.full(len(tokens), options[row].repetition_penalty)))
    _change(
        logits, penalized, lambda old, less, factor: torch.where(old > 0, old / factor, old * factor) - less
    )
    least = [row for row in changing if options[row].min_p > 0 and options[row].temperature > 0]
    if least:
        below = np.array([options[row].temperature * math.log(options[row].min_p) for row in least])
        table = upload({"rows": np.array(least), "below": below.astype(np.float32)[:, None]}, logits.device)
        mine = logits[table["rows"]]
        few = mine < mine.amax(-1, keepdim=True) + table["below"]
        logits[table["rows"]] = mine.masked_fill_(few, float("-inf"))
    return logits


def _change(logits: torch.Tensor, changes: Sequence[tuple], function: Callable[..., torch.Tensor]) -> None:
    """Replace logits of some tokens by a function of them and of numbers beside them.

    Args:
        changes: for each row its number, its tokens (each once) and columns of numbers for the function.
    """
    if not changes:
        return
    rows = [np.full(len(tokens), row) for row, tokens, *_ in changes]
    tokens, *numbers = (
        np.concatenate(column) for column in zip(*(change[1:] for change in changes), strict=True)
    )
    # a tokenizer may have more tokens than the model can give
    known = (tokens >= 0) & (tokens < logits.shape[1])
    columns = {str(i): column[known].astype(np.float32) for i, column in enumerate(numbers)}
    table = upload({"rows": np.concatenate(rows)[known], "tokens": tokens[known], **columns}, logits.device)
    at = table["rows"], table["tokens"]
    logits[at] = function(logits[at], *(table[name] for name in columns))
