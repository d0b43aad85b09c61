"""A control: keep randomly chosen tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpic.press.press import LayerKV, Press

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Random(Press):
    """Random: shows the effect of the size alone. The draw depends only on layer, heads and length, so a chunk is
    compressed the same way every time."""

    syntax = "random-R"
    summary = "Removes R percent of the tokens at random. A control."

    def score(self, kv: LayerKV) -> torch.Tensor:
        import torch

        drawn = torch.rand(kv.keys.shape[:2], generator=torch.Generator().manual_seed(kv.layer))
        return drawn.to(kv.keys.device)
