"""The reference sampler: it draws one request after the other, slowly and obviously, and ``sampling.py`` must agree.

It is the oracle of the tests; nothing is served with it.
"""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

from mpic.engine.base import Sampling, TokenLogprob
from mpic.engine.native.sampling import Sampler


class SequentialSampler:
    """Draws one request's tokens from logits on the CPU. With the same seed it draws the same tokens as ``choose``.

    Args:
        prompt: the tokens of the prompt.
    """

    def __init__(self, sampling: Sampling, prompt: list[int] | None = None) -> None:
        self.sampling, self._numbers = sampling, Sampler(sampling)
        self._prompt, self._written = prompt or [], []

    def __call__(self, logits: torch.Tensor) -> tuple[int, TokenLogprob | None]:
        """``logits [vocabulary]`` fp32 on the CPU -> the token and, if asked for, its log-probability (of the model's
        own distribution, before temperature and truncation)."""
        s, changed = self.sampling, self._adjusted(logits)
        token = int(changed.argmax()) if s.temperature == 0 else self._draw(changed)
        self._written.append(token)
        if s.logprobs is None:
            return token, None
        logprobs = torch.log_softmax(logits, -1)
        top = torch.topk(logprobs, min(s.logprobs, len(logprobs))) if s.logprobs else None
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else ()
        return token, TokenLogprob(token, float(logprobs[token]), pairs)

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """Change the logits by transformers' own processors, and by OpenAI's formula for the two that it lacks."""
        s, row = self.sampling, logits[None]
        ids = torch.tensor([[*self._prompt, *self._written]])
        first = LogitsProcessorList()
        if s.logit_bias:
            first.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in s.logit_bias}))
        if s.repetition_penalty != 1 and ids.numel():
            first.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
        row = first(ids, row.clone())
        for token in set(self._written):
            row[0, token] -= self._written.count(token) * s.frequency_penalty + s.presence_penalty
        if s.min_p and s.temperature:
            kept = MinPLogitsWarper(s.min_p)(ids, TemperatureLogitsWarper(s.temperature)(ids, row))
            row = row.masked_fill(kept.isinf(), float("-inf"))
        return row[0]

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
