"""Checkpoints whose weights are quantised already (bitsandbytes, GPTQ, AWQ, compressed-tensors, torchao, fp8, ...).
Transformers loads them, and checkpoints that it cannot load on this machine are refused before any weight is read."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from mpic.errors import ModelRefused
from mpic.model.quantize import weight_bytes


def quantization_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the quantization settings in a checkpoint's configuration, or None if it is not quantised."""
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found:
            return found if isinstance(found, dict) else found.to_dict()
    return None


def method_of(quantization: dict[str, Any]) -> str:
    """Return the name of a method, such as ``gptq``; empty if none is given."""
    method = quantization.get("quant_method") or ""
    bits = "8" if quantization.get("load_in_8bit") else "4" if quantization.get("load_in_4bit") else ""
    return f"bitsandbytes_{bits}bit" if bits else str(getattr(method, "value", method))


def described(config: PretrainedConfig, model: nn.Module) -> dict[str, Any] | None:
    """Return the facts for ``/health`` about a quantised checkpoint; None if it is not quantised."""
    quantization = quantization_of(config)
    return None if quantization is None else {"method": method_of(quantization), "bytes": weight_bytes(model)}


def refuse_quantized(config: PretrainedConfig) -> None:
    """Refuse checkpoints that transformers cannot load here. It would treat weights of an unknown method as plain
    ones, and replace those that it does not find by random ones.

    Raises:
        ModelRefused: the method is unknown, needs a GPU, or needs a package that is not installed.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return
    method = method_of(quantization)
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelRefused(
            f"{config.model_type}: its weights are quantised with '{method}', which transformers does not know"
        )
    try:
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:
        raise ModelRefused(
            f"{config.model_type}: its weights are quantised with {method}, which cannot be loaded here: {error}"
        ) from error
