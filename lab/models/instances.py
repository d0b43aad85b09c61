"""Tiny random instances of the model families that the installed transformers knows.

No family is treated specially: the sizes in a family's default configuration are replaced by small ones, by name, and
the values that a configuration derives from them follow. Lists with one entry per layer keep their kinds, alternating.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

from mpic.errors import ModelRefused
from mpic.model.structure import inner_of, text_model_of

LAYERS = 4
MOST_PARAMETERS = 30_000_000
MAPPINGS = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text-to-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}

WINDOW = 8
GRID = [[32, 64], [64, 32], [64, 64]]
"""Sizes of images that are cut into tiles of 32 by 32 pixels."""
_NAMES: tuple[tuple[int, str], ...] = (
    (300, "vocab_size vocab_size_per_layer_input"),
    (64, "hidden_size d_model n_embd dim embed_dim emb_dim word_embed_proj_dim"),
    (64, "projection_dim projection_hidden_size"),
    (96, "intermediate_size intermediate_size_mlp ffn_dim ffn_hidden_size decoder_ffn_dim n_inner"),
    (32, "moe_intermediate_size expert_intermediate_size expert_ffn_hidden_size"),
    (32, "shared_intermediate_size shared_expert_intermediate_size"),
    (LAYERS, "num_hidden_layers num_layers n_layers n_layer decoder_layers"),
    (4, "num_attention_heads num_heads n_heads n_head decoder_attention_heads swa_num_attention_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
    (16, "head_dim swa_head_dim qk_nope_head_dim v_head_dim kv_lora_rank"),
    (32, "global_head_dim"),
    (8, "qk_rope_head_dim"),
    (24, "q_lora_rank"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_group topk_group first_k_dense_replace"),
    (16, "hidden_size_per_layer_input mm_tokens_per_image"),
    (512, "max_position_embeddings n_positions"),
    (WINDOW, "sliding_window sliding_window_size attention_chunk_size local_attention"),
)
"""Small sizes, and the names that families have for each."""
_SMALL: dict[str, Any] = {
    **{name: size for size, names in _NAMES for name in names.split()},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_grid_pinpoints": GRID,
    "vision_feature_layers": [-2, -1],
    "projector_patch_to_query_dict": {61 * 61: 4},
    "full_attn_idxs": [1, 3],
}
_VISION: dict[str, Any] = {
    **{k: v for k, v in _SMALL.items() if not k.endswith("token_id") and "position" not in k},
    "depth": 2,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "image_size": 32,
    "deepstack_visual_indexes": [0],
    "patch_size": 8,
    "out_hidden_size": 64,
    "intermediate_size": 256,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "vision_output_dim": 64,
}
_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "attention_layers")


def families(kind: str) -> list[str]:
    """Return the ``model_type`` of every family that the installed transformers has of a kind of ``MAPPINGS``."""
    return sorted(MAPPINGS[kind])


def class_names(family: str, kind: str) -> list[str]:
    names = MAPPINGS[kind][family]
    return [names] if isinstance(names, str) else list(names)


def build(family: str, kind: str, seed: int = 0, sizes: Mapping[str, Any] | None = None) -> nn.Module:
    """Return a tiny instance in fp32 with random weights.

    Args:
        sizes: in place of those of text models here.

    Raises:
        ModelRefused: no instance could be made; the message says why.
    """
    first: Exception | None = None
    for extra in _TRIES:
        try:
            torch.manual_seed(seed)
            model = _instance(family, kind, {**_SMALL, **extra, **(sizes or {})}, extra)
        except ModelRefused:
            raise
        except Exception as error:
            first = first or error
            continue
        randomise(model, seed)
        return model
    assert first is not None
    raise ModelRefused(f"no small instance: {one_line(first)}") from first


def _instance(family: str, kind: str, sizes: dict[str, Any], extra: dict[str, Any]) -> nn.Module:
    import transformers

    config = small_config(family, sizes, extra)
    cls = getattr(transformers, class_names(family, kind)[0])
    wanted = cls.config_class
    if wanted is not None and not isinstance(config, wanted):
        config = small(wanted, sizes, extra, sizes)
    try:
        with torch.device("meta"):
            outline = cls(config)
    except TypeError:  # the model fills its buffers in a way that the meta device does not support
        outline = cls(config)
    count = sum(p.numel() for p in outline.parameters())
    if count > MOST_PARAMETERS:
        raise ModelRefused(f"its sizes could not be made small ({count / 1e6:.0f} M parameters)")
    _divide_axes(config.get_text_config(), outline)
    return cls(config).float().eval()


_TRIES: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 16},
    {"head_dim": 16, "num_key_value_heads": 2},
    {"head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4},
    {"num_kv_shared_layers": 2},
    {"num_experts_per_tok": 1},
    {
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "moe_intermediate_size": 32,
    },
)
"""Further settings, for configurations that do not work without them."""


def _divide_axes(text_config: Any, outline: nn.Module) -> None:
    """Divide the rotary dimensions among the three axes of positions, if a model has them, since the defaults fit its
    real size."""
    rope = getattr(text_config, "rope_parameters", None)
    if not hasattr(inner_of(outline), "get_rope_index") or not isinstance(rope, dict):
        return
    buffers = text_model_of(outline).named_buffers()
    half = next((len(b) for name, b in buffers if name.endswith("inv_freq") and "original" not in name), 0)
    rope["mrope_section"] = [half // 4, half // 4, half - 2 * (half // 4)]


def small_config(family: str, sizes: dict[str, Any], extra: dict[str, Any]) -> PretrainedConfig:
    """Return a family's default configuration with small sizes; see ``small``."""
    import transformers

    name = configuration_auto.CONFIG_MAPPING_NAMES[family]
    return small(getattr(transformers, name), sizes, extra, sizes)


