"""transformers as one of the peers: the stock model on the same weights, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

from mpic.kv.chunk import Chunk
from mpic.prompt.segments import Prompt
from mpic_lab.bench.baseline import StockGenerator
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.bench.peers.prompts import First, flat, parts
from mpic_lab.bench.workload import IMAGE_TOKEN, DecoderShape, TowerShape


class Stock:
    """A plain forward for first tokens; ``generate`` over a filled static cache for answers.

    Args:
        tower: of a model that takes images; None for a model of text.
    """

    name = "transformers"

    def __init__(
        self, stock: nn.Module, shape: DecoderShape, placement: BenchDevice, tower: TowerShape | None = None
    ) -> None:
        self._stock, self._shape, self._placement, self._tower = stock, shape, placement, tower
        self._pixels = tower.processor().image_processor if tower else None
        dtype = str(placement.dtype).removeprefix("torch.")
        self.detail = (
            f"transformers {transformers.__version__}, {dtype}, sdpa; nothing kept between prompts; answers by "
            "generate over a static cache, not compiled; in this process"
        )

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """Return the logits behind a prompt, float32 on the host."""
        self._stock.set_attn_implementation("sdpa")
        with torch.inference_mode():
            return self._stock(**self._inputs(prompt), logits_to_keep=1).logits[0, -1].float().cpu()

    def _inputs(self, prompt: Prompt) -> dict[str, Any]:
        """Return the tokens, and the pixels of images, each of which has as many tokens as the tower makes of it."""
        device = self._placement.device
        if self._tower is None:
            return {"input_ids": torch.tensor([flat(prompt)], device=device)}
        ids: list[int] = []
        images = []
        for part in parts(prompt):
            if isinstance(part, Chunk):
                ids += [IMAGE_TOKEN] * self._tower.tokens
                images.append(part.load_image())
            else:
                ids += part
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids], device=device)}
        if images:
            pixels = self._pixels(images, return_tensors="pt")["pixel_values"]
            inputs["pixel_values"] = pixels.to(device, self._placement.dtype)
        return inputs

    def next_token(self, prompt: Prompt) -> int:
        return int(self.logits(prompt).argmax())

    def first(self, prompt: Prompt) -> First:
        began = time.perf_counter()
        self.next_token(prompt)
        return First((time.perf_counter() - began) * 1e3, 0)

    def rate(self, prompts: Sequence[Prompt], tokens: int) -> float:
        length = max(len(flat(prompt)) for prompt in prompts)
        return StockGenerator(self._stock, self._shape, "static", len(prompts), length, tokens)()

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass
