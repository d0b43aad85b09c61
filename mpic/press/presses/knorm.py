"""Key norms: keep the tokens with the smallest keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpic.press import papers
from mpic.press.press import LayerKV, Press

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KNorm(Press):
    """L2 norm (arXiv 2406.11430): keys of a small norm attract attention, so those of a large norm are removed."""

    syntax = "knorm-R"
    summary = "Removes the R percent of tokens with the largest keys."
    paper = papers.KNORM

    def score(self, kv: LayerKV) -> torch.Tensor:
        return -kv.keys.norm(dim=-1)
