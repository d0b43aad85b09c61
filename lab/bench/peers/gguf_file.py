"""Writes the random Llama of a bench as a GGUF file, the format of llama.cpp, with the package ``gguf``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import LlamaForCausalLM

from mpic_lab.bench.checkpoint import tokenizer

if TYPE_CHECKING:
    import gguf

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Modules of a transformers Llama layer -> tensors of a GGUF block."""
_CONTROL, _NORMAL = 3, 1  # token types of the format


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Write weights, shape and vocabulary. Matrices keep the model's dtype; norms are float32, which llama.cpp wants.

    Raises:
        ImportError: the package ``gguf`` is not installed.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, model)
    _vocabulary(writer, model.config.vocab_size)
    config, base = model.config, model.model
    _add(writer, "token_embd", base.embed_tokens.weight)
    _add(writer, "output_norm", base.norm.weight)
    for number, layer in enumerate(base.layers):
        for module, tensor in _LAYER.items():
            weight = layer.get_submodule(module).weight
            if tensor in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if tensor == "attn_q" else config.num_key_value_heads
                weight = _interleaved(weight, heads)
            _add(writer, f"blk.{number}.{tensor}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, model: LlamaForCausalLM) -> None:
    config = model.config
    writer.add_name("random")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    words = tokenizer(size)
    names = words.convert_ids_to_tokens(range(size))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([-float(i) for i in range(size)])
    special = set(words.all_special_ids)
    writer.add_token_types([_CONTROL if i in special else _NORMAL for i in range(size)])
    writer.add_bos_token_id(words.bos_token_id)
    writer.add_eos_token_id(words.eos_token_id)
    writer.add_unk_token_id(words.unk_token_id)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of a query or key projection ``[heads * head_dim, hidden]`` in the order of llama.cpp's rotary
    embedding, which turns neighbouring dimensions together where transformers turns dimension i with i + half."""
    rows, hidden = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, hidden)
    return halves.swapaxes(1, 2).reshape(rows, hidden)


def _add(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    import gguf

    weight = weight.detach().cpu().contiguous()
    if weight.ndim == 1 or weight.dtype == torch.float32:
        writer.add_tensor(f"{name}.weight", weight.float().numpy())
    elif weight.dtype == torch.float16:
        writer.add_tensor(f"{name}.weight", weight.numpy())
    else:  # numpy has no bfloat16, so pass raw bytes with their type
        raw = weight.view(torch.uint8).numpy().view(np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
