"""TOVA: keep the tokens that the last one looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpic.press import papers
from mpic.press.observation import observed_attention
from mpic.press.press import LayerKV, Press

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TOVA(Press):
    """TOVA (arXiv 2401.06104): the attention of a chunk's last token, averaged over the heads of a layer, which
    therefore keep the same tokens. In a packet the last token is an adapter's."""

    syntax = "tova-R"
    summary = "Removes the R percent of tokens that the last one attends to least."
    paper = papers.TOVA
    needs_queries = True

    def observed(self, n: int, trailer: int) -> int:
        return 1

    def score(self, kv: LayerKV) -> torch.Tensor:
        return observed_attention(kv)[:, -1].mean(0).expand(kv.keys.shape[0], -1)