def small(
    cls: type[PretrainedConfig], sizes: dict[str, Any], extra: dict[str, Any], text_sizes: dict[str, Any]
) -> PretrainedConfig:
    """Return a configuration of a class with other sizes, those in ``extra`` even where it uses no such size. Text
    models in it have ``text_sizes``, other parts ``_VISION``."""
    default = cls()
    known = {**inspect.signature(cls.__init__).parameters, **default.to_dict()}
    changes = {k: v for k, v in sizes.items() if k in known and (k in extra or _has_size(default, k))}
    special = (k for k, v in default.to_dict().items() if isinstance(v, int) and v >= 300 and _is_token(k))
    changes |= {name: 4 + number % 6 for number, name in enumerate(special)}
    if "qk_rope_head_dim" in known:  # in multi-head latent attention the sizes follow from others
        changes.pop("head_dim", None)
        changes["num_key_value_heads"] = changes.get("num_attention_heads", 4)
    for name, part in (getattr(cls, "sub_configs", None) or {}).items():
        present = getattr(default, name, None)
        kind = type(present) if isinstance(present, PretrainedConfig) else part
        if kind is not PretrainedConfig and isinstance(kind, type) and kind.__name__ != "AutoConfig":
            text = "text" in name or "decoder" in name
            vision = {**_VISION, "out_hidden_size": text_sizes["hidden_size"]}  # the inputs of the text model
            changes[name] = small(kind, *((text_sizes, extra) if text else (vision, {})), text_sizes)
    layers = next(
        (changes[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if k in changes), LAYERS
    )
    for name in _LISTS:
        entries = getattr(default, name, None)
        settable = not isinstance(getattr(cls, name, None), property) and name in known
        if settable and isinstance(entries, list | tuple) and entries:
            kinds = sorted(dict.fromkeys(entries), key=lambda kind: kind == "full_attention")
            changes[name] = [kinds[i % len(kinds)] for i in range(layers)]
    if "full_attn_idxs" in changes:  # the kinds of its layers follow from these
        changes.pop("layer_types", None)
    return cls(**changes)


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index", "_token"))


def _has_size(default: PretrainedConfig, name: str) -> bool:
    """Return whether a configuration uses a size: one that is None by default is derived or switched off."""
    if name.endswith("token_id") or name in ("num_experts_per_tok", "n_routed_experts", "full_attn_idxs"):
        return True
    try:
        return getattr(default, name, None) is not None
    except Exception:  # transformers raises this for values that vary with the layer
        return True


def randomise(model: nn.Module, seed: int) -> None:
    """Set weights that make attention far from uniform, and a different value for every bias and sink."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (0.5 if "embed" in name or "wte" in name else 0.12))
            elif not torch.isfinite(parameter).all() or "sink" in name:
                parameter.copy_(noise)
            else:
                parameter.add_(noise * 0.05)


def one_line(error: BaseException) -> str:
    """Return an error in one short line."""
    return shortened(f"{type(error).__name__}: {error}")


def shortened(text: str) -> str:
    """Return a text in one line of at most 200 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."
