"""Puts combinations of layers that no family of transformers has into stock models, because the facts found at load
time must not depend on existing families."""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl


class _OwnRotaryLayer(LlamaDecoderLayer):
    """A layer that turns its keys by a rotary embedding of its own."""

    def forward(self, hidden_states, position_ids=None, position_embeddings=None, **kwargs):
        turned = self.own_rotary(hidden_states, position_ids)
        return super().forward(hidden_states, position_ids=position_ids, position_embeddings=turned, **kwargs)


def with_rotaries(model: nn.Module, thetas: list[float]) -> nn.Module:
    """Give each layer of a Llama a rotary embedding of its own."""
    for layer, theta in zip(model.model.layers, thetas, strict=True):
        config = type(model.config).from_dict(model.config.to_dict())
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        layer.own_rotary = LlamaRotaryEmbedding(config)
        layer.__class__ = _OwnRotaryLayer
    return model


class _SinkAttention(qwen2_vl.Qwen2VLAttention):
    """Qwen2-VL's attention with one sink logit a head, as gpt-oss has them."""

    def forward(
        self, hidden_states, attention_mask=None, position_embeddings=None, past_key_values=None, **kwargs
    ):
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = qwen2_vl.apply_rotary_pos_emb(q, k, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        given = {"scaling": self.scaling, "sliding_window": self.sliding_window, "s_aux": self.sinks}
        out, weights = attend(self, q, k, v, attention_mask, **given)
        return self.o_proj(out.reshape(*hidden_states.shape[:2], -1).contiguous()), weights


def with_sinks(model: nn.Module) -> nn.Module:
    """Give every head of a Qwen2-VL a sink logit."""
    for layer in model.model.language_model.layers:
        layer.self_attn.__class__ = _SinkAttention
        layer.self_attn.sinks = nn.Parameter(torch.zeros(layer.self_attn.num_heads))
    return model
