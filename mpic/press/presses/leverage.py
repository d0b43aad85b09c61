"""Leverage scores: keep the tokens whose keys the others do not explain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpic.press import papers
from mpic.press.press import LayerKV, Press

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Leverage(Press):
    """Compactor (arXiv 2507.08143), its query-agnostic part: the statistical leverage of a token's key before its
    rotation, among the centred keys of a head, behind a Gaussian sketch where heads are larger than that.

    Class attributes:
        sketch: columns of the sketch.
        ridge: share of the mean variance that is added to each column's variance, so that short chunks have scores too.
    """

    syntax = "leverage-R"
    summary = "Removes the R percent of tokens whose keys the others explain best."
    paper = papers.COMPACTOR
    needs_positions = True
    sketch: ClassVar[int] = 48
    ridge: ClassVar[float] = 1e-3

    def score(self, kv: LayerKV) -> torch.Tensor:
        import torch

        keys = kv.unrotated()
        rows = keys - keys.mean(1, keepdim=True)
        size = rows.shape[-1]
        if size > self.sketch:
            drawn = torch.randn(size, self.sketch, generator=torch.Generator().manual_seed(kv.layer))
            rows = rows @ drawn.to(rows) / self.sketch**0.5
        gram = rows.transpose(1, 2) @ rows
        spread = gram.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(1e-30)
        ridge = torch.eye(gram.shape[-1], device=gram.device) * (self.ridge * spread)[:, None, None]
        return (rows * torch.linalg.solve(gram + ridge, rows.transpose(1, 2)).transpose(1, 2)).sum(-1)
