"""StreamingLLM: keep the first and the last tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpic.press import papers
from mpic.press.press import LayerKV, Press

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Streaming(Press):
    """StreamingLLM (arXiv 2309.17453): the first tokens of a chunk, which are its attention sink, and the last ones
    stay, and those between are removed. Every press protects the sink."""

    syntax = "streaming-R"
    summary = "Removes R percent of the tokens from the middle, behind the first ones."
    paper = papers.STREAMING_LLM

    def score(self, kv: LayerKV) -> torch.Tensor:
        import torch

        heads, n = kv.keys.shape[:2]
        return torch.arange(n, dtype=torch.float32, device=kv.keys.device).expand(heads, n)
