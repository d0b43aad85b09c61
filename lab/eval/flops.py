"""Floating point operations of a prefill, counted from the work that the engine reports.

A computed row takes two operations for every weight of the decoder's linear layers, and a (query, key) pair of a layer
``4 x heads x head_dim`` (scores and weighted values); the last row also meets the output projection. A test holds the
sum equal to torch's own counter over a stock forward. Compiling chunks and encoding images are not included.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from mpic.data.published import gguf_path, graft_folder, is_gguf
from mpic.engine.base import GenerationUsage
from mpic.link import DynamicPolicy, Evidence, Policy

_QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
"""Names of the modules for queries, keys and values in transformers' decoders."""


class Flops:
    """Counts operations for one model.

    Args:
        model: of transformers; only the shapes of its weights matter, so it may be on the device ``meta``.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = model.get_decoder().layers
        self.layer = 2 * sum(_weights(layer) for layer in layers) / len(layers)
        self.layers = len(layers)
        self.projections = 2 * sum(_weights(layer, _QKV) for layer in layers) / len(layers)
        config = model.config.get_text_config()
        heads, plain = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        dims = [getattr(getattr(one, "self_attn", None), "head_dim", plain) for one in layers]
        self.pair = 4 * heads * sum(dims) / len(dims)  # the mean, if layers differ in heads
        self.head = 2 * config.hidden_size * config.vocab_size

    def of(self, usage: GenerationUsage, policy: Policy | None = None) -> float:
        """Return the operations of a request's prefill.

        Args:
            policy: a dynamic policy has looked at the prompt first, which counts, too: for deviation, one layer and the
                next layer's projections over the whole prompt; for attention, the projections of the text after the
                chunks and its scores over their tokens.
        """
        rows, pairs = usage.computed, usage.attended
        total = self.layers * (self.layer * rows + self.pair * pairs) + self.head
        n = usage.probed
        if n and isinstance(policy, DynamicPolicy) and policy.evidence is Evidence.ATTENTION:
            total += self.projections * n + self.pair / 2 * n * (usage.reused + usage.recomputed)
        elif n:
            total += (self.layer + self.projections) * n + self.pair * n * (n + 1) // 2
        return float(total)


def shapes_of(path: str) -> nn.Module:
    """Return a model of a folder, a hub id or a GGUF file with the shapes of its weights and without their values."""
    if is_gguf(path):
        file = gguf_path(path)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    else:
        config = AutoConfig.from_pretrained(graft_folder(path) or path)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


def _weights(layer: nn.Module, only: tuple[str, ...] = ("",)) -> int:
    """Return the weights of a layer's linear modules whose names end in one of ``only``."""
    return sum(
        module.weight.numel()
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(only)
    )
