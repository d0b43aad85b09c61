"""The model of the data folders in ``upgrade/``. Compiled chunks belong to one model, so this one never changes."""

from __future__ import annotations

from pathlib import Path

import torch
from server_helpers import byte_tokenizer, llava_processor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)


def save_model(folder: Path) -> Path:
    """Save a random LLaVA of three small layers, always the same one, with processor and chat template."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=image_token, vision_feature_layer=-1
    )
    LlavaForConditionalGeneration(config).eval().save_pretrained(folder)
    llava_processor(tokenizer).save_pretrained(folder)
    return folder
