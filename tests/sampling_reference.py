"""The reference sampler: it draws one request after the other, slowly and obviously, and ``sampling.py`` must agree.

It is the oracle of the tests; nothing is served with it.
"""

from __future__ import annotations

import torch

from mpic.engine.base import Sampling, TokenLogprob
from mpic.engine.native.sampling import Sampler


class SequentialSampler:
    """Draws one request's tokens from logits on the CPU. With the same seed it draws the same tokens as ``choose``."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling, self._numbers = sampling, Sampler(sampling)

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
        """Keep the ``top_k`` most likely tokens (the lower id first among equals), of those the fewest that reach
        ``top_p``, and invert the distribution function over the vocabulary at the request's next number."""
        s = self.sampling
        probabilities = torch.softmax((logits.double() - float(logits.max())) / s.temperature, -1)
        if s.top_p < 1 or s.top_k:
            order = logits.sort(descending=True, stable=True).indices
            ordered = probabilities[order]
            if s.top_k:
                ordered[s.top_k :] = 0
            # the token that crosses top_p stays
            outside = ordered.cumsum(0) - ordered >= s.top_p * ordered.sum()
            if s.top_p < 1:
                ordered[outside] = 0
            probabilities = torch.zeros_like(probabilities).index_copy_(0, order, ordered)
        ends = probabilities.cumsum(0)
        return int(torch.searchsorted(ends, self._numbers.next() * ends[-1], right=True))
