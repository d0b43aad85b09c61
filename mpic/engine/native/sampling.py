"""Choosing tokens, one request at a time so that no batch can change a result."""

from __future__ import annotations

import secrets

import torch

from mpic.engine.base import Sampling, TokenLogprob


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
