"""Tiny random models of every verified family, each with the image processor of the real one.

Weights are larger than transformers' initialisation, so that attention is far from uniform and positions matter.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers as tf
from odd_families import with_rotaries, with_sinks
from PIL import Image
from torch import nn

from mpic.model.loaded import LoadedModel
from mpic_lab.oracle import IMAGE_TYPES, PREFIX_TYPES

TEXT = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE_TOKEN = 5
Sizes = dict[str, Any]
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION |= {"image_size": 32, "patch_size": 8}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
_QWEN_VL = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": 6, "vision_end_token_id": 7}
_QWEN_VL |= {"video_token_id": 8}


def _head_dim(text: Sizes) -> int:
    return text["hidden_size"] // text["num_attention_heads"]


def _mrope(text: Sizes) -> dict[str, object]:
    half = _head_dim(text) // 2
    section = [half // 4, 3 * half // 8, 3 * half // 8]
    return {"rope_type": "default", "mrope_section": section, "rope_theta": 1e4}


def _qwen_vision(text: Sizes, **more: object) -> Sizes:
    same = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 8}
    return {**same, "out_hidden_size": text["hidden_size"], **more}


def _llama(text: Sizes) -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**text, rope_parameters=_LLAMA3))


def _rotaries(text: Sizes) -> nn.Module:
    """Three rotary embeddings, unevenly spread."""
    sizes = {**text, "num_hidden_layers": 5}
    return with_rotaries(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)), [1e4, 1e2, 1e6, 1e6, 1e2])


def _mistral(text: Sizes) -> nn.Module:
    return tf.MistralForCausalLM(tf.MistralConfig(**{"sliding_window": 1024, **text}))


def _qwen2(text: Sizes) -> nn.Module:
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**text))


def _qwen3(text: Sizes) -> nn.Module:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**text, head_dim=32))


def _phi3(text: Sizes) -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return tf.Phi3ForCausalLM(tf.Phi3Config(**text, rope_parameters=rope))


def _gemma3(text: Sizes) -> nn.Module:
    """Two rotary embeddings and windows that are smaller than a chunk, unevenly spread; an odd number of heads."""
    sizes = {**text, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    sizes |= {"num_hidden_layers": 4, "sliding_window": 7, "layer_types": kinds}
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**sizes))


def _gemma2(text: Sizes) -> nn.Module:
    """Capped scores beside windows."""
    sizes = {**text, "head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 9}
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes))


def _gpt_oss(text: Sizes) -> nn.Module:
    """A sink logit a head, windows, YaRN, experts."""
    sizes = {**text, "head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    return tf.GptOssForCausalLM(tf.GptOssConfig(**sizes))


def _llama4(text: Sizes) -> nn.Module:
    """Windows in chunks; layers without rotary embedding; pairs of neighbouring dimensions."""
    sizes = {**text, "head_dim": 16, "num_hidden_layers": 4}
    sizes |= {"num_local_experts": 2, "intermediate_size_mlp": 64}
    layers = {"no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 10}
    return tf.Llama4ForCausalLM(tf.Llama4TextConfig(**sizes, **layers))


def _gemma4(text: Sizes) -> nn.Module:
    """Heads of two sizes, fewer key heads in some layers, keys shared between layers, embeddings in every layer."""
    sizes = {**text, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 5, "num_kv_shared_layers": 2}
    kinds = ["sliding_attention", "sliding_attention"]
    kinds += ["full_attention", "sliding_attention", "full_attention"]
    more = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8}
    per_layer = {"vocab_size_per_layer_input": text["vocab_size"], "sliding_window": 8, "layer_types": kinds}
    return tf.Gemma4ForCausalLM(tf.Gemma4TextConfig(**sizes, **more, **per_layer))


def _deepseek(text: Sizes) -> nn.Module:
    """Multi-head latent attention: only the last dimensions of a key turn, and values are smaller than keys."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
    latent |= {"qk_rope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = {**latent, **text, "num_key_value_heads": 4}
    sizes |= {"moe_intermediate_size": 32, "first_k_dense_replace": 2}
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**sizes, **experts))


