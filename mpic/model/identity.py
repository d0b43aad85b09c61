"""The identity of a model, which is the same on both engines: digests that identify its chunks, and its special
tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mpic.imaging.processing import changed_settings, image_text
from mpic.kv.chunk import KVShape, digest

VERIFIED = frozenset({
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gpt_oss",
    "llama4_text", "deepseek_v3", "paligemma", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
})  # fmt: skip
"""model_type of the families whose invariants are tested; others run if they pass the load-time self-test."""


def fingerprint(model: nn.Module) -> str:
    """Return a digest of configuration and weights: for every tensor its name, shape, dtype, the exact integer sum of
    all its words and 4,096 evenly spaced values. It covers every weight and is fast enough for large models."""
    return fingerprint_of(model.config, sorted(model.state_dict().items()))


def fingerprint_of(configuration: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the ``fingerprint`` of a model with this configuration and these weights, which come in the order of
    their names."""
    config = {
        k: v
        for k, v in configuration.to_dict().items()
        if not k.startswith("_") and k != "transformers_version"
    }
    h = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        words = flat.view(
            {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        )
        total = int(words.sum(dtype=torch.int64))
        sample = flat[:: max(1, flat.numel() // 4096)].float().cpu().numpy().tobytes()
        h.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|{total}".encode())
        h.update(sample)
    return h.hexdigest()


_PLAIN = "_mpic_weights_digest"


def remember_weights(model: nn.Module) -> None:
    """Store a model's present ``weights_digest``. Call it before the weights are quantised."""
    setattr(model, _PLAIN, weights_digest(model))


def weights_digest(model: nn.Module) -> str:
    """Return a digest of configuration and weights that is the same for every dtype in which a checkpoint is loaded or
    quantised, because an adapter that was trained with the weights fits all of them. It covers the name and shape of
    every tensor and 4,096 evenly spaced values, rounded to bfloat16."""
    if known := getattr(model, _PLAIN, ""):
        return known
    return weights_digest_of(model.config, sorted(model.state_dict().items()))


def weights_digest_of(configuration: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the ``weights_digest`` of a model with this configuration and these weights, which come in the order of
    their names."""
    config = _without_dtype(configuration.to_dict())
    h = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 4096)].to(torch.bfloat16).float().cpu().numpy().tobytes()
        h.update(f"{name}|{tuple(tensor.shape)}".encode())
        h.update(sample)
    return h.hexdigest()


def _without_dtype(config: dict[Any, Any]) -> dict[str, Any]:
    return {
        str(key): _without_dtype(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not str(key).startswith("_") and key not in ("dtype", "torch_dtype", "transformers_version")
    }


_IN_TILES = (600, 300)
"""The width and height of an image that every processor which cuts images cuts into two tiles or more."""


def preprocessing_digest(processor: Any) -> str:
    """Return a digest of a processor's (or tokenizer's) tokenizer, its image processor, the settings that it has for
    that one, and what it puts between the tokens of an image; part of every recipe.

    Raises:
        ModelRefused: it does not say what it puts into a prompt for an image.
    """
    parts = []
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is not None:
        backend_tokenizer = getattr(tokenizer, "backend_tokenizer", None)
        parts.append(backend_tokenizer.to_str() if backend_tokenizer else repr(tokenizer))
    image_processor = getattr(processor, "image_processor", None)
    if image_processor is not None:
        parts.append(type(image_processor).__name__)
        parts.append(json.dumps(image_processor.to_dict(), sort_keys=True, default=str))
        # nothing is added for most models, so that their chunks of earlier releases, which ignored both, stay valid
        if changed := changed_settings(processor):
            parts.append(json.dumps(changed, sort_keys=True, default=str))
        if between := image_text(processor, _IN_TILES)[1]:
            parts.append(between)
    return digest(*parts)


def shape_of(text_config: Any) -> KVShape:
    """Return the geometry of a decoder's KV."""
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    return KVShape(text_config.num_hidden_layers, kv_heads, head_dim)


def deepstack_layers(config: Any) -> int:
    """Return how many layers an image's DeepStack features have (Qwen3-VL); 0 for models without them."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def eos_ids(generation_config: Any, text_config: Any) -> frozenset[int]:
    """Return the tokens that end an answer."""
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list | tuple) else [eos])


def bos_id(text_config: Any, tokenizer: Any) -> int:
    """Return the token compiled in front for LegoLink-0; models without BOS use their pad or first token."""
    for source in (text_config, tokenizer):
        for attribute in ("bos_token_id", "pad_token_id"):
            value = getattr(source, attribute, None)
            if isinstance(value, int):
                return value
    return 0
