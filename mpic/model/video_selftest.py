"""The load-time self-test with clips: a prompt of two clips between texts, once by the stock model, called with what
its processor makes of them, and once as a step in which each clip lies in an extent of its own."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from mpic.imaging.clips import Clip, ClipFacts
from mpic.model.image_selftest import linked
from mpic.model.loaded import LoadedModel
from mpic.model.selftest import compare, stock_attention
from mpic.model.vision import CLIP_TYPE, processed


@torch.inference_mode()
def video_self_test(loaded: LoadedModel) -> float:
    """Compare with the stock model and return the relative error.

    Raises:
        ModelRefused: the logits differ, or the model's clips cannot be linked.
    """
    clips = [_clip(4, 64, 48), _clip(6, 40, 64)]
    failed = f"{loaded.config.model_type}: its clips cannot be linked"
    why = "it lays its clips out, or attends to them, in another way"

    def logits() -> tuple[torch.Tensor, torch.Tensor]:
        return linked(loaded, [loaded.clip_inputs(clip) for clip in clips], partial(_stock, clips=clips))

    return compare(loaded, logits, failed, "logits behind linked clips", why)


def _clip(frames: int, width: int, height: int) -> Clip:
    """Return a clip of noise, every other frame of which is seen."""
    generator = np.random.default_rng(frames)
    pixels = generator.integers(0, 256, (frames, height, width, 3), np.uint8)
    facts = ClipFacts(width, height, 2 * frames, 4.0)
    return Clip(facts, tuple(range(0, 2 * frames, 2)), pixels)


def _stock(loaded: LoadedModel, ids: torch.Tensor, clips: list[Clip]) -> torch.Tensor:
    made = processed(loaded.processor, clips, [loaded.processor.video_token * len(clips)])
    extra = {
        k: v.to(loaded.device, loaded.dtype if v.is_floating_point() and k.startswith("pixel") else None)
        for k, v in made.items()
        if isinstance(v, torch.Tensor) and k not in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    kinds = torch.where(ids == loaded.config.video_token_id, CLIP_TYPE, 0)
    extra["mm_token_type_ids"] = kinds[None].to(loaded.device)
    with stock_attention(loaded):
        return loaded.model(input_ids=ids[None].to(loaded.device), **extra, use_cache=False).logits[0].float()