def llava(text: Sizes, image_token: int = IMAGE_TOKEN) -> nn.Module:
    configs = {"vision_config": tf.CLIPVisionConfig(**_VISION), "text_config": tf.LlamaConfig(**text)}
    config = tf.LlavaConfig(**configs, image_token_id=image_token, vision_feature_layer=-1)
    return tf.LlavaForConditionalGeneration(config)


def _llava_next(text: Sizes) -> nn.Module:
    config = tf.LlavaNextConfig(
        vision_config=tf.CLIPVisionConfig(**_VISION),
        text_config=tf.MistralConfig(**{**text, "sliding_window": None}),
        image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-1,
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )
    return tf.LlavaNextForConditionalGeneration(config)


def _qwen2_vl(text: Sizes) -> nn.Module:
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    vision |= {"patch_size": 8, "hidden_size": text["hidden_size"]}
    text = {**text, "rope_parameters": _mrope(text)}
    config = tf.Qwen2VLConfig(text_config=text, vision_config=vision, **_QWEN_VL)
    return tf.Qwen2VLForConditionalGeneration(config)


def _qwen2_vl_odd(text: Sizes) -> nn.Module:
    """Positions with three axes beside windows, which count tokens and not positions; sink logits; an odd number of
    heads; windows in the last three of four layers."""
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    heads = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 4}
    return with_sinks(_qwen2_vl({**text, **window, **heads}))


def _qwen2_5_vl(text: Sizes) -> nn.Module:
    vision = _qwen_vision(text, window_size=32, fullatt_block_indexes=[1])
    text = {**text, "rope_parameters": _mrope(text)}
    config = tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_QWEN_VL)
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(text: Sizes) -> nn.Module:
    vision = _qwen_vision(text, deepstack_visual_indexes=[0, 1], num_position_embeddings=16)
    rope = {**_mrope(text), "mrope_interleaved": True}
    text = {**text, "head_dim": _head_dim(text), "rope_parameters": rope}
    config = tf.Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_VL)
    return tf.Qwen3VLForConditionalGeneration(config)


def _gemma3_images(text: Sizes, image_token: int = IMAGE_TOKEN) -> nn.Module:
    """Images that attend to themselves in both directions, with windows smaller than an image and layers without."""
    sizes = {**text, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 7}
    sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = tf.Gemma3Config(
        text_config=tf.Gemma3TextConfig(**sizes),
        vision_config=tf.SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=16,
        image_token_index=image_token,
    )
    return tf.Gemma3ForConditionalGeneration(config)


