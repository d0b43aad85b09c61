"""transformers as one of the peers: the stock model on the same weights, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import transformers
from torch import nn

from mpic.evals.bench.baseline import StockGenerator
from mpic.evals.bench.harness import BenchDevice
from mpic.evals.bench.peers.prompts import flat
from mpic.kv.chunk import KVShape
from mpic.prompt.segments import Prompt


class Stock:
    """A plain forward for first tokens; ``generate`` over a filled static cache for answers."""

    name = "transformers"

    def __init__(self, stock: nn.Module, shape: KVShape, placement: BenchDevice) -> None:
        self._stock, self._shape, self._placement = stock, shape, placement
        self.detail = (
            f"transformers {transformers.__version__}, sdpa; nothing kept between prompts; answers by generate over a "
            "static cache, not compiled; in this process"
        )

    def next_token(self, ids: Sequence[int]) -> int:
        self._stock.set_attn_implementation("sdpa")
        with torch.inference_mode():
            tokens = torch.tensor([list(ids)], device=self._placement.device)
            return int(self._stock(input_ids=tokens, logits_to_keep=1).logits[0, -1].argmax())

    def first_ms(self, prompt: Prompt) -> float:
        ids = flat(prompt)
        began = time.perf_counter()
        self.next_token(ids)
        return (time.perf_counter() - began) * 1e3

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        length = max(len(flat(prompt)) for prompt in prompts)
        return StockGenerator(self._stock, self._shape, "static", len(prompts), length, tokens)()

    def close(self) -> None:
        pass
