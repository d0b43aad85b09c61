"""Saves a LLaVA as a folder like a hub repository, which transformers and vLLM both load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    CLIPImageProcessorPil,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)


def save_folder(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    template: str,
    dtype: torch.dtype,
    **pixels: Any,
) -> None:
    """Save a model, under weight names that transformers and vLLM both load, with its processor and template.

    Args:
        pixels: options of the image processor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tied = model.config.tie_word_embeddings
    state = {
        published_name(name): value.detach().to("cpu", dtype, copy=True).contiguous()
        for name, value in model.state_dict().items()
        if not (tied and name.startswith("lm_head."))
    }
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    config = model.config.__class__.from_pretrained(folder)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    side, patch = model.config.vision_config.image_size, model.config.vision_config.patch_size
    crop = {"height": side, "width": side}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size=crop, do_convert_rgb=True, **pixels
        ),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(folder)


def published_name(name: str) -> str:
    """Return the on-disk weight name: the published LLaVA layout, which both loaders map."""
    name = name.removeprefix("model.") if not name.startswith("lm_head") else name
    if name.startswith("language_model."):
        return "language_model.model." + name.removeprefix("language_model.")
    if name.startswith("lm_head."):
        return "language_model." + name
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return "vision_tower.vision_model." + name.removeprefix("vision_tower.")
    return name
