"""Refuses models by name whose results would be wrong, with the reason.

This list is for clear messages; the load-time self-test catches what it misses.
"""

from __future__ import annotations

from typing import Any

from mpic.errors import ModelRefused

_REASONS = {"mllama": "its images enter through cross-attention, not as tokens"}
_ON_VLLM = {
    **dict.fromkeys(
        ("smollm3", "cohere2", "llama4", "exaone4"), "some of its layers have no rotary embedding"
    ),
    **dict.fromkeys(("gemma3", "gemma3n"), "its images attend to themselves in both directions"),
    "paligemma": "its prompt attends to itself in both directions",
}
_ROTATED = ("no_rope_layers", "use_rope_layers", "layer_rope_theta")
"""Names of lists with an entry for each layer, which is 0 or false where it has no rotary embedding."""
_STATES = ("linear", "conv", "mamba", "recurrent", "ssm")
"""Parts of the names of layers that keep a state."""


def refuse_unsupported(config: Any, text_config: Any) -> None:
    """Raise ModelRefused for a model that is known not to work on any engine."""
    _refuse_by_name(config, text_config, _REASONS)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{config.model_type}: an encoder-decoder attends across, not over one prompt")
    kinds = set(getattr(text_config, "layer_types", None) or ())
    states = sorted(kind for kind in kinds if any(part in str(kind) for part in _STATES))
    if states:
        raise ModelRefused(f"{config.model_type}: layers of kind {states} keep a state, not keys and values")
    if (
        getattr(text_config, "alibi", False)
        or getattr(text_config, "position_embedding_type", "rope") == "alibi"
    ):
        raise ModelRefused(f"{config.model_type}: ALiBi has no keys that could be moved")


def refuse_on_vllm(config: Any, text_config: Any) -> None:
    """Raise ModelRefused for a model whose keys cannot be moved inside vLLM's pages, although the native engine may
    serve it (the native engine looks at each layer instead, ``trace.py``)."""
    refuse_unsupported(config, text_config)
    _refuse_by_name(config, text_config, _ON_VLLM)
    if getattr(text_config, "use_bidirectional_attention", None):
        raise ModelRefused(f"{config.model_type}: attention in both directions depends on the whole prompt")
    if not all(flag for name in _ROTATED for flag in getattr(text_config, name, None) or ()):
        raise ModelRefused(f"{config.model_type}: some of its layers have no rotary embedding")
    other = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ModelRefused(f"{config.model_type}: layers of kind {sorted(other)} are not supported in vLLM")
    for name in ("head_dim", "num_key_value_heads"):
        layers = text_config.per_layer_config if getattr(text_config, "is_heterogeneous", False) else ()
        if len({getattr(layer, name, None) for layer in layers}) > 1:
            raise ModelRefused(f"{config.model_type}: layers with different {name} are not supported in vLLM")
    for name in ("attn_logit_softcapping", "kv_lora_rank"):
        if getattr(text_config, name, None):
            raise ModelRefused(f"{config.model_type}: attention with {name} is not supported")


def _refuse_by_name(config: Any, text_config: Any, reasons: dict[str, str]) -> None:
    for part in (config, text_config):
        if part.model_type in reasons:
            raise ModelRefused(f"{part.model_type}: {reasons[part.model_type]}")


def context_limit(text_config: Any) -> int:
    """Return the longest context in tokens.

    Llama 4 scales queries by a row's number in the forward once that reaches ``floor_scale``, and a packed step has
    rows of many requests: its context ends before that.
    """
    limit = getattr(text_config, "max_position_embeddings", None) or 4096
    if getattr(text_config, "attn_temperature_tuning", None):
        limit = min(limit, int(getattr(text_config, "floor_scale", limit)) - 1)
    return int(limit)


def context_on_vllm(text_config: Any) -> int:
    """Return the longest context in tokens in vLLM: no longer than the model's sliding window if it has one."""
    limit = context_limit(text_config)
    window = getattr(text_config, "sliding_window", None)
    layer_types = getattr(text_config, "layer_types", None)
    if window and (layer_types is None or "sliding_attention" in layer_types):
        limit = min(limit, window)
    return int(limit)
