"""CUR: keep the tokens whose keys and values are large among their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpic.press import papers
from mpic.press.press import LayerKV, Press

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CUR(Press):
    """CurDKV (arXiv 2509.15038) with its local approximation: the leverage of a token in a CUR decomposition is
    approximated by the squared norm of its key, as a share of those in its window, times that of its value.

    Class attributes:
        window: tokens that are compared with each other.
    """

    syntax = "cur-R"
    summary = "Removes the R percent of tokens with small keys and values among their neighbours."
    paper = papers.CURDKV
    window: ClassVar[int] = 16

    def score(self, kv: LayerKV) -> torch.Tensor:
        return self._shares(kv.keys) * self._shares(kv.values)

    def _shares(self, states: torch.Tensor) -> torch.Tensor:
        """Return each token's share of the squared norms in its window, ``[heads, n]`` for ``[heads, n,
        head_dim]``."""
        import torch

        norms = states.square().sum(-1)
        parts = norms.split(self.window, -1)
        return torch.cat([part / part.sum(-1, keepdim=True).clamp_min(1e-30) for part in parts], -1)
