"""The demo MLLM: a plain `LlavaForConditionalGeneration`, built, saved and loaded."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mpic.kernels import instructions
from mpic_lab.generator.conversation import CHAT_TEMPLATES, SPECIAL, Labels
from mpic_lab.generator.images import LARGE, PATCH, SIZE


@dataclass(frozen=True)
class Design:
    """Sizes of a model; heads are 8 of 64."""

    hidden: int
    mlp: int
    layers: int
    image_size: int  # pixels
    patch: int  # pixels
    context: int  # tokens
    rope_theta: float

    @property
    def image_tokens(self) -> int:
        """Tokens of an image."""
        return (self.image_size // self.patch) ** 2


FIRST = Design(256, 704, 5, SIZE, 8, 2048, 1e6)
SECOND = Design(384, 1024, 6, LARGE, PATCH, 8192, 1e8)
"""LLaVA-1.5's image geometry: 24 x 24 patches of 14 px. With this theta half of the rotary pairs hardly turn over the
whole context, so content can be matched at any distance."""
IMAGE_TOKENS = FIRST.image_tokens


def build_model(
    tokenizer: PreTrainedTokenizerFast, layers: int | None = None, design: Design = FIRST
) -> LlavaForConditionalGeneration:
    """Returns a freshly initialised model of a design; `layers`: another number of them."""
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=design.hidden,
        intermediate_size=design.mlp,
        num_hidden_layers=layers or design.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=design.context,
        rope_parameters={"rope_type": "default", "rope_theta": design.rope_theta},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=design.image_size,
        patch_size=design.patch,
        hidden_act="gelu",
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(SPECIAL["image"]),
        image_seq_length=design.image_tokens,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def image_features(model: LlavaForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """Returns [images, image tokens, hidden]: what the language model sees of uint8 pixels [images, side, side, 3]."""
    scaled = pixels.permute(0, 3, 1, 2).to(model.dtype) / 127.5 - 1
    features = model.model.get_image_features(pixel_values=scaled)
    features = getattr(features, "pooler_output", features)
    return torch.stack(list(features)) if isinstance(features, list | tuple) else features


def save_model(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    labels: Labels = "around",
) -> None:
    """Saves a demo model in bf16, with its processor, generation settings and the template whose labels stand there."""
    stop = [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids(SPECIAL["end"]),
    ]  # a search call ends a turn too
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stop,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=64,
    )
    tokenizer.image_token = SPECIAL["image"]
    tokenizer.model_max_length = model.config.text_config.max_position_embeddings
    pixels = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    save_folder(model, tokenizer, folder, CHAT_TEMPLATES[labels], torch.bfloat16, **pixels)


def save_folder(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    template: str,
    dtype: torch.dtype,
    **pixels: Any,
) -> None:
    """Saves a model, under weight names that transformers and vLLM both load, with its processor and template.

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
        image_token=SPECIAL["image"],
        num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(folder)


def published_name(name: str) -> str:
    """Returns the on-disk weight name: the published LLaVA layout, which both loaders map."""
    name = name.removeprefix("model.") if not name.startswith("lm_head") else name
    if name.startswith("language_model."):
        return "language_model.model." + name.removeprefix("language_model.")
    if name.startswith("lm_head."):
        return "language_model." + name
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return "vision_tower.vision_model." + name.removeprefix("vision_tower.")
    return name


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[LlavaForConditionalGeneration, PreTrainedTokenizerFast]:
    """Returns a saved model and its tokenizer."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def products_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 where the device is made for its products, else float32.

    An x86 processor without AVX-512 BF16 multiplies bf16 five times slower than fp32, and small matrices fifty times.
    """
    slow = device.type == "cpu" and platform.machine() == "x86_64" and not instructions.pairs()
    return torch.float32 if slow else torch.bfloat16


def autocast(device: torch.device) -> torch.autocast:
    """Returns a context in which products are computed in bf16 if the device is made for that."""
    lower = products_dtype(device) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=lower)