def _gemma4_images(text: Sizes) -> nn.Module:
    """Images that attend to themselves in both directions in the layers with windows alone; layers with embeddings of
    their own, which look up another token for an image's."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    sizes = {**text, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 16, "layer_types": kinds}
    sizes |= {"sliding_window": 40, "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 8}
    sizes |= {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": text["vocab_size"]}
    vision = tf.Gemma4VisionConfig(
        **{**_VISION, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
        pooling_kernel_size=2,
    )
    config = tf.Gemma4Config(
        text_config=tf.Gemma4TextConfig(**sizes),
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE_TOKEN,
        video_token_id=6,
        audio_token_id=7,
    )
    return tf.Gemma4ForConditionalGeneration(config)


def _paligemma(text: Sizes, image_token: int = IMAGE_TOKEN) -> nn.Module:
    """A prefix language model: the whole prompt attends to itself in both directions."""
    config = tf.PaliGemmaConfig(
        text_config=tf.GemmaConfig(**text, head_dim=16),
        vision_config=tf.SiglipVisionConfig(**_VISION),
        projection_dim=text["hidden_size"],
        image_token_index=image_token,
    )
    return tf.PaliGemmaForConditionalGeneration(config)


def _paligemma2(text: Sizes) -> nn.Module:
    """The same with windows and capped scores: they apply to generated tokens, not to the prompt."""
    sizes = {**text, "head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0}
    config = tf.PaliGemmaConfig(
        text_config=tf.Gemma2Config(**sizes),
        vision_config=tf.SiglipVisionConfig(**_VISION),
        projection_dim=text["hidden_size"],
        image_token_index=IMAGE_TOKEN,
    )
    return tf.PaliGemmaForConditionalGeneration(config)


def _clip_processor() -> object:
    size = {"height": 32, "width": 32}
    return tf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)


def _next_processor() -> object:
    return tf.LlavaNextImageProcessor(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )


def _siglip_processor() -> object:
    return tf.SiglipImageProcessor(size={"height": 32, "width": 32})


def _gemma4_processor() -> object:
    return tf.Gemma4ImageProcessor(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)


def _qwen_processor() -> object:
    return tf.Qwen2VLImageProcessor(patch_size=8, min_pixels=256, max_pixels=4096)


TEXT_FAMILIES = {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "phi3": _phi3}
FEATURES = {"gemma3": _gemma3, "gemma2": _gemma2, "gpt_oss": _gpt_oss, "llama4": _llama4}
FEATURES |= {"gemma4": _gemma4, "deepseek": _deepseek, "rotaries": _rotaries}
"""One family for each thing that layers may have beside causal attention with one rotary embedding."""
TEXT_FAMILIES |= FEATURES
VISION_FAMILIES = {
    "llava": (llava, _clip_processor),
    "llava_next": (_llava_next, _next_processor),
    "qwen2_vl": (_qwen2_vl, _qwen_processor),
    "qwen2_5_vl": (_qwen2_5_vl, _qwen_processor),
    "qwen3_vl": (_qwen3_vl, _qwen_processor),
    "qwen2_vl_odd": (_qwen2_vl_odd, _qwen_processor),
    "gemma3_images": (_gemma3_images, _siglip_processor),
    "gemma4_images": (_gemma4_images, _gemma4_processor),
    "paligemma": (_paligemma, _siglip_processor),
    "paligemma2": (_paligemma2, _siglip_processor),
}
ODD = ("rotaries", "qwen2_vl_odd")
"""Families that transformers does not have; no checkpoint of them could be loaded."""
TYPES = {
    "gemma3_images": IMAGE_TYPES["token_type_ids"],
    "gemma4_images": IMAGE_TYPES["mm_token_type_ids"],
    "paligemma": PREFIX_TYPES,
    "paligemma2": PREFIX_TYPES,
}
"""What the families' processors say of the types of tokens."""
FAMILIES = [name for name in (*TEXT_FAMILIES, *VISION_FAMILIES) if name != "paligemma"]
"""Those of the invariants; ``paligemma2`` has all that ``paligemma`` has."""


@dataclass
class Family:
    """A hooked model and an untouched twin with the same weights."""

    name: str
    loaded: LoadedModel
    stock: nn.Module


def make_model(
    name: str, seed: int = 0, text: Sizes | None = None, **more: int
) -> tuple[nn.Module, object | None]:
    """Return a family's tiny stock model and, for a vision model, its image processor.

    ``text`` overrides sizes of the text model (``TEXT``); ``more`` goes to the builder of a family with images.
    """
    torch.manual_seed(seed)
    sizes = {**TEXT, **(text or {})}
    image_processor = None
    if name in TEXT_FAMILIES:
        model = TEXT_FAMILIES[name](sizes)
    else:
        build, make_processor = VISION_FAMILIES[name]
        model = build(sizes, **more)
        image_processor = make_processor()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in key:
                parameter.mul_(4.0)
            elif "sinks" in key:
                parameter.normal_()
            elif "embed_tokens" in key or "embed_in" in key:
                parameter.mul_(25.0)
    model = model.float().eval()
    model.generation_config.eos_token_id = None
    return model, image_processor


def make_family(name: str, seed: int = 0, processor: object = None) -> Family:
    """Build a family's tiny model; ``processor`` overrides tokenizer-less default."""
    model, image_processor = make_model(name, seed)
    if image_processor is not None:
        processor = processor or SimpleNamespace(image_processor=image_processor, tokenizer=None)
    stock = copy.deepcopy(model)
    return Family(name, LoadedModel(model, processor, name), stock)


def random_image(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())
