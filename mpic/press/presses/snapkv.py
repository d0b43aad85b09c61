"""SnapKV: keep the tokens that the last ones look at, and their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpic.press import papers
from mpic.press.observation import by_key_head, observed_attention
from mpic.press.press import LayerKV, Press

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SnapKV(Press):
    """SnapKV (arXiv 2404.14469): the attention of an observation window at the chunk's end, pooled over neighbours,
    averaged over the heads that share keys; the window itself stays. The window of a packet is its trailer: trained
    tokens that stand for the question (KV Packet, arXiv 2604.13226).

    Class attributes:
        window: tokens at the end that are observed; at most half of the chunk.
        kernel: neighbours that are averaged, an odd number.
    """

    syntax = "snapkv-R"
    summary = "Removes the R percent of tokens that the last ones attend to least."
    paper = papers.SNAPKV
    needs_queries = True
    window: ClassVar[int] = 16
    kernel: ClassVar[int] = 5

    def observed(self, n: int, trailer: int) -> int:
        return trailer or max(1, min(self.window, n // 2))

    def score(self, kv: LayerKV) -> torch.Tensor:
        from torch.nn.functional import avg_pool1d, pad

        w = kv.queries.shape[1]
        attention = by_key_head(observed_attention(kv).mean(1), kv)[:, None, :-w]
        around = (self.kernel, 1, self.kernel // 2)
        pooled = (
            avg_pool1d(attention, *around, count_include_pad=False)[:, 0]
            if attention.numel()
            else attention[:, 0]
        )
        return pad(pooled, (0, w), value=2.0)  # larger than any attention score
