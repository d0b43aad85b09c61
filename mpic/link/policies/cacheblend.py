"""CacheBlend: recompute the tokens whose cached values the prompt would change most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpic.link import papers
from mpic.link.policy import ChunkPlace, DynamicPolicy, Ranges, ranges_of
from mpic.method import percent

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CacheBlend(DynamicPolicy):
    """CacheBlend-r (CacheBlend, section 4; the baseline of MPIC, EPIC, MEPIC and KV Packet): of all chunk tokens of the
    prompt, recompute the ``r`` percent with the largest KV deviation. It decides at the second layer, the first whose
    keys and values depend on context, and recomputes those tokens in all deeper layers.

    The first layer runs over the whole prompt, as in the paper. Its keys and values are those of the compiled chunks
    (they depend on the token alone), so linking the decided tokens afterwards gives the same result as narrowing that
    forward would; the chosen tokens pass the first layer twice, which costs r percent of a layer.
    """

    syntax = "cacheblend-R"
    summary = "Recomputes the R percent of tokens whose cache differs most."
    paper = papers.CACHEBLEND
    examples = ("cacheblend-15",)
    r: int = percent()

    def _budget(self, tokens: int) -> int:
        return round(tokens * self.r / 100)

    def select(self, chunks: Sequence[ChunkPlace]) -> list[Ranges]:
        left = self._budget(sum(chunk.length for chunk in chunks))
        heads = []
        for chunk in chunks:
            taken = min(left, chunk.length)
            heads.append(((0, taken),) if taken else ())
            left -= taken
        return heads

    def choose(self, found: Sequence[torch.Tensor]) -> list[Ranges]:
        import torch  # imported here, because reading a configuration must not load torch

        if not found:
            return []
        flat = torch.cat(list(found)).float().cpu()
        # among tokens with equal deviation the earlier one comes first
        order = torch.argsort(flat, descending=True, stable=True)
        chosen = torch.zeros(len(flat), dtype=torch.bool)
        chosen[order[: self._budget(len(flat))]] = True
        return [
            ranges_of(part.nonzero()[:, 0].tolist()) for part in chosen.split([len(one) for one in found])
        ]
